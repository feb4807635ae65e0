from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swift_loader.report.report import Report
from tests.support.helpers import slow
from tests.support.observed import observe, with_workers

pytest.importorskip("matplotlib")


SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize(
    ("suffix", "num_batches", "num_workers"), [("png", 1, 1), ("svg", 2, 0), ("pdf", 90, 300), slow("png", 4096, 64)]
)
def test_any_number_of_batches_and_workers_is_drawn_in_the_suffixs_format(
    tmp_path: Path, suffix: str, num_batches: int, num_workers: int
) -> None:
    observations = observe(setup=with_workers(num_workers), num_batches=num_batches, steps_per_epoch=500)
    Report(observations).plot(tmp_path / f"report.{suffix}")
    assert (tmp_path / f"report.{suffix}").read_bytes().startswith(SIGNATURES[suffix])


@pytest.mark.parametrize("source", [Report(), Report(observe(num_batches=0))], ids=["nothing measured", "no batch"])
def test_without_a_batch_there_is_nothing_to_draw(tmp_path: Path, source: Report) -> None:
    with pytest.raises(ValueError, match="there is no batch to draw"):
        source.plot(tmp_path / "report.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        Report(observe(num_batches=5)).plot(tmp_path / "report.png")
