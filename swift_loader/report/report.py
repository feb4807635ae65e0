"""The report of a loader: what was measured, what it means, and what would help.

sent ─► began ─read─► ─fetch─► ─collate─► ─encode─► built ─► received ─decode─► ready ─► its turn ─► delivered
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from io import BytesIO
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import counted, time_text
from swift_loader.log import logger
from swift_loader.metrics.machine import available_memory
from swift_loader.metrics.observations import LIFE, NOBODY, Durations, Observations, Part, Setup, stage_times, steps_ns
from swift_loader.report import plots
from swift_loader.report.tuning import room_for, window_of

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

_BUSY = 0.5
"""If building waits for a core for more than this share of its time, more workers would wait, too."""

_READING = 0.5
"""If building waits for reads for more than this share of its time, more reads help rather than more workers."""

_MAX_WORKERS = 8
_MAX_SLOWEST = 4
_MAX_TUNING = 3
_MIN_SHOWN_SHARE = 0.002

_FIRST_LOOK_S = 60.0
"""Of a run. After each line in the log, the next look is after twice the time."""

_LOOK_EVERY_S = 1.0
"""A look takes a millisecond."""


# Whether the loop waits ----------------------------------------------------------------------------------------------


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
        batches = _steady(observations)
        if len(batches) < MIN_BATCHES or observations.num_delivered <= observations.setup.max_in_flight:
            run_s = observations.elapsed_s
            return cls(Bound.STARTING, min(1.0, observations.waited_s / run_s) if run_s > 0 else 0.0)
        waited, worked = int(stage_times(batches)["wait"][1:].sum()), int(steps_ns(batches).sum())
        share = waited / (waited + worked) if waited + worked > 0 else 0.0
        if share >= DATA_BOUND:
            return cls(Bound.DATA, share)
        return cls(Bound.MODEL if share <= MODEL_BOUND else Bound.BALANCED, share)

    def __str__(self) -> str:
        if self.bound is Bound.STARTING:
            return f"{self.bound.value}: too few batches for a verdict"
        only, end = ("only ", "; faster data would bring nothing") if self.bound is Bound.MODEL else ("", "")
        return f"{self.bound.value}: the loop waits for data {only}{100 * self.wait_share:.0f} % of its time{end}"


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change."""

    action: str
    """Such as `worker_per_consumer=6`."""
    gain: float
    """How much faster the loop may get at most: 0.45 is 45 %. From n to m workers, at most m/n - 1. It is less if
    workers compete for memory bandwidth or a disk, or if build times vary so much that batches wait for their turn."""

    def __str__(self) -> str:
        return f"{self.action} would bring up to {100 * self.gain:+.0f} %"


def advise(observations: Observations, option: str = SWIFT_LOADER) -> tuple[Advice, ...]:
    """Return what would make the loop faster. Empty if it hardly waits, or if more workers bring less than 5 %.

    Also if building mostly waits for a core: nobody knows how many cores further workers would get.
    """
    setup = observations.setup
    batches = _steady(observations)
    is_waiting = Verdict.of(observations).bound in (Bound.DATA, Bound.BALANCED)
    # Of actors, the cores aren't those of this machine.
    if not is_waiting or setup.num_remote or _is_busy(_cpu_use(batches, setup)):
        return ()
    times = stage_times(batches)
    read_share = float(times["read"].sum()) / max(1, int(times["build"].sum()))
    if read_share >= _READING:
        waited = Verdict.of(observations).wait_share
        return (Advice(f"mapped(reads={2 * math.ceil(_reads(batches))})", min(1.0, 1 / (1 - read_share * waited) - 1)),)
    trainer_cpu_s = observations.trainer_cpu_s / max(1, observations.num_delivered)
    if setup.worker_type == "thread" or not setup.num_workers:  # the time of building is the trainer's, too
        trainer_cpu_s = max(0.0, trainer_cpu_s - float(batches["cpu_ns"].mean()) / 1e9)
    window = window_of(batches, setup.num_workers, trainer_cpu_s)
    machine = room_for(observations, available_memory(), keeps_limit=False)
    assert window is not None, "a verdict needs more batches"
    number = window.needed_workers(machine)
    most = number / setup.num_workers if setup.num_workers else math.inf  # others wait for cores, too
    gain = min(window.expected_rate(number, machine.num_cores) / window.rate, most) - 1
    if number <= setup.num_workers or gain < _MIN_GAIN:
        return ()
    action = f"{option}={number}"
    if option == SWIFT_LOADER and not setup.is_in_flight_chosen and setup.max_in_flight < number:
        action += " and data_queue_size=None"  # which grows with the workers, as the DataLoader's does anyway
    return (Advice(action, gain),)


