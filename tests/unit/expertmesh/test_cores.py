"""Cores: how many there are, who gets which, and what is refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.cores import (
    THREADS,
    CoreShare,
    UsableCores,
    cgroup_quota,
    format_cores,
    parse_cores,
    settle,
    share_cores,
    usable_cores,
)
from expertmesh.errors import SettingsError


def cores(num: int, limit: int | None = None) -> UsableCores:
    """The first cores of a machine."""
    return UsableCores(tuple(range(num)), limit or num)


@pytest.mark.parametrize(
    ("usable", "num_processes", "expected"),
    [
        (cores(2), 1, [CoreShare(2)]),
        (cores(2), 2, [CoreShare(1, "0"), CoreShare(1, "1")]),
        (cores(2), 3, [CoreShare(1, "0"), CoreShare(1, "1"), CoreShare(1, "0")]),
        (cores(1), 1, [CoreShare(1)]),
        (cores(1), 2, [CoreShare(1), CoreShare(1)]),
        (cores(8), 3, [CoreShare(2, "0-1"), CoreShare(3, "2-4"), CoreShare(3, "5-7")]),
        (UsableCores((1, 3, 6), 3), 2, [CoreShare(1, "1"), CoreShare(2, "3,6")]),
        (cores(64, limit=4), 2, [CoreShare(2), CoreShare(2)]),
        (cores(64, limit=1), 3, [CoreShare(1), CoreShare(1), CoreShare(1)]),
    ],
)
def test_shares(usable: UsableCores, num_processes: int, expected: list[CoreShare]) -> None:
    """All cores for one, a part for each of several, one in turn for too many; no cores of one's
    own under a quota, where the others on the machine are not known."""
    assert list(share_cores(usable, num_processes)) == expected


def test_shares_as_asked_for() -> None:
    """Fewer threads, and no cores of one's own."""
    assert share_cores(cores(8), 2, max_threads=3) == (CoreShare(3, "0-3"), CoreShare(3, "4-7"))
    assert share_cores(cores(4), 2, pin=False) == (CoreShare(2), CoreShare(2))


@given(st.integers(1, 200), st.integers(1, 200))
def test_no_core_is_given_twice_without_need(num_cores: int, num_processes: int) -> None:
    """Every core is given, none twice unless there are more processes; shares are about equal."""
    shares = share_cores(cores(num_cores), num_processes)
    assert len(shares) == num_processes
    given_out = [core for share in shares for core in parse_cores(share.cores)]
    if num_processes > 1 and num_cores > 1:
        assert set(given_out) == set(range(num_cores))
    if num_processes <= num_cores:
        assert len(given_out) == len(set(given_out))
        assert sum(share.num_threads for share in shares) == num_cores
    sizes = {share.num_threads for share in shares}
    assert max(sizes) - min(sizes) <= 1


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cores(ids: set[int]) -> None:
    """Written and read, with ranges."""
    assert set(parse_cores(format_cores(ids))) == ids
    assert format_cores([8, 0, 1, 3, 2]) == "0-3,8"


@pytest.mark.parametrize("text", ["x", "3-1", "0,,1", "-1", "1-", "0-3;8", "999999", "²"])
def test_bad_lists_of_cores(text: str) -> None:
    """The part that is wrong is named."""
    with pytest.raises(SettingsError, match=r"cores has '.*', expected such as 0-3,8"):
        parse_cores(text)


V2 = "0::/kube/pod\n"
V1 = "5:memory:/a\n4:cpu,cpuacct:/docker/1\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {}, math.inf),
        (V2, {"kube/pod/cpu.max": "max 100000"}, math.inf),
        (V2, {"kube/pod/cpu.max": "150000 100000"}, 1.5),
        (V2, {"kube/pod/cpu.max": "max 100000", "kube/cpu.max": "400000 100000"}, 4),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        (V1, {"cpu/docker/1/cpu.cfs_quota_us": "-1"}, math.inf),
        (
            V1,
            {
                "cpu/docker/1/cpu.cfs_quota_us": "50000\n",
                "cpu/docker/1/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        ("", {}, math.inf),
        ("nonsense\n", {"cpu.max": "nonsense"}, math.inf),
    ],
)
def test_quota(tmp_path: Path, cgroup: str, files: dict[str, str], expected: float) -> None:
    """The least of all limits around the process, in both versions of cgroups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert cgroup_quota(tmp_path) == expected
    usable = usable_cores(tmp_path)
    assert usable.ids == tuple(sorted(os.sched_getaffinity(0)))
    assert usable.limit == max(1, min(len(usable.ids), int(min(expected, 1e6))))


def test_this_process_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads is what is asked for, else that of the environment, else the cores."""
    usable = usable_cores()
    monkeypatch.setenv(THREADS, "1")
    assert settle(None, "").num_threads == 1
    monkeypatch.setenv(THREADS, "")
    assert settle(None, "") == CoreShare(usable.limit)
    assert os.environ[THREADS] == str(usable.limit)
    assert settle(1, "").num_threads == 1
    assert os.environ[THREADS] == "1"


@pytest.mark.parametrize(
    ("threads", "variable", "ids", "message"),
    [
        (None, "many", "", "EXPERTMESH_THREADS is 'many', expected a whole number from 1 to 1024"),
        (None, "0", "", "EXPERTMESH_THREADS is '0', expected a whole number from 1 to 1024"),
        (None, "1000", "", "EXPERTMESH_THREADS is 1000, but this process may use"),
        (1000, "1", "", "threads is 1000, but this process may use"),
        (None, "1", "90000", "cores has 90000, but this process may run on"),
        (None, "1", "a", "cores has 'a', expected such as 0-3,8"),
    ],
)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, variable: str, ids: str, message: str
) -> None:
    """What cannot be is named, and nothing is changed."""
    monkeypatch.setenv(THREADS, variable)
    with pytest.raises(SettingsError) as refused:
        settle(threads, ids)
    assert message in refused.value.message
    assert os.environ[THREADS] == variable
