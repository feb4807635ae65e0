"""`progress=True`: a bar of each epoch, which starts where the loop is, and leaves nothing behind."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader import DataLoader, SwiftLoader
from swift_loader.engine.iterator import ShownIterator
from swift_loader.pipeline import Pipeline, StageLoader
from tests.support import datasets


def planned() -> Any:
    return SwiftLoader(datasets.Counting, batch_size=10, worker_per_consumer=1, seed=0, progress=True)


def torchs() -> Any:
    dataset: Any = datasets.Counting()
    return DataLoader(dataset, 10, num_workers=1, progress=True)


def pipeline() -> Any:
    return Pipeline(range(10), progress=True).map(abs, concurrency=2)


ALL = pytest.mark.parametrize("make", [planned, torchs, pipeline])
BOTH = pytest.mark.parametrize("make", [planned, torchs])


@BOTH
@pytest.mark.parametrize("leaves", [False, True])
def test_the_bar_begins_where_the_loop_is_and_is_closed_when_it_is_left(
    make: Callable[..., Any], leaves: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = make()
    before = threading.active_count()
    for step, _ in enumerate(loader):
        if step == 3:
            state = loader.state_dict()
            if leaves:
                break
    shown = capsys.readouterr().err
    assert shown.startswith("\repoch 0:   0%")
    assert shown.endswith("\n"), "it isn't closed"
    assert ("3/10" if leaves else "10/10") in shown.rpartition("\r")[2]
    assert "% waiting for data]" in shown
    assert [thread for thread in threading.enumerate()[before:] if "swift_loader" not in thread.name] == []
    loader.load_state_dict(state)
    assert len(list(loader)) == 6
    assert capsys.readouterr().err.startswith("\repoch 0:  40%")
    loader.close()


def test_the_bar_of_a_pipeline_counts_results(capsys: pytest.CaptureFixture[str]) -> None:
    loader = pipeline().batch(1)
    loader.set_epoch(3)
    for step, _ in enumerate(loader):
        if step == 3:
            state = loader.state_dict()
    shown = capsys.readouterr().err
    assert shown.startswith("\repoch 3:   0%")
    assert "10/10" in shown.rpartition("\r")[2]
    assert "result" in shown
    assert "% waiting for data]" in shown
    loader.load_state_dict(state)
    assert len(list(loader)) == 6
    last = capsys.readouterr().err.rpartition("\r")[2]  # the place in the epoch isn't known
    assert last.startswith("epoch 3: 6result [")
    for made in (Pipeline.mix([pipeline(), Pipeline([1])]), StageLoader([1, 2], progress=True)):
        assert list(made)
        assert capsys.readouterr().err.startswith("\repoch 0:")


@ALL
def test_ranks_but_the_first_show_none(
    make: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = make()
    assert len(list(loader)) in (5, 10)
    assert capsys.readouterr().err == ""
    loader.close()


@BOTH
def test_what_interrupts_the_making_of_the_bar_loses_no_batch(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make()
    iterator = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr("swift_loader.engine.iterator._bar_class", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(iterator)
    assert len(list(iterator)) == 10
    loader.close()


class Broken(io.StringIO):
    """As a pipe that nobody reads."""

    def flush(self) -> None:
        raise BrokenPipeError


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("stderr", [lambda: None, closed, Broken], ids=["none", "closed", "broken"])
def test_the_loop_goes_on_if_nothing_can_be_shown(
    stderr: Callable[[], Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset: Any = datasets.Counting()
    planned_here = SwiftLoader(datasets.Counting, batch_size=10, worker_per_consumer=0, progress=True)
    for loader in (DataLoader(dataset, 10, progress=True), planned_here):
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stderr())
            assert len(list(iterator)) == 10 - steps


def test_an_error_in_a_batch_s_place_loses_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    dataset: Any = datasets.Misbehaving(at=13, deed="raise")
    iterator = iter(DataLoader(dataset, 4, num_workers=1, progress=True))
    for _ in range(3):
        next(iterator)
    with pytest.raises(datasets.CustomError):
        next(iterator)
    assert capsys.readouterr().err.endswith("\n")
    assert len(list(iterator)) == 6


def test_without_it_the_iterators_are_the_usual_ones_and_it_needs_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset: Any = datasets.Counting()
    for loader in (SwiftLoader(datasets.Counting), DataLoader(dataset), Pipeline([1])):
        assert not isinstance(iter(loader), ShownIterator)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for make in (planned, torchs, pipeline):
        with pytest.raises(ModuleNotFoundError, match=r"progress=True needs tqdm: pip install tqdm"):
            make()
