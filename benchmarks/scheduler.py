"""Measures the scheduler with up to thousands of workers, and the plan with up to 10^12 samples. No process is started.

    python benchmarks/scheduler.py [--rounds 9] [--workers 1,8,...] [--json FILE]

Three tables. The first has the real time in the scheduler per batch: for the worker's answer, and for the loop that
takes the batch. The workers live in virtual time, and their build times vary; the numbers of workers take turns. The
second has the rate in order as a share of that in completion order, if one sample in twenty takes 50 times as long as
the others, with two and three batches in flight per worker. The third has the time for the indices of a batch and for
a resume, the memory of the plan, and the size of the saved state.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json

from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings, Uneven
from swift_loader.sampling.run import Run
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.sampling.skips import Position
from swift_loader.sampling.work import PlannedSource, PlannedWork
from swift_loader.scheduler.messages import Action, Answered, Event, Ready, Send
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import Scheduler, SchedulerSettings

NUM_WORKERS = (1, 8, 64, 256, 1024, 2048)
NUM_HEAVY = (8, 16, 64)
RUNS = ((10**6, 1), (10**9, 64), (10**12, 4096))
"""(samples, ranks)"""

_BATCHES_PER_TURN = 3000
_NUM_STEPS = 10**6
"""Of an epoch of the scheduler's."""

_BUILD_S, _BUILD_SIGMA = 0.02, 0.3
"""How long a worker takes for a batch: the median, and the standard deviation of its logarithm. Virtual time."""

_BATCH_SIZE = 256
_EPOCH = 3
_NUM_BATCHES = 256


class TimedScheduler:
    """The real scheduler, whose workers build batches in virtual time. The loop takes each batch as soon as it can."""

    def __init__(self, num_workers: int, *, in_order: bool) -> None:
        limits = Limits.of(None, None, num_workers, in_order=in_order)
        self._scheduler = Scheduler(SchedulerSettings(limits, max_restarts=100, num_workers=num_workers))
        plan = Plan.of(_NUM_STEPS, PlanSettings.of_seed(0))
        self._scheduler.begin(PlannedSource(plan, Position(0, 0), 0), keeps_meaning=True)
        self._in_order = in_order
        self._random = random.Random(0)
        self._now_s = self._spent_s = 0.0
        self._num_taken = 0
        self._tasks: list[deque[Send]] = [deque() for _ in range(num_workers)]
        """Of each worker, which is building the first one."""
        self._ends: list[tuple[float, int, float]] = []
        """A heap: when a batch is built, by which worker, and in how many seconds."""
        for worker in range(num_workers):
            self._handle(Ready(worker, worker))

    def us_per_batch(self, num_batches: int) -> float:
        """Let the loop take so many more batches. Return the real time in the scheduler for each."""
        spent_s, stop = self._spent_s, self._num_taken + num_batches
        while self._num_taken < stop:
            self._now_s, worker, build_s = heappop(self._ends)
            task = self._tasks[worker].popleft()
            if self._tasks[worker]:
                self._build(worker)
            self._handle(Answered(task, task.work, build_s=build_s))
            while self._take():
                pass
        return (self._spent_s - spent_s) / num_batches * 1e6

    def _handle(self, event: Event) -> None:
        begin_s = time.perf_counter()
        self._scheduler.handle(event, self._now_s)
        actions = self._scheduler.decide(self._now_s)
        self._spent_s += time.perf_counter() - begin_s
        self._carry_out(actions)

    def _take(self) -> bool:
        begin_s = time.perf_counter()
        delivered = self._scheduler.ledger.deliver()
        actions = [] if delivered is None else self._scheduler.decide(self._now_s)
        self._spent_s += time.perf_counter() - begin_s
        if delivered is None:
            return False
        expected = PlannedWork(*divmod(self._num_taken, _NUM_STEPS))
        if delivered.batch != delivered.work or (self._in_order and delivered.work != expected):
            raise RuntimeError(f"the loop got {delivered} instead of {expected}")
        self._num_taken += 1
        self._carry_out(actions)
        return True

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, Send), "no worker ends"
            self._tasks[action.worker].append(action)
            if len(self._tasks[action.worker]) == 1:
                self._build(action.worker)

    def _build(self, worker: int) -> None:
        build_s = _BUILD_S * self._random.lognormvariate(0.0, _BUILD_SIGMA)
        heappush(self._ends, (self._now_s + build_s, worker, build_s))


