"""How much work a grammar may make, the same at the gateway's door and in the attention worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_LEXER_FUEL = 100_000
"""A tenth of llguidance's own limit: regular expressions beyond take seconds to compile."""


def grammar_limits() -> LLParserLimits:
    """Limits for llguidance."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=_LEXER_FUEL)
