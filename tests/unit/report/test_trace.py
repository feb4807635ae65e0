from __future__ import annotations

import dataclasses
import gzip
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, record_function

from swift_loader.metrics.observations import Observations
from swift_loader.report.trace import Clock, write_trace
from tests.support.simulated import observed
from tests.support.trace_format import Event, check_format, named, read_trace, spans


def traced(tmp_path: Path, observations: Observations, **options: Any) -> list[Event]:
    write_trace(observations, tmp_path / "trace.json", **options)
    events: list[Event] = read_trace(tmp_path / "trace.json")["traceEvents"]
    check_format(events)
    return events


@pytest.mark.parametrize("num_workers", [0, 1, 3, 64])
@pytest.mark.parametrize("num_batches", [0, 1, 90])
def test_a_trace_is_in_chromes_format(tmp_path: Path, num_batches: int, num_workers: int) -> None:
    events = traced(tmp_path, observed(num_batches=num_batches, num_workers=num_workers, steps_per_epoch=40))
    assert len(spans(events, "fetch")) == len(spans(events, "wait")) == num_batches
    assert sum(event["ph"] == "f" for event in events) == num_batches


def test_rows_are_the_loop_the_receiver_and_each_worker(tmp_path: Path) -> None:
    rows = named(traced(tmp_path, observed(num_workers=3, num_batches=30)))
    assert sorted(rows, key=lambda name: rows[name]) == ["loop", "receiver", "worker 0", "worker 1", "worker 2"]


def test_without_workers_the_row_says_that_the_loop_builds(tmp_path: Path) -> None:
    assert "built in the loop" in named(traced(tmp_path, observed(num_workers=0, num_batches=3)))


def test_threads_that_decode_at_a_time_have_a_row_each(tmp_path: Path) -> None:
    events = traced(tmp_path, observed(num_workers=8, num_batches=60, decode_ms=5.0))
    assert {"receiver", "receiver 1"} <= named(events).keys()
    assert len(spans(events, "decode")) == 60


def test_spans_lie_where_they_were_measured(tmp_path: Path) -> None:
    observations = observed(num_workers=2, num_batches=5)
    events = traced(tmp_path, observations)
    origin_us = spans(events, "wait")[0]["ts"]
    batch = observations.batches[3]
    (fetch,) = [span for span in spans(events, "fetch") if span["args"]["step"] == 3]
    assert fetch["tid"] == named(events)[f"worker {batch['worker_id']}"]
    assert fetch["ts"] - origin_us == pytest.approx((batch["began_ns"] - observations.batches[0]["asked_ns"]) / 1e3)
    assert fetch["dur"] == pytest.approx(batch["fetch_ns"] / 1e3)
    assert fetch["args"] == {"epoch": 0, "step": 3, "samples": 32, "nbytes": int(batch["nbytes"])}
    step = spans(events, "step")[3]
    assert step["dur"] == pytest.approx((observations.batches[4]["asked_ns"] - batch["delivered_ns"]) / 1e3)


def test_the_step_before_another_epoch_says_so(tmp_path: Path) -> None:
    events = traced(tmp_path, observed(num_batches=10, steps_per_epoch=5))
    assert [span["args"]["step"] for span in spans(events, "step, then the next epoch")] == [4]
    assert [span["args"] for span in spans(events, "delivered")] == [spans(events, "wait")[-1]["args"]]


def test_ready_batches_are_counted(tmp_path: Path) -> None:
    observations = observed(num_batches=30)
    counts = [event["args"]["batches"] for event in traced(tmp_path, observations) if event["ph"] == "C"]
    assert counts == observations.batches["num_ready"].tolist()


def changed(observations: Observations, **columns: Any) -> Observations:
    batches = observations.batches.copy()
    for name, values in columns.items():
        batches[name] = values
    return dataclasses.replace(observations, batches=batches)


def test_clocks_that_differ_leave_spans_nested(tmp_path: Path) -> None:
    observations = observed(num_batches=50)
    jitter = np.random.default_rng(0).integers(-9_000_000, 9_000_000, 50)
    check = changed(
        observations,
        began_ns=observations.batches["began_ns"] + jitter,
        received_ns=observations.batches["received_ns"] + 10_000_000,
    )
    write_trace(check, tmp_path / "trace.json")
    rows = [event for event in read_trace(tmp_path / "trace.json")["traceEvents"] if event["ph"] not in "stf"]
    check_format(rows)


def test_a_batch_without_the_workers_times_has_no_span_there(tmp_path: Path) -> None:
    events = traced(tmp_path, changed(observed(num_batches=4), began_ns=0, received_ns=0, decode_ns=0))
    assert named(events).keys() == {"loop"}
    assert len(spans(events, "wait")) == 4


def test_the_copy_to_the_device_is_within_the_step(tmp_path: Path) -> None:
    copies = spans(traced(tmp_path, changed(observed(num_batches=4), copy_ns=10_000)), "copy")
    assert [copy["dur"] for copy in copies] == [10.0, 10.0, 10.0, 1.0]


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
def test_indices_are_named_in_short(tmp_path: Path, indices: NDArray[np.int64], text: str) -> None:
    events = traced(tmp_path, observed(num_batches=1), indices_of=lambda _epoch, _step, _delivered_ns: indices)
    assert spans(events, "fetch")[0]["args"]["indices"] == text


