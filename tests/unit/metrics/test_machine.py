"""The limits of cgroups, from what the kernel says about them in several set-ups."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from swift_loader.metrics import machine
from swift_loader.metrics.machine import (
    Group,
    available_cores,
    available_memory,
    free_in,
    groups_of,
    quota_of,
    ranks_here,
)

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)
V1_IN_CONTAINER = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime master:9 - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("controller", "cgroups", "mounts", "folders"),
    [
        ("cpu", "0::/\n", V2_MOUNT, ["/sys/fs/cgroup"]),
        ("cpu", "0::/user/job\n", V2_MOUNT, ["/sys/fs/cgroup/user/job", "/sys/fs/cgroup/user", "/sys/fs/cgroup"]),
        ("cpu", "0::/../other\n", V2_MOUNT, ["/sys/fs/cgroup"]),
        (
            "cpu",
            "9:memory:/job\n3:cpu,cpuacct:/a/b\n",
            V1_MOUNTS,
            ["/sys/fs/cgroup/cpu,cpuacct/a/b", "/sys/fs/cgroup/cpu,cpuacct/a", "/sys/fs/cgroup/cpu,cpuacct"],
        ),
        ("memory", "9:memory:/docker/abc\n", V1_IN_CONTAINER, ["/sys/fs/cgroup/memory"]),
        ("memory", "9:memory:/docker/abc/x\n", V1_IN_CONTAINER, ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory"]),
        ("cpu", "0::/\n", "", []),
        ("cpu", "nonsense\n\n", "nonsense - \n- cgroup2\n", []),
    ],
)
def test_the_groups_of_a_process_are_found(
    files: dict[str, str], controller: str, cgroups: str, mounts: str, folders: list[str]
) -> None:
    files |= {"/proc/self/cgroup": cgroups, "/proc/self/mountinfo": mounts}
    assert [group.folder for group in groups_of(controller)] == folders


@pytest.mark.parametrize(
    ("version", "content", "cores"),
    [
        (2, {"cpu.max": "150000 100000\n"}, 1.5),
        (2, {"cpu.max": "max 100000\n"}, math.inf),
        (2, {}, math.inf),
        (1, {"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4.0),
        (1, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, math.inf),
        (1, {"cpu.cfs_quota_us": "100\n", "cpu.cfs_period_us": "0\n"}, math.inf),
        (1, {}, math.inf),
    ],
)
def test_a_quota_is_read_as_cores(files: dict[str, str], version: int, content: dict[str, str], cores: float) -> None:
    files |= {f"/g/{name}": text for name, text in content.items()}
    assert quota_of(Group(version, "/g")) == cores


@pytest.mark.parametrize(
    ("version", "content", "nbytes"),
    [
        (2, {"memory.max": "1000\n", "memory.current": "300\n"}, 700),
        (2, {"memory.max": "1000", "memory.current": "300", "memory.stat": "anon 1\ninactive_file 50\n"}, 750),
        (2, {"memory.max": "max\n", "memory.current": "300\n"}, math.inf),
        (2, {}, math.inf),
        (1, {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "400"}, 600),
        (1, {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "400"}, math.inf),
    ],
)
def test_what_a_group_may_still_use_is_read(
    files: dict[str, str], version: int, content: dict[str, str], nbytes: float
) -> None:
    files |= {f"/g/{name}": text for name, text in content.items()}
    assert free_in(Group(version, "/g")) == nbytes


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Files that stand for the machine's."""
    content: dict[str, str] = {"/proc/self/cgroup": "0::/job/step\n", "/proc/self/mountinfo": V2_MOUNT}
    monkeypatch.setattr(machine, "_read", lambda path: content.get(path, ""))
    machine._cores_in.cache_clear()
    yield content
    machine._cores_in.cache_clear()


def test_the_tightest_of_nested_quotas_counts(files: dict[str, str]) -> None:
    files["/sys/fs/cgroup/job/cpu.max"] = "50000 100000\n"
    files["/sys/fs/cgroup/job/step/cpu.max"] = "80000 100000\n"
    assert available_cores() == 0.5


def test_the_least_free_of_nested_groups_counts(files: dict[str, str]) -> None:
    files["/proc/meminfo"] = "MemAvailable:  500 kB\n"
    files["/sys/fs/cgroup/job/memory.max"] = "100000"
    files["/sys/fs/cgroup/job/memory.current"] = "30000"
    files["/sys/fs/cgroup/job/step/memory.max"] = "90000"
    files["/sys/fs/cgroup/job/step/memory.current"] = "10000"
    assert available_memory() == 70000


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_the_launcher_says_how_many_ranks_are_here(
    environment: dict[str, str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_here() == number
