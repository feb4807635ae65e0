"""Says whether the loop waits for data, and which number of workers would help. Only `Teller` isn't pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from swift_loader.log import logger
from swift_loader.metrics.observations import Observations, steps_ns
from swift_loader.report.stages import stage_ns, steady
from swift_loader.tuning.autotuner import room_for
from swift_loader.tuning.tuner import window_of

SWIFT_LOADER = "worker_per_consumer"
DATALOADER = "num_workers"
"""What a loader's class calls its number of workers."""

MIN_BATCHES = 16
"""With fewer batches, there is no verdict."""

DATA_BOUND = 0.10
MODEL_BOUND = 0.03
"""Shares of the time that the loop waits: at least, and at most."""

_MIN_GAIN = 0.05
"""A smaller gain isn't worth a change."""

_FIRST_LOOK_S = 60.0
"""Of a run. After each line in the log, the next look is after twice the time."""

_LOOK_EVERY_S = 1.0
"""A look takes a millisecond."""


class Bound(str, Enum):
    """What limits the speed of the loop."""

    STARTING = "starting"
    """Too few batches to say."""
    MODEL = "model-bound"
    """The loop hardly ever waits. Faster data would bring nothing."""
    BALANCED = "balanced"
    """The loop waits now and then."""
    DATA = "data-bound"
    """The loop waits for data for more than a tenth of the time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the loop waits for data, and how much."""

    bound: Bound
    wait_share: float
    """Share of the loop's time in which it waited for a batch, from 0 to 1."""

    @classmethod
    def of(cls, observations: Observations) -> Verdict:
        """Return the verdict on the last batches. The time between two epochs doesn't count, nor does the start."""
        batches = steady(observations).batches
        if len(batches) < MIN_BATCHES:
            run_s = observations.elapsed_s
            return cls(Bound.STARTING, min(1.0, observations.waited_s / run_s) if run_s > 0 else 0.0)
        waited, worked = int(stage_ns(batches, "wait")[1:].sum()), int(steps_ns(batches).sum())
        share = waited / (waited + worked) if waited + worked > 0 else 0.0
        if share >= DATA_BOUND:
            return cls(Bound.DATA, share)
        return cls(Bound.MODEL if share <= MODEL_BOUND else Bound.BALANCED, share)


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change."""

    action: str
    """Such as `worker_per_consumer=6`."""
    gain: float
    """How much faster the loop may get: 0.45 is 45 %. Less where workers compete for what the machine shares, such as
    memory bandwidth or a disk, or where build times vary so much that batches wait for their turn."""

    def __str__(self) -> str:
        return f"{self.action} would bring up to {100 * self.gain:+.0f} %"


def advise(observations: Observations, option: str = SWIFT_LOADER) -> tuple[Advice, ...]:
    """Return what would make the loop faster. Empty if it hardly waits, or if more workers bring less than 5 %."""
    setup = observations.setup
    if Verdict.of(observations).bound not in (Bound.DATA, Bound.BALANCED):
        return ()
    if setup.num_remote:  # the cores that build aren't those of this machine
        return ()
    batches = steady(observations).batches
    trainer_cpu_s = observations.trainer_cpu_s / max(1, observations.num_delivered)
    if setup.worker_type == "thread":  # the workers' CPU time is the trainer's, too
        trainer_cpu_s = max(0.0, trainer_cpu_s - float(batches["cpu_ns"].mean()) / 1e9)
    window, machine = window_of(batches, setup.num_workers, trainer_cpu_s), room_for(observations, keeps_limit=False)
    if window is None:
        return ()
    number = window.needed_workers(machine)
    gain = window.expected_rate(number, machine.num_cores) / window.rate - 1
    if number <= setup.num_workers or gain < _MIN_GAIN:
        return ()
    action = f"{option}={number}"
    if option == SWIFT_LOADER and not setup.is_in_flight_chosen and setup.max_in_flight < number:
        action += " and data_queue_size=None"  # which grows with the workers, as the DataLoader's does anyway
    return (Advice(action, gain),)


class Teller:
    """Looks at a loader after its epochs, and says what would help: in loguru's log, and never twice. Loop's thread."""

    def __init__(self, option: str, write: Callable[[str], None] | None = None) -> None:
        """`option` is what the loader calls its number of workers. `write` gets each line, too."""
        self._option = option
        self._write = write
        self._next_at_s = _FIRST_LOOK_S
        """How long the loop must have run for the next look."""
        self._last_action = ""

    def tell(self, elapsed_s: float, observe: Callable[[], Observations]) -> None:
        """Look at the epoch that is over, after all passes have lasted so long. Mostly this returns at once."""
        if elapsed_s < self._next_at_s:
            return
        try:
            line = self._line(observe())
        except Exception as error:  # advice must not end a run that works without it
            logger.debug(f"no advice after the epoch: {type(error).__name__}: {error}")
            return
        if line:
            logger.info(line)
            if self._write is not None:
                self._write(line)

    def _line(self, observations: Observations) -> str:
        """Return the line for the last epoch. Empty: there is nothing to say, or nothing new."""
        if not len(observations.batches):
            return ""
        self._next_at_s = observations.elapsed_s + _LOOK_EVERY_S
        of_epoch = _last_pass(observations)
        verdict = Verdict.of(of_epoch)
        if verdict.bound is not Bound.DATA:
            return ""
        self._next_at_s = 2 * observations.elapsed_s
        advices = advise(of_epoch, self._option)
        if not advices or advices[0].action == self._last_action:
            return ""
        self._last_action = advices[0].action
        epoch = observations.batches["epoch"][-1]
        return f"the loop waited {100 * verdict.wait_share:.0f} % of epoch {epoch} for data: {advices[0]}"


def _last_pass(observations: Observations) -> Observations:
    """Return the observations of the last pass, or all of them if it has too few batches."""
    batches = observations.batches
    mask = (batches["epoch"] == batches["epoch"][-1]) & (batches["pass_number"] == batches["pass_number"][-1])
    if int(np.count_nonzero(mask)) < 2 * MIN_BATCHES:
        return observations
    return replace(observations, batches=batches[mask])
