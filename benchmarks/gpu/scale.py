"""The sizes of a run: full, quick, or tiny to test the benchmark itself on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes of all parts."""

    rounds: int
    """Turns of each system."""
    max_workers: int
    copy_sizes: tuple[int, ...]
    """Bytes of the buffers that are copied to the device."""
    num_slots: int
    """Buffers of each kind that are copied in turn. The full run has 18 slots, as with data_queue_size=10."""
    num_copies: int
    """Per turn."""
    num_pairs: int
    """Turns of each kind of memory, whose ratios are made turn by turn."""
    batch_size: int
    """Images of (3, 224, 224) uint8."""
    num_distinct: int
    """Images that a dataset repeats."""
    model_width: int
    max_model_depth: int
    step_s: float
    """What a training step should take, by the choice of the model's depth."""
    num_uncounted_steps: int
    """At the beginning of a turn: more than a loader holds ready while it isn't asked."""
    num_steps: int
    """Those that count."""
    num_checked: int
    """Batches whose content is checked, each way."""
    block_nbytes: int
    """Of a sample there; a batch has four."""
    stall_s: float
    """How long a stream is kept busy before each checksum, or before each copy, where it is to be held up."""
    turn_s: float
    """Length of a turn where rates are measured."""

    @property
    def num_workers(self) -> int:
        """Worker processes of each loader."""
        return min(self.max_workers, len(os.sched_getaffinity(0)))


FULL = Scale(
    rounds=5,
    max_workers=8,
    copy_sizes=(64 * 3 * 224 * 224, 256 * 3 * 224 * 224),
    num_slots=18,
    num_copies=90,
    num_pairs=15,
    batch_size=64,
    num_distinct=64,
    model_width=1024,
    max_model_depth=24,
    step_s=0.015,
    num_uncounted_steps=40,
    num_steps=60,
    num_checked=10_000,
    block_nbytes=80_000,
    stall_s=0.0005,
    turn_s=2.0,
)

QUICK = replace(FULL, rounds=3, num_copies=54, num_pairs=7, num_steps=30, num_checked=1_000, turn_s=1.0)

TINY = Scale(
    rounds=2,
    max_workers=1,
    copy_sizes=(100_000, 400_000),
    num_slots=3,
    num_copies=6,
    num_pairs=2,
    batch_size=2,
    num_distinct=2,
    model_width=16,
    max_model_depth=1,
    step_s=0.0,
    num_uncounted_steps=1,
    num_steps=2,
    num_checked=100,
    block_nbytes=1_000,
    stall_s=0.0,
    turn_s=0.1,
)
