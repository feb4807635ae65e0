"""A Ray cluster of two nodes on this machine. Each has a raylet and an object store."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

HERE, THERE = "here", "there"
"""Custom resources: what asks for one runs on that node."""

_NUM_CPUS = 16
"""What a node claims to have, so that all actors find room."""
_STORE_NBYTES = 1 << 30


class TwoNodes:
    """Starts the cluster and connects this process to its first node. A context manager, which ends all of it."""

    def __init__(self) -> None:
        self.ray: Any = None
        self._cluster: Any = None
        self._raylets: dict[str, psutil.Process] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))  # sockets have short paths
        self._variables = {"RAY_TMPDIR": str(self._folder), "RAY_USAGE_STATS_ENABLED": "0"}
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> TwoNodes:
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        (self._folder / "ray").mkdir()  # where a cluster notes its address
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        common = {"num_cpus": _NUM_CPUS, "object_store_memory": _STORE_NBYTES}
        head = {**common, "resources": {HERE: _NUM_CPUS}, "include_dashboard": False, "temp_dir": str(self._folder)}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        other = self._cluster.add_node(**common, resources={THERE: _NUM_CPUS})
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")
        for name, node in ((HERE, self._cluster.head_node), (THERE, other)):
            self._raylets[name] = psutil.Process(node.all_processes["raylet"][0].process.pid)
        here = ray.get_runtime_context().get_node_id()
        assert here == self._cluster.head_node.node_id, "this process isn't on the first node"

    def raylet(self, place: str) -> psutil.Process:
        """Return the process of a node's raylet, which also holds its object store."""
        return self._raylets[place]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect, and end all processes of the cluster."""
        if self.ray is not None:
            self.ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)