def test_each_event_is_a_line(tmp_path: Path) -> None:
    write_trace(observed(num_batches=20), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert len(text.splitlines()) == len(json.loads(text)["traceEvents"]) + 2


def test_a_path_that_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    write_trace(observed(num_batches=3), tmp_path / "trace.json.gz")
    check_format(json.loads(gzip.open(tmp_path / "trace.json.gz").read())["traceEvents"])


def test_the_clock_is_unix_time() -> None:
    clock = Clock.now()
    here_ns = time.time_ns()
    assert abs(clock.us(time.perf_counter_ns()) + clock.base_ns / 1e3 - here_ns / 1e3) < 1_000_000


# With torch.profiler -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Observations]:
    """A real trace of torch.profiler, and observations of the same loop: three steps, each marked in the trace."""
    batches = observed(num_batches=3, num_workers=1).batches.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU]) as recording:
            torch.ones(3).sum()  # what the profiler loads with its first mark
            with record_function("first"):
                pass
            for batch in batches:
                batch["asked_ns"] = batch["began_ns"] = time.perf_counter_ns()
                with record_function("wait for the batch"):
                    torch.ones(100, 100) @ torch.ones(100, 100)
                batch["delivered_ns"] = time.perf_counter_ns()
                torch.ones(300, 300) @ torch.ones(300, 300)
    path = tmp_path_factory.mktemp("profile") / "torch.json"
    recording.export_chrome_trace(str(path))
    batches["received_ns"] = 0
    for name in ("fetch_ns", "collate_ns", "encode_ns"):
        batches[name] = 1000
    return path, dataclasses.replace(observed(num_batches=3, num_workers=1), batches=batches)


def test_the_clock_is_torch_profilers(tmp_path: Path, profiled: tuple[Path, Observations]) -> None:
    write_trace(profiled[1], tmp_path / "trace.json")
    ours, theirs = read_trace(tmp_path / "trace.json"), read_trace(profiled[0])
    assert ours["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    assert ours["displayTimeUnit"] == theirs["displayTimeUnit"]


@pytest.mark.parametrize("name", ["merged.json", "torch.json", "merged.json.gz"])
def test_merged_with_torch_profilers_trace_the_waits_lie_where_it_saw_them(
    tmp_path: Path, profiled: tuple[Path, Observations], name: str
) -> None:
    source = tmp_path / "torch.json"
    source.write_bytes(profiled[0].read_bytes())
    write_trace(profiled[1], tmp_path / name, profile=source)
    merged, theirs = read_trace(tmp_path / name), read_trace(profiled[0])
    assert merged["traceEvents"][: len(theirs["traceEvents"])] == theirs["traceEvents"]
    assert {key for key in theirs if key != "traceEvents"} <= merged.keys()
    ours = merged["traceEvents"][len(theirs["traceEvents"]) :]
    check_format(ours)
    marks, waits = spans(theirs["traceEvents"], "wait for the batch"), spans(ours, "wait")
    assert len(marks) == len(waits) == 3
    for mark, wait in zip(marks, waits, strict=True):
        assert wait["ts"] - 100 < mark["ts"]  # the profiler has the mark's own cost before it
        assert mark["ts"] + mark["dur"] < wait["ts"] + wait["dur"] + 100
        assert abs(wait["dur"] - mark["dur"]) < 5_000


def test_rows_of_the_two_do_not_mix(tmp_path: Path, profiled: tuple[Path, Observations]) -> None:
    write_trace(profiled[1], tmp_path / "merged.json", profile=profiled[0])
    events = read_trace(tmp_path / "merged.json")["traceEvents"]
    ours = {event["pid"] for event in events if event.get("cat") == "swift_loader"}
    theirs = {event["pid"] for event in events if event.get("cat") in ("cpu_op", "user_annotation")}
    assert len(ours) == 1
    assert theirs == {os.getpid()}


def test_a_trace_of_another_base_is_shifted_to(tmp_path: Path) -> None:
    base_ns = 1_600_000_000_000_000_000
    (tmp_path / "other.json").write_text(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": []}))
    write_trace(
        observed(num_batches=1, begin_ns=time.perf_counter_ns()),
        tmp_path / "trace.json",
        profile=tmp_path / "other.json",
    )
    (wait,) = spans(read_trace(tmp_path / "trace.json")["traceEvents"], "wait")
    assert wait["ts"] + base_ns / 1e3 == pytest.approx(time.time_ns() / 1e3, abs=60e6)


def test_a_trace_that_is_only_a_list_counts_from_1970(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps([{"ph": "X", "name": "theirs"}]))
    write_trace(observed(num_batches=1), tmp_path / "trace.json", profile=tmp_path / "other.json")
    trace = read_trace(tmp_path / "trace.json")
    assert trace["traceEvents"][0] == {"ph": "X", "name": "theirs"}
    assert trace["baseTimeNanoseconds"] == 0


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json' has no traceEvents; give a file of export_chrome_trace"):
        write_trace(observed(num_batches=1), tmp_path / "trace.json", profile=tmp_path / "other.json")
    assert not (tmp_path / "trace.json").exists()
