"""Writes a loader's batches as a trace: Chrome's trace event format, for Perfetto, chrome://tracing and speedscope.

    process "swift_loader"
        loop          wait │ step │ wait │ step …            the counter "ready batches" beside it
        receiver      decode …
        worker 0      batch 12 (fetch │ collate │ encode) …  with an arrow from there, over decode, to the step
        worker 1

The clock is that of `torch.profiler`: microseconds after `baseTimeNanoseconds`, a Unix time, which is the same in both
files. So the two can be merged: see `write_trace`.

Events: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import BATCH, Observations, stage_times
from swift_loader.sampling.plan import PastPlans

TraceEvent = dict[str, Any]

_QUARTER_NS = 7_889_238 * 1_000_000_000
"""Kineto, torch.profiler's recorder, counts from a multiple of a quarter of a year after 1970. So do we."""

_FIRST_FREE_PID = 1 << 22
"""Linux has no process of this id or above. The rows get a process of their own: among the spans that
torch.profiler has of a thread, those of the loop would overlap with others."""

_US = 1000
_LOOP_ROW = 1
_FIRST_RECEIVER_ROW = 10
_FIRST_WORKER_ROW = 100
_MAX_RECEIVER_ROWS = _FIRST_WORKER_ROW - _FIRST_RECEIVER_ROW
_MAX_INDICES = 8


def write_trace(
    observations: Observations,
    path: str | os.PathLike[str],
    *,
    profile: str | os.PathLike[str] | None = None,
    plans: PastPlans | None = None,
) -> None:
    """Write the batches of the observations as a trace. Runs in the trainer, on the machine that measured them.

    The events and properties of a profile of the same machine since it booted go into the file, too. Without
    `plans`, the trace has no dataset indices. Raises `ValueError` if `path` and `profile` are one file.
    """
    if profile is not None and Path(path).resolve() == Path(profile).resolve():
        raise ValueError("path and profile are one file, and a failed write would destroy it; give path another name")
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(5)]
    before, unix_ns, after = min(readings, key=lambda reading: reading[2] - reading[0])
    properties: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms"}
    properties["baseTimeNanoseconds"] = unix_ns - unix_ns % _QUARTER_NS
    theirs: list[TraceEvent] = []
    if profile is not None:
        properties = {"baseTimeNanoseconds": 0, **_read(profile)}
        theirs = properties.pop("traceEvents")
    zero_ns = properties["baseTimeNanoseconds"] - unix_ns + (before + after) // 2
    events = [*theirs, *_Trace(observations, zero_ns, plans).events()]
    with _opened(path, "w") as file:
        file.write(json.dumps({**properties, "traceEvents": events}, separators=(",", ":")))


def _opened(path: str | os.PathLike[str], mode: str) -> IO[str]:
    if os.fspath(path).endswith(".gz"):
        return cast("IO[str]", gzip.open(path, f"{mode}t", encoding="utf-8"))
    return Path(path).open(mode, encoding="utf-8")


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    with _opened(path, "r") as file:
        profile = json.load(file)
    if isinstance(profile, list):  # the format's other form: events only
        profile = {"traceEvents": profile}
    if not isinstance(profile, dict) or "traceEvents" not in profile:
        raise ValueError(f"profile={os.fspath(path)!r} has no traceEvents; give a file of export_chrome_trace")
    return profile


