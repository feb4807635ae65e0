from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from swift_loader import DataLoader, SwiftLoader
from swift_loader.metrics.observations import NAMES, flat_metrics
from tests.support.datasets import Counting
from tests.support.pages import ROOT, Page
from tests.support.pictures import Pictures
from tests.support.trace_format import check_format, named, read_trace, spans


@pytest.fixture(scope="module")
def _profiler_loaded() -> None:
    """It keeps a thread or a file from its first use on."""
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(1)


DATA: Any = Pictures(64)

LOADERS: dict[str, Callable[[], Any]] = {
    "two workers": lambda: SwiftLoader(dataset=DATA, batch_size=4, worker_per_consumer=2, shuffle=False),
    "threads": lambda: SwiftLoader(
        dataset=DATA, batch_size=4, worker_per_consumer=2, worker_type="thread", shuffle=False
    ),
    "no worker": lambda: SwiftLoader(dataset=DATA, batch_size=4, worker_per_consumer=0, shuffle=False),
    "drop-in": lambda: DataLoader(DATA, batch_size=4, num_workers=2),
    "drop-in without workers": lambda: DataLoader(DATA, batch_size=4),
}


def close(loader: Any) -> None:
    if isinstance(loader, SwiftLoader):
        loader.close()


@pytest.mark.parametrize("name", LOADERS)
def test_metrics_count_what_the_loop_got_as_the_report_does_and_a_trace_has_each_batch(
    name: str, tmp_path: Path
) -> None:
    loader = LOADERS[name]()
    assert loader.metrics().keys() == {f"swift_loader/{metric}" for metric in NAMES}
    for _ in range(2):
        for _batch in loader:
            pass
    metrics = loader.metrics(prefix="")
    assert metrics == flat_metrics(loader.report().observations, "")
    assert metrics["batches_total"] == 32
    assert metrics["samples_total"] == 128
    assert metrics["batches_per_s"] > 0
    assert 0 <= metrics["wait_share"] <= 1
    assert 0 < metrics["waited_s_total"] <= metrics["elapsed_s_total"]
    assert all(math.isfinite(value) and value >= 0 for value in metrics.values())
    loader.trace(tmp_path / "trace.json")
    close(loader)
    events = read_trace(tmp_path / "trace.json")["traceEvents"]
    check_format(events)
    for span in ("fetch", "wait"):
        places = {(one["args"]["epoch"], one["args"]["step"]) for one in spans(events, span)}
        assert places == {(epoch, step) for epoch in range(2) for step in range(16)}
    has_workers = any(row.startswith("worker") for row in named(events))  # one of them may have built all batches
    assert has_workers == ("worker" not in name.replace("two workers", ""))  # else: built in the loop


def test_a_trace_names_the_indices_of_a_swift_loaders_batch(tmp_path: Path) -> None:
    with LOADERS["two workers"]() as loader:
        for _batch in loader:
            pass
        loader.trace(tmp_path / "trace.json")
    fetches = spans(read_trace(tmp_path / "trace.json")["traceEvents"], "fetch")
    assert {one["args"]["step"]: one["args"]["indices"] for one in fetches}[3] == "12 to 15"


def test_a_trace_names_the_indices_that_batches_had_before_another_state_was_loaded(tmp_path: Path) -> None:
    with SwiftLoader(Counting, batch_size=3, worker_per_consumer=0, seed=1) as other:
        next(iter(other))
        state = other.state_dict()
    with SwiftLoader(Counting, batch_size=4, worker_per_consumer=0) as loader:
        got = [next(iter(loader))["id"].tolist()]
        loader.load_state_dict(state)
        got.append(next(iter(loader))["id"].tolist())
        loader.trace(tmp_path / "trace.json")
    fetches = spans(read_trace(tmp_path / "trace.json")["traceEvents"], "fetch")
    assert [one["args"]["indices"] for one in fetches] == [", ".join(map(str, indices)) for indices in got]


@pytest.mark.parametrize("name", ["no worker", "drop-in without workers"])
def test_before_the_start_there_is_nothing_to_trace(name: str, tmp_path: Path) -> None:
    loader = LOADERS[name]()
    with pytest.raises(RuntimeError, match="nothing to trace before the lo"):
        loader.trace(tmp_path / "trace.json")
    assert not loader.report()
    assert set(loader.metrics().values()) == {0.0}


def test_a_loader_that_measures_nothing_has_zeros_and_an_empty_trace(tmp_path: Path) -> None:
    with SwiftLoader(dataset=Pictures(8), batch_size=4, worker_per_consumer=0, benchmark=False) as loader:
        for _batch in loader:
            pass
        assert loader.metrics(prefix="")["batches_total"] == 0
        loader.trace(tmp_path / "trace.json")
    check_format(read_trace(tmp_path / "trace.json")["traceEvents"])


def test_metrics_and_trace_work_after_close(tmp_path: Path) -> None:
    with LOADERS["two workers"]() as loader:
        for _batch in loader:
            pass
    assert loader.metrics(prefix="")["batches_total"] == 16
    loader.trace(tmp_path / "trace.json")
    assert len(spans(read_trace(tmp_path / "trace.json")["traceEvents"], "wait")) == 16


@pytest.mark.usefixtures("_profiler_loaded")
def test_merged_with_torch_profilers_trace_waits_lie_within_the_calls_of_next(tmp_path: Path) -> None:
    with LOADERS["two workers"]() as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = iter(loader)
        next(batches)
        with profile(activities=[ProfilerActivity.CPU]) as recording:
            with record_function("first"):  # what the profiler loads with its first mark
                pass
            for _ in range(10):
                with record_function("next"):
                    batch = next(batches)
                torch.as_tensor(np.ones((100, 100))) @ torch.ones(100, 100, dtype=torch.float64)
        del batch
        recording.export_chrome_trace(str(tmp_path / "torch.json"))
        loader.trace(tmp_path / "merged.json", profile=tmp_path / "torch.json")
    events = read_trace(tmp_path / "merged.json")["traceEvents"]
    calls, waits = spans(events, "next"), spans(events, "wait")[1:]
    assert len(calls) == len(waits) == 10
    for call, wait in zip(calls, waits, strict=True):
        assert call["ts"] - 500 < wait["ts"]
        assert wait["ts"] + wait["dur"] < call["ts"] + call["dur"] + 500


def test_the_recipe_of_the_docs_tells_this_machine_alone_the_metrics() -> None:
    (recipe,) = (block for block in Page(ROOT / "docs" / "dashboards.md").blocks() if "HTTPServer" in str(block.code))
    assert len(recipe.code) <= 25
    with LOADERS["no worker"]() as loader:
        for _batch in loader:
            pass
        names: dict[str, Any] = {"loader": loader}
        exec("\n".join(recipe.code).replace("9464", "0"), names)  # 0: any port that is free
        server = names["server"]
        address, port = server.server_address
        with urlopen(f"http://{address}:{port}/metrics") as response:
            lines = response.read().decode().splitlines()
        server.shutdown()
        server.server_close()
        expected = loader.metrics(prefix="swift_loader_")
    assert address == "127.0.0.1"
    assert {name: float(value) for name, value in map(str.split, lines)} == expected
