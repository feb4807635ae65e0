from __future__ import annotations

import dataclasses
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from swift_loader.metrics.observations import Observations
from swift_loader.report.trace import write_trace
from swift_loader.sampling.plan import PastPlans
from tests.support.observed import observe, with_workers
from tests.support.trace_format import Event, check_format, read_trace, spans


def traced(tmp_path: Path, observations: Observations, **options: Any) -> list[Event]:
    write_trace(observations, tmp_path / "trace.json", **options)
    events: list[Event] = read_trace(tmp_path / "trace.json")["traceEvents"]
    check_format(events)
    return events


@pytest.mark.parametrize(("num_batches", "num_workers"), [(0, 1), (1, 0), (90, 3), (90, 64)])
def test_a_trace_is_in_chromes_format(tmp_path: Path, num_batches: int, num_workers: int) -> None:
    events = traced(tmp_path, observe(setup=with_workers(num_workers), num_batches=num_batches, steps_per_epoch=40))
    assert len(spans(events, "fetch")) == len(spans(events, "wait")) == num_batches
    assert sum(event["ph"] == "f" for event in events) == num_batches


def changed(observations: Observations, **columns: Any) -> Observations:
    batches = observations.batches.copy()
    for name, values in columns.items():
        batches[name] = values
    return dataclasses.replace(observations, batches=batches)


def test_clocks_that_differ_leave_spans_nested(tmp_path: Path) -> None:
    observations = observe(num_batches=50)
    jitter = np.random.default_rng(0).integers(-9_000_000, 9_000_000, 50)
    check = changed(
        observations,
        began_ns=observations.batches["began_ns"] + jitter,
        received_ns=observations.batches["received_ns"] + 10_000_000,
    )
    write_trace(check, tmp_path / "trace.json")
    rows = [event for event in read_trace(tmp_path / "trace.json")["traceEvents"] if event["ph"] not in "stf"]
    check_format(rows)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        (np.arange(4, 9), "4 to 8"),
        ([7], "7"),
        ([], ""),
        ([3, 1, 2], "3, 1, 2"),
        (np.arange(9)[::-1], "8, 7, 6, 5, 4, 3, 2, 1, … (9 from 0 to 8)"),
    ],
)
def test_indices_are_named_in_short(tmp_path: Path, indices: Any, text: str) -> None:
    class Plans(PastPlans):
        def indices_of(self, epoch: int, step: int, delivered_ns: int) -> NDArray[np.int64]:
            return np.array(indices, np.int64)

    events = traced(tmp_path, observe(num_batches=1), plans=Plans())
    assert spans(events, "fetch")[0]["args"]["indices"] == text


def test_a_path_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    write_trace(observe(num_batches=3), tmp_path / "trace.json.gz")
    check_format(json.loads(gzip.open(tmp_path / "trace.json.gz").read())["traceEvents"])


# With the trace of a profiler ----------------------------------------------------------------------------------------


def test_a_trace_of_another_base_is_shifted_to(tmp_path: Path) -> None:
    base_ns = 1_600_000_000_000_000_000
    (tmp_path / "other.json").write_text(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": []}))
    write_trace(
        observe(num_batches=1, start_ns=time.perf_counter_ns()),
        tmp_path / "trace.json",
        profile=tmp_path / "other.json",
    )
    (wait,) = spans(read_trace(tmp_path / "trace.json")["traceEvents"], "wait")
    assert wait["ts"] + base_ns / 1e3 == pytest.approx(time.time_ns() / 1e3, abs=60e6)


def test_a_trace_that_is_only_a_list_counts_from_1970(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps([{"ph": "X", "name": "theirs"}]))
    write_trace(observe(num_batches=1), tmp_path / "trace.json", profile=tmp_path / "other.json")
    trace = read_trace(tmp_path / "trace.json")
    assert trace["traceEvents"][0] == {"ph": "X", "name": "theirs"}
    assert trace["baseTimeNanoseconds"] == 0


def test_a_profile_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(ValueError, match="path and profile are one file"):
        write_trace(observe(num_batches=1), tmp_path / "model.json", profile=tmp_path / "." / "model.json")
    assert (tmp_path / "model.json").read_text() == "[]"


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json' has no traceEvents; give a file of export_chrome_trace"):
        write_trace(observe(num_batches=1), tmp_path / "trace.json", profile=tmp_path / "other.json")
    assert not (tmp_path / "trace.json").exists()
