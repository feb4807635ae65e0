from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from swift_loader.report.plots import draw, plot
from swift_loader.report.report import Report
from tests.support.fonts import open_fonts
from tests.support.simulated import observed

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True, scope="module")
def _fonts() -> None:
    open_fonts()


SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_the_suffix_chooses_the_format(tmp_path: Path, suffix: str) -> None:
    plot(observed(num_batches=20), tmp_path / f"report.{suffix}")
    assert (tmp_path / f"report.{suffix}").read_bytes().startswith(SIGNATURES[suffix])


@pytest.mark.parametrize(("num_batches", "num_workers"), [(1, 1), (1, 64), (2, 0), (90, 300), (4096, 1), (4096, 64)])
def test_any_number_of_batches_and_workers_is_drawn(num_batches: int, num_workers: int) -> None:
    figure = draw(observed(num_batches=num_batches, num_workers=num_workers, steps_per_epoch=500, spread=1.0))
    figure.canvas.draw()


def test_the_panels_have_titles_and_units() -> None:
    axes = draw(observed(num_batches=100, steps_per_epoch=50)).axes
    labels = {one.get_title(loc="left"): one.get_xlabel() + one.get_ylabel() for one in axes}
    assert labels == {
        "A batch's life: bar to the median, line to p99": "ms from the beginning of the batch",
        "Time to build a batch": "ms for fetch, collate and encodebatches",
        "Throughput of the loop (dotted: a new epoch)": "batches/s",
        "Share of time in which the loop waits for a batch": "% of time",
        "Workers: share of time at a batch": "secondsworker",
    }


def test_the_slowest_samples_are_named_by_index() -> None:
    axes = draw(observed(num_batches=100)).axes[1]
    texts = [text.get_text() for text in axes.texts]
    assert "0: 50 ms\n7: 48 ms\n14: 46 ms\n21: 44 ms\n28: 42 ms" in texts


def test_the_headline_is_the_verdict() -> None:
    data_bound, model_bound = (draw(observed(num_batches=100, step_ms=step_ms)) for step_ms in (0.1, 30))
    assert data_bound.texts[0].get_text().startswith("Data-bound: the loop waits for data 9")
    assert model_bound.texts[0].get_text() == "Model-bound: the loop waits for data 0 % of the time"


def test_a_report_is_plotted_like_its_observations(tmp_path: Path) -> None:
    observations = observed(num_batches=50)
    Report(observations).plot(tmp_path / "report.png")
    plot(observations, tmp_path / "observations.png")
    assert (tmp_path / "report.png").read_bytes() == (tmp_path / "observations.png").read_bytes()


@pytest.mark.parametrize("source", [Report(), observed(num_batches=0)], ids=["report", "observations"])
def test_without_a_batch_there_is_nothing_to_draw(source: Report) -> None:
    with pytest.raises(ValueError, match="there is no batch to draw"):
        draw(source)


def test_batches_without_the_workers_times_are_drawn() -> None:
    batches = observed(num_batches=30).batches.copy()
    for name in ("began_ns", "fetch_ns", "collate_ns", "encode_ns", "received_ns", "decode_ns", "sent_ns"):
        batches[name] = 0
    draw(dataclasses.replace(observed(num_batches=30), batches=batches)).canvas.draw()


def test_pyplot_is_left_alone() -> None:
    code = """
import sys
import matplotlib
settings = lambda: {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}
before = settings()
from swift_loader.report.plots import draw
from tests.support.fonts import open_fonts
from tests.support.simulated import observed
draw(observed(num_batches=5)).canvas.draw()
assert "matplotlib.pyplot" not in sys.modules
assert settings() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'swift_loader\[plot\]'"):
        draw(observed(num_batches=5))
