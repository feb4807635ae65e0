"""Whatever happens to the workers, the loop gets the reference, or a failure that is justified."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.ledger import Ledger
from swift_loader.scheduler.queues import Limits, Worker, Workers
from swift_loader.scheduler.restarts import Judgement, Restarts, Watchdog
from swift_loader.scheduler.scheduler import Scheduler
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
    cursed=st.frozensets(st.integers(0, NUM_BATCHES - 1), max_size=1),
    varies=st.booleans(),
)

NUM_MUTANT_RUNS = 3000


def random_case(rng: random.Random) -> tuple[Setting, bytes]:
    setting = Setting(
        num_workers=rng.randint(1, 4),
        in_order=rng.random() < 0.5,
        max_in_flight=rng.randint(1, 12),
        max_ready=rng.randint(1, 4),
        max_restarts=rng.randint(0, 3),
        kind=rng.choice(["planned", "index", "bound", "stream"]),
        cursed=frozenset(rng.sample(range(NUM_BATCHES), rng.random() < 0.3)),
        varies=rng.random() < 0.5,
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
    if not world.processes:  # the only one was let go, and the next one isn't started yet
        world.carry_out()
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


@settings(max_examples=300, deadline=None, derandomize=True)
@given(setting=SETTINGS, tape=st.binary(max_size=150))
def test_the_loop_gets_the_reference_or_a_failure_that_is_justified(setting: Setting, tape: bytes) -> None:
    run(setting, tape)


@pytest.mark.exhaustive
def test_the_loop_gets_the_reference_or_a_justified_failure_in_ten_thousand_more_interleavings() -> None:
    rng = random.Random(0)
    for _ in range(10_000):
        run(*random_case(rng))


def never_resend(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.remove_worker

    def remove_worker(self: Ledger, worker: Worker) -> int:
        num_lost = real(self, worker)
        self._lost.clear()
        return num_lost

    patch.setattr(Ledger, "remove_worker", remove_worker)


def survive_one_death_more(patch: pytest.MonkeyPatch) -> None:
    real = Restarts.__init__
    patch.setattr(Restarts, "__init__", lambda self, budget: real(self, budget + 1))


def deliver_a_batch_twice(patch: pytest.MonkeyPatch) -> None:
    real = Ledger.deliver
    last: list[Delivery] = []

    def deliver(self: Ledger) -> Delivery | None:
        batch = real(self)
        if batch is None:
            return last.pop() if last else None
        last[:] = [batch]
        return batch

    patch.setattr(Ledger, "deliver", deliver)


def never_forgive_a_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarts, "note_batch", lambda self, worker_id, batch: None)


def never_give_up_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watchdog, "judge", lambda self, worker, since_s, now_s: Judgement.NOTHING)


def judge_by_time_in_which_the_trainer_was_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watchdog, "wake", lambda self, now_s: 0.0)


def deliver_what_is_ready_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "next_deliverable", lambda self: next(iter(self.ready.values()), None))


def exceed_what_may_be_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = Workers.__init__

    def init(self: Workers, limits: Limits) -> None:
        real(self, replace(limits, max_in_flight=limits.max_in_flight + 1))

    patch.setattr(Workers, "__init__", init)


def start_too_few_workers(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._start

    def start(self: Scheduler, worker_id: int) -> None:
        if worker_id:
            real(self, worker_id)

    patch.setattr(Scheduler, "_start", start)


MUTANTS = [
    never_resend,
    survive_one_death_more,
    deliver_a_batch_twice,
    never_forgive_a_death,
    never_give_up_waiting,
    judge_by_time_in_which_the_trainer_was_stopped,
    deliver_what_is_ready_first,
    exceed_what_may_be_in_flight,
    start_too_few_workers,
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
