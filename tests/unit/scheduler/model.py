"""A model of an executor whose workers die, hang, answer late and lie, and of a loop that takes batches and seeks.

World     the executor, the loop and the clock; it carries out actions whenever it likes
Process   a worker, as it is in truth
Judge     what was decided and heard; it knows, without the scheduler, what is to be delivered and what is justified
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_loader.errors import ProtocolError, WorkerDied
from swift_loader.scheduler.actions import (
    Action,
    Casualty,
    Fail,
    GiveUp,
    Kill,
    Reap,
    Replace,
    ReplaceTemplate,
    Send,
    Stall,
    TemplateLost,
    Warn,
)
from swift_loader.scheduler.events import (
    Built,
    Death,
    Disconnected,
    Ended,
    Event,
    ExecutorFailed,
    Failed,
    Ready,
    SampleFailed,
    Skipped,
    StreamEnded,
    TemplateEnded,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.restarts import Decision
from swift_loader.scheduler.scheduler import Delivered, Scheduler, SchedulerSettings, SchedulerState
from swift_loader.scheduler.watchdog import MIN_STOPPED_S
from swift_loader.scheduler.work import IndexSource, IndexWork, PlannedSource, PlannedWork, StreamWork, Work, WorkSource
from tests.unit.scheduler.streams import StreamSource

__all__ = ["NUM_BATCHES", "Process", "Setting", "World"]

NUM_BATCHES = 7
"""Of each planned epoch."""

TIMEOUT_S = 10.0
TEMPLATE = -1


@dataclass(frozen=True)
class Setting:
    """What a run is about."""

    num_places: int
    in_order: bool
    max_in_flight: int
    max_ready: int
    max_restarts: int
    kind: str
    """planned, index or stream"""
    trial: str = "none"
    """What the loop does with the trial batch: use it, forget it, or begin with batches of another meaning."""
    cursed: frozenset[int] = frozenset()
    """Steps of epoch 0 whose batch ends each worker that begins it."""
    lengths: tuple[int, ...] = (3, 0, 5, 1)
    """Batches of each shard of a stream."""


@dataclass
class Process:
    """A worker. It does its tasks in order."""

    serial: int
    place: int
    pipe: deque[Send] = field(default_factory=deque)
    """Tasks that have arrived and aren't done."""
    said: deque[Event] = field(default_factory=deque)
    """Events that the executor hasn't heard."""
    is_ready: bool = False
    is_hanging: bool = False
    is_dead: bool = False
    is_unkillable: bool = False
    is_at_work: bool = False
    """Whether it has begun the first task of its pipe."""
    is_cut_off: bool = False
    """Whether the executor has stopped listening to it."""
    with_template: bool = False
    newest: int = 0
    """The latest generation that it knows of."""

    def die(self, *, with_template: bool = False) -> None:
        """End, at work or not."""
        if not self.is_dead:
            self.is_dead, self.with_template = True, with_template
            if not self.is_cut_off:
                self.said.append(Disconnected(self.serial, self.place))

    def cut_off(self) -> None:
        """Find out how it ended, and listen to nothing else."""
        self.is_cut_off = True
        self.said.clear()
        death = Death(-9 if self.is_dead else None, self.is_at_work, self.with_template)
        self.said.append(Ended(self.serial, self.place, death))


@dataclass
class Record:
    """What the judge knows about a worker."""

    place: int
    unanswered: deque[Send] = field(default_factory=deque)
    """Tasks that were decided, and whose answers weren't heard."""
    num_ready: int = 0
    since_s: float = 0.0
    """When it got to its oldest task at the earliest."""
    is_closed: bool = False
    """Whether it gets no more tasks: it was killed or reaped."""
    killed_s: float = math.inf
    is_reaped: bool = False
    blamed: Send | None = None
    """The task that it was at when it was reaped."""


