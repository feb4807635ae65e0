"""What a batch costs, wherever it is built: the input of the simulation, taken from observations. Pure.

A worker's time at a batch has three parts: it runs, it waits for I/O, and it waits for a core. The last one depends on
what else runs, so it is left out here, and the simulation adds its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from swift_loader.metrics.observations import Observations, SlowSample
from swift_loader.report.life import Life, Seconds, activity, steady
from swift_loader.report.slowdown import Slowdown

__all__ = ["Workload"]

_MOSTLY = 0.5
_MIN_READY = 5
_PICKUP_SHARE = 0.3
"""Of the time from ready to delivered, if the loop waits: what isn't for waking up. Measured with small batches."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What batches and steps cost. Arrays of one length belong together. All times in seconds."""

    waiting: Seconds
    """How long the worker waits for I/O, by batch."""
    cpu: Seconds
    """How long it needs a core, if nothing else runs, by batch."""
    fetch_share: Seconds
    """Share of fetching in the time at the batch, from 0 to 1, by batch."""
    lag: float
    """From when a worker has a task and is free to when it begins."""
    transport: float
    """From built to received."""
    round_trip: bool
    """Whether a worker gets its next task only after the trainer has received its batch."""
    decode: Seconds
    """How long the trainer decodes, by batch. One at a time."""
    pickup: Seconds
    """From when a batch is ready to when the loop has it, if it waits for it, by batch."""
    pickup_ready: Seconds
    """How long `next` takes if the batch was ready before, by batch."""
    step_waiting: Seconds
    """How long the loop needs no core in a step, by step."""
    step_cpu: Seconds
    """How long it needs one, by step."""
    aside_cpu: float
    """CPU time of the trainer's other threads per batch."""
    cores: float
    interference: float
    """By how much a core is slower because of other programs, at least 1."""
    slowdown: float
    """By how much the CPU time of a batch grows with each other one that runs at the same time: 0.5 is by a half.
    It isn't 0 for work that is bound by memory."""
    is_slowdown_known: bool
    """Whether the batches tell it. They don't if always the same number ran at once."""
    samples_per_batch: float

    @property
    def service(self) -> Seconds:
        """How long a worker needs for a batch if it always has a core."""
        return self.waiting + self.cpu

    @property
    def step(self) -> Seconds:
        """How long the loop needs for a step if it always has a core."""
        return self.step_waiting + self.step_cpu

    @classmethod
    def of(cls, observations: Observations) -> Workload:
        """Return what the last batches cost. There must be at least two."""
        kept = steady(observations)
        setup, life = kept.setup, Life.of(kept)
        cores = max(1.0, setup.num_cores / max(1, setup.world_size_here))
        delay = np.minimum(life.known_run_delay, life.service)
        cpu = np.minimum(life.cpu, life.service - delay) if life.cpu.any() else life.service - delay
        wants_core = np.divide(cpu + delay, life.service, out=np.zeros_like(cpu), where=life.service > 0)
        num_running = activity(life.began, life.began + life.service, wants_core)
        latency = _latency(life.service, cpu, delay, num_running / cores)
        delay = delay - latency
        waiting = life.service - delay - cpu
        slowdown = Slowdown.of(cpu / np.maximum(1, kept.batches["num_samples"]), num_running, cores)
        stretch = _stretch(cpu, delay)
        step, step_cpu, aside = _steps(observations, life, stretch)
        return cls(
            waiting=waiting,
            cpu=cpu / slowdown.factor(num_running, cores),
            fetch_share=np.divide(life.fetch, life.service, out=np.zeros_like(cpu), where=life.service > 0),
            lag=float(np.median(life.lag)),
            transport=float(np.quantile(life.transport, 0.25)),
            round_trip=bool(setup.num_workers) and float(np.mean(life.was_queued[1:])) < _MOSTLY,
            decode=_apart(life),
            pickup=life.pickup + life.copy,
            pickup_ready=_pickup_ready(life) + life.copy,
            step_waiting=step - step_cpu,
            step_cpu=step_cpu,
            aside_cpu=aside,
            cores=cores,
            interference=_interference(stretch, num_running + step_cpu.sum() / max(1e-9, _span(life)), cores),
            slowdown=slowdown.per_neighbour,
            is_slowdown_known=slowdown.is_known,
            samples_per_batch=max(1.0, float(np.mean(kept.batches["num_samples"]))),
        )

    def with_fetch(self, factor: Seconds) -> Workload:
        """Return the workload with the time for fetching multiplied by this, by batch.

        What is left out of a worker's time is its waiting for I/O first: collating and encoding need a core.
        """
        saved = self.service * self.fetch_share * (1 - factor)
        of_waiting = np.minimum(self.waiting, saved)
        return replace(self, waiting=self.waiting - of_waiting, cpu=np.maximum(0, self.cpu - (saved - of_waiting)))

    def without(self, slowest: tuple[SlowSample, ...]) -> Workload:
        """Return the workload if these samples took as long as the others."""
        mean = float(np.mean(self.service * self.fetch_share)) / max(1.0, self.samples_per_batch)
        fetch = self.service * self.fetch_share
        left = fetch.copy()
        for sample in sorted(slowest, key=lambda sample: -sample.seconds):
            batch = int(np.argmax(left))
            left[batch] -= min(left[batch], max(0.0, sample.seconds - mean))
        return self.with_fetch(np.divide(left, fetch, out=np.ones_like(fetch), where=fetch > 0))

    def with_batch_size(self, factor: float) -> Workload:
        """Return the workload with batches so many times as large. The model's step grows with them."""
        return replace(
            self,
            waiting=_merged(self.waiting, factor),
            cpu=_merged(self.cpu, factor),
            fetch_share=np.full(len(self.cpu), float(np.mean(self.fetch_share))),
            decode=_merged(self.decode, factor),
            step_waiting=_merged(self.step_waiting, factor),
            step_cpu=_merged(self.step_cpu, factor),
            aside_cpu=self.aside_cpu * factor,
            samples_per_batch=self.samples_per_batch * factor,
        )


