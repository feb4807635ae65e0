"""The root of a process, and its former ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swift_loader.executors.process.launch import Launch
from swift_loader.executors.process.root import RootRefused
from swift_loader.executors.process.roots import SWITCH, Roots
from swift_loader.worker.import_guard import importing


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Roots]:
    monkeypatch.setenv(SWITCH, "1")
    roots = Roots()
    yield roots
    roots.stop()


@pytest.fixture
def launch() -> Iterator[Launch]:
    launch = Launch.of_this_process()
    yield launch
    launch.close()


def test_there_is_none_where_modules_are_imported_for_a_loader_or_if_it_is_switched_off(
    roots: Roots, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with importing():
        roots.warm(("json",))
    assert roots._current is None
    monkeypatch.setenv(SWITCH, "0")
    roots.warm(("json",))
    assert roots._current is None
    assert roots.fork(launch, ("json",), may_start=True) is None


def test_a_fork_is_given_out_once_it_exists(roots: Roots, launch: Launch) -> None:
    request = roots.fork(launch, ("json",), may_start=True)
    assert request is not None
    blank = request.result(30)
    assert blank.pid > 0
    blank.close()
    assert blank.wait(30) == 0


def test_a_later_fork_needs_a_root_in_its_environment(
    roots: Roots, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert roots.fork(launch, (), may_start=False) is None
    monkeypatch.setenv("MINE", "1")
    roots.warm(())
    assert roots.fork(launch, (), may_start=False) is None


def test_who_was_asked_before_a_root_retires_still_gets_a_fork(
    roots: Roots, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = roots.fork(launch, ("json",), may_start=True)
    monkeypatch.setenv("MINE", "1")
    roots.warm(())
    assert request is not None
    blank = request.result(30)
    blank.close()
    assert blank.wait(30) == 0


def test_modules_that_can_not_be_imported_are_remembered(roots: Roots, launch: Launch) -> None:
    request = roots.fork(launch, ("json", "no_such_module"), may_start=True)
    assert request is not None
    with pytest.raises(RootRefused, match="no_such_module raised ModuleNotFoundError"):
        request.result(30)
    assert roots.fork(launch, ("no_such_module",), may_start=True) is None
    again = roots.fork(launch, ("fractions",), may_start=True)
    assert again is not None
    again.result(30).close()