class Judge:
    """Judges actions and batches by the rules, from what was decided and heard."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
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
            self.records[event.worker] = Record(event.place)
        elif isinstance(event, Disconnected):
            self.records.setdefault(event.worker, Record(event.place))
        elif isinstance(event, (Built, Failed, Skipped, StreamEnded)):
            record = self.records[event.worker]
            task = record.unanswered.popleft()
            record.since_s = now_s
            if task.generation == self.generation and isinstance(event, (Built, Failed)):
                record.num_ready += 1
                self.num_ready += 1
                self.deaths_in_a_row.pop(record.place, None)
                self.deaths_in_a_row.pop(TEMPLATE, None)
                self.deaths_by_work.pop(key_of(task.work), None)
        elif isinstance(event, TemplateEnded):
            self.note_death(TEMPLATE, None)
        elif isinstance(event, Ended):
            record = self.records.pop(event.worker)
            if not event.death.with_template:
                blamed = record.blamed if event.death.is_at_work else None
                self.note_death(record.place, blamed)
                num_lost = sum(task.generation == self.generation for task in record.unanswered)
                self.last_death = blamed.work if blamed is not None else None, num_lost

    def reap(self, serial: int) -> None:
        """Take down what a worker is at."""
        record = self.records[serial]
        assert not record.is_reaped, "a worker was reaped twice"
        if record.unanswered and record.unanswered[0].generation == self.generation:
            record.blamed = record.unanswered[0]
        record.is_closed = record.is_reaped = True

    def note_death(self, place: int, task: Send | None) -> None:
        """Count a death, and say whether it is one too many."""
        self.deaths_in_a_row[place] += 1
        if self.deaths_in_a_row[place] > self.setting.max_restarts:
            self.blamed.add("template" if place == TEMPLATE else Decision.TOO_MANY)
        if task is not None:
            self.deaths_by_work[key_of(task.work)] += 1
            if self.setting.max_restarts and self.deaths_by_work[key_of(task.work)] >= 2:
                self.blamed.add(Decision.BATCH_IS_TO_BLAME)

    def seek(self, begin: tuple[int, int], *, keeps_meaning: bool, adopts: Work | None) -> None:
        """Begin another generation, with the trial batch as its first one if `adopts` is its work."""
        self.generation += 1
        self.begin, self.delivered = begin, []
        self.num_ready = 0 if adopts is None else 1
        self.works = {} if adopts is None else {0: adopts}
        for record in self.records.values():
            if adopts is None:
                record.num_ready = 0
        self.meanings.append(self.meanings[-1] + (not keeps_meaning))
        if not keeps_meaning:
            self.deaths_by_work.clear()
            for record in self.records.values():
                record.blamed = None

    # What is decided

    def check_send(self, task: Send, now_s: float) -> None:
        """Judge a task that is about to be sent."""
        record = self.records[task.worker]
        assert not record.is_closed, f"{task} goes to a worker that was killed or has ended"
        assert task.generation == self.generation
        if isinstance(task.work, StreamWork):
            assert task.work.place == record.place
        holders = [one for one in self.records.values() for sent in one.unanswered if is_same(sent, task)]
        assert not holders, f"{task} is being built"
        if task.sequence not in self.works:
            assert task.sequence == len(self.works), "a sequence was left out"
            assert record.num_ready < self.setting.max_ready, "a worker has too many batches ready"
        self.works[task.sequence] = task.work
        if not isinstance(task.work, StreamWork):  # else some don't exist
            assert len(self.works) - len(self.delivered) <= self.setting.max_in_flight
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
        assert stall.work == (oldest.work if oldest.generation == self.generation else None)
        assert stall.is_trial == (stall.work is not None and not self.generation)

    def check_delivered(self, one: Delivered) -> None:
        """Judge a batch for the loop."""
        assert one.num_before == len(self.delivered)
        assert (one.error is not None) == (one.work.step % 5 == 4)
        meaning, work, serial = one.outcome if one.error is None else one.error.args
        assert (meaning, work) == (self.meanings[self.generation], one.work)
        self.num_ready -= 1
        if serial in self.records:
            self.records[serial].num_ready -= 1
        assert one.failures in ((), (("sample", one.work),))
        assert bool(one.failures) == (one.work.step % 3 == 0) or self.is_adopted(one)
        self.delivered.append(one.work)

    def is_adopted(self, one: Delivered) -> bool:
        """Whether this may be the trial batch, whose samples' failures aren't kept."""
        return self.generation == 1 and not one.num_before

    def check_order(self) -> None:
        """Compare what was delivered with what should have been."""
        works = [one._replace(step=0) if isinstance(one, StreamWork) else one for one in self.delivered]
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
        if self.setting.kind == "index":
            return [IndexWork(epoch, one, [one, 2 * one]) for one in range(step, NUM_BATCHES)][:num]
        lengths = self.setting.lengths[: self.setting.num_places]
        return [
            StreamWork(epoch, 0, place, turn)
            for turn in range(max(lengths, default=0))
            for place, length in enumerate(lengths)
            if turn < length
        ][:num]


class World:
    """The executor, the loop and the clock."""

    def __init__(self, setting: Setting, make: Callable[[SchedulerSettings], Scheduler] = Scheduler) -> None:
        self.setting = setting
        self.judge = Judge(setting)
        limits = Limits(setting.max_in_flight, setting.max_ready, 64, setting.in_order)
        self.scheduler = make(SchedulerSettings(limits, setting.max_restarts, TIMEOUT_S / 2, TIMEOUT_S))
        self.now_s = 0.0
        self.processes: dict[int, Process] = {}
        self.num_started = 0
        self.to_do: deque[Action] = deque()
        """Decided, but not done."""
        self.has_failed = False
        """Whether the failure was decided."""
        self.is_told = False
        """Whether the loop has met it, after all that was ready."""
        self.wait_began_s: float | None = None
        for place in range(setting.num_places):
            self.start(place)
        if setting.trial != "none":
            self.scheduler.try_out(self.source(0, 0).next() or PlannedWork(0, 0))
            self.decide()
        else:
            self.seek(0, 0)

    # What the scheduler hears and decides

    def tell(self, event: Event, *, is_lie: bool = False) -> None:
        """Let the scheduler handle an event."""
        if not is_lie:
            self.judge.hear(event, self.now_s)
        try:
            self.scheduler.handle(event, self.now_s)
        except ProtocolError as error:
            if not is_lie:
                raise
            self.judge.blamed.add(error)
            self.scheduler.handle(ExecutorFailed(error), self.now_s)
        else:
            assert not is_lie, f"{event} was believed"
        self.decide()
        assert self.is_over or not self.judge.blamed, f"it goes on in spite of {self.judge.blamed}"

    def decide(self) -> None:
        """Have decisions made, and judge them."""
        actions = self.scheduler.decide(self.now_s)
        kinds = [isinstance(action, Send) for action in actions]
        assert kinds == sorted(kinds), "tasks are sent before the user is warned"
        for action in actions:
            assert not self.has_failed or isinstance(action, Reap), f"{action} after a failure"
            self.has_failed |= isinstance(action, Fail)
            self.check(action)
            self.to_do.append(action)
        assert self.scheduler.decide(self.now_s) == [], "something was left undecided"

    def check(self, action: Action) -> None:
        """Judge a decision."""
        match action:
            case Send():
                self.judge.check_send(action, self.now_s)
            case Kill():
                self.judge.check_stall(action.stall, self.now_s, TIMEOUT_S)
                record = self.judge.records[action.worker]
                assert not record.is_closed, "a worker was killed twice"
                record.is_closed, record.killed_s = True, self.now_s
            case Reap():
                record, process = self.judge.records[action.worker], self.processes[action.worker]
                if not process.is_dead:
                    assert self.now_s - record.killed_s >= TIMEOUT_S, "a worker was given up too early"
                self.judge.reap(action.worker)
            case Warn(Stall() as stall):
                if stall.worker is not None and not self.judge.records[stall.worker].is_closed:
                    self.judge.check_stall(stall, self.now_s, TIMEOUT_S / 2)
            case Warn(Casualty() as casualty):
                assert casualty.num_in_a_row == self.judge.deaths_in_a_row[casualty.place]
                assert casualty.decision is Decision.REPLACE
                assert (casualty.work, casualty.num_lost) == self.judge.last_death
            case Warn(TemplateLost() as lost):
                assert lost.num_in_a_row == self.judge.deaths_in_a_row[TEMPLATE]
            case GiveUp():
                assert self.wait_began_s is not None
                assert self.now_s - self.wait_began_s >= TIMEOUT_S, "the loop gave up too early"
            case Fail():
                cause = action.cause
                if isinstance(cause, Casualty):
                    assert cause.decision in self.judge.blamed, cause
                else:
                    assert cause in self.judge.blamed or "template" in self.judge.blamed, cause

    def carry_out(self, num: int = 1000) -> None:
        """Do some of what was decided, in order."""
        for _ in range(min(num, len(self.to_do))):
            match self.to_do.popleft():
                case Send() as task:
                    process = self.processes.get(task.worker)
                    if process is not None and not process.is_dead:
                        assert process.is_ready
                        process.pipe.append(task)
                        process.newest = max(process.newest, task.generation)
                case Kill(serial):
                    if not self.processes[serial].is_unkillable:
                        self.processes[serial].die()
                case Reap(serial):
                    self.processes[serial].cut_off()
                case Replace(serial, place):
                    del self.processes[serial]
                    self.start(place)
                case GiveUp():
                    self.wait_began_s = None
                case ReplaceTemplate() | Warn() | Fail():
                    pass

    @property
    def is_over(self) -> bool:
        """Whether the scheduler says that it can't continue."""
        return self.scheduler.state is SchedulerState.FAILED

    # What happens to workers

    def start(self, place: int) -> None:
        """Start a worker."""
        self.processes[self.num_started] = Process(self.num_started, place)
        self.num_started += 1

    def get_ready(self, process: Process) -> None:
        """Have the dataset."""
        if not process.is_ready and not process.is_dead:
            process.is_ready = True
            process.said.append(Ready(process.serial, process.place))

    def work(self, process: Process, *, finishes: bool = True) -> None:
        """Begin a task, and maybe finish it."""
        if process.is_dead or process.is_hanging or not process.pipe:
            return
        process.is_at_work = True
        task = process.pipe[0]
        if task.work.epoch == 0 and task.work.step in self.setting.cursed:
            process.die()
        elif finishes:
            process.pipe.popleft()
            process.is_at_work = False
            if not process.is_cut_off:
                process.said.extend(self.answers(process, task))

    def answers(self, process: Process, task: Send) -> list[Event]:
        """Return what a worker says about a task."""
        serial, generation, sequence, work = process.serial, task.generation, task.sequence, task.work
        if generation < process.newest:
            return [Skipped(serial, generation)]
        if isinstance(work, StreamWork) and work.turn >= self.setting.lengths[work.place]:
            return [StreamEnded(serial, generation, sequence)]
        said: list[Event] = []
        if work.step % 3 == 0:
            said.append(SampleFailed(serial, generation, sequence, 1, ("sample", work)))
        outcome = (self.judge.meanings[generation], work, serial)
        if work.step % 5 == 4:
            return [*said, Failed(serial, generation, sequence, ValueError(*outcome))]
        return [*said, Built(serial, generation, sequence, outcome, 0.0005)]

    def end_template(self) -> None:
        """End the template, and all workers with it."""
        self.tell(TemplateEnded(WorkerDied("the template")))
        for process in self.processes.values():
            process.die(with_template=True)

    def lie(self, process: Process, which: int) -> None:
        """Have a worker answer twice, out of order, or what it wasn't asked."""
        record = self.judge.records.get(process.serial)
        tasks = list(record.unanswered)[1:] if record is not None else []
        answered = [(0, 0), (self.judge.generation, 0), (self.judge.generation, len(self.judge.works))]
        task = [*((one.generation, one.sequence) for one in tasks), *answered][which % (len(tasks) + 3)]
        due = record.unanswered[0] if record is not None and record.unanswered else None
        if self.is_over or process.is_cut_off or (due is not None and task == (due.generation, due.sequence)):
            return
        self.tell(Built(process.serial, *task, "nonsense"), is_lie=True)

    def hear(self, process: Process) -> None:
        """Let the scheduler hear one thing that a worker has said."""
        if process.said:
            self.tell(process.said.popleft())

    # The loop

    def seek(self, epoch: int, step: int, *, keeps_meaning: bool = True) -> None:
        """Begin another generation, unless the trial batch is still to come."""
        source, adopts = self.source(epoch, step), None
        if self.setting.trial != "none" and not self.judge.generation:
            trial = self.scheduler.take_trial()
            if trial is None:
                return
            keeps_meaning = self.setting.trial != "change"
            if self.setting.trial == "use" and trial.work == self.source(epoch, step).next():
                adopts = trial.work
            elif self.setting.trial == "forget":
                assert len(self.scheduler.forget_trial()) == 1
                assert self.scheduler.take_trial() is None
        self.judge.seek((epoch, step), keeps_meaning=keeps_meaning, adopts=adopts)
        num_ready = self.scheduler.ledger.num_ready
        dropped = self.scheduler.begin(source, keeps_meaning=keeps_meaning)
        failures = [one for one in dropped if isinstance(one, tuple) and one[0] == "sample"]
        assert len(dropped) - len(failures) == num_ready - (adopts is not None)
        self.wait_began_s = None
        self.decide()

    def source(self, epoch: int, step: int) -> WorkSource:
        """Return the work from a position on."""
        if self.setting.kind == "planned":
            return PlannedSource(epoch, step, lambda _: NUM_BATCHES)
        if self.setting.kind == "index":
            return IndexSource(epoch, step, iter([[one, 2 * one] for one in range(step, NUM_BATCHES)]))
        return StreamSource(epoch, self.setting.num_places)

    def take(self) -> None:
        """Take a batch, if it is there; else wait."""
        if not self.judge.generation:
            self.take_trial()
            return
        assert self.scheduler.ledger.num_ready == self.judge.num_ready
        has_deliverable = self.scheduler.ledger.next_deliverable() is not None
        taken = self.scheduler.take()
        assert (taken is not None) == has_deliverable
        if taken is not None:
            self.judge.check_delivered(taken)
            self.wait_began_s = None
            self.decide()
        elif self.is_over:
            self.fail()
        elif not self.scheduler.ledger.is_exhausted:
            self.wait()

    def take_trial(self) -> None:
        """Wait for the trial batch, and begin where it is the first batch."""
        if self.scheduler.take_trial() is not None:
            self.seek(0, 0)
        elif self.is_over:
            self.fail()
        else:
            self.wait()

    def fail(self) -> None:
        """Tell the loop about the failure."""
        assert self.has_failed, "nobody said why there is no batch"
        self.is_told = True

    def wait(self) -> None:
        """Wait from now on, if the loop isn't waiting yet."""
        if self.wait_began_s is None:
            self.scheduler.watchdog.begin(self.now_s)
            self.wait_began_s = self.now_s

    def pass_time(self, seconds: float) -> None:
        """Let time pass while nothing happens."""
        if self.wait_began_s is not None:
            self.scheduler.watchdog.rest(self.now_s, self.now_s + seconds)
            self.now_s += seconds
            self.scheduler.wake(self.now_s)
            self.scheduler.tick(self.now_s)
            self.decide()
        else:
            self.now_s += seconds

    def stop(self, seconds: float) -> None:
        """Let the trainer be stopped while it waits, which is nobody's fault."""
        if self.wait_began_s is not None:
            self.scheduler.watchdog.rest(self.now_s, self.now_s)
            self.now_s += seconds
            self.scheduler.wake(self.now_s)
            excused_s = seconds if seconds >= MIN_STOPPED_S else 0.0
            self.wait_began_s += excused_s
            for record in self.judge.records.values():
                record.since_s += excused_s
                record.killed_s += excused_s

    def settle(self, *, is_kind: bool) -> None:
        """Let all be well from now on: whatever is to come must come, or the failure.

        Args:
            is_kind: Whether workers that hang or were killed end by themselves. If not, the scheduler must see to it.
        """
        for _ in range(10_000):
            if self.is_told or self.is_done():
                return
            self.carry_out()
            for process in list(self.processes.values()):
                record = self.judge.records.get(process.serial)
                if is_kind and (process.is_hanging or (record is not None and record.is_closed)):
                    process.die()
                self.get_ready(process)
                self.work(process)
                while process.said:
                    self.hear(process)
            self.take()
            if not is_kind:
                self.pass_time(1.0)
        raise AssertionError(f"nothing goes on: {self.scheduler!r}")

    def is_done(self) -> bool:
        """Whether the loop has got all that there is, or enough."""
        if not self.judge.generation:
            return False
        if self.setting.kind == "planned":
            return len(self.judge.delivered) >= 2 * NUM_BATCHES
        if not self.scheduler.ledger.is_exhausted:
            return False
        assert len(self.judge.delivered) == len(self.judge.expected(1000)), "some batches never came"
        return True


def key_of(work: Work) -> Hashable:
    """Return what tells whether two works are the same batch."""
    if isinstance(work, StreamWork):
        return work.epoch, work.place, work.turn
    return work.epoch, work.step


def is_same(one: Any, other: Any) -> bool:
    """Whether two tasks are for the same batch."""
    return bool((one.generation, one.sequence) == (other.generation, other.sequence))
