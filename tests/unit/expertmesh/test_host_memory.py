"""How much memory a process may still take."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertmesh.host_memory import available_host_memory

V1, V2 = "4:memory:/a\n", "0::/kube/pod\n"
GIB = 2**30


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {}, 8 * GIB),
        (V2, {"kube/pod/memory.max": "max\n", "kube/pod/memory.current": "5"}, 8 * GIB),
        (V2, {"kube/memory.max": f"{2 * GIB}\n", "kube/memory.current": f"{GIB}\n"}, GIB),
        (
            V2,  # files that were read give way
            {
                "kube/pod/memory.max": f"{2 * GIB}",
                "kube/pod/memory.current": f"{2 * GIB}",
                "kube/pod/memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file 5\n",
            },
            GIB + 5,
        ),
        (
            V1,
            {
                "memory/a/memory.limit_in_bytes": f"{3 * GIB}",
                "memory/a/memory.usage_in_bytes": f"{2 * GIB}",
                "memory/a/memory.stat": "inactive_file 9\ntotal_inactive_file 3\n",
            },
            GIB + 3,
        ),
        (V2, {"kube/pod/memory.max": "5", "kube/pod/memory.current": "9"}, 0),
        ("nonsense\n", {"memory.max": "nonsense"}, 8 * GIB),
    ],
)
def test_available_memory(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    """What the machine has, within the least of all limits around the process."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "proc/meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n")
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert available_host_memory(tmp_path) == expected


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    """A guess, so that a start is possible."""
    assert available_host_memory(tmp_path) == 4 * GIB
