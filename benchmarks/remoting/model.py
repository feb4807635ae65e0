"""What remote workers bring: rates computed from what a batch was measured to cost. Pure.

    rate of the remote workers = min(n / (build + remote worker), the narrowest of link, busiest threads and cores)
    rate of the local workers  = (cores - remote rate x receiving) / (build + local worker + local trainer)

The model assumes that nothing else limits: remote nodes have a core per worker, the loop does nothing with a batch, an
actor always has a call to answer, and the link carries what it says. Local workers keep the trainer's cores busy, so
receiving a remote batch takes time from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Costs", "CostsBySize", "Limit", "Line", "Load", "fit_line"]

_MIN_S = 1e-9
"""What costs less is taken to cost this."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds per batch, as a function of its size."""

    fixed_s: float
    per_byte_s: float

    def at(self, nbytes: int) -> float:
        """Return the seconds for a batch of this size."""
        return self.fixed_s + self.per_byte_s * nbytes


def fit_line(points: Mapping[int, float]) -> Line:
    """Return the line through measured seconds by bytes that has the least relative errors, and no negative part."""
    if not points:
        raise ValueError("there are no points; a line needs at least one")
    pairs = [(nbytes, max(seconds, _MIN_S)) for nbytes, seconds in points.items()]
    s0 = sum(1 / y**2 for _, y in pairs)
    s1 = sum(x / y**2 for x, y in pairs)
    s2 = sum(x * x / y**2 for x, y in pairs)
    t0 = sum(1 / y for _, y in pairs)
    t1 = sum(x / y for x, y in pairs)
    determinant = s0 * s2 - s1 * s1
    if len(pairs) > 1 and determinant > 0:
        line = Line((t0 * s2 - t1 * s1) / determinant, (t1 * s0 - t0 * s1) / determinant)
        if line.fixed_s >= 0 and line.per_byte_s >= 0:
            return line
        if line.fixed_s < 0:
            return Line(0.0, t1 / s2)
    return Line(t0 / s0, 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What a batch is."""

    nbytes: int
    build_s: float
    """Seconds of a core for fetching and collating it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The highest rate of remote batches, and what limits it."""

    rate: float
    """Batches per second."""
    name: str


@dataclass(frozen=True, slots=True)
class Costs:
    """What a batch costs besides building it, in seconds of a core, by its size. Measured, but for the link."""

    local_worker: Line
    local_trainer: Line
    remote_worker: Line
    """In the actor's process, with copying the batch into its object store."""
    remote_trainer: Line
    """In the trainer's process, over all its threads."""
    remote_raylet: Line
    """In the raylet of the trainer's node."""
    trainer_thread: Line
    """In that thread of the trainer that a remote batch keeps busy longest. It can't have more than one core."""
    raylet_thread: Line
    """The same of the raylet."""
    link_bytes_per_s: float

    def local_s(self, load: Load) -> float:
        """Return the core seconds of a batch that is built on the trainer's node."""
        return load.build_s + self.local_worker.at(load.nbytes) + self.local_trainer.at(load.nbytes)

    def receive_s(self, load: Load) -> float:
        """Return the core seconds that a remote batch takes on the trainer's node."""
        return self.remote_trainer.at(load.nbytes) + self.remote_raylet.at(load.nbytes)

    def remote_rate(self, load: Load) -> float:
        """Return the batches per second of one remote worker, if nothing else limits it."""
        return 1 / (load.build_s + self.remote_worker.at(load.nbytes))

    def limit(self, load: Load, num_cores: float | None = None) -> Limit:
        """Return how many remote batches can arrive, on a node of so many cores. None: cores don't limit."""
        limits = [
            Limit(self.link_bytes_per_s / load.nbytes, "link"),
            Limit(1 / self.trainer_thread.at(load.nbytes), "trainer"),
            Limit(1 / self.raylet_thread.at(load.nbytes), "raylet"),
        ]
        if num_cores is not None:
            limits.append(Limit(num_cores / self.receive_s(load), "cores"))
        return min(limits, key=lambda limit: limit.rate)

    def rate(self, load: Load, num_cores: float, num_remote: int) -> float:
        """Return the batches per second of a trainer with so many cores for local workers, and so many remote ones."""
        remote = min(num_remote * self.remote_rate(load), self.limit(load, num_cores).rate)
        return remote + max(0.0, num_cores - remote * self.receive_s(load)) / self.local_s(load)

    def gross_share(self, load: Load) -> float:
        """Return a remote worker's rate as a share of a local core's: what counts if the trainer has idle cores."""
        return min(self.remote_rate(load), self.limit(load).rate) * self.local_s(load)

    def net_share(self, load: Load) -> float:
        """Return the same without what it takes from local workers. Not positive: it doesn't pay off."""
        return self.gross_share(load) * (1 - self.receive_s(load) / self.local_s(load))

    def num_saturating(self, load: Load) -> float:
        """Return how many remote workers bring as much as can arrive."""
        return self.limit(load).rate / self.remote_rate(load)

    def least_build_s(self, nbytes: int) -> float:
        """Return the build time above which a remote batch takes less of the trainer's cores than a local one."""
        return max(0.0, self.receive_s(Load(nbytes, 0.0)) - self.local_s(Load(nbytes, 0.0)))


@dataclass(frozen=True, slots=True)
class CostsBySize:
    """Ray sends small batches with the answer, and large ones through object stores."""

    small: Costs
    large: Costs
    max_small_nbytes: int

    def of(self, nbytes: int) -> Costs:
        """Return the costs of batches of this size."""
        return self.small if nbytes <= self.max_small_nbytes else self.large
