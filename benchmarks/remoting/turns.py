"""The systems, and what one turn measures of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from remoting.cluster import HERE, THERE

__all__ = ["LOCAL", "OTHER_NODE", "PLACES", "SAME_NODE", "Turn"]

LOCAL = "local"
SAME_NODE = "ray, same node"
OTHER_NODE = "ray, other node"
PLACES = {LOCAL: None, SAME_NODE: HERE, OTHER_NODE: THERE}
"""Systems, and the node of their workers. None: worker processes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What was measured in a turn. All but the rate is per batch, in milliseconds."""

    rate: float
    """Batches per second."""
    build_ms: float
    """Median: fetch, collate, encode."""
    way_ms: float
    """Median: from when the worker had built a batch until the trainer could read it."""
    view_ms: float
    """Median: decoding, in the trainer."""
    worker_cpu_ms: float
    """CPU time of the workers' processes, with building."""
    trainer_cpu_ms: float
    """CPU time of the trainer's process, over all its threads."""
    here_cpu_ms: float
    """CPU time of the raylet on the trainer's node."""
    there_cpu_ms: float
    """CPU time of the other node's raylet."""
    trainer_thread_ms: float
    """CPU time of the trainer's busiest thread."""
    here_thread_ms: float
    """CPU time of the busiest thread of the raylet on the trainer's node."""
