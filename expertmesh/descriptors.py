"""File descriptors: how many this process may have open, and that it may have many."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

_WITHOUT_LIMIT = 2**20
"""Taken for the limit where there is none."""


def descriptor_limit() -> int:
    """Descriptors that this process may have open; an operator can change it while it runs."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _WITHOUT_LIMIT if limit == resource.RLIM_INFINITY else limit


def raise_descriptor_limit() -> None:
    """Raises the limit as far as this process may: the usual one is made for programs of a person.

    Processes that are started later inherit it.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:  # some systems have a lower one that they do not tell
        logger.debug("the limit of descriptors stays: %s", error)
    logger.debug("descriptors: %d, at start %d", descriptor_limit(), before)
