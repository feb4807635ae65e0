"""What a simulated cluster is like."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ClusterSettings"]


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A trainer, nodes with workers, and a network."""

    num_nodes: int
    workers_per_node: int
    build_s: float
    """How long a worker takes for a batch: the median."""
    build_sigma: float = 0.3
    """How much that varies: the standard deviation of its logarithm."""
    step_s: float = 0.0
    """How long the loop takes for a batch."""
    batch_nbytes: int = 0
    latency_s: float = 0.0
    """How long a message takes, in each direction."""
    node_gbit: float = 100.0
    """Gb/s of each node's link."""
    trainer_gbit: float = 400.0
    """Gb/s of the trainer's link."""
    notice_s: float = 0.2
    """How long it takes to notice that a worker or a node is gone."""
    restart_s: float = 1.0
    """How long it takes to replace it."""
    in_order: bool = True

    @property
    def num_workers(self) -> int:
        """Those of all nodes."""
        return self.num_nodes * self.workers_per_node
