"""Examines a dataset in three processes, one after the other, and puts their reports together.

    examine    builds and measures; started again without a sample that kills or hangs it
    compare    builds the same samples in another order
    resume     runs a loader over some of them

No user code runs in the calling process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from swift_loader.doctor import facts
from swift_loader.doctor.cores import available_cores
from swift_loader.doctor.diagnosis import Diagnosis
from swift_loader.doctor.facts import Ended, Evidence
from swift_loader.doctor.isolated import run_isolated
from swift_loader.doctor.probes.board import Request, Role
from swift_loader.doctor.settings import Settings
from swift_loader.executors.environment import import_path

__all__ = ["Step", "diagnose"]

Step = Callable[[str, float], None]
"""Is told what is being done, and which share of the whole is done."""

_MAX_STARTS = 4
"""How often the first process is started: once more for each sample that kills it."""

_PARTS: dict[type, str] = {
    facts.Construction: "construction",
    facts.FirstFailing: "first_failing",
    facts.Batches: "batches",
    facts.Contention: "contention",
    facts.Stacks: "stacks",
    facts.Habits: "habits",
    facts.Draws: "draws",
    facts.Digests: "digests",
    facts.OtherBuild: "other_build",
    facts.Resumed: "resumed",
}
"""Report -> field of `Evidence`. A later report replaces an earlier one."""

_LISTS: dict[type, str] = {
    facts.Container: "containers",
    facts.Growth: "growths",
    facts.Sample: "samples",
    facts.Failure: "failures",
    facts.SlowAgain: "slow_again",
    facts.Ended: "ended",
}
"""Report -> field of `Evidence`, which has all of them."""

_COMPARE_SHARE = 0.3
_RESUME_SHARE = 0.5
"""Of `seconds`: how long the samples of a resumed run may take in all."""
_LEAST_RESUME_S = 3.0
_RESUME_BUILDS = 6
"""How often such a run builds each sample, about."""
_MAX_RESUMED = 48


def diagnose(settings: Settings, step: Step = lambda doing, share: None) -> Diagnosis:  # noqa: ARG005
    """Examine a dataset. Blocks for about `settings.seconds` and some seconds more.

    Args:
        settings: What to examine, and for how long.
        step: Is called with what is being done. For a progress display.

    Raises:
        CommandError: The target, or the collate function, can't be found. `swift_loader.cli.errors` has the class.
    """
    gathered = _Gathered()
    step("building and measuring", 0.0)
    _examine(settings, gathered, step)
    indices = gathered.comparable()
    if indices:
        step("building the same samples in another order", 0.6)
        seconds = max(1.0, _COMPARE_SHARE * settings.seconds)
        gathered.run(_request(Role.COMPARE, settings, seconds, indices))
    chosen = indices[: gathered.num_to_resume(max(_LEAST_RESUME_S, _RESUME_SHARE * settings.seconds))]
    if len(chosen) >= facts.MIN_RESUMED:
        step("stopping and resuming a run", 0.7)
        gathered.run(_request(Role.RESUME, settings, settings.seconds, chosen))
    step("done", 1.0)
    return Diagnosis.of(settings, gathered.evidence(), available_cores())


def _examine(settings: Settings, gathered: _Gathered, step: Step) -> None:
    """Run the first process, and once more without each sample that killed it."""
    began_s, avoid = time.monotonic(), set[int]()
    for start in range(_MAX_STARTS):
        left_s = settings.seconds / 2**start
        request = Request(Role.EXAMINE, settings, import_path(), left_s, avoid=frozenset(avoid))
        ended = gathered.run(request, partial(_show, step, began_s, settings.seconds))
        if ended is None or ended.index is None:
            return
        avoid.add(ended.index)


def _show(step: Step, began_s: float, seconds: float) -> None:
    step("measuring", 0.6 * min(1.0, (time.monotonic() - began_s) / seconds))


def _request(role: Role, settings: Settings, seconds: float, indices: tuple[int, ...]) -> Request:
    return Request(role, settings, import_path(), seconds, indices)


class _Gathered:
    """The reports so far."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}
        self._lists: dict[str, list[Any]] = {name: [] for name in _LISTS.values()}

    def run(self, request: Request, step: Callable[[], None] = lambda: None) -> Ended | None:
        """Run a process and keep its reports. Return its `Ended`, if it ended too early."""
        if request.role is Role.EXAMINE:
            self._forget()
        ended = None
        with closing(run_isolated(request)) as reports:
            for report in reports:
                kind = type(report)
                if kind in _PARTS:
                    self._parts[_PARTS[kind]] = report
                else:
                    self._lists[_LISTS[kind]].append(report)
                ended = report if isinstance(report, Ended) else ended
                step()
        return ended

    def _forget(self) -> None:
        """Forget what the first process reported, which is started again; not how it ended."""
        self._parts.clear()
        for name, reports in self._lists.items():
            if name != "ended":
                reports.clear()

    def evidence(self) -> Evidence:
        """Return all of it."""
        lists: dict[str, Any] = {name: tuple(reports) for name, reports in self._lists.items()}
        return Evidence(**self._parts, **lists)

    def comparable(self) -> tuple[int, ...]:
        """Return the samples that were built twice."""
        digests: facts.Digests | None = self._parts.get("digests")
        return () if digests is None else tuple(digests.first)

    def num_to_resume(self, seconds: float) -> int:
        """Return for how many samples there is time in a run that is resumed."""
        samples: list[facts.Sample] = self._lists["samples"]
        mean_s = sum(sample.took_s for sample in samples) / max(1, len(samples))
        return min(_MAX_RESUMED, int(seconds / max(1e-9, mean_s * _RESUME_BUILDS)))
