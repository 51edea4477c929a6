"""How much memory this process may still take, of the machine and within control groups."""

from __future__ import annotations

from pathlib import Path

from expertmesh.cgroups import groups_around, read_text

_UNKNOWN = 4 * 2**30
"""Where the operating system does not say."""
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By version of control groups: limit, use, and how names of parts of it begin."""
_GIVE_WAY = ("active_file", "inactive_file")
"""Parts that the system takes back when memory is short: files that were read."""


def available_host_memory(root: Path = Path("/")) -> int:
    """Bytes.

    Args:
        root: Where `proc` and `sys` are.
    """
    left = [_of_machine(root)]
    for folder, version in groups_around("memory", root):
        limit, used, prefix = _NAMES[version]
        most, taken = (_number(read_text(folder / name)) for name in (limit, used))
        if most is not None and taken is not None:
            parts = _fields(read_text(folder / "memory.stat"))
            files = sum(_number(parts.get(prefix + name, "")) or 0 for name in _GIVE_WAY)
            left.append(most - max(0, taken - files))
    return max(0, min(left))


def _of_machine(root: Path) -> int:
    """What can be had without swapping."""
    kib = _number(_fields(read_text(root / "proc/meminfo")).get("MemAvailable:", ""))
    return _UNKNOWN if kib is None else kib * 1024


def _fields(text: str) -> dict[str, str]:
    """First word of each line to the second."""
    lines = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def _number(text: str) -> int | None:
    """None for `max` and for no text."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None
