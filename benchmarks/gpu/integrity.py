"""Whether every byte arrives: checksums of thousands of batches, made on the device, on the loop's stream.

The loop does nothing but queue the checksum and drop the batch, and few batches are in flight, so that slots of shared
memory and the device's memory are used again as soon as they may be. `lagging` keeps the device busy before each
checksum: the copies are far ahead of the loop's stream then, and memory that was given back too early would be written
before it is read. `control` is wrong on purpose, in that way, without a loader; it shows that the check sees such a
thing, and must find mismatches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from device_accelerator import Accelerator
from device_checksums import expected_checksums, make_weights, mismatches
from device_datasets import Blocks
from device_outcome import Outcome
from device_scale import Scale
from numpy.typing import NDArray
from report import Result, format_number, format_table

from swift_loader import SwiftLoader

__all__ = ["check_integrity"]

_BATCH_SIZE = 4
_IN_FLIGHT = 4
_NUM_CONTROLLED = 200
_HEADERS = ["case", "system", "batches", "mismatches", "batches/s"]
_MAX_NAMED = 10


def check_integrity(accelerator: Accelerator, scale: Scale) -> Outcome:
    """Return how many batches were checked, and how many were wrong: none, or the outcome isn't right."""
    make_dataset = partial(Blocks, length=scale.num_checked * _BATCH_SIZE, nbytes=scale.block_nbytes)
    weights = make_weights(_BATCH_SIZE * scale.block_nbytes)
    expected = expected_checksums(make_dataset(), scale.num_checked, _BATCH_SIZE, weights)
    device_weights = torch.from_numpy(weights).to(accelerator.device)
    rows, results, notes = [], [], []
    num_wrong = 0
    for case, stall_s in (("plain", 0.0), ("lagging", scale.stall_s)):
        with _make_loader(make_dataset, scale.num_workers) as loader:
            loader.start(device=accelerator.device)
            begin = time.perf_counter()
            found = _checksums(accelerator, loader, device_weights, scale.num_checked, stall_s)
            rate = len(found) / (time.perf_counter() - begin)
        wrong = mismatches(found, expected)
        num_wrong += len(wrong)
        rows.append([case, "swift_loader", f"{len(found):,}", str(len(wrong)), format_number(rate)])
        results.append(Result(case, "swift_loader", "mismatches", [float(len(wrong))]))
        if wrong:
            notes.append(f"{case}: MISMATCHES in the batches {wrong[:_MAX_NAMED]} ...")
    if accelerator.is_gpu:
        num_seen = _control(accelerator, scale, make_dataset(), device_weights, expected)
        rows.append(["lagging", "control", f"{min(_NUM_CONTROLLED, scale.num_checked):,}", str(num_seen), "-"])
        notes.append("the control was seen" if num_seen else "the control was NOT seen: the check is blind here")
    verdict = f"{num_wrong} mismatches in {sum(scale.num_checked for _ in results):,} batches"
    return Outcome("\n".join([format_table(_HEADERS, rows), verdict, *notes]), results, is_right=not num_wrong)


def _make_loader(make_dataset: partial[Blocks], num_workers: int) -> SwiftLoader:
    return SwiftLoader(
        make_dataset.func,
        make_dataset.keywords,
        batch_size=_BATCH_SIZE,
        nb_consumer=1,
        worker_per_consumer=num_workers,
        shuffle=False,
        data_queue_size=_IN_FLIGHT,
    )


def _checksums(
    accelerator: Accelerator, loader: Iterable[Any], weights: torch.Tensor, num_batches: int, stall_s: float
) -> NDArray[np.int64]:
    """Return the sum of each batch that came, in order; waits for the device only at the end."""
    sums = torch.zeros(num_batches, dtype=torch.int64, device=accelerator.device)
    count = 0
    for batch in loader:  # no enumerate(), which would hold the batch while the next one is fetched
        accelerator.stall(stall_s)
        if count < num_batches:
            sums[count] = _checksum(batch, weights)
        count += 1
        del batch
    if count > num_batches:
        raise ValueError(f"{count} batches came instead of {num_batches}")
    return sums[:count].cpu().numpy()


def _checksum(batch: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (batch.flatten() * weights).sum()


def _control(
    accelerator: Accelerator,
    scale: Scale,
    dataset: Blocks,
    weights: torch.Tensor,
    expected: NDArray[np.int64],
) -> int:
    """Return the number of mismatches if all batches are copied to the same memory, without waiting for its readers."""
    num_batches = min(_NUM_CONTROLLED, scale.num_checked)
    hosts = [
        torch.from_numpy(np.stack([dataset[step * _BATCH_SIZE + place] for place in range(_BATCH_SIZE)])).pin_memory()
        for step in range(num_batches)
    ]
    shared = torch.empty(hosts[0].shape, dtype=torch.uint8, device=accelerator.device)
    sums = torch.zeros(num_batches, dtype=torch.int64, device=accelerator.device)
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    accelerator.synchronize()
    for step, host in enumerate(hosts):
        with torch.cuda.stream(side):
            shared.copy_(host, non_blocking=True)
        current.wait_event(side.record_event())
        accelerator.stall(scale.stall_s)
        sums[step] = _checksum(shared, weights)
    accelerator.synchronize()
    return len(mismatches(sums.cpu().numpy(), expected[:num_batches]))
