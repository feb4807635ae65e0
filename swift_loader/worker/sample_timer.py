"""Measures the samples of a batch one by one, where that costs nothing next to fetching them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from swift_loader.worker.seeding import Seeding

_LONG_NS = 20_000
"""Samples that take so long are always measured: a reading of the clock takes 0.3 % of it."""

_EVERY = 64
"""Of batches with shorter samples, one of so many is measured."""

_INT64 = range(-(2**63), 2**63)


class SampleTimer:
    """Finds the slowest sample of each batch that it measures. Not thread-safe."""

    def __init__(self) -> None:
        self.is_due = True
        """Whether to measure the samples of the next batch: to call `fetch`."""
        self.slow_index = 0
        """Dataset index of the slowest sample of the batch."""
        self.slow_ns = 0
        """How long it took; 0: not measured. The caller sets it to 0 before each batch."""
        self._num_batches = 0

    def fetch(self, dataset: Any, keys: Sequence[Any], samples: list[Any], seeding: Seeding) -> None:
        """Append the samples of these keys, and measure each. What the dataset raises comes out of it."""
        slow_key, slow_ns, by_sample, clock = None, self.slow_ns, seeding.by_sample, time.perf_counter_ns
        began_ns = clock()
        try:
            for number, key in enumerate(keys, len(samples)):
                if by_sample:
                    seeding.begin_sample(number)
                samples.append(dataset[key])
                now_ns = clock()
                if now_ns - began_ns > slow_ns:
                    slow_key, slow_ns = key, now_ns - began_ns
                began_ns = now_ns
        finally:
            if type(slow_key) is int and slow_key in _INT64:  # a key of the DataLoader may be anything
                self.slow_index, self.slow_ns = slow_key, slow_ns

    def note_batch(self, fetch_ns: int, num_samples: int) -> None:
        """Record how long it took to fetch a batch, which decides about the next one."""
        self._num_batches += 1
        self.is_due = fetch_ns >= _LONG_NS * num_samples or not self._num_batches % _EVERY

    def __repr__(self) -> str:
        return f"<SampleTimer{' due' if self.is_due else ''}>"
