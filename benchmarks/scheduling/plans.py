"""The plan, the state and the resume of a run over very many samples and ranks."""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np

from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings, Position, Uneven
from swift_loader.sampling.run import Run
from swift_loader.sampling.shuffle import OrderSettings

__all__ = ["LargeRun"]

_BATCH_SIZE = 256
_EPOCH = 3
_NUM_BATCHES = 256


class LargeRun:
    """The last rank of a run, in the middle of an epoch."""

    def __init__(self, num_samples: int, num_ranks: int) -> None:
        self.num_samples, self.num_ranks = num_samples, num_ranks
        order = OrderSettings.of(seed=1, shuffle=True, window=None, batch_size=_BATCH_SIZE)
        self._settings = PlanSettings(order, _BATCH_SIZE, num_ranks, num_ranks - 1, Uneven.PAD, drop_last=False)
        plan = Plan.of(num_samples, self._settings)
        self._step = plan.num_batches(_EPOCH) // 2
        run = Run(order, frozenset())
        run.note_length(num_samples)
        run.progress.restore(plan.position_after(_EPOCH, self._step - 1) if self._step else Position(_EPOCH, 0))
        self.state = json.dumps(run.state_dict())
        """What is saved, as text."""

    def resume(self) -> tuple[PlanReader, int]:
        """Return the plan of the saved state, and the step where it continues."""
        state = json.loads(self.state)
        run = Run(OrderSettings.of(seed=0, shuffle=True, window=None, batch_size=_BATCH_SIZE), frozenset())
        run.note_length(self.num_samples)
        run.load_state_dict(state)
        begin = run.progress.next_begin(self.num_samples)
        settings, step = self._settings.resumed_at(begin)
        return PlanReader(Plan.of(self.num_samples, settings)), step

    def resume_s(self) -> float:
        """Return how long it takes from the saved text to the indices of the next batch."""
        begin_s = time.perf_counter()
        reader, step = self.resume()
        batch = reader.batch(_EPOCH, step)
        seconds = time.perf_counter() - begin_s
        expected = Plan.of(self.num_samples, self._settings).batch(_EPOCH, self._step)
        if step != self._step or not np.array_equal(batch.indices, expected.indices):
            raise RuntimeError(f"resumed at step {step} instead of {self._step}")
        return seconds

    def batch_s(self) -> float:
        """Return how long the plan of a batch takes, with consecutive batches."""
        reader, first = self.resume()
        num_batches = min(_NUM_BATCHES, reader.plan.num_batches(_EPOCH) - first)
        begin_s = time.perf_counter()
        for step in range(first, first + num_batches):
            reader.batch(_EPOCH, step)
        return (time.perf_counter() - begin_s) / num_batches

    def peak_nbytes(self) -> int:
        """Return the most memory that the plan takes at a time, from a resume through many batches."""
        tracemalloc.start()
        try:
            self.batch_s()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
