"""The machine and what is installed on it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from expertmesh.cores import usable_cores
from expertmesh.descriptors import descriptor_limit, raise_descriptor_limit
from expertmesh.host_memory import available_host_memory
from gateway.doctor.finding import Finding, broken, fine, warning

_OLDEST_PYTHON = (3, 11)
_PACKAGES = ("torch", "numba", "grpcio", "protobuf", "aiohttp", "tokenizers")
_FEW_DESCRIPTORS = 4096
"""A connection of a client is one, and so are those to expert workers."""
_LITTLE_MEMORY = 2 * 2**30
_GPU_DEVICE = Path("/dev/nvidiactl")
_GIB = 2**30


def check_machine(gpu_device: Path = _GPU_DEVICE) -> Iterator[Finding]:
    """All of it.

    Args:
        gpu_device: Is there if a driver for GPUs is.
    """
    yield _python(sys.version_info[:2])
    yield from _packages(_PACKAGES)
    yield _cores()
    yield _memory(available_host_memory())
    raise_descriptor_limit()  # as every process of the mesh does
    yield _descriptors(descriptor_limit())
    yield from _gpu(gpu_device)


def _python(version: tuple[int, ...]) -> Finding:
    name = f"Python {platform.python_version()}"
    if version < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return broken("python", name, f"use Python {oldest} or newer")
    return fine("python", name)


def _packages(names: tuple[str, ...]) -> Iterator[Finding]:
    for name in names:
        try:
            yield fine("package", f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield broken("package", f"{name} is not installed", f"pip install {name}")


def _cores() -> Finding:
    cores = usable_cores()
    return fine("cores", f"{len(cores.ids)} cores, of which {cores.limit} may be busy at a time")


def _memory(num_bytes: int) -> Finding:
    message = f"{num_bytes / _GIB:.1f} GiB of memory can be had"
    if num_bytes < _LITTLE_MEMORY:
        return warning("memory", message, "end other programs, or raise the limit of the container")
    return fine("memory", message)


def _descriptors(limit: int) -> Finding:
    message = f"{limit} file descriptors for each process"
    if limit < _FEW_DESCRIPTORS:
        fix = f"raise the hard limit (ulimit -Hn {_FEW_DESCRIPTORS}): a connection takes one"
        return warning("descriptors", message, fix)
    return fine("descriptors", message)


def _gpu(device: Path) -> Iterator[Finding]:
    """A GPU that torch cannot use; nothing where there is none."""
    if not device.exists():
        return
    build = metadata.version("torch")
    if build.endswith("+cpu"):
        fix = "install a torch for CUDA, or leave the GPU alone with --device cpu"
        yield warning("gpu", f"there is a GPU, but torch {build} is made for CPUs", fix)
    else:
        yield fine("gpu", f"there is a GPU, and torch {build}")
