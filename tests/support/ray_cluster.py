"""A Ray cluster of several nodes on this machine, and the actors of a loader."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil

from swift_loader import SwiftLoader
from swift_loader.executors.executor import WorkerExecutor
from swift_loader.executors.ray.actor import ActorHandle
from swift_loader.executors.ray.fleet import ActorFleet, MixedFleet
from tests.support.helpers import is_gone, wait_until

STORE_NBYTES = 80 << 20
"""Ray takes no less."""


class SmallCluster:
    """A head, to which this process is connected, and other nodes."""

    def __init__(self, num_others: int, num_cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self.num_cpus = num_cpus
        head = {"num_cpus": num_cpus, "object_store_memory": STORE_NBYTES}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.others: list[Any] = []
        for _ in range(num_others):
            self.add_node()

    def add_node(self) -> None:
        self.others.append(self._cluster.add_node(num_cpus=self.num_cpus, object_store_memory=STORE_NBYTES))

    def kill_node(self, rng: Random) -> None:
        """Kill the processes of a node, its object store among them."""
        node = self.others.pop(rng.randrange(len(self.others)))
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def small_cluster(num_others: int = 2, num_cpus: int = 2) -> Iterator[SmallCluster]:
    """Return a cluster, to which this process is connected. Fails if it leaves a process behind."""
    import ray

    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short, because sockets have names in it
    (folder / "ray").mkdir()
    before, handler = os.environ.get("RAY_TMPDIR"), signal.getsignal(signal.SIGTERM)
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        cluster = SmallCluster(num_others, num_cpus)
        try:
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.close()
        wait_until(lambda: not _processes_in(folder), f"the end of all processes of {folder}")
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.environ.pop("RAY_TMPDIR")
        if before is not None:
            os.environ["RAY_TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


def _processes_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def actors_of(loader: SwiftLoader) -> list[ActorHandle]:
    """Return the executor's handles on all actors that exist."""
    assert loader._session is not None
    executor = loader._session.engine._executor
    assert isinstance(executor, WorkerExecutor)
    fleet = executor.fleet.remote if isinstance(executor.fleet, MixedFleet) else executor.fleet
    assert isinstance(fleet, ActorFleet)
    return list(fleet.workers.values())


def actor_pids(loader: SwiftLoader) -> list[int]:
    """Return the process ids of the actors that run, also if Ray hasn't told yet of one that ended."""
    pids = [actor.process.pid for actor in actors_of(loader)]  # all of them are on this machine
    return [pid for pid in pids if pid and not is_gone(pid)]


def references() -> int:
    """Return how many objects this process refers to in Ray."""
    import ray

    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
