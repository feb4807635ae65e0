"""A model of an executor whose workers die, hang, answer late and lie, and of a loop that takes batches and seeks.

World     the executor, the loop and the clock; it carries out actions whenever it likes
Process   a worker, as it is in truth
Judge     what was decided and heard; it knows, without the scheduler, what is to be delivered and what is justified
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from swift_loader.errors import ProtocolError, WorkerDied
from swift_loader.sampling.work import PlannedWork, StreamRounds, StreamWork, WorkSource
from swift_loader.scheduler.delivery import BatchState
from swift_loader.scheduler.messages import (
    Action,
    Answered,
    Dismiss,
    Event,
    ExecutorFailed,
    Fail,
    GiveUp,
    Kill,
    NoBatch,
    Ready,
    Reap,
    Release,
    ReplaceTemplate,
    SampleFailed,
    Send,
    Stall,
    Start,
    TemplateEnded,
    TemplateLost,
    Warn,
    WorkerLost,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.restarts import MIN_STOPPED_S, Decision
from swift_loader.scheduler.scheduler import Scheduler, SchedulerSettings, SchedulerState
from tests.support.work import IndexQueue, planned
from tests.unit.scheduler.judge import NUM_BATCHES, TEMPLATE, TIMEOUT_S, Judge, Setting, unbound
from tests.unit.scheduler.process import Process


class World:
    """The executor, the loop and the clock."""

    def __init__(self, setting: Setting, make: Callable[[SchedulerSettings], Scheduler] = Scheduler) -> None:
        self.setting = setting
        self.judge = Judge(setting)
        limits = Limits(setting.max_in_flight, setting.max_ready, setting.in_order)
        settings = SchedulerSettings(limits, setting.max_restarts, TIMEOUT_S / 2, TIMEOUT_S)
        self.scheduler = make(replace(settings, num_workers=setting.num_workers))
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
        self.vacated: int | None = None
        """The id of a worker that was let go, and whose place another one is to take."""
        self.queue: IndexQueue | None = None
        """What may bind batches to workers now."""
        for worker_id in range(setting.num_workers):
            self.start(worker_id)
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
            assert self.vacated is None or isinstance(action, Start), "another decision comes between"
            assert not self.has_failed or isinstance(action, Reap), f"{action} after a failure"
            self.has_failed |= isinstance(action, Fail)
            self.check(action)
            self.to_do.append(action)
        assert self.vacated is None, "nobody takes the place of a worker that is wanted"
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
            case Warn(WorkerLost() as worker_lost):
                assert worker_lost.num_in_a_row == self.judge.deaths_in_a_row[worker_lost.worker_id]
                is_wanted = worker_lost.worker_id < self.judge.num_wanted
                assert worker_lost.decision is (Decision.REPLACE if is_wanted else Decision.LET_GO)
                assert (unbound(worker_lost.work), worker_lost.num_lost) == self.judge.last_death
            case Warn(TemplateLost() as lost):
                assert lost.num_in_a_row == self.judge.deaths_in_a_row[TEMPLATE]
            case Release(serial):
                worker_id = self.processes[serial].worker_id
                self.vacated = worker_id if worker_id < self.judge.num_wanted else None
            case Start(worker_id):
                assert worker_id < self.judge.num_wanted, "a worker is started that isn't wanted"
                if worker_id != self.vacated:
                    self.judge.deaths_in_a_row.pop(worker_id, None)
                self.vacated = None
            case Dismiss(serial):
                self.judge.check_dismissed(serial)
            case GiveUp():
                assert self.wait_began_s is not None
                assert self.now_s - self.wait_began_s >= TIMEOUT_S, "the loop gave up too early"
            case Fail():
                cause = action.cause
                if isinstance(cause, WorkerLost):
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
                case Release(serial):
                    del self.processes[serial]
                case Start(worker_id):
                    self.start(worker_id)
                case Dismiss(serial):
                    self.processes[serial].dismiss()
                case GiveUp():
                    self.wait_began_s = None
                case ReplaceTemplate() | Warn() | Fail():
                    pass

    @property
    def is_over(self) -> bool:
        """Whether the scheduler says that it can't continue."""
        return self.scheduler.state is SchedulerState.FAILED

    # What happens to workers

    def start(self, worker_id: int) -> None:
        ids = [process.worker_id for process in self.processes.values()]
        assert worker_id not in ids, "two workers have one id"
        self.processes[self.num_started] = Process(self.num_started, worker_id)
        self.num_started += 1

    def get_ready(self, process: Process) -> None:
        """Have the dataset."""
        if not process.is_ready and not process.is_dead:
            process.is_ready = True
            process.said.append(Ready(process.serial, process.worker_id))

    def work(self, process: Process, *, finishes: bool = True) -> None:
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
        work = unbound(task.work)
        if task.generation < process.newest:
            return [NoBatch(task)]
        if isinstance(work, StreamWork) and work.turn >= self.setting.lengths[work.worker_id]:
            return [NoBatch(task)]
        said: list[Event] = []
        if work.step % 3 == 0:
            said.append(SampleFailed(task, ("sample", work)))
        outcome = (self.judge.meanings[task.generation], work, process.serial)
        if work.step % 5 == 4:
            return [*said, Answered(task, error=ValueError(*outcome))]
        build_s = (0.05 + 0.2 * (work.step % 2)) if self.setting.varies else 0.0005
        return [*said, Answered(task, outcome, build_s=build_s)]

    def end_template(self) -> None:
        self.tell(TemplateEnded(WorkerDied("the template")))
        for process in self.processes.values():
            process.die(with_template=True)

    def lie(self, process: Process, which: int) -> None:
        """Have a worker answer twice, out of order, or what it wasn't asked."""
        record = self.judge.records.get(process.serial)
        tasks = list(record.unanswered)[1:] if record is not None else []
        others = [Send(process.serial, self.judge.generation, sequence, PlannedWork(0, 0)) for sequence in (0, 99)]
        if not self.is_over and not process.is_cut_off:
            self.tell(Answered([*tasks, *others][which % (len(tasks) + 2)], "nonsense"), is_lie=True)

    def hear(self, process: Process) -> None:
        """Let the scheduler hear one thing that a worker has said."""
        if process.said:
            self.tell(process.said.popleft())

    # The loop

    def resize(self, num_workers: int) -> None:
        self.judge.resize(num_workers)
        if self.queue is not None:
            self.queue.unbind()
        limits = replace(self.scheduler.limits, max_in_flight=self.judge.max_in_flight)
        self.scheduler.resize(num_workers, limits)
        self.decide()

    def settle_number(self) -> None:
        """Let those come and go that are to; then there must be as many as are wanted."""
        for _ in range(100):
            self.carry_out()
            for process in list(self.processes.values()):
                record = self.judge.records.get(process.serial)
                process.is_hanging = False
                if record is not None and record.is_closed:  # it was killed, which may take its time
                    process.die()
                self.get_ready(process)
                self.work(process)
                while process.said:
                    self.hear(process)
            ids = sorted(process.worker_id for process in self.processes.values() if process.is_ready)
            if self.is_over or ids == list(range(self.judge.num_wanted)):
                return
        raise AssertionError(f"{self.judge.num_wanted} workers are wanted, and there are {self.processes}")

    def seek(self, epoch: int, step: int, *, keeps_meaning: bool = True) -> None:
        """Begin another generation."""
        source = self.source(epoch, step)
        num_ready = self.judge.num_ready
        self.judge.seek((epoch, step), keeps_meaning=keeps_meaning)
        self.queue = source if isinstance(source, IndexQueue) else None
        dropped = self.scheduler.begin(source, keeps_meaning=keeps_meaning)
        assert sum(one.state is BatchState.READY for one in dropped) == num_ready
        self.wait_began_s = None
        self.decide()

    def source(self, epoch: int, step: int) -> WorkSource:
        """Return the work from a position on."""
        if self.setting.kind == "planned":
            return planned(epoch, step, lambda _: NUM_BATCHES)
        if self.setting.kind == "stream":
            return StreamRounds(epoch, self.setting.num_workers)
        queue = IndexQueue(epoch, self.judge.num_wanted, in_order=self.setting.kind == "bound")
        for one in range(step, NUM_BATCHES):
            queue.put(one, self.setting.keys(one))
        return queue

    def take(self) -> None:
        """Take a batch, if it is there; else wait."""
        assert len(self.scheduler.ledger.ready) == self.judge.num_ready
        has_deliverable = self.scheduler.ledger.next_deliverable() is not None
        taken = self.scheduler.ledger.deliver()
        assert (taken is not None) == has_deliverable
        if taken is not None:
            self.judge.check_delivered(taken)
            self.wait_began_s = None
            self.decide()
        elif self.is_over:
            self.fail()
        elif not self.scheduler.ledger.is_exhausted:
            self.wait()

    def fail(self) -> None:
        assert self.has_failed, "nobody said why there is no batch"
        self.is_told = True

    def wait(self) -> None:
        """Wait from now on, if the loop isn't waiting yet."""
        if self.wait_began_s is None:
            self.scheduler.watchdog.begin(self.now_s, 0.0)
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

        `is_kind`: workers that hang or were killed end by themselves. If not, the scheduler must see to it.
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
        if self.setting.kind == "planned":
            return len(self.judge.delivered) >= 2 * NUM_BATCHES
        if not self.scheduler.ledger.is_exhausted:
            return False
        assert len(self.judge.delivered) == len(self.judge.expected(1000)), "some batches never came"
        return True