def _pickup_ready(life: Life) -> float:
    """Return how long `next` takes if the batch is ready. Without such batches: a part of what waking up takes."""
    was_ready = life.queued > 0
    if int(was_ready.sum()) >= _MIN_READY:
        return float(np.median(life.pickup[was_ready]))
    return _PICKUP_SHARE * float(np.median(life.pickup))


def _latency(service: Seconds, cpu: Seconds, delay: Seconds, load: Seconds) -> Seconds:
    """Return the part of the run delay that comes with each wait for I/O, because waking up takes some time.

    It is what the competition among the workers doesn't explain. The more a batch computes, the more of that is due to
    other programs.
    """
    unexplained = np.maximum(0, delay - cpu * np.maximum(0, load - 1))
    waits = np.maximum(0, service - cpu - delay)
    share = np.divide(waits, waits + cpu, out=np.zeros_like(cpu), where=waits + cpu > 0)
    return unexplained * share


def _stretch(cpu: Seconds, delay: Seconds) -> float:
    """Return how much longer the workers' CPU time took because they waited for a core."""
    return 1 + float(delay.sum()) / float(cpu.sum()) if cpu.sum() > 0 else 1.0


def _steps(observations: Observations, life: Life, stretch: float) -> tuple[Seconds, Seconds, float]:
    """Return what a step takes and the CPU time in it, by step, and the CPU time of the trainer's other threads."""
    step = life.step[np.isfinite(life.step)]
    step = step if step.size else np.zeros(1)
    total = observations.trainer_cpu_s / max(1, observations.num_delivered)
    if observations.setup.worker_type == "thread":  # the workers' CPU time is the trainer's, too
        total -= float(np.mean(life.cpu))
    if not observations.setup.num_workers:
        total -= float(np.mean(life.service))
    mean = float(step.mean())
    decode_cpu = min(max(0.0, total), float(np.mean(life.decode)) / stretch)
    in_step = min(max(0.0, total) - decode_cpu, mean / stretch)
    share = in_step / mean if mean > 0 else 0.0
    delay = in_step * (stretch - 1)
    aside = max(0.0, total) - in_step
    return np.maximum(step * share, step - delay * step / max(mean, 1e-12)), step * share, aside


def _interference(stretch: float, num_running: Seconds, cores: float) -> float:
    """Return the part of the stretch that the competition among workers and trainer doesn't explain, at least 1."""
    return max(1.0, stretch / float(np.mean(np.maximum(1, num_running / cores))))


def _apart(life: Life) -> Seconds:
    """Return how long each batch took to decode, if several at a time shared a core."""
    total = float(life.decode.sum())
    if total <= 0:
        return life.decode
    ended = life.began + life.service + life.transport + life.decode
    began = ended - life.decode
    order = np.argsort(began)
    furthest = np.concatenate([[-np.inf], np.maximum.accumulate(ended[order])[:-1]])
    covered = np.maximum(0, ended[order] - np.maximum(began[order], furthest)).sum()
    return life.decode * float(covered) / total


def _span(life: Life) -> float:
    return float(np.nansum(life.step) + life.waited[1:].sum())


def _merged(values: Seconds, factor: float) -> Seconds:
    """Return the sums of so many values each, in a row; a part of one counts so much of it. The mean is exact."""
    whole = int(factor)
    merged = np.zeros(len(values))
    for shift in range(whole):
        merged += np.roll(values, shift * 7 + shift)
    return merged + (factor - whole) * np.roll(values, whole * 8) if factor > whole else merged