_HEAVY_SIZE, _SLOW_SHARE, _SLOW_FACTOR, _SAMPLE_S = 32, 0.05, 50, 0.002


class HeavyTailed:
    """The same, with batches of samples of which some take far longer."""

    def __init__(self, num_workers: int, per_worker: int, *, in_order: bool) -> None:
        limits = Limits.of(max(10, per_worker * num_workers), None, num_workers, in_order=in_order)
        self._scheduler = Scheduler(SchedulerSettings(limits, 100, num_workers=num_workers))
        settings = replace(PlanSettings.of_seed(0), batch_size=_HEAVY_SIZE)
        plan = Plan.of(_NUM_STEPS * _HEAVY_SIZE, settings)
        self._scheduler.begin(PlannedSource(plan, Position(0, 0), 0), keeps_meaning=True)
        self._now_s = 0.0
        self._tasks: list[deque[Send]] = [deque() for _ in range(num_workers)]
        self._ends: list[tuple[float, int, float]] = []
        for worker in range(num_workers):
            self._scheduler.handle(Ready(worker, worker), self._now_s)
            self._carry_out()

    def rate(self, num_batches: int) -> float:
        """Let the loop take some batches, then so many more. Return how many of those it takes per second."""
        num_taken, began_s = -num_batches // 4, 0.0
        while num_taken < num_batches:
            self._now_s, worker, build_s = heappop(self._ends)
            task = self._tasks[worker].popleft()
            if self._tasks[worker]:
                self._build(worker)
            answer = Answered(task, "the batch", build_s=build_s)
            self._scheduler.handle(answer, self._now_s)
            self._carry_out()
            while self._scheduler.ledger.deliver() is not None:
                num_taken += 1
                began_s = self._now_s if num_taken == 0 else began_s
                self._carry_out()
        return num_batches / (self._now_s - began_s)

    def _carry_out(self) -> None:
        for task in self._scheduler.decide(self._now_s):
            assert isinstance(task, Send), "no worker ends"
            self._tasks[task.worker].append(task)
            if len(self._tasks[task.worker]) == 1:
                self._build(task.worker)

    def _build(self, worker: int) -> None:
        work = self._tasks[worker][0].work
        rng = random.Random(work.step)
        build_s = sum(_SAMPLE_S * (_SLOW_FACTOR if rng.random() < _SLOW_SHARE else 1) for _ in range(_HEAVY_SIZE))
        heappush(self._ends, (self._now_s + build_s, worker, build_s))


def measure_order(numbers: Sequence[int]) -> list[Result]:
    results = []
    for number in numbers:
        best = HeavyTailed(number, 2, in_order=False).rate(200 * number)
        for per_worker in (2, 3):
            rate = HeavyTailed(number, per_worker, in_order=True).rate(200 * number)
            results.append(Result(f"{number} workers", f"{per_worker} per worker", "share", [rate / best]))
    return results


