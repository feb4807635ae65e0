"""The first process: builds the dataset, measures it, and looks at all that one process can see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from swift_loader.doctor.facts import Contention, Digests, Failure, FirstFailing, Habits, Sample
from swift_loader.doctor.probes.board import Board, Request
from swift_loader.doctor.probes.draws import watch_draws
from swift_loader.doctor.probes.holdings import containers_of, growths, lengths_of
from swift_loader.doctor.probes.leaves import digests_of, large_views, requiring_grad
from swift_loader.doctor.probes.process_state import ProcessState, queued_so_far_s
from swift_loader.doctor.probes.samples import (
    collate_function,
    first_failing,
    look_longer,
    measure,
    measure_batches,
    probe_order,
    time_again,
)
from swift_loader.doctor.probes.stack_sampler import StackSampler
from swift_loader.doctor.probes.subject import Subject, build
from swift_loader.doctor.settings import Settings

__all__ = ["examine"]

_SHARES = {"samples": 0.5, "again": 0.1, "batches": 0.15, "draws": 0.1, "twice": 0.15}
"""Of the time for measurements."""

_NUM_SLOW = 8
_NUM_CLOSE = 64
"""How many samples are looked at more closely: what they draw, and whether they are the same again."""
_NUM_VIEWED = 4

_MAX_PRINTED = 120

Report = Callable[[object], None]


def examine(request: Request, board: Board, report: Report) -> None:
    """Build the dataset and report all about it.

    Raises:
        CommandError: The target or the collate function can't be found.
    """
    settings = request.settings
    collate = collate_function(settings.collate)
    dataset, construction = build(settings.target, board)
    report(construction)
    if dataset is None or not construction.lengths[0]:
        return
    for container in containers_of(dataset):
        report(container)
    seconds = {name: share * request.seconds for name, share in _SHARES.items()}
    subject = Subject(dataset, construction.lengths[0], board)
    printed, state, lengths = _Printed(), ProcessState.now(), lengths_of(dataset)
    samples = _measure(subject, request, seconds, report)
    good = [sample.index for sample in samples]
    num_fetches, (num_lines, last) = subject.num_fetches, printed.since()
    if good:
        batch_size = _batch_size(samples, settings, seconds["batches"])
        report(measure_batches(subject, good, collate, batch_size, seconds["batches"], board))
        report(watch_draws(subject, good[:_NUM_CLOSE], seconds["draws"]))
        report(_build_twice(subject, good[:_NUM_CLOSE], seconds["twice"]))
        views, with_grad = _look_at_leaves(subject, good[:_NUM_VIEWED])
        changed = ProcessState.now().changed_since(state)
        report(Habits(num_fetches, num_lines, last, changed, views, with_grad))
    for growth in growths(lengths, lengths_of(dataset)):
        report(growth)


def _measure(subject: Subject, request: Request, seconds: dict[str, float], report: Report) -> list[Sample]:
    """Measure samples one by one, and report all about them. Return those that succeeded."""
    failures: list[Failure] = []

    def note(result: object) -> None:
        if isinstance(result, Failure):
            failures.append(result)
        report(result)

    sampler = StackSampler()
    order = (index for index in probe_order(subject.num_samples) if index not in request.avoid)
    sampler.start()
    began_s, queued_s = time.perf_counter(), queued_so_far_s()
    samples = measure(subject, order, seconds["samples"], sampler, note)
    report(Contention(queued_so_far_s() - queued_s))
    left_s = seconds["samples"] - (time.perf_counter() - began_s)
    look_longer(subject, [sample.index for sample in samples], left_s, sampler)
    sampler.stop()
    slow = _slowest(samples)
    report(sampler.stacks({sample.index for sample in slow}))
    for again in time_again(subject, slow, seconds["again"]):
        report(again)
    beyond = first_failing(subject, failures)
    if beyond is not None:
        report(FirstFailing(beyond))
    return samples


def _batch_size(samples: Sequence[Sample], settings: Settings, seconds: float) -> int:
    """Return how many samples to build into a batch: those that the user wants, or for which there is time."""
    mean_s = sum(sample.took_s for sample in samples) / len(samples)
    return min(settings.batch_size, max(2, int(seconds / max(mean_s, 1e-9))))


def _slowest(samples: Sequence[Sample]) -> list[Sample]:
    """Return the slowest samples, without the first one, which warms up."""
    return sorted(samples[1:], key=lambda sample: -sample.took_s)[:_NUM_SLOW]


def _build_twice(subject: Subject, indices: Sequence[int], seconds: float) -> Digests:
    """Build samples twice with the same seeds, and return their digests."""
    first, again = {}, {}
    deadline_s = time.perf_counter() + seconds
    for index in indices:
        with suppress(Exception, SystemExit):
            one, other = digests_of(subject.fetch(index)), digests_of(subject.fetch(index))
            first[index], again[index] = one, other
        if time.perf_counter() > deadline_s:
            break
    return Digests(first, again)


def _look_at_leaves(
    subject: Subject, indices: Sequence[int]
) -> tuple[tuple[tuple[str, int, int], ...], tuple[str, ...]]:
    """Return the leaves that are views of large arrays, and those that require grad."""
    views: dict[str, tuple[str, int, int]] = {}
    with_grad: dict[str, None] = {}
    for index in indices:
        with suppress(Exception, SystemExit):
            sample = subject.fetch(index)
            views |= {view[0]: view for view in large_views(sample)}
            with_grad |= dict.fromkeys(requiring_grad(sample))
    return tuple(views.values()), tuple(with_grad)


class _Printed:
    """What this process has printed since this was made. Its stderr and stdout are one file."""

    def __init__(self) -> None:
        self._begin = self._size()

    def since(self) -> tuple[int, str]:
        """Return the number of lines, and the last one."""
        length = self._size() - self._begin
        os.lseek(2, self._begin, os.SEEK_SET)  # writing goes to the end in any case
        lines = os.read(2, length).decode(errors="replace").splitlines()
        return len(lines), lines[-1][:_MAX_PRINTED] if lines else ""

    @staticmethod
    def _size() -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        return os.fstat(2).st_size
