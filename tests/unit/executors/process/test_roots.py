"""The root of a process, and its former ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swift_loader.executors.process import template_starts
from swift_loader.executors.process.event_loop_thread import EventLoopThread
from swift_loader.executors.process.launch import Launch
from swift_loader.executors.process.root import RootRefused
from swift_loader.executors.process.roots import SWITCH, Roots
from swift_loader.worker.import_guard import importing
from swift_loader.worker.spec import StartMethod


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


def test_a_fork_ahead_has_what_the_root_was_seen_to_import(roots: Roots, launch: Launch) -> None:
    assert roots.fork_ahead(launch, ("json",)) is None
    request = roots.fork(launch, ("json", "wave"), may_start=True)
    assert request is not None
    assert roots.fork_ahead(launch, ("json",)) is None or request.done()
    request.result(30).close()
    ahead = roots.fork_ahead(launch, ("json",))
    assert ahead is not None
    assert ahead[1] >= {"json", "wave"}
    assert roots.fork_ahead(launch, ("json", "aifc")) is None
    ahead[0].result(30).close()


@pytest.mark.parametrize(("needed", "is_used"), [((), True), (("wave",), True), (("chunk",), False)])
def test_a_fork_ahead_is_used_if_it_has_all_modules_and_exits_otherwise(
    needed: tuple[str, ...], is_used: bool, roots: Roots, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_starts, "ROOTS", roots)
    first = roots.fork(launch, ("json", "wave"), may_start=True)
    assert first is not None
    first.result(30).close()
    starts = template_starts.TemplateStarts(launch.copy(), ("json",), StartMethod.TEMPLATE)
    starts.ask_ahead()
    assert starts._ahead is not None
    ahead = starts._ahead[0]
    starts.need(needed)
    thread = EventLoopThread(lambda: None, lambda _: None)
    try:
        _, blank = thread.call(lambda: starts.next(thread, is_first=True)).result(30)
        assert blank is not None
        assert (ahead.result(30) is blank) == is_used
        blank.close()
        assert ahead.result(30).wait(30) == blank.wait(30) == 0
    finally:
        thread.end()
        thread.loop.close()
        starts.close()


def test_a_fork_ahead_that_nobody_asks_for_exits(roots: Roots, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_starts, "ROOTS", roots)
    first = roots.fork(launch, ("json",), may_start=True)
    assert first is not None
    first.result(30).close()
    starts = template_starts.TemplateStarts(launch.copy(), ("json",), StartMethod.TEMPLATE)
    starts.ask_ahead()
    assert starts._ahead is not None
    ahead = starts._ahead[0]
    starts.close()
    assert ahead.result(30).wait(30) == 0


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