class _TraceRow:
    """A row of spans that don't overlap."""

    def __init__(self, tid: int, pid: int, zero_ns: int) -> None:
        self.tid = tid
        self._pid = pid
        self._zero_ns = zero_ns
        """The reading of `time.perf_counter_ns` that is 0 in the trace."""
        self.begin_ns = 0
        """When its last span begins."""
        self.free_ns = 0
        """When its last span ends."""

    def event(self, phase: str, name: str, at_ns: int, **more: Any) -> TraceEvent:
        """Return an event at a time, which is exact to the nanosecond."""
        ids = {"ph": phase, "cat": "swift_loader", "name": name, "pid": self._pid, "tid": self.tid}
        return {**ids, "ts": round((at_ns - self._zero_ns) / 1000, 3), **more}

    def span(self, name: str, begin_ns: int, end_ns: int, args: TraceEvent) -> TraceEvent:
        """Return a span. Where it would overlap with the one before, because clocks differ, it begins later."""
        self.begin_ns = max(begin_ns, self.free_ns)
        self.free_ns = max(self.begin_ns, end_ns)
        return self.inner(name, self.begin_ns, self.free_ns, args)

    def arrow(self, phase: str, number: int) -> TraceEvent:
        """Return a point of an arrow: its end where the last span begins, another one where that ends."""
        before_end_ns = min(_US, (self.free_ns - self.begin_ns) // 2)  # clearly within the span
        at_ns = self.begin_ns if phase == "f" else self.free_ns - before_end_ns
        return self.event(phase, "batch", at_ns, id=number, bp="e")

    def inner(self, name: str, begin_ns: int, end_ns: int, args: TraceEvent) -> TraceEvent:
        """Return a span within the last one."""
        begin_ns, end_ns = (min(max(at_ns, self.begin_ns), self.free_ns) for at_ns in (begin_ns, end_ns))
        return self.event("X", name, begin_ns, dur=(end_ns - begin_ns) / 1000, args=args)


class _Trace:
    """The events of one loader."""

    def __init__(self, observations: Observations, zero_ns: int, plans: PastPlans | None) -> None:
        self._observations = observations
        self._zero_ns = zero_ns
        self._plans = plans
        self._pid = _FIRST_FREE_PID + os.getpid()
        self._loop = self._row(_LOOP_ROW)
        self._receivers: list[_TraceRow] = []
        """As many as decoded at a time."""
        self._workers: dict[int, _TraceRow] = {}

    def _row(self, tid: int) -> _TraceRow:
        return _TraceRow(tid, self._pid, self._zero_ns)

    def events(self) -> Iterator[TraceEvent]:
        """Yield all events, row by row."""
        rows = self._observations.batches
        batches = [dict(zip(BATCH.names or (), row, strict=True)) for row in rows.tolist()]
        for place, (batch, build_ns) in enumerate(zip(batches, stage_times(rows)["build"].tolist(), strict=True)):
            batch["build_ns"] = build_ns
            batch["arrow"] = self._pid * 1_000_000 + place  # unique among the ranks of a machine
            batch["args"] = self._args(batch)
        for batch in sorted((batch for batch in batches if _is_built(batch)), key=itemgetter("began_ns")):
            yield from self._build(batch)
        for batch in sorted((batch for batch in batches if batch["received_ns"] > 0), key=itemgetter("received_ns")):
            yield from self._decode(batch)
        for batch, follower in zip_longest(batches, batches[1:]):
            yield from self._wait_and_step(batch, follower)
        yield from self._names()

    def _build(self, batch: TraceEvent) -> Iterator[TraceEvent]:
        """Yield what a worker did for a batch: one span, and in it one for each stage."""
        number, at_ns = batch["worker_id"], batch["began_ns"]
        worker = self._workers.setdefault(number, self._row(_FIRST_WORKER_ROW + number))
        name = f"batch {batch['epoch']}:{batch['step']}"
        end_ns = at_ns + batch["build_ns"]  # the sum, if several workers built it
        yield worker.span(name, at_ns, min(end_ns, batch["received_ns"] or end_ns), batch["args"])
        for stage in ("fetch", "collate", "encode"):
            yield worker.inner(stage, at_ns, at_ns + batch[f"{stage}_ns"], batch["args"])
            at_ns += batch[f"{stage}_ns"]
        yield worker.arrow("s", batch["arrow"])

    def _decode(self, batch: TraceEvent) -> Iterator[TraceEvent]:
        """Yield what a receiver did: on the first row that is free, because several threads may decode at a time."""
        at_ns = batch["received_ns"]
        free = [row for row in self._receivers if row.free_ns <= at_ns]
        if not free and len(self._receivers) < _MAX_RECEIVER_ROWS:
            free = [self._row(_FIRST_RECEIVER_ROW + len(self._receivers))]
            self._receivers += free
        receiver = free[0] if free else self._receivers[-1]
        yield receiver.span("decode", at_ns, at_ns + batch["decode_ns"], batch["args"])
        if _is_built(batch):
            yield receiver.arrow("t", batch["arrow"])

    def _wait_and_step(self, batch: TraceEvent, follower: TraceEvent | None) -> Iterator[TraceEvent]:
        """Yield how the loop got a batch, and what it did with it. How long the last step took isn't known."""
        yield self._loop.event("C", "ready", batch["asked_ns"], args={"batches": batch["num_ready"]})
        yield self._loop.span("wait", batch["asked_ns"], batch["delivered_ns"], batch["args"])
        name, end_ns = "delivered", batch["delivered_ns"] + _US
        if follower is not None:
            is_last = any(follower[name] != batch[name] for name in ("epoch", "pass_number"))
            name, end_ns = "step, then the next epoch" if is_last else "step", follower["asked_ns"]
        yield self._loop.span(name, batch["delivered_ns"], end_ns, batch["args"])
        if _is_built(batch):  # Perfetto turns an arrow round that ends in a span begun before: a wait won't do
            yield self._loop.arrow("f", batch["arrow"])
        if batch["copy_ns"]:
            end_ns = batch["delivered_ns"] + batch["copy_ns"]
            yield self._loop.inner("copy", batch["delivered_ns"], end_ns, batch["args"])

    def _args(self, batch: TraceEvent) -> TraceEvent:
        args = {name: batch[name] for name in ("epoch", "step", "nbytes")} | {"samples": batch["num_samples"]}
        if self._plans is not None:
            args["indices"] = _shortened(self._plans.indices_of(batch["epoch"], batch["step"], batch["delivered_ns"]))
        return args

    def _names(self) -> Iterator[TraceEvent]:
        """Yield the names of the rows, which stand in the order of their ids."""
        in_the_loop = not self._observations.setup.num_workers
        names = {self._loop.tid: "loop"}
        names |= {row.tid: f"receiver {place}" if place else "receiver" for place, row in enumerate(self._receivers)}
        workers = sorted(self._workers.items())
        names |= {row.tid: "built in the loop" if in_the_loop else f"worker {number}" for number, row in workers}
        yield self._metadata("process_name", 0, name=f"swift_loader {os.getpid()}")
        yield self._metadata("process_sort_index", 0, sort_index=-1)
        for tid, name in names.items():
            yield self._metadata("thread_name", tid, name=name)
            yield self._metadata("thread_sort_index", tid, sort_index=tid)

    def _metadata(self, kind: str, tid: int, **args: Any) -> TraceEvent:
        return {"ph": "M", "name": kind, "pid": self._pid, "tid": tid, "args": args}


def _is_built(batch: TraceEvent) -> bool:
    """Return whether the worker's times were measured."""
    return bool(batch["began_ns"] > 0 and batch["build_ns"] > 0)


def _shortened(indices: NDArray[np.int64]) -> str:
    """Return indices as text: a range where they are one, else the first ones and the extent."""
    numbers = indices.tolist()
    if not numbers:
        return ""
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    if len(numbers) <= _MAX_INDICES:
        return ", ".join(map(str, numbers))
    first = ", ".join(map(str, numbers[:_MAX_INDICES]))
    return f"{first}, … ({len(numbers)} from {min(numbers)} to {max(numbers)})"
