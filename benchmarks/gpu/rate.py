"""How fast bytes get to the device: from torch's page-locked memory, from page-locked segments, from ordinary memory.

A segment is made and page-locked as the trainer does it. Target: at least 0.9 of the rate of torch's own memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from device_accelerator import Accelerator
from device_outcome import Outcome, Target, measure_in_turns, table_with_ratios
from device_scale import Scale
from report import Result

from swift_loader.device.pinning import PageLock
from swift_loader.transport.segments import Segment, capacity_for

__all__ = ["measure_rate"]

_TARGET = Target("segments / pinned", at_least=0.9)


def measure_rate(accelerator: Accelerator, scale: Scale) -> Outcome:
    """Return GB/s for each kind of memory and size."""
    results: list[Result] = []
    notes: list[str] = []
    for nbytes in scale.copy_sizes:
        results += _measure_size(accelerator, scale, nbytes, notes)
    medians = {(result.case, result.system): result.median for result in results}
    verdicts = [
        f"{case}, {_TARGET.judge(medians[case, 'segments'] / medians[case, 'pinned'], accelerator)}"
        for case in dict.fromkeys(result.case for result in results)
    ]
    return Outcome("\n".join([table_with_ratios(results, "pinned"), *verdicts, *notes]), results)


def _measure_size(accelerator: Accelerator, scale: Scale, nbytes: int, notes: list[str]) -> list[Result]:
    segment = _make_segment(accelerator, nbytes, notes)
    sources = {
        "pinned": accelerator.pinned(nbytes),
        # A view of the mapping, which doesn't keep it: `segment` lives until all copies are over.
        "segments": torch.from_numpy(segment.array()[:nbytes]),
        "pageable": torch.empty(nbytes, dtype=torch.uint8),
    }
    target = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device)
    systems: dict[str, Callable[[], float]] = {}
    for number, (name, source) in enumerate(sources.items(), 1):
        source.fill_(number)
        systems[name] = partial(_copy_rate, accelerator, target, source, scale.num_copies)
    if accelerator.is_gpu and not sources["segments"].is_pinned():
        notes.append(f"{_megabytes(nbytes)}: the segment does NOT count as page-locked")
    try:
        return measure_in_turns(_megabytes(nbytes), "GB/s", systems, scale.rounds)
    finally:
        accelerator.synchronize()
        del sources, systems
        del segment


def _make_segment(accelerator: Accelerator, nbytes: int, notes: list[str]) -> Segment:
    segment, descriptor = Segment.create(capacity_for(nbytes))
    os.close(descriptor)
    PageLock(accelerator.registry(), notes.append).lock(segment)
    return segment


def _copy_rate(accelerator: Accelerator, target: torch.Tensor, source: torch.Tensor, num_copies: int) -> float:
    def copy() -> None:
        for _ in range(num_copies):
            target.copy_(source, non_blocking=True)

    seconds = accelerator.seconds_of(copy)
    if int(target[-1]) != int(source[-1]):
        raise AssertionError("the device has other bytes than the host")
    return num_copies * source.numel() / seconds / 1e9


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
