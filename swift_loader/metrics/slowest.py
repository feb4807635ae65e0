"""The slowest samples of a run. Pure. Not thread-safe."""

from __future__ import annotations

from swift_loader.metrics.observations import SlowSample

__all__ = ["NUM_KEPT", "Slowest"]

NUM_KEPT = 20


class Slowest:
    """The `NUM_KEPT` samples with the longest times, each dataset index once."""

    def __init__(self) -> None:
        self.floor_ns = 0
        """A sample that took no longer isn't kept. The caller looks here first, because most aren't."""
        self._by_index: dict[int, tuple[int, int]] = {}
        """Dataset index -> (ns, epoch)."""

    def note(self, index: int, took_ns: int, epoch: int) -> None:
        """Record how long a sample took. Of several times of one sample, the longest counts."""
        kept = self._by_index
        before = kept.get(index)
        if before is not None and took_ns <= before[0]:
            return
        kept[index] = (took_ns, epoch)
        if len(kept) > NUM_KEPT:
            del kept[min(kept, key=lambda each: kept[each][0])]
        if len(kept) == NUM_KEPT:
            self.floor_ns = min(took_ns for took_ns, _ in kept.values())

    def samples(self) -> tuple[SlowSample, ...]:
        """Return them, slowest first."""
        ordered = sorted(self._by_index.items(), key=lambda item: -item[1][0])
        return tuple(SlowSample(index, took_ns / 1e9, epoch) for index, (took_ns, epoch) in ordered)

    def __repr__(self) -> str:
        return f"<Slowest of {len(self._by_index)}>"