# Where the time goes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """What one worker did."""

    worker_id: int
    num_batches: int
    busy_share: float
    """Share of the time in which it was at a batch, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What workers do while they are at a batch. The shares add up to 1."""

    running: float
    waiting_for_core: float
    """The worker was ready to run, but all cores were taken. 0 where the system doesn't tell."""
    waiting_for_io: float
    """The worker waited for a file, the network, a lock or a sleep."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of the last batches went."""

    parts: tuple[Part, ...]
    """The stages of a batch, in their order."""
    idle: Part
    """The time between two batches of a worker. Its share is a share of the workers' time."""
    workers: tuple[WorkerUse, ...]
    """One entry per worker, in the order of their numbers. Workers that built none of these batches are missing."""
    cpu: CpuUse | None
    """What the workers do with their cores. None: it wasn't measured."""
    reads: float = 0.0
    """How many reads of a mapped dataset each worker has in flight, on average. 0: none is mapped."""

    @classmethod
    def of(cls, observations: Observations) -> Breakdown:
        """Return where the time went. Without batches, all is 0."""
        batches = _steady(observations)
        times = stage_times(batches, in_order=observations.setup.in_order)
        total_ns = sum(int(times[name].sum()) for name in LIFE)
        began, build, numbers = batches["began_ns"], times["build"], batches["worker_id"]
        order = np.lexsort((began, numbers))
        gaps = began[order][1:] - (began + build)[order][:-1]
        idle = np.maximum(0, gaps[np.diff(numbers[order]) == 0])  # before each batch of a worker but its first one
        span_ns = max(int((began + build).max() - began.min()), 1) if len(batches) else 1
        return cls(
            parts=tuple(_part(name, who, times[name], total_ns) for name, who in LIFE.items()),
            idle=_part("idle worker", NOBODY, idle, int(idle.sum() + build.sum())),
            workers=tuple(
                WorkerUse(number, int((numbers == number).sum()), int(build[numbers == number].sum()) / span_ns)
                for number in np.unique(numbers).tolist()
            ),
            cpu=_cpu_use(batches, observations.setup),
            reads=_reads(batches),
        )