class LargeRun:
    """The last rank of a run, in the middle of an epoch."""

    def __init__(self, num_samples: int, num_ranks: int) -> None:
        self.num_samples, self.num_ranks = num_samples, num_ranks
        order = OrderSettings.of(seed=1, shuffle=True, window=None, batch_size=_BATCH_SIZE)
        self._settings = PlanSettings(order, _BATCH_SIZE, num_ranks, num_ranks - 1, Uneven.PAD, drop_last=False)
        plan = Plan.of(num_samples, self._settings)
        self._step = plan.num_batches(_EPOCH) // 2
        run = Run(order, frozenset())
        run.note_length(num_samples)
        run.progress.restore(plan.position_after(_EPOCH, self._step - 1) if self._step else Position(_EPOCH, 0))
        self.state = json.dumps(run.state_dict())
        """What is saved, as text."""

    def resume(self) -> tuple[PlanReader, int]:
        """Return the plan of the saved state, and the step where it continues."""
        state = json.loads(self.state)
        run = Run(OrderSettings.of(seed=0, shuffle=True, window=None, batch_size=_BATCH_SIZE), frozenset())
        run.note_length(self.num_samples)
        run.load_state_dict(state)
        begin = run.progress.next_begin(self.num_samples)
        plan, step = Plan.of(self.num_samples, self._settings).resumed_at(begin)
        return PlanReader(plan), step

    def resume_s(self) -> float:
        """Return how long it takes from the saved text to the indices of the next batch."""
        begin_s = time.perf_counter()
        reader, step = self.resume()
        batch = reader.batch(_EPOCH, step)
        seconds = time.perf_counter() - begin_s
        expected = Plan.of(self.num_samples, self._settings).batch(_EPOCH, self._step)
        if step != self._step or not np.array_equal(batch.indices, expected.indices):
            raise RuntimeError(f"resumed at step {step} instead of {self._step}")
        return seconds

    def batch_s(self) -> float:
        """Return how long the plan of a batch takes, with consecutive batches."""
        reader, first = self.resume()
        num_batches = min(_NUM_BATCHES, reader.plan.num_batches(_EPOCH) - first)
        begin_s = time.perf_counter()
        for step in range(first, first + num_batches):
            reader.batch(_EPOCH, step)
        return (time.perf_counter() - begin_s) / num_batches

    def peak_nbytes(self) -> int:
        """Return the most memory that the plan takes at a time, from a resume through many batches."""
        tracemalloc.start()
        try:
            self.batch_s()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def measure_batches(numbers: Sequence[int], rounds: int) -> list[Result]:
    results, schedulers = {}, {}
    for number in numbers:
        for in_order in (True, False):
            key = (number, in_order)
            order = "in order" if in_order else "as they are ready"
            results[key] = Result(f"{number} worker{'s' * (number > 1)}", order, "us/batch")
            schedulers[key] = TimedScheduler(number, in_order=in_order)
            schedulers[key].us_per_batch(6 * number + 100)
    for turn in range(rounds):
        for key in list(schedulers)[:: 1 if turn % 2 else -1]:
            results[key].samples.append(schedulers[key].us_per_batch(_BATCHES_PER_TURN))
    return list(results.values())


def measure_plans(rounds: int) -> list[Result]:
    results = []
    for num_samples, num_ranks in RUNS:
        run = LargeRun(num_samples, num_ranks)
        case = f"{num_samples:.0e} samples, {num_ranks} ranks".replace("e+", "e")
        run.resume_s()
        results += [
            Result(case, "indices", "us/batch", [run.batch_s() * 1e6 for _ in range(rounds)]),
            Result(case, "resume", "ms", [run.resume_s() * 1e3 for _ in range(rounds)]),
            Result(case, "memory", "KiB", [run.peak_nbytes() / 1024]),
            Result(case, "state", "bytes", [float(len(run.state))]),
        ]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each number of workers (default: 9)")
    parser.add_argument("--workers", default=",".join(map(str, NUM_WORKERS)), help="numbers of workers to measure")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine), flush=True)

    batches = measure_batches([int(number) for number in arguments.workers.split(",")], arguments.rounds)
    rows = [[*result.as_cells(), format_number(2e6 / result.median)] for result in batches]
    print(format_table(["workers", "order", "median", "min", "max", "unit", "events/s"], rows), flush=True)

    orders = measure_order(NUM_HEAVY)
    print()
    print(format_table(["workers", "in flight", "median", "min", "max", "unit"], [one.as_cells() for one in orders]))

    plans = measure_plans(arguments.rounds)
    print()
    print(format_table(["run", "what", "median", "min", "max", "unit"], [result.as_cells() for result in plans]))
    if arguments.json:
        write_json(arguments.json, machine, vars(arguments), batches + orders + plans)


if __name__ == "__main__":
    main()
