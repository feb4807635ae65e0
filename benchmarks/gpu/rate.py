"""How fast bytes get to the device: from torch's page-locked memory, from page-locked segments, from ordinary memory.

Segments are made and page-locked as the trainer does it, and as many of each kind of memory are copied in turn as a
worker has slots. Ratios are made within each round. Target: at least 0.95 of the rate of torch's own memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
from common.report import Result
from common.turns import measure_in_turns, table_with_ratios

from gpu.accelerator import Accelerator
from gpu.outcome import Outcome, Target, paired_ratios
from gpu.scale import Scale
from swift_loader.device.pinning import PageLock
from swift_loader.transport.segments import Segment, capacity_for

_TARGET = Target("segments / pinned", at_least=0.95)
_NUM_TARGETS = 2


def measure_rate(accelerator: Accelerator, scale: Scale) -> Outcome:
    """Return GB/s for each kind of memory and size."""
    results: list[Result] = []
    notes: list[str] = []
    for nbytes in scale.copy_sizes:
        results += _measure_size(accelerator, scale, nbytes, notes)
    verdicts = [
        f"{case}, {_TARGET.judge(paired_ratios(results, case, 'segments', 'pinned'), accelerator)}"
        for case in dict.fromkeys(result.case for result in results)
    ]
    return Outcome("\n".join([table_with_ratios(results, "pinned"), *verdicts, *notes]), results)


def _measure_size(accelerator: Accelerator, scale: Scale, nbytes: int, notes: list[str]) -> list[Result]:
    segments = [_make_segment(accelerator, nbytes, notes) for _ in range(scale.num_slots)]
    sources = {
        "pinned": [accelerator.pinned(nbytes) for _ in segments],
        # Views of the mappings, which don't keep them: `segments` lives until all copies are over.
        "segments": [torch.from_numpy(segment.array()[:nbytes]) for segment in segments],
        "pageable": [torch.empty(nbytes, dtype=torch.uint8) for _ in segments],
    }
    targets = [torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device) for _ in range(_NUM_TARGETS)]
    systems: dict[str, Callable[[], float]] = {}
    for number, (name, buffers) in enumerate(sources.items()):
        for place, buffer in enumerate(buffers):
            buffer.fill_(number * scale.num_slots + place)
        systems[name] = partial(_copy_rate, accelerator, targets, buffers, scale.num_copies)
    if accelerator.is_gpu and not all(buffer.is_pinned() for buffer in sources["segments"]):
        notes.append(f"{_megabytes(nbytes)}: a segment does NOT count as page-locked")
    try:
        return measure_in_turns(_megabytes(nbytes), "GB/s", systems, scale.num_pairs)
    finally:
        accelerator.synchronize()
        del sources, systems, buffers, buffer
        del segments


def _make_segment(accelerator: Accelerator, nbytes: int, notes: list[str]) -> Segment:
    segment, descriptor = Segment.create(capacity_for(nbytes))
    os.close(descriptor)
    PageLock(accelerator.registry(), notes).lock(segment)
    return segment


def _copy_rate(
    accelerator: Accelerator, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], num_copies: int
) -> float:
    def copy() -> None:
        for number in range(num_copies):
            targets[number % len(targets)].copy_(sources[number % len(sources)], non_blocking=True)

    seconds = accelerator.seconds_of(copy)
    for number in range(num_copies - len(targets), num_copies):
        if int(targets[number % len(targets)][-1]) != int(sources[number % len(sources)][-1]):
            raise AssertionError("the device has other bytes than the host")
    return num_copies * sources[0].numel() / seconds / 1e9


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