def _steady(observations: Observations) -> NDArray[np.void]:
    """Return the batches without those of the start, which waited for workers to start."""
    batches = observations.batches
    is_start_seen = observations.num_delivered <= len(batches)
    return batches[min(observations.setup.num_workers + 1, len(batches) // 2) :] if is_start_seen else batches


def _part(name: str, who: str, durations: Durations, total_ns: int) -> Part:
    if not durations.size:
        return Part(name, 0.0, 0.0, 0.0, who)
    p50, p99 = (float(value) / 1e9 for value in np.quantile(durations, [0.5, 0.99]))
    return Part(name, p50, p99, int(durations.sum()) / total_ns if total_ns > 0 else 0.0, who)


def _cpu_use(batches: NDArray[np.void], setup: Setup) -> CpuUse | None:
    """Return what workers do while they are at a batch."""
    cpu, delay, service = batches["cpu_ns"], batches["run_delay_ns"], stage_times(batches)["build"]
    total = float(service.sum())
    if total <= 0 or not cpu.any():
        return None
    is_known = delay >= 0
    cpu_known = float(cpu[is_known].sum())
    share = float(delay[is_known].sum()) / cpu_known if cpu_known > 0 else setup.run_delay_ratio
    running = np.minimum(cpu, service)
    delay = np.minimum(np.where(is_known, delay, share * cpu), service - running)  # as elsewhere, where not measured
    shares = float(running.sum()) / total, float(delay.sum()) / total
    return CpuUse(*shares, max(0.0, 1 - sum(shares)))


def _reads(batches: NDArray[np.void]) -> float:
    """Return how many reads each worker has in flight, on average."""
    if not batches["reading_ns"].any():
        return 0.0
    began = batches["began_ns"]
    span_ns = int((began + stage_times(batches)["build"]).max() - began.min())
    return float(batches["reading_ns"].sum()) / max(span_ns, 1) / len(np.unique(batches["worker_id"]))


def _is_busy(cpu: CpuUse | None) -> bool:
    return cpu is not None and cpu.waiting_for_core > _BUSY


# The report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Report(Mapping[str, Any]):
    """What was measured of a loader, up to now. It doesn't change. It is empty, and false, if nothing was measured.

    `print` it. As a mapping, it has the counts and the times of each stage: `report["batches_delivered"]`.
    """

    observations: Observations | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    option: str = SWIFT_LOADER
    """What the loader calls its number of workers."""
    tuning: tuple[str, ...] = ()
    """What the loader did about its number of workers, and why, if it chooses that itself."""
    stages: str = ""
    """What each stage of a pipeline does, a line for each."""

    def __getitem__(self, name: str) -> Any:
        return self.counts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the loop waits for data. If nothing was measured, this is a `ValueError`."""
        return Verdict.of(self._measured())

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where a batch's time goes. If nothing was measured, this is a `ValueError`."""
        return Breakdown.of(self._measured())

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What would make the loop faster: at most one thing. Empty if nothing would bring 5 %, if the machine is busy,
        or if the loader chooses its number of workers itself.
        """
        return () if self.observations is None or self.tuning else advise(self.observations, self.option)

    def _measured(self) -> Observations:
        if self.observations is None and "stages" in self.counts:
            raise ValueError("a pipeline's report has no batches; report['stages'] says which stage is slow")
        if self.observations is None:
            raise ValueError("nothing is measured: ask again once the loop got a batch; benchmark=False measures none")
        return self.observations

    def plot(self, path: str | PathLike[str]) -> None:
        """Write a [picture](dashboards.md#a-picture) of the report to a file."""
        if self.observations is None or not len(self.observations.batches):
            raise ValueError("there is no batch to draw: plot a loader that measures, once a loop got a batch of it")
        plots.draw(str(self.verdict), self.breakdown.parts, self.observations, path)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it but the single batches, as plain JSON types."""
        if self.observations is None:
            failures = {name: [*map(repr, self.counts[name])] for name in self.counts if name == "failures"}
            return {**self.counts, **failures}
        return {
            **self.counts,
            "verdict": {"bound": self.verdict.bound.value, "wait_share": self.verdict.wait_share},
            "setup": asdict(self.observations.setup),
            "breakdown": asdict(self.breakdown),
            "slowest": [asdict(sample) for sample in self.observations.slowest],
            "tuning": list(self.tuning),
            "advice": [asdict(advice) for advice in self.advice],
        }

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=dict)

    def to_html(self) -> str:
        """Return a page with the report, and with its picture if matplotlib is installed. It needs no other file."""
        file: Any = BytesIO()
        picture = ""
        with suppress(ModuleNotFoundError, ValueError):  # no matplotlib, or no batches yet
            self.plot(file)
            picture = f"<img style='max-width:100%' src='data:image/png;base64,{b64encode(file.getvalue()).decode()}'>"
        return f"<!doctype html><meta charset='utf-8'><title>swift_loader</title>{self._repr_html_()}{picture}"

    def __repr__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return html_table("Report", [re.split(" {2,}", line) for line in _lines(self) if line])


def plain_length(dataset: Any) -> int | None:
    """Return the length of a dataset if that runs none of the user's code; else None."""
    return len(dataset) if type(dataset) in {list, tuple, range, np.ndarray} else None


def facts_of(loader: Any) -> dict[str, str]:
    """Return what a loader says of itself. A debugger asks also one whose `__init__` failed or isn't done."""
    try:
        return loader._facts()  # type: ignore[no-any-return] # noqa: SLF001
    except Exception:
        return {"state": "not usable"}


def html_table(title: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table for notebooks, without scripts and files. The last cell of a row fills it."""
    from html import escape

    lines, rows = "", list(rows)
    for *first, last in rows:
        cells = "".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in first)
        width = max(map(len, rows)) - len(first)
        lines += f"<tr>{cells}<td style='text-align:left' colspan='{width}'>{escape(last)}</td></tr>"
    return f"<table><caption>swift_loader {escape(title)}</caption>{lines}</table>"


def _lines(report: Report) -> Iterator[str]:
    """Yield the report in at most 25 lines."""
    observations = report.observations
    if report.stages:
        yield from report.stages.split("\n")
        yield f"{counted(report['num_failures'], 'item')} left out"
        return
    if observations is None or not len(observations.batches):
        yield "<Report: nothing is measured>" if observations is None else "<Report: no batches yet>"
        return
    breakdown, verdict, setup = report.breakdown, report.verdict, observations.setup
    yield from (str(verdict), _speed(observations), "")
    yield f"{'a batch':<20}{'p50':>10}{'p99':>10}{'share':>8}"
    for part in breakdown.parts:
        if part.share >= _MIN_SHOWN_SHARE:
            share = f"{100 * part.share:.0f} %"
            yield f"{part.name:<20}{time_text(part.p50_s):>10}{time_text(part.p99_s):>10}{share:>8}"
    yield ""
    if used := breakdown.workers:
        busy = [round(100 * one.busy_share) for one in used]
        few = 1 < len(used) <= _MAX_WORKERS
        shares = ", ".join(f"{share} %" for share in busy) if few else f"{_range(busy)} %"
        reads = f"; each reads {breakdown.reads:.3g} times at once" if breakdown.reads else ""
        yield f"workers are busy {shares} of the time, with {_range([one.num_batches for one in used])} batches{reads}"
    if (cpu := breakdown.cpu) is not None:
        yield (
            f"at a batch they run {100 * cpu.running:.0f} %, wait for I/O {100 * cpu.waiting_for_io:.0f} %, wait for a "
            f"core {100 * cpu.waiting_for_core:.0f} %"
        )
    if observations.slowest:
        slowest = (f"{one.index} ({time_text(one.seconds)})" for one in observations.slowest[:_MAX_SLOWEST])
        yield f"slowest samples: {', '.join(slowest)}"
    yield from (f"workers: {line}" for line in report.tuning[-_MAX_TUNING:])
    yield ""
    if verdict.bound in (Bound.DATA, Bound.BALANCED):
        if setup.num_remote:
            yield "what more actors would bring isn't known: try RayExecutor(n) with another n, or resize(n)"
        elif cpu is not None and _is_busy(cpu):
            who = "workers wait" if setup.num_workers else "the loop waits"
            yield f"{who} for a core {100 * cpu.waiting_for_core:.0f} % of the time at a batch: the machine is busy"
        elif not report.tuning:
            yield from map(str, report.advice or ["more workers wouldn't bring 5 %"])


def _speed(observations: Observations) -> str:
    setup, elapsed = observations.setup, observations.elapsed_s
    delivered = observations.num_delivered
    rate = f", {delivered / elapsed:.4g} batches/s" if elapsed > 0 and delivered > 1 else ""  # one was there already
    num_here = setup.num_workers - setup.num_remote
    workers = counted(num_here, f"worker {setup.worker_type}")
    if setup.num_remote:
        actors = counted(setup.num_remote, "Ray actor")
        workers = f"{actors} and {workers}" if num_here else actors
    cores = f"{setup.num_cores:g} core{'' if setup.num_cores == 1 else 's'}"
    return (
        f"{delivered} batch{'' if delivered == 1 else 'es'} in {time_text(elapsed)}{rate}; {workers} on {cores}, "
        f"at most {setup.max_in_flight} batches in flight"
    )


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


# The line in the log --------------------------------------------------------------------------------------------------


class Teller:
    """Looks at a loader after its epochs, and says what would help: in loguru's log, and never twice. Loop's thread."""

    def __init__(self, option: str) -> None:
        """`option` is what the loader calls its number of workers."""
        self._option = option
        self._next_at_s = _FIRST_LOOK_S
        """How long the loop must have run for the next look."""
        self._last_action = ""

    def is_due(self, elapsed_s: float) -> bool:
        """Return whether to look at the epoch that is over, after all passes have lasted so long. Mostly it isn't."""
        return elapsed_s >= self._next_at_s

    def tell(self, observations: Observations) -> str:
        """Look at the epoch that is over. Return what was said. Empty: there is nothing to say, or nothing new."""
        try:
            line = self._line(observations)
        except Exception as error:  # advice must not end a run that works without it
            logger.debug(f"no advice after the epoch: {type(error).__name__}: {error}")
            return ""
        if line:
            logger.info(line)
        return line

    def _line(self, observations: Observations) -> str:
        if not len(observations.batches):
            return ""
        self._next_at_s = observations.elapsed_s + _LOOK_EVERY_S
        of_epoch, batches = observations, observations.batches
        mask = (batches["epoch"] == batches["epoch"][-1]) & (batches["pass_number"] == batches["pass_number"][-1])
        if int(np.count_nonzero(mask)) >= 2 * MIN_BATCHES:  # else all of them say more
            of_epoch = replace(observations, batches=batches[mask])
        verdict = Verdict.of(of_epoch)
        if verdict.bound is not Bound.DATA:
            return ""
        self._next_at_s = 2 * observations.elapsed_s
        advices = advise(of_epoch, self._option)
        if not advices or advices[0].action == self._last_action:
            return ""
        self._last_action = advices[0].action
        epoch = batches["epoch"][-1]
        return f"the loop waited {100 * verdict.wait_share:.0f} % of epoch {epoch} for data: {advices[0]}"
