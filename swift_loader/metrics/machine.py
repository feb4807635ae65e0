"""What the machine has for this process: cores and memory, within the limits of its cgroups.

A limit of any group on the way up counts, because groups are nested.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

_NO_LIMIT_V1 = 1 << 60
"""cgroup v1 says "no limit" by a number of bytes that is larger than this."""


@dataclass(frozen=True, slots=True)
class Group:
    """The folder of a cgroup."""

    version: int
    """1 or 2."""
    folder: str

    def read(self, name: str) -> str:
        """Return what one of its files says; empty if it has no such file."""
        return _read(f"{self.folder}/{name}").strip()


def available_cores() -> float:
    """Return how many cores this process and its children may use: the affinity, and the quotas of its cgroups.

    The system is asked once a second at most: that takes longer than all else that a dashboard asks for.
    """
    return _cores_in(int(time.monotonic()))


@lru_cache(maxsize=1)
def _cores_in(_second: int) -> float:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(num_cores), *map(quota_of, groups_of("cpu"))])


def available_memory() -> int:
    """Return how many bytes this process and its children may still use; 0 if the system doesn't tell.

    Pages of files that the kernel could drop count as free. RLIMIT_AS counts as the limit of this process.
    """
    of_system = _field(_read("/proc/meminfo"), "MemAvailable:") * 1024 or math.inf
    least = min([of_system, _free_addresses(), *map(free_in, groups_of("memory"))])
    return 0 if math.isinf(least) else int(least)


def _free_addresses() -> float:
    """Return how many bytes more this process may map; infinite without a limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    mapped = _field(_read("/proc/self/status"), "VmSize:") * 1024
    return math.inf if soft == resource.RLIM_INFINITY else max(0, soft - mapped)


def main_thread_ns() -> tuple[int, int]:
    """Return how long this process's main thread has run, and how long it was ready to run but had no core.

    Both are 0 on a system that doesn't tell.
    """
    ran, waited, *_ = (*_read("/proc/self/schedstat").split(), "0", "0")
    return int(ran), int(waited)


def ranks_here() -> int:
    """Return how many ranks of this run are on this machine, as the launcher says; 1 if it doesn't."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return 1


def groups_of(controller: str) -> list[Group]:
    """Return the cgroups that limit this process's `"cpu"` or `"memory"`, from its own up to the highest it sees."""
    groups = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        version = 2 if not names else 1
        if version == 1 and controller not in names.split(","):
            continue
        for root, mount_point in _mounts_of(version, controller):
            groups += [Group(version, folder) for folder in _folders(path, root, mount_point)]
    return groups


def _mounts_of(version: int, controller: str) -> list[tuple[str, str]]:
    """Return what is mounted of a hierarchy of cgroups, and where."""
    found = []
    for line in _read("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = (*rest.split(" ", 2), "", "")[:3]
        is_meant = kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(",")  # noqa: PLR2004
        if is_meant and len(parts := fields.split()) > 4:  # noqa: PLR2004 - see proc_pid_mountinfo(5)
            found.append((parts[3], parts[4]))
    return found


def _folders(path: str, root: str, mount_point: str) -> list[str]:
    """Return the folders of a group and of those above it. `root` is the group that is mounted."""
    group, top = PurePosixPath(path), PurePosixPath(root)
    if ".." in group.parts or not group.is_relative_to(top):  # moved out of what a container sees: its top is all
        return [mount_point]
    below = group.relative_to(top)
    return [str(PurePosixPath(mount_point, part)) for part in (below, *below.parents)]


def quota_of(group: Group) -> float:
    """Return how many cores a cgroup may use; infinite if it has no quota."""
    if group.version == 2:  # noqa: PLR2004
        quota, period = (*group.read("cpu.max").split(), "", "")[:2]
    else:
        quota, period = (group.read(f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if not quota.isdecimal() or not period.isdecimal() or not int(period):  # "max", -1, or no file
        return math.inf
    return int(quota) / int(period)


def free_in(group: Group) -> float:
    """Return how many bytes a cgroup may still use; infinite if it has no limit."""
    is_v2 = group.version == 2  # noqa: PLR2004
    names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = map(group.read, names)
    if not limit.isdecimal() or int(limit) >= _NO_LIMIT_V1:
        return math.inf
    droppable = _field(group.read("memory.stat"), "inactive_file" if is_v2 else "total_inactive_file")
    return max(0, int(limit) - int(used if used.isdecimal() else 0) + droppable)


def _field(text: str, name: str) -> int:
    """Return the number after a name at the beginning of a line; 0 if there is none."""
    for line in text.splitlines():
        parts = line.split()
        if len(parts) > 1 and parts[0] == name and parts[1].isdecimal():
            return int(parts[1])
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
