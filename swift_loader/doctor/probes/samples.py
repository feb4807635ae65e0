"""Fetches samples and measures them, one by one and as batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any

import numpy as np

from swift_loader.batch.collate import Collate, HeapMemory, collate_into
from swift_loader.batch.torch_collate import torch_collate
from swift_loader.cli import find_target
from swift_loader.doctor.facts import Batches, Failure, Layout, Sample, SlowAgain
from swift_loader.doctor.probes.board import Board, Phase
from swift_loader.doctor.probes.leaves import layout_of
from swift_loader.doctor.probes.stack_sampler import StackSampler
from swift_loader.doctor.probes.subject import SEED, Subject, describe_failure
from swift_loader.sampling.permutation import permute
from swift_loader.transport.by_value import Definitions
from swift_loader.worker.fetch import Fetcher, OnError
from swift_loader.worker.seeding import Rng, Seeding

__all__ = [
    "collate_function",
    "first_failing",
    "look_longer",
    "measure",
    "measure_batches",
    "probe_order",
    "time_again",
]

MAX_SAMPLES = 20_000
"""Of very fast samples, more say nothing new."""

_MAX_BATCHES = 20

_ENOUGH_HITS = 200
"""Of a small dataset of fast samples, one pass shows too few stacks."""

_NUM_AGAIN = 3
"""The machine may be busy once, hardly three times."""

_BEYOND_THE_END = ("IndexError", "KeyError", "StopIteration")
"""What a dataset raises for an index that it doesn't have."""

_MAX_TEXT = 300


def probe_order(num_samples: int) -> Iterator[int]:
    """Yield dataset indices to look at, each once: the first, the last, then others from all over the dataset."""
    first = [index for index in dict.fromkeys((0, num_samples - 1)) if 0 <= index < num_samples]
    yield from first
    keys = np.array([SEED], np.uint64)
    for begin in range(0, min(num_samples, MAX_SAMPLES), 1024):
        positions = np.arange(begin, min(begin + 1024, num_samples), dtype=np.uint64)
        yield from (index for index in permute(positions, num_samples, keys).tolist() if index not in first)


def measure(
    subject: Subject, indices: Iterator[int], seconds: float, sampler: StackSampler, report: Callable[[object], None]
) -> list[Sample]:
    """Fetch samples for some seconds, and report each `Sample` or `Failure`. Return those that succeeded."""
    deadline_s = time.perf_counter() + seconds
    samples: list[Sample] = []
    layouts: dict[Layout, Layout] = {}
    for index in indices:
        result = _measure_one(subject, index, sampler, layouts)
        report(result)
        if isinstance(result, Sample):
            samples.append(result)
        if time.perf_counter() > deadline_s:
            break
    return samples


def look_longer(subject: Subject, indices: Sequence[int], seconds: float, sampler: StackSampler) -> None:
    """Fetch the same samples again, until the sampler has seen enough or the time is over."""
    deadline_s = time.perf_counter() + seconds
    for index in cycle(indices):
        if sampler.num_hits >= _ENOUGH_HITS or time.perf_counter() > deadline_s:
            return
        subject.prepare(index)
        sampler.index = index
        with suppress(Exception, SystemExit):
            subject.get(index)
        sampler.index = None
        subject.leave()


def _measure_one(
    subject: Subject, index: int, sampler: StackSampler, layouts: dict[Layout, Layout]
) -> Sample | Failure:
    raised: BaseException | None = None
    sample = None
    subject.prepare(index)
    sampler.index = index
    cpu_s, began_s = time.thread_time(), time.perf_counter()
    try:
        sample = subject.get(index)
    except (Exception, SystemExit) as error:
        raised = error
    took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
    sampler.index = None  # before anything else: what comes now isn't the sample's time
    subject.leave()
    if raised is not None:
        return describe_failure(index, raised)
    layout = layout_of(sample)
    return Sample(index, took_s, cpu_s, layouts.setdefault(layout, layout))


def time_again(subject: Subject, slow: Sequence[Sample], seconds: float) -> tuple[SlowAgain, ...]:
    """Fetch slow samples some times more, as far as the time allows, and keep the shortest times."""
    found, deadline_s = [], time.perf_counter() + seconds
    for sample in slow:
        again_s = min(_time_once(subject, sample.index) for _ in range(_NUM_AGAIN))
        found.append(SlowAgain(sample.index, sample.took_s, again_s))
        if time.perf_counter() > deadline_s:
            break
    return tuple(found)


def _time_once(subject: Subject, index: int) -> float:
    subject.prepare(index)
    began_s = time.perf_counter()
    with suppress(Exception, SystemExit):
        subject.get(index)
    took_s = time.perf_counter() - began_s
    subject.leave()
    return took_s


def first_failing(subject: Subject, failures: Sequence[Failure]) -> int | None:
    """Return the index from which on samples fail as beyond the end of the dataset.

    None if the last one doesn't, or if all do: then the length isn't what is wrong.
    """
    last = subject.num_samples - 1
    of_last = [failure for failure in failures if failure.index == last and failure.kind in _BEYOND_THE_END]
    if not of_last:
        return None
    good, bad = -1, last
    while bad - good > 1:
        middle = (good + bad) // 2
        if subject.fails(middle):
            bad = middle
        else:
            good = middle
    return bad or None


def collate_function(name: str) -> Collate:
    """Return the collate function of that name.

    Raises:
        CommandError: There is no such function.
    """
    if name == "default":
        return collate_into(None)
    return torch_collate if name == "torch" else collate_into(find_target(name))


def measure_batches(
    subject: Subject, indices: Sequence[int], collate: Collate, batch_size: int, seconds: float, board: Board
) -> Batches:
    """Build batches for some seconds, at least one, as a worker does it."""
    seeding = Seeding(Rng.SAMPLE)
    fetcher = Fetcher(subject.dataset, subject.num_samples, OnError.RAISE, seeding, Definitions())
    deadline_s = time.perf_counter() + seconds
    took: list[float] = []
    collated: list[float] = []
    nbytes = 0
    for number in range(_MAX_BATCHES):
        chosen = np.resize(np.roll(indices, -number * batch_size), batch_size).tolist()
        board.enter(Phase.COLLATING)
        began_s = time.perf_counter()
        try:
            samples = _fetch(fetcher, seeding, chosen)
            fetched_s = time.perf_counter()
            batch = collate(samples, HeapMemory())
        except Exception as error:
            return Batches(batch_size, (), (), 0, f"{type(error).__name__}: {error}"[:_MAX_TEXT])
        ended_s = time.perf_counter()
        took.append(ended_s - began_s)
        collated.append(ended_s - fetched_s)
        nbytes = sum(leaf.nbytes for leaf in layout_of(batch)) if number == 0 else nbytes
        if ended_s > deadline_s:
            break
    return Batches(batch_size, tuple(took[1:] or took), tuple(collated[1:] or collated), nbytes)


def _fetch(fetcher: Fetcher, seeding: Seeding, indices: list[int]) -> list[Any]:
    samples = fetcher.fetch(SEED, 0, indices).samples
    if seeding.needs_rebuild():  # the first batch shows whether samples draw; later ones are seeded at once
        samples = fetcher.fetch(SEED, 0, indices).samples
        seeding.needs_rebuild()
    return list(samples)
