"""All at once, at random: equal to the inline executor, or a typed error. See storm.py for longer runs."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_loader import SwiftLoader
from tests.support import storm_loop, storm_trainer
from tests.support.helpers import exhaustive
from tests.support.storm import Storm
from tests.support.storm_case import TRAITS, Case, Deed, Event, Leg, Pass, draw_case
from tests.support.storm_datasets import KINDS
from tests.support.storm_loop import Loop
from tests.support.storm_reference import (
    Deviation,
    Fingerprint,
    compare_in_order,
    compare_unordered,
    make_reference,
    storm_loader,
)
from tests.support.storm_run import Verdict, run_case
from tests.support.storm_trainer import Surroundings

SEEDS = [
    ("arrays", 2),
    exhaustive("augments", 20),
    exhaustive("augments", 21),
    exhaustive("cached open", 43),
    exhaustive("draws in constructor", 100),
    exhaustive("environment", 125),
    exhaustive("environment", 127),
    exhaustive("grows", 142),
    ("kept open", 221),
    exhaustive("open by import", 242),
    exhaustive("opened late", 262),
    exhaustive("opened late", 266),
    exhaustive("relative, kept open", 300),
    ("relative, opened late", 327),
]
"""Loaders of all kinds, kills, forks, changes of the trainer, data that grow: about a second each."""

QUIET = Leg(
    workers=2,
    start_method="template",
    in_order=True,
    multithread=True,
    data_queue_size=3,
    dataset_per_worker=False,
    timeout_s=20.0,
    slow_s=0.0,
    worker_restarts=3,
    validate=True,
    starts_by_itself=False,
    closes_in_midst=False,
    hoard=400,
    passes=(Pass(None, None, ()),),
)


def quiet_case(kind: str = "arrays", **changes: Any) -> Case:
    """Return a case in which nothing happens to one loader, but for what is given."""
    leg = replace(QUIET, **changes)
    return replace(
        draw_case(1, kind),
        num_samples=40,
        sizes="equal",
        in_bulk=False,
        as_instance=False,
        fails=(),
        batch_size=4,
        drop_last=False,
        num_consumers=1,
        ignores_sigchld=False,
        num_descriptors=0,
        closes_standard=False,
        legs=(leg,),
    )


def events(*deeds: Deed) -> tuple[Pass, ...]:
    """Return a pass in which these happen, one before each batch, from the third on."""
    return (Pass(None, None, tuple(Event(number, deed, number) for number, deed in enumerate(deeds, 2))),)


@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_a_storm_ends_in_equal_bytes_or_a_typed_error(kind: str, seed: int) -> None:
    result = run_case(draw_case(seed, kind))
    assert result.verdict is not Verdict.DEVIATION, f"{result.case.describe()}\n{result.text}"


def test_a_case_is_the_same_again() -> None:
    assert draw_case(123) == draw_case(123)
    assert draw_case(123) != draw_case(124)


def test_every_kind_of_dataset_has_traits() -> None:
    assert set(TRAITS) == set(KINDS)


def test_kills_beyond_what_is_survived_are_refused_with_a_typed_error() -> None:
    case = quiet_case(worker_restarts=0, slow_s=0.01, workers=1, passes=events(Deed.KILL))
    result = run_case(case)
    assert result.verdict is Verdict.REFUSED, result.text
    assert result.text.startswith("WorkerDied")


# What would be noticed ------------------------------------------------------------------------------------------------


def test_data_of_another_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm_loop, "make_reference", _reference_of_elsewhere)
    result = run_case(quiet_case("relative"))
    assert result.verdict is Verdict.DEVIATION
    assert "has other bytes in 4 of its 4 samples" in result.text


def _reference_of_elsewhere(case: Case, folder: str) -> Any:
    os.chdir(Path(folder).with_name("there"))
    try:
        return make_reference(case, folder)
    finally:
        os.chdir(folder)


def test_another_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_seed(case: Case, *arguments: Any, **options: Any) -> SwiftLoader:
        return storm_loader(replace(case, seed=case.seed + 1, shuffle=True), *arguments, **options)

    monkeypatch.setattr(storm_loop, "storm_loader", with_another_seed)
    result = run_case(quiet_case())
    assert result.verdict is Verdict.DEVIATION
    assert re.search(r"batch 0 has the samples \[.*\] instead of \[", result.text)


def test_a_batch_that_changes_while_it_is_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Loop._carry_out

    def scribble(run: Loop, event: Event, *arguments: Any) -> None:
        for kept in run._kept:
            part = kept._part
            (part["data"] if isinstance(part, dict) else part)[...] = 99
        real(run, event, *arguments)

    monkeypatch.setattr(Loop, "_carry_out", scribble)
    result = run_case(quiet_case(passes=events(*[Deed.IDLE] * 8)))
    assert result.verdict is Verdict.DEVIATION
    assert "changed while it was kept" in result.text


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")  # the storm has killed the workers by then
def test_a_loader_that_isnt_closed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm_trainer, "_SETTLE_S", 0.5)
    loaders: list[SwiftLoader] = []
    monkeypatch.setattr(SwiftLoader, "__exit__", lambda loader, *_: loaders.append(loader))
    result = run_case(quiet_case())
    monkeypatch.undo()
    for loader in loaders:
        loader.close()
    assert result.verdict is Verdict.DEVIATION
    assert "left behind: children" in result.text


def test_a_hang_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(_: Surroundings) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # the time is up now, however long the start took
        time.sleep(30)

    monkeypatch.setattr(Surroundings, "change_directory", hang)
    result = run_case(quiet_case(passes=events(Deed.CHDIR)))
    assert result.verdict is Verdict.DEVIATION
    assert result.text.startswith("hang: not done within 60.0 s")
    assert "_carry_out" in result.text


@pytest.fixture
def fingerprints() -> list[Fingerprint]:
    return [Fingerprint("", (n, n + 1), (10 * n, 10 * n + 1), 2) for n in range(0, 6, 2)]


def test_batches_that_come_twice_or_are_others_are_caught(fingerprints: list[Fingerprint]) -> None:
    first, second, third = fingerprints
    compare_unordered([third, first, second], fingerprints, "here")
    with pytest.raises(Deviation, match="here: a batch comes twice"):
        compare_unordered([first, first], fingerprints, "here")
    with pytest.raises(Deviation, match=r"other bytes in 1 of its 2 samples: \[3\]"):
        compare_unordered([first, replace(second, checksums=(20, 5))], fingerprints, "here")
    with pytest.raises(Deviation, match=r"has the samples \[8, 9\], which none has"):
        compare_unordered([replace(first, ids=(8, 9))], fingerprints, "here")
    with pytest.raises(Deviation, match=r"here has the samples \[2, 3\] instead of \[0, 1\]"):
        compare_in_order(second, first, "here")
    with pytest.raises(Deviation, match="here has the form f instead of "):
        compare_in_order(replace(first, form="f"), first, "here")


def test_a_summary_names_what_deviates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storm_loop, "make_reference", _reference_of_elsewhere)
    storm = Storm(details=tmp_path / "details.txt")
    storm.run(quiet_case("relative"))
    summary = storm.summary()
    assert "1 deviations: wrong data (relative)" in summary
    assert str(quiet_case().seed) in summary
    assert "workers=2" in (tmp_path / "details.txt").read_text()
