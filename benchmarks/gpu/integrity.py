"""Checks every byte: checksums of thousands of batches on the device.

The loop only queues the checksum, on its stream, and drops the batch. Few batches are in flight, so slots and device
memory are used again as soon as possible.

- plain: no delay.
- lagging: the loop's stream is delayed before each checksum. Device memory that is released too early is written before
  it is read.
- late: the copy stream is delayed before each copy. A slot that is released too early is written before it is read.

Two controls release memory too early on purpose. If the check misses one, the result is invalid (status 1). They need a
device that runs beside the host, so the CPU has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from common.report import Result, format_number, format_table
from numpy.typing import NDArray

import swift_loader
from gpu.accelerator import Accelerator
from gpu.checksums import expected_checksums, make_weights, mismatches
from gpu.datasets import Blocks
from gpu.outcome import Outcome
from gpu.scale import Scale
from swift_loader import SwiftLoader
from swift_loader.device.streams import CopiesInFlight

_BATCH_SIZE = 4
_IN_FLIGHT = 4
_LATE_DEPTH = 4
"""Batches ahead of the loop where copies are late: so many of them are under way."""
_NUM_CONTROLLED = 2000
_HEADERS = ["case", "system", "batches", "mismatches", "batches/s"]
_MAX_NAMED = 10


@dataclass(frozen=True, slots=True)
class _Way:
    """What is held up."""

    name: str
    loop_s: float = 0.0
    """For how long, per batch, the loop's stream is."""
    copy_s: float | None = None
    """The same, for the copies' stream; None: the loader's own move."""
    depth: int = 1


@dataclass(frozen=True, slots=True)
class _Known:
    """What the sums are checked against."""

    make_dataset: partial[Blocks]
    weights: torch.Tensor
    """On the device."""
    sums: NDArray[np.int64]


def check_integrity(accelerator: Accelerator, scale: Scale) -> Outcome:
    """Return how many batches were checked, and how many were wrong.

    The outcome isn't right if any was, or if a control wasn't seen.
    """
    known = _make_known(accelerator, scale)
    rows, results, notes = [], [], []
    num_wrong = 0
    for way in (
        _Way("plain"),
        _Way("lagging", loop_s=scale.stall_s),
        _Way("late", copy_s=scale.stall_s, depth=_LATE_DEPTH),
    ):
        begin = time.perf_counter()
        wrong = _run(accelerator, scale, known, way, scale.num_checked)
        rate = scale.num_checked / (time.perf_counter() - begin)
        num_wrong += len(wrong)
        rows.append([way.name, "swift_loader", f"{scale.num_checked:,}", str(len(wrong)), format_number(rate)])
        results.append(Result(way.name, "swift_loader", "mismatches", [float(len(wrong))]))
        if wrong:
            notes.append(f"{way.name}: MISMATCHES in the batches {wrong[:_MAX_NAMED]} ...")
    num_controlled = min(_NUM_CONTROLLED, scale.num_checked)
    is_blind = False
    for name, control in _CONTROLS.items() if accelerator.is_gpu else ():
        num_seen = len(control(accelerator, scale, known, num_controlled))
        rows.append([name, "control", f"{num_controlled:,}", str(num_seen), "-"])
        if not num_seen:
            is_blind = True
            notes.append(f"{name}: the control was NOT seen, so the check is blind and its result means nothing")
    if not accelerator.is_gpu:
        notes.append(f"{accelerator.describe()}: no control, as copies there are over at once")
    verdict = f"{num_wrong} mismatches in {len(results) * scale.num_checked:,} batches"
    text = "\n".join([format_table(_HEADERS, rows), verdict, *notes])
    return Outcome(text, results, is_right=not num_wrong and not is_blind)


def _make_known(accelerator: Accelerator, scale: Scale) -> _Known:
    make_dataset = partial(Blocks, length=scale.num_checked * _BATCH_SIZE, nbytes=scale.block_nbytes)
    weights = make_weights(_BATCH_SIZE * scale.block_nbytes)
    sums = expected_checksums(make_dataset(), scale.num_checked, _BATCH_SIZE, weights)
    return _Known(make_dataset, torch.from_numpy(weights).to(accelerator.device), sums)


def _run(accelerator: Accelerator, scale: Scale, known: _Known, way: _Way, num_batches: int) -> list[int]:
    """Return which of so many batches that a loader brings to the device are wrong."""

    def late(batch: Any, device: torch.device) -> Any:
        accelerator.stall(way.copy_s or 0.0)
        return swift_loader.to_device(batch, device)

    make_dataset = partial(Blocks, length=num_batches * _BATCH_SIZE, nbytes=scale.block_nbytes)
    with _make_loader(make_dataset, scale.num_workers, way.depth) as loader:
        loader.start(device=accelerator.device, to_device=None if way.copy_s is None else late)
        found = _checksums(accelerator, loader, known.weights, num_batches, way.loop_s)
    return mismatches(found, known.sums[:num_batches])


def _make_loader(make_dataset: partial[Blocks], num_workers: int, depth: int) -> SwiftLoader:
    return SwiftLoader(
        make_dataset.func,
        make_dataset.keywords,
        batch_size=_BATCH_SIZE,
        nb_consumer=1,
        worker_per_consumer=num_workers,
        shuffle=False,
        data_queue_size=max(_IN_FLIGHT, num_workers),
        max_nb_batch_on_device=depth,
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


def _control_device(accelerator: Accelerator, scale: Scale, known: _Known, num_batches: int) -> list[int]:
    """Return the mismatches if all batches are copied to the same memory, without waiting for its readers."""
    num_batches = min(num_batches, 200)
    dataset = known.make_dataset()
    hosts = []
    for step in range(num_batches):
        host = accelerator.pinned(_BATCH_SIZE * scale.block_nbytes)
        host.numpy()[:] = np.concatenate([dataset[step * _BATCH_SIZE + place] for place in range(_BATCH_SIZE)])
        hosts.append(host)
    shared = torch.empty_like(hosts[0], device=accelerator.device)
    sums = torch.zeros(num_batches, dtype=torch.int64, device=accelerator.device)
    accelerator.synchronize()
    for step, host in enumerate(hosts):
        accelerator.copy_aside(shared, host)
        accelerator.stall(scale.stall_s)
        sums[step] = _checksum(shared, known.weights)
    accelerator.synchronize()
    return mismatches(sums.cpu().numpy(), known.sums[:num_batches])


def _control_host(accelerator: Accelerator, scale: Scale, known: _Known, num_batches: int) -> list[int]:
    """Return the mismatches if slots are given back while their copies are under way."""
    way = _Way("early", loop_s=scale.stall_s, copy_s=scale.stall_s, depth=_LATE_DEPTH)
    with _early_release():
        return _run(accelerator, scale, known, way, num_batches)


@contextmanager
def _early_release() -> Iterator[None]:
    """Have the loader keep no batch on the host until its copy is over."""

    def let_go(self: CopiesInFlight) -> None:
        self._in_flight.clear()

    proper = CopiesInFlight.drop_finished
    CopiesInFlight.drop_finished = let_go  # type: ignore[method-assign]
    try:
        yield
    finally:
        CopiesInFlight.drop_finished = proper  # type: ignore[method-assign]


_CONTROLS: dict[str, Callable[[Accelerator, Scale, _Known, int], list[int]]] = {
    "lagging": _control_device,
    "late": _control_host,
}
"""By the way of holding up that each is for."""
