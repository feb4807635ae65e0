"""Whatever happens to the workers, the loop gets the reference, or a failure that is justified."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.batches import Batch, BatchState
from swift_loader.scheduler.events import Built, Ended, Failed, SampleFailed
from swift_loader.scheduler.ledger import Ledger
from swift_loader.scheduler.queues import Limits, Queues
from swift_loader.scheduler.restarts import Restarts
from swift_loader.scheduler.roster import Roster
from swift_loader.scheduler.sample_failures import SampleFailures
from swift_loader.scheduler.scheduler import Scheduler
from swift_loader.scheduler.watchdog import Judgement, Watchdog
from swift_loader.scheduler.work import PlannedWork
from swift_loader.scheduler.workers import WORKER_STATES, Worker, WorkerMove, WorkerState
from tests.unit.scheduler.judge import NUM_BATCHES, Setting
from tests.unit.scheduler.model import World

SETTINGS = st.builds(
    Setting,
    num_workers=st.integers(1, 4),
    in_order=st.booleans(),
    max_in_flight=st.integers(1, 12),
    max_ready=st.integers(1, 4),
    max_restarts=st.integers(0, 3),
    kind=st.sampled_from(["planned", "index", "bound", "stream"]),
    trial=st.sampled_from(["none", "use", "forget", "change"]),
    cursed=st.frozensets(st.integers(0, NUM_BATCHES - 1), max_size=1),
)

NUM_MUTANT_RUNS = 3000

LOST: Batch[object] = Batch(0, PlannedWork(0, 0), BatchState.LOST)


def random_case(rng: random.Random) -> tuple[Setting, bytes]:
    setting = Setting(
        num_workers=rng.randint(1, 4),
        in_order=rng.random() < 0.5,
        max_in_flight=rng.randint(1, 12),
        max_ready=rng.randint(1, 4),
        max_restarts=rng.randint(0, 3),
        kind=rng.choice(["planned", "index", "bound", "stream"]),
        trial=rng.choice(["none", "none", "none", "use", "forget", "change"]),
        cursed=frozenset(rng.sample(range(NUM_BATCHES), rng.random() < 0.3)),
    )
    return setting, rng.randbytes(rng.randint(0, 150))


def run(setting: Setting, tape: bytes, make: Callable[..., Scheduler] = Scheduler) -> World:
    """Let happen what the tape says, then let all be well."""
    world = World(setting, make)
    for byte in tape:
        act(world, *divmod(byte, 8))
        world.judge.check_order()
    world.settle(is_kind=len(tape) % 2 == 0)
    world.judge.check_order()
    world.settle_number()
    return world


def act(world: World, what: int, which: int) -> None:
    process = list(world.processes.values())[which % len(world.processes)]
    if what < 6:
        world.carry_out()
        world.work(process)
        world.hear(process)
    elif what < 12:
        world.hear(process)
    elif what < 17:
        world.take()
    elif what < 19:
        world.work(process, finishes=which > 1)
    elif what < 22:
        world.carry_out(1 + which)
    elif what < 25:
        world.get_ready(process)
    elif what == 25 and which < 5:
        process.die()
    elif what == 25 and world.setting.kind != "stream":
        world.resize(which - 4)
    elif what == 26:
        process.is_hanging = not process.is_hanging
        process.is_unkillable = which > 3
    elif what < 29:
        world.pass_time((1.0, 6.0, 9.0, 11.0)[which % 4])
    elif what == 29:
        world.stop((0.125, 0.25, 5.0, 100.0)[which % 4])
    elif what == 30:
        step = which % NUM_BATCHES if world.setting.kind != "stream" else 0
        world.seek(which % 3, step, keeps_meaning=which % 2 == 0)
    elif which == 0:
        world.end_template()
    elif which == 1:
        world.lie(process, len(world.judge.works))
    elif world.setting.kind != "stream":
        world.resize(which - 1)


@settings(max_examples=2000, deadline=None, derandomize=True)
@given(setting=SETTINGS, tape=st.binary(max_size=150))
def test_the_loop_gets_the_reference_or_a_failure_that_is_justified(setting: Setting, tape: bytes) -> None:
    run(setting, tape)


@pytest.mark.slow
def test_the_loop_gets_the_reference_or_a_justified_failure_in_ten_thousand_more_interleavings() -> None:
    rng = random.Random(0)
    for _ in range(10_000):
        run(*random_case(rng))


def never_resend(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.remove_worker

    def remove_worker(self: Ledger[object], serial: int) -> int:
        num_lost = real(self, serial)
        self._lost.clear()
        return num_lost

    patch.setattr(Ledger, "remove_worker", remove_worker)


def send_again_what_is_being_built(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.assign
    last: list[Send] = []

    def assign(self: Ledger[object]) -> Send | None:
        send = real(self)
        if send is None:
            return last.pop() if last and last[0].worker in self.queues._room._open else None
        last[:] = [send]
        return send

    patch.setattr(Ledger, "assign", assign)


def send_the_batches_of_a_worker_to_others_before_its_end_is_judged(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._lose

    def lose(self: Scheduler, worker: Worker, move: WorkerMove) -> None:
        real(self, worker, move)
        self.ledger.remove_worker(worker.serial)

    patch.setattr(Scheduler, "_lose", lose)


def believe_an_answer_that_comes_twice(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._take_answer

    def take_answer(self: Scheduler, answer: Built | Failed, build_s: float | None, now_s: float) -> None:
        with suppress(ProtocolError):
            real(self, answer, build_s, now_s)

    patch.setattr(Scheduler, "_take_answer", take_answer)


def deliver_a_batch_twice(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.deliver
    last: list[Batch[object]] = []

    def deliver(self: Ledger[object]) -> Batch[object] | None:
        batch = real(self)
        if batch is None:
            return last.pop() if last else None
        last[:] = [batch]
        return batch

    patch.setattr(Ledger, "deliver", deliver)


def count_batches_of_another_generation(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.complete

    def complete(
        self: Ledger[object], serial: int, generation: int, sequence: int, answer: object, build_s: float | None
    ) -> bool:
        is_due = self.queues.first(serial) == (generation, sequence)
        if is_due and generation != self.generation and self._batches.get(sequence, LOST).state is BatchState.SENT:
            generation = self.generation
            self.queues._queues[serial].tasks[0] = (generation, sequence)
        return real(self, serial, generation, sequence, answer, build_s)

    patch.setattr(Ledger, "complete", complete)


def survive_one_death_more(patch: pytest.MonkeyPatch) -> None:
    real = Restarts.__init__
    patch.setattr(Restarts, "__init__", lambda self, budget: real(self, budget + 1))


def survive_one_death_less(patch: pytest.MonkeyPatch) -> None:
    real = Restarts.__init__
    patch.setattr(Restarts, "__init__", lambda self, budget: real(self, max(0, budget - 1)))


def never_forgive_a_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarts, "note_batch", lambda self, worker_id, batch: None)


def blame_a_batch_that_means_another_one_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarts, "forget_batches", lambda self: None)


def blame_the_batch_that_the_loop_waits_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "work_of", lambda self, serial: self.head())


def blame_a_batch_that_was_not_begun(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._take_ended

    def take_ended(self: Scheduler, event: Ended) -> None:
        real(self, replace(event, death=replace(event.death, is_at_work=True)))

    patch.setattr(Scheduler, "_take_ended", take_ended)


def judge_by_when_a_task_was_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "note_answer", lambda self, now_s: self.sent_s.popleft())


def judge_by_when_the_wait_began(patch: pytest.MonkeyPatch) -> None:
    real = Watchdog.judge
    patch.setattr(Watchdog, "judge", lambda self, since_s, now_s: real(self, self.began_s, now_s))


def judge_by_time_in_which_the_trainer_was_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "postpone", lambda self, seconds: None)


def never_give_up_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watchdog, "judge", lambda self, since_s, now_s: Judgement.NOTHING)


def wait_for_a_killed_worker_for_ever(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._lose

    def lose(self: Scheduler, worker: Worker, move: WorkerMove) -> None:
        if move is not WorkerMove.ABANDON:
            real(self, worker, move)

    patch.setattr(Scheduler, "_lose", lose)


def deliver_what_is_ready_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "next_deliverable", lambda self: next(iter(self._ready.values()), None))


def forget_whose_samples_failed(patch: pytest.MonkeyPatch) -> None:
    real = SampleFailures.note

    def note(self: SampleFailures, event: SampleFailed, generation: int) -> None:
        real(self, replace(event, worker=0), generation)

    patch.setattr(SampleFailures, "note", note)


def give_tasks_to_a_worker_that_was_killed(patch: pytest.MonkeyPatch) -> None:
    real = Queues.remove

    def remove(self: Queues, serial: int) -> list[tuple[int, int]]:
        self._room.close(serial)
        return real(self, serial)

    patch.setattr(Queues, "retire", lambda self, serial: None)
    patch.setattr(Queues, "remove", remove)


def exceed_what_may_be_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.__init__

    def init(self: Ledger[object], limits: Limits) -> None:
        real(self, replace(limits, max_in_flight=limits.max_in_flight + 1))

    patch.setattr(Ledger, "__init__", init)


def exceed_what_may_be_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queues, "pick", Queues.pick_for_lost)


def use_a_trial_batch_that_means_another_one_now(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.begin
    patch.setattr(Ledger, "begin", lambda self, source, *, reuses_trial: real(self, source, reuses_trial=True))


def build_the_trial_batch_again(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.begin
    patch.setattr(Ledger, "begin", lambda self, source, *, reuses_trial: real(self, source, reuses_trial=False))


def wait_for_a_batch_beyond_the_end_of_its_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_pass_void", lambda self: None)


def give_tasks_to_a_worker_that_is_leaving(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._keep_or_leave

    def keep_or_leave(self: Scheduler, worker: Worker) -> None:
        real(self, worker)
        if worker.state is WorkerState.LEAVING:
            self.ledger.queues.reopen(worker.serial)

    patch.setattr(Scheduler, "_keep_or_leave", keep_or_leave)


def dismiss_a_worker_that_has_tasks(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._dismiss_if_done

    def dismiss(self: Scheduler, worker: Worker) -> None:
        tasks, worker.sent_s = worker.sent_s, type(worker.sent_s)()
        real(self, worker)
        worker.sent_s = tasks

    patch.setattr(Scheduler, "_dismiss_if_done", dismiss)


def keep_a_worker_that_is_not_wanted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_dismiss_if_done", lambda *_: None)


def start_too_few_workers(patch: pytest.MonkeyPatch) -> None:
    real = Roster.missing
    patch.setattr(Roster, "missing", lambda self: real(self)[1:])


def start_a_worker_beside_one_that_leaves(patch: pytest.MonkeyPatch) -> None:
    def missing(self: Roster) -> list[int]:
        staying = (WorkerState.READY, WorkerState.STARTING)
        taken = {worker.worker_id for worker in self.all.values() if worker.state in staying} | self._starting
        return [worker_id for worker_id in range(self.num_wanted or 0) if worker_id not in taken]

    patch.setattr(Roster, "missing", missing)


def take_one_that_was_dismissed_for_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(WORKER_STATES, (WorkerState.DISMISSED, WorkerMove.DISCONNECT), WorkerState.REAPED)


def replace_one_that_is_not_wanted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "is_wanted", lambda *_: True)


def leave_batches_to_workers_that_leave(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("swift_loader.scheduler.ledger._unbound", lambda work: work)


MUTANTS = [
    never_resend,
    send_again_what_is_being_built,
    send_the_batches_of_a_worker_to_others_before_its_end_is_judged,
    believe_an_answer_that_comes_twice,
    deliver_a_batch_twice,
    count_batches_of_another_generation,
    survive_one_death_more,
    survive_one_death_less,
    never_forgive_a_death,
    blame_a_batch_that_means_another_one_now,
    blame_the_batch_that_the_loop_waits_for,
    blame_a_batch_that_was_not_begun,
    judge_by_when_a_task_was_sent,
    judge_by_when_the_wait_began,
    judge_by_time_in_which_the_trainer_was_stopped,
    never_give_up_waiting,
    wait_for_a_killed_worker_for_ever,
    deliver_what_is_ready_first,
    forget_whose_samples_failed,
    give_tasks_to_a_worker_that_was_killed,
    exceed_what_may_be_in_flight,
    exceed_what_may_be_ready,
    use_a_trial_batch_that_means_another_one_now,
    build_the_trial_batch_again,
    wait_for_a_batch_beyond_the_end_of_its_shard,
    give_tasks_to_a_worker_that_is_leaving,
    dismiss_a_worker_that_has_tasks,
    keep_a_worker_that_is_not_wanted,
    start_too_few_workers,
    start_a_worker_beside_one_that_leaves,
    take_one_that_was_dismissed_for_dead,
    replace_one_that_is_not_wanted,
    leave_batches_to_workers_that_leave,
]


@pytest.mark.parametrize("mutate", MUTANTS)
def test_a_scheduler_that_errs_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    rng = random.Random(0)
    for _ in range(NUM_MUTANT_RUNS):
        try:
            run(*random_case(rng))
        except (AssertionError, ProtocolError):
            return
    pytest.fail(f"the mutant was not caught in {NUM_MUTANT_RUNS} runs")
