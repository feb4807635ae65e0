"""The network of a simulated cluster."""

from __future__ import annotations

from scheduling.settings import ClusterSettings

__all__ = ["Network"]


class Network:
    """A link of each node, and the trainer's, through which all batches go. Each sends one batch after the other."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._latency_s = settings.latency_s
        self._node_s = settings.batch_nbytes * 8e-9 / settings.node_gbit
        """How long a batch takes on a node's link."""
        self._trainer_s = settings.batch_nbytes * 8e-9 / settings.trainer_gbit
        self._node_free_s = [0.0] * settings.num_nodes
        """When each link has sent all that it has."""
        self._trainer_free_s = 0.0

    def send(self, node: int, now_s: float) -> float:
        """Send a batch from a node, and return when it arrives."""
        begin_s = max(now_s, self._node_free_s[node])
        self._node_free_s[node] = sent_s = begin_s + self._node_s
        # Both links work at the same time, so the slower one counts.
        self._trainer_free_s = max(sent_s, max(begin_s, self._trainer_free_s) + self._trainer_s)
        return self._trainer_free_s + self._latency_s

    def clear(self, node: int) -> None:
        """Forget what a node had to send."""
        self._node_free_s[node] = 0.0
