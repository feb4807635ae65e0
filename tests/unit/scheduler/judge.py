"""Judges what the scheduler does. It knows by itself what is to be delivered, and which failures are justified."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swift_loader.sampling.work import IndexWork, PlannedWork, StreamWork, Work
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.messages import (
    Answered,
    Disconnected,
    Ended,
    Event,
    NoBatch,
    Ready,
    Send,
    Stall,
    TemplateEnded,
)
from swift_loader.scheduler.restarts import Decision

AnyWork = TypeVar("AnyWork", bound=Work | None)

NUM_BATCHES = 7
"""Of each planned epoch."""

TIMEOUT_S = 10.0
TEMPLATE = -1


@dataclass(frozen=True)
class Setting:
    """What a run is about."""

    num_workers: int
    in_order: bool
    max_in_flight: int
    max_ready: int
    max_restarts: int
    kind: str
    """planned, index, bound (each batch of a sampler to one worker, until a resize) or stream"""
    cursed: frozenset[int] = frozenset()
    """Steps of epoch 0 whose batch ends each worker that begins it."""
    lengths: tuple[int, ...] = (3, 0, 5, 1)
    """Batches of each shard of a stream."""
    varies: bool = False
    """Whether batches take long, and some far longer than others."""

    def keys(self, step: int) -> list[int]:
        """Return what a sampler chooses for a batch."""
        return [step, 2 * step]


@dataclass
class Record:
    """What the judge knows about a worker."""

    worker_id: int
    unanswered: deque[Send] = field(default_factory=deque)
    """Tasks that were decided, and whose answers weren't heard."""
    num_ready: int = 0
    since_s: float = 0.0
    """When it got to its oldest task at the earliest."""
    is_closed: bool = False
    """Whether it gets no more tasks: it was killed or reaped."""
    killed_s: float = math.inf
    is_reaped: bool = False
    is_dismissed: bool = False
    blamed: Send | None = None
    """The task that it was at when it was reaped."""


