"""Advice: which option to change, to what, and what that will bring. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swift_loader.metrics.observations import Observations
from swift_loader.report.prediction import Change, Data, Prediction, Predictor
from swift_loader.report.verdict import Bound, Verdict
from swift_loader.scheduler.in_flight_limit import InFlightLimit

__all__ = ["DATALOADER", "SWIFT_LOADER", "Advice", "OptionNames", "advise"]

_MIN_GAIN = 0.05
"""A smaller gain isn't worth a change."""

_NEAR_BEST = 0.03
"""So much of the best speed is given up for fewer workers."""

_MAX_WORKERS = 128
_NUM_TRIED = 7


@dataclass(frozen=True, slots=True)
class OptionNames:
    """What a loader's class calls its options."""

    num_workers: str
    max_in_flight: str
    is_in_flight_per_worker: bool


SWIFT_LOADER = OptionNames("worker_per_consumer", "data_queue_size", is_in_flight_per_worker=False)
DATALOADER = OptionNames("num_workers", "prefetch_factor", is_in_flight_per_worker=True)


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change."""

    change: Change
    action: str
    """What to do, such as `worker_per_consumer=6`."""
    prediction: Prediction

    def __str__(self) -> str:
        low, high = (f"{100 * gain:+.0f}" for gain in (self.prediction.low, self.prediction.high))
        return f"{self.action}: about {100 * self.prediction.gain:+.0f} % (between {low} and {high} %)"


def advise(observations: Observations, names: OptionNames = SWIFT_LOADER) -> tuple[Advice, ...]:
    """Return what would make the loop faster: options first, then what the dataset can do; the most useful first.

    Empty if the loop hardly waits, or if nothing brings 5 %. Takes up to a second.
    """
    if Verdict.of(observations).bound not in (Bound.DATA, Bound.BALANCED):
        return ()
    if observations.setup.loading_rank is not None:  # another rank has the workers, and their options
        return ()
    if observations.setup.num_remote:  # the prediction knows the cores of this machine only
        return ()
    predictor = Predictor(observations)
    options = _useful(predictor, _option_changes(predictor), names)
    code = _useful(predictor, [Change(data=Data.SLOWEST_FIXED), Change(data=Data.CACHED)], names)
    return (*options, *code)


def _useful(predictor: Predictor, changes: list[Change], names: OptionNames) -> list[Advice]:
    gains = [(predictor.gain(change), change) for change in changes]
    useful = sorted((pair for pair in gains if pair[0] >= _MIN_GAIN), key=lambda pair: -pair[0])
    setup = predictor.observations.setup
    return [Advice(change, _action(change, names, setup.batch_size), predictor.predict(change)) for _, change in useful]


def _option_changes(predictor: Predictor) -> list[Change]:
    """Return changes of options to look at. Each of them alone; order is given up only if that brings much more."""
    setup = predictor.observations.setup
    workers = best_workers(predictor)
    changes = [] if workers.num_workers == setup.num_workers else [workers]
    if setup.num_workers and setup.in_order:
        unordered = Change(in_order=False)
        wider = Change(max_in_flight=2 * setup.max_in_flight)
        changes += [
            change for change in (unordered, wider) if predictor.gain(change) > predictor.gain(workers) + _MIN_GAIN
        ]
    return changes


def best_workers(predictor: Predictor) -> Change:
    """Return the smallest number of workers that is nearly as good as the best one."""
    tried: dict[int, float] = {}

    def gain(number: int) -> float:
        if number not in tried:
            tried[number] = predictor.gain(_with_workers(predictor.observations, number))
        return tried[number]

    numbers = _numbers_to_try(predictor)
    best = max(gain(number) for number in numbers)
    enough = (1 + best) * (1 - _NEAR_BEST) - 1
    found = next(number for number in numbers if gain(number) >= enough)
    below = max((number for number in numbers if number < found), default=found - 1)
    while found - below > 1:
        middle = (found + below) // 2
        found, below = (middle, below) if gain(middle) >= enough else (found, middle)
    return _with_workers(predictor.observations, found)


def _numbers_to_try(predictor: Predictor) -> list[int]:
    """Return numbers of workers, increasing, up to more than enough."""
    workload, now = predictor.workload, predictor.observations.setup.num_workers
    service = float(workload.service.mean())
    per_batch = max(float(workload.step.mean()), float(workload.cpu.mean()) / workload.cores, service / _MAX_WORKERS)
    needed = service / per_batch if per_batch > 0 else 1.0
    top = min(_MAX_WORKERS, max(2, math.ceil(1.6 * needed) + 1))
    steps = [top ** (step / (_NUM_TRIED - 1)) for step in range(_NUM_TRIED)]
    return sorted({max(1, round(step)) for step in steps} | ({now} if now else set()))


def _with_workers(observations: Observations, number: int) -> Change:
    """Return a change of the workers' number, and of a given limit in flight that would keep some of them idle."""
    setup = observations.setup
    chosen = InFlightLimit.of(None, number, in_order=setup.in_order).num_batches
    needs_more = not setup.is_in_flight_chosen and setup.max_in_flight < chosen and number != setup.num_workers
    return Change(num_workers=number, max_in_flight=chosen if needs_more else None)


def _action(change: Change, names: OptionNames, batch_size: int) -> str:
    actions = []
    if change.num_workers is not None:
        actions.append(f"{names.num_workers}={change.num_workers}")
    if change.max_in_flight is not None:
        actions.append(f"{names.max_in_flight}={_shown_limit(change, names)}")
    if change.in_order is not None:
        actions.append(f"in_order={change.in_order}")
    if change.batch_size is not None:
        actions.append(f"batch_size={change.batch_size} (now {batch_size})")
    if change.data is Data.SLOWEST_FIXED:
        actions.append("the slowest samples as fast as the others")
    elif change.data is Data.CACHED:
        actions.append("a cache of samples, so that fetching costs nothing")
    return " and ".join(actions)


def _shown_limit(change: Change, names: OptionNames) -> int:
    assert change.max_in_flight is not None
    if not names.is_in_flight_per_worker:
        return change.max_in_flight
    return math.ceil(change.max_in_flight / max(1, change.num_workers or 1))
