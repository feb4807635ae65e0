"""Measures the cost of seeding per sample: `rng="sample"` beside `rng=None`, which seeds nothing.

    python benchmarks/randomness.py [--rounds 21] [--seconds 1] [--json FILE]

Two cases, both with 16 floats in batches of 256: rows that draw nothing, and rows that draw from `random` and
`numpy.random`. Two figures for each. The first is the time to build a batch, measured in this process, which is steady
enough to show one percent. The second is batches per second through two workers, which is what a user sees. The modes
take turns. The table shows medians over the rounds and ratios of medians.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from functools import partial

from common.datasets import DrawingRows, Rows
from common.report import Result
from common.turns import begin, end, measure_in_turns, parse
from transport.cases import Case
from transport.systems import Throughput, make_swift

from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.slots import HeapStore
from swift_loader.transport.task import Task
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import WorkerOptions, WorkerSpec

CASES = (
    Case("plain", Rows, 256, 1000, "rows (16,) float32 that draw nothing, batch 256"),
    Case("drawing", DrawingRows, 256, 1000, "rows (16,) float32 with noise, batch 256"),
)
MODES = (Rng.NONE, Rng.SAMPLE)
_BATCHES_PER_TURN = 200


class Building:
    """Measures the microseconds to build a batch as a worker does, without sending it."""

    def __init__(self, case: Case, rng: Rng) -> None:
        dataset = case.make_dataset()
        order = OrderSettings.of(seed=1, shuffle=True, window=5 * case.batch_size, batch_size=case.batch_size)
        plan = PlanSettings(order, case.batch_size, 1, 0, Uneven.PAD, drop_last=False)
        options = WorkerOptions(dataset=dataset, rng=rng, validate=True)
        self._builder = BatchBuilder(dataset, len(dataset), WorkerSpec(options, plan), Definitions())
        self._store = HeapStore()
        self._step = 0

    def measure(self) -> float:
        """Return the mean over several batches."""
        start = time.perf_counter()
        for _ in range(_BATCHES_PER_TURN):
            self._builder.build(self._store, Task(1, 0, 0, self._step))
            self._step = (self._step + 1) % CASES[0].num_batches
        return (time.perf_counter() - start) / _BATCHES_PER_TURN * 1e6


def measure_case(case: Case, rounds: int, seconds: float) -> list[Result]:
    """Measure building alone, then through workers."""
    built = {f"rng={rng.value}": Building(case, rng).measure for rng in MODES}
    results = measure_in_turns(case.name, "us/batch", built, rounds)
    with ExitStack() as running:
        sent = {}
        for rng in MODES:
            system = Throughput(make_swift(case, rng.value))
            running.callback(system.close)
            sent[f"rng={rng.value}"] = partial(system.measure, seconds)
        return [*results, *measure_in_turns(case.name, "batches/s", sent, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21, help="turns of each mode (default: 21)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn through workers (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parse(parser)
    begun = begin(arguments)
    results = [one for case in CASES for one in measure_case(case, arguments.rounds, arguments.seconds)]
    end(arguments, begun, results, f"rng={Rng.NONE.value}")


if __name__ == "__main__":
    main()