class Judge:
    """Judges actions and batches by the rules, from what was decided and heard."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.num_wanted = setting.num_workers
        self.max_in_flight = setting.max_in_flight
        self.records: dict[int, Record] = {}
        self.generation = 0
        self.begin = (0, 0)
        self.meanings = [0]
        """By generation; changes when equal work becomes another batch."""
        self.works: dict[int, Work] = {}
        """Those of the generation that were sent, by sequence."""
        self.delivered: list[Work] = []
        """Those of the generation."""
        self.num_ready = 0
        self.deaths_in_a_row: Counter[int] = Counter()
        self.deaths_by_work: Counter[Hashable] = Counter()
        self.blamed: set[object] = set()
        """Why a failure is justified."""
        self.last_death: tuple[Work | None, int] = (None, 0)
        """What the last worker to end was building, and how many batches it had been given."""

    # What is heard

    def hear(self, event: Event, now_s: float) -> None:
        """Keep the books of answers and deaths."""
        if isinstance(event, Ready):
            self.records[event.worker] = Record(event.worker_id)
        elif isinstance(event, Disconnected):
            self.records.setdefault(event.worker, Record(event.worker_id))
        elif isinstance(event, (Answered, NoBatch)):
            record = self.records[event.task.worker]
            task = record.unanswered.popleft()
            assert task is event.task
            record.since_s = now_s
            if self.is_needed(task) and isinstance(event, Answered):
                record.num_ready += 1
                self.num_ready += 1
                self.deaths_in_a_row.pop(record.worker_id, None)
                self.deaths_in_a_row.pop(TEMPLATE, None)
                self.deaths_by_work.pop(key_of(task.work), None)
        elif isinstance(event, TemplateEnded):
            self.note_death(TEMPLATE, None)
        elif isinstance(event, Ended):
            record = self.records.pop(event.worker)
            num_lost = sum(map(self.is_needed, record.unanswered))
            if record.is_dismissed or (record.worker_id >= self.num_wanted and not num_lost):
                self.deaths_in_a_row.pop(record.worker_id, None)
            elif not event.death.with_template:
                blamed = record.blamed if event.death.is_at_work else None
                self.note_death(record.worker_id, blamed)
                self.last_death = unbound(blamed.work) if blamed is not None else None, num_lost

    def is_needed(self, task: Send) -> bool:
        """Return whether a task is of the generation."""
        return task.generation == self.generation

    def reap(self, serial: int) -> None:
        """Take down what a worker is at."""
        record = self.records[serial]
        assert not record.is_reaped, "a worker was reaped twice"
        if record.unanswered and self.is_needed(record.unanswered[0]):
            record.blamed = record.unanswered[0]
        record.is_closed = record.is_reaped = True

    def note_death(self, worker_id: int, task: Send | None) -> None:
        """Count a death, and say whether it is one too many."""
        self.deaths_in_a_row[worker_id] += 1
        if self.deaths_in_a_row[worker_id] > self.setting.max_restarts:
            self.blamed.add("template" if worker_id == TEMPLATE else Decision.TOO_MANY)
        if task is not None:
            self.deaths_by_work[key_of(task.work)] += 1
            if self.setting.max_restarts and self.deaths_by_work[key_of(task.work)] >= 2:
                self.blamed.add(Decision.BATCH_IS_TO_BLAME)

    def seek(self, begin: tuple[int, int], *, keeps_meaning: bool) -> None:
        """Begin another generation."""
        self.generation += 1
        self.begin, self.delivered = begin, []
        self.num_ready, self.works = 0, {}
        for record in self.records.values():
            record.num_ready = 0
        self.meanings.append(self.meanings[-1] + (not keeps_meaning))
        if not keeps_meaning:
            self.deaths_by_work.clear()
            for record in self.records.values():
                record.blamed = None

    def resize(self, num_workers: int) -> None:
        """Want another number of workers, and as many batches in flight as before per worker."""
        self.num_wanted = num_workers
        self.max_in_flight = max(1, self.setting.max_in_flight * num_workers // self.setting.num_workers)

    # What is decided

    def check_dismissed(self, serial: int) -> None:
        """Judge whether a worker may go."""
        record = self.records[serial]
        assert not record.is_closed, "a worker was dismissed that is gone"
        assert not record.unanswered, "a worker was dismissed that has something left to do"
        assert record.worker_id >= self.num_wanted, "a worker was dismissed that is wanted"
        record.is_closed = record.is_dismissed = True

    def check_send(self, task: Send, now_s: float) -> None:
        record = self.records[task.worker]
        assert not record.is_closed, f"{task} goes to a worker that was killed or has ended"
        assert record.worker_id < self.num_wanted, f"{task} goes to a worker that is leaving"
        assert task.generation == self.generation
        if not isinstance(task.work, PlannedWork) and task.work.worker_id is not None:
            assert task.work.worker_id == record.worker_id
        holders = [one for one in self.records.values() for sent in one.unanswered if is_same(sent, task)]
        assert not holders, f"{task} is being built"
        if task.sequence not in self.works:
            assert task.sequence == len(self.works), "a sequence was left out"
            assert record.num_ready < self.setting.max_ready, "a worker has too many batches ready"
            if not isinstance(task.work, StreamWork):  # else some don't exist
                begun = {key_of(work) for work in self.works.values()} | {key_of(task.work)}
                assert len(begun) <= self.max_in_flight + len(self.delivered)
        self.works[task.sequence] = task.work
        if not record.unanswered:
            record.since_s = max(record.since_s, now_s)
        record.unanswered.append(task)

    def check_stall(self, stall: Stall, now_s: float, limit_s: float) -> None:
        """Judge what is said about a worker that hangs."""
        assert stall.worker is not None
        record = self.records[stall.worker]
        assert record.unanswered, "a worker has nothing to do, and is said to hang"
        assert now_s - record.since_s >= limit_s, "a worker is said to hang too early"
        oldest = record.unanswered[0]
        assert unbound(stall.work) == (unbound(oldest.work) if self.is_needed(oldest) else None)

    def check_delivered(self, one: Delivery) -> None:
        assert one.work is not None
        assert (one.error is not None) == (one.work.step % 5 == 4)
        meaning, work, serial = one.batch if one.error is None else one.error.args
        assert (meaning, work) == (self.meanings[self.generation], unbound(one.work))
        self.num_ready -= 1
        if serial in self.records:
            self.records[serial].num_ready -= 1
        assert one.failures in ((), (("sample", unbound(one.work)),))
        assert bool(one.failures) == (one.work.step % 3 == 0)
        self.delivered.append(one.work)

    def check_order(self) -> None:
        """Compare what was delivered with what should have been."""
        works: list[Work] = [
            one._replace(step=0) if isinstance(one, StreamWork) else unbound(one) for one in self.delivered
        ]
        if self.setting.in_order:
            assert works == self.expected(len(works))
            return
        assert len({key_of(work) for work in works}) == len(works), "a batch came twice"
        if self.setting.kind == "planned":
            assert [work.epoch for work in works] == sorted(work.epoch for work in works)
            for epoch in {work.epoch for work in works[:-1]} - {works[-1].epoch if works else -1}:
                first = self.begin[1] if epoch == self.begin[0] else 0
                assert {work.step for work in works if work.epoch == epoch} == set(range(first, NUM_BATCHES))
        else:
            assert {key_of(work) for work in works} <= {key_of(work) for work in self.expected(1000)}

    def expected(self, num: int) -> Sequence[Work]:
        """Return the first works that are to be delivered in order, as far as there are any."""
        epoch, step = self.begin
        if self.setting.kind == "planned":
            return [PlannedWork(epoch + (step + i) // NUM_BATCHES, (step + i) % NUM_BATCHES) for i in range(num)]
        if self.setting.kind in ("index", "bound"):
            return [IndexWork(epoch, one, self.setting.keys(one)) for one in range(step, NUM_BATCHES)][:num]
        lengths = self.setting.lengths[: self.setting.num_workers]
        return [
            StreamWork(epoch, 0, worker_id, turn)
            for turn in range(max(lengths, default=0))
            for worker_id, length in enumerate(lengths)
            if turn < length
        ][:num]


def key_of(work: Work) -> Hashable:
    """Return what tells whether two works are the same batch."""
    if isinstance(work, StreamWork):
        return work.epoch, work.worker_id, work.turn
    return work.epoch, work.step


def unbound(work: AnyWork) -> AnyWork:
    """Return the work as if any worker could build it."""
    return work._replace(worker_id=None) if isinstance(work, IndexWork) else work


def is_same(one: Any, other: Any) -> bool:
    """Whether two tasks are for the same batch."""
    return bool((one.generation, one.sequence) == (other.generation, other.sequence))
