"""Predicts the speed of a loop after a change: the observed batches, simulated with another setup. Pure.

The simulation is fitted first: where the loop waits for data, all times of the workers are scaled until the simulated
loop is as fast as the observed one. `low` and `high` say how much the parts of the observations disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from swift_loader.metrics.observations import Observations
from swift_loader.report.life import Life, steady
from swift_loader.report.simulation import Loader, Outcome, simulate
from swift_loader.report.verdict import MIN_BATCHES
from swift_loader.report.workload import Workload
from swift_loader.scheduler.in_flight_limit import InFlightLimit

__all__ = ["Change", "Data", "Prediction", "Predictor", "predict"]

_NUM_FITS = 3
_MIN_ERROR = 0.02
"""No prediction is surer than this."""

_UNKNOWN_SLOWDOWN = 0.6
"""How much workers may slow each other down if nothing is known of it: for the lower end of a prediction. Two copies of
large arrays at once take 1.6 times as long on a machine with two cores."""

_SHORTEST_S = 1e-9
"""Of a step or a run, so that rates are finite."""

_NUM_PARTS = 2
_NUM_OF_PART = 500


class Data(str, Enum):
    """What happens to the samples."""

    AS_IS = "as they are"
    SLOWEST_FIXED = "the slowest samples as fast as the others"
    CACHED = "fetching costs nothing"
    FREE = "data costs nothing"
    """The upper bound of all that can be done about data."""


@dataclass(frozen=True, slots=True)
class Change:
    """What would be different. None: as it is."""

    num_workers: int | None = None
    batch_size: int | None = None
    max_in_flight: int | None = None
    in_order: bool | None = None
    data: Data = Data.AS_IS


@dataclass(frozen=True, slots=True)
class Prediction:
    """The speed of the loop after a change."""

    batches_per_s: float
    samples_per_s: float
    wait_share: float
    """Share of the time in which the loop would wait for data."""
    gain: float
    """How much faster than now, in samples per second: 0.45 is 45 % faster."""
    low: float
    high: float
    """Where the gain probably is."""


def predict(observations: Observations, change: Change) -> Prediction:
    """Return the speed after a change.

    Raises:
        ValueError: There are too few batches, or the change is out of its range.
    """
    return Predictor(observations).predict(change)


class Predictor:
    """Predicts several changes from the same observations. Fitting them takes as long as a prediction."""

    def __init__(self, observations: Observations) -> None:
        """Fit the simulation.

        Raises:
            ValueError: There are too few batches.
        """
        kept = steady(observations)
        if len(kept.batches) < MIN_BATCHES:
            raise ValueError(
                f"{len(kept.batches)} batches were measured after the start; a prediction needs {MIN_BATCHES}: run the "
                f"loop longer"
            )
        self.observations = observations
        self._fit = _Fit.of(observations)
        self._parts: list[_Fit] | None = None

    @property
    def workload(self) -> Workload:
        """What batches and steps cost, as fitted."""
        return self._fit.workload

    def gain(self, change: Change) -> float:
        """Return the gain alone, in half the time of `predict`."""
        return self._fit.outcome_of(change)[1]

    def predict(self, change: Change) -> Prediction:
        """Return the speed after a change.

        Raises:
            ValueError: The change is out of its range.
        """
        _check(change)
        if self._parts is None:
            self._parts = _parts_of(self.observations)
        outcome, gain, samples_per_batch = self._fit.outcome_of(change)
        gains = [part.outcome_of(change)[1] for part in self._parts]
        if change.num_workers is not None and not self.workload.is_slowdown_known:
            gains.append(self._fit.slowed(_UNKNOWN_SLOWDOWN).outcome_of(change)[1])
        error = max(_MIN_ERROR, self._fit.error)
        return Prediction(
            batches_per_s=outcome.batches_per_s,
            samples_per_s=outcome.batches_per_s * samples_per_batch,
            wait_share=outcome.wait_share,
            gain=gain,
            low=(1 + min([gain, *gains])) / (1 + error) - 1,
            high=(1 + max([gain, *gains])) * (1 + error) - 1,
        )


@dataclass(frozen=True, slots=True)
class _Fit:
    """A simulation that is as fast as what was observed."""

    observations: Observations
    workload: Workload
    samples_per_s: float
    factor: float
    """Observed speed, compared with the simulated one."""
    num_batches: int

    @property
    def error(self) -> float:
        """How far the fitted simulation is from what was observed."""
        return abs(math.log(self.factor))

    @classmethod
    def of(cls, observations: Observations, num_batches: int = 800) -> _Fit:
        """Fit a simulation of so many batches."""
        workload, loader = Workload.of(observations), _loader_of(observations)
        observed = _observed_rate(observations)
        factor = 1.0
        for turn in range(_NUM_FITS):
            outcome = simulate(workload, loader, num_batches=num_batches)
            factor = observed / outcome.batches_per_s
            is_fitted = outcome.wait_share < _MIN_ERROR or abs(math.log(factor)) < _MIN_ERROR / 2
            if is_fitted or turn == _NUM_FITS - 1:
                break
            workload = _scaled(workload, min(2.0, max(0.5, 1 / factor)))
        return cls(observations, workload, observed * workload.samples_per_batch, factor, num_batches)

    def slowed(self, slowdown: float) -> _Fit:
        """Return the fit of workers that slow each other down."""
        return replace(self, workload=replace(self.workload, slowdown=slowdown))

    def outcome_of(self, change: Change) -> tuple[Outcome, float, float]:
        """Return the outcome of a change, its gain, and how many samples a batch has."""
        workload = _changed(self.workload, self.observations, change)
        if change.data is Data.FREE:
            step = float(workload.step.mean())
            outcome = Outcome(1 / max(_SHORTEST_S, step), 0.0, self.num_batches, self.num_batches)
        else:
            loader = _loader_of(self.observations, change)
            num_batches = max(self.num_batches, 4 * loader.max_in_flight)
            outcome = simulate(workload, loader, num_batches=num_batches)
            outcome = replace(outcome, batches_per_s=outcome.batches_per_s * self.factor)
        gain = outcome.batches_per_s * workload.samples_per_batch / self.samples_per_s - 1
        return outcome, gain, workload.samples_per_batch


def _parts_of(observations: Observations) -> list[_Fit]:
    """Return fits of the first and the last half, if there is enough in each."""
    batches = steady(observations).batches
    if len(batches) < 4 * MIN_BATCHES:
        return []
    halves = np.array_split(batches, _NUM_PARTS)
    # Their batches are of the middle of a run: nothing of them is left out as its start.
    return [_Fit.of(replace(observations, batches=half), _NUM_OF_PART) for half in halves]


def _changed(workload: Workload, observations: Observations, change: Change) -> Workload:
    if change.data is Data.CACHED:
        workload = workload.with_fetch(np.zeros(len(workload.cpu)))
    elif change.data is Data.SLOWEST_FIXED:
        workload = workload.without(observations.slowest)
    if change.batch_size is not None:
        workload = workload.with_batch_size(change.batch_size / observations.setup.batch_size)
    return workload


def _loader_of(observations: Observations, change: Change | None = None) -> Loader:
    """Return the loader that was observed, or the one after a change."""
    setup, change = observations.setup, change or Change()
    num_workers = setup.num_workers if change.num_workers is None else change.num_workers
    in_order = setup.in_order if change.in_order is None else change.in_order
    limit = setup.max_in_flight
    if change.max_in_flight is not None:
        limit = change.max_in_flight
    elif setup.is_in_flight_chosen and change != Change(data=change.data):
        limit = InFlightLimit.of(None, num_workers, in_order=in_order).num_batches
    return Loader(num_workers, max(1, limit), in_order)


def _scaled(workload: Workload, factor: float) -> Workload:
    """Return the workload with all times of the workers and of the way to the loop multiplied."""
    return replace(
        workload,
        waiting=workload.waiting * factor,
        cpu=workload.cpu * factor,
        lag=workload.lag * factor,
        transport=workload.transport * factor,
        decode=workload.decode * factor,
        pickup=workload.pickup * factor,
        pickup_ready=workload.pickup_ready * factor,
    )


def _observed_rate(observations: Observations) -> float:
    """Return batches per second, without the time between two epochs."""
    life = Life.of(steady(observations))
    elapsed = float(life.waited[1:].sum() + np.nansum(life.step))
    return (len(life.waited) - 1) / max(_SHORTEST_S, elapsed)


def _check(change: Change) -> None:
    for name in ("batch_size", "max_in_flight", "num_workers"):
        number, least = getattr(change, name), 0 if name == "num_workers" else 1
        if number is not None and number < least:
            raise ValueError(f"{name}={number} can't be predicted; give an integer of at least {least}")
