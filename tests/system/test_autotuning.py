"""The loader chooses its workers while the loop runs, and nothing of that shows in what the loop gets."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from swift_loader import SwiftLoader
from swift_loader.engine import observer
from swift_loader.engine.session import Session
from tests.support import datasets, tuning
from tests.support.checked import Checked, Reference, digest
from tests.support.helpers import HANG_S, exhaustive, ids_of, make_loader, slow
from tests.support.resizing import await_workers
from tests.support.tuning import SleepingChecked, SleepingCounting, be_hasty, is_settled, loop

OPTIONS: dict[str, Any] = {"kwargs": {"num_samples": 200}, "batch_size": 4}
NUM_BATCHES = 50
NUM_NEEDED = 5

WORKERS: dict[str, dict[str, Any]] = {
    "processes": {},
    "threads": {"worker_type": "thread", "rng": None},
    "spawn": {"start_method": "spawn"},
    "fork": {"start_method": "fork"},
    "own datasets": {"dataset_per_worker": True},
}
KINDS = [*list(WORKERS)[:2], *map(slow, list(WORKERS)[2:])]

reference = Reference(lambda: make_loader(Checked, workers=0, **OPTIONS))


def auto_loader(dataset: Any = SleepingChecked, **options: Any) -> SwiftLoader:
    given: Any = "auto"
    return make_loader(dataset, workers=given, **{**OPTIONS, **options})


def passes_until(condition: Callable[[], object], loader: SwiftLoader) -> Iterator[list[Any]]:
    """Yield the batches of whole passes, until a condition holds after one."""
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {HANG_S} s: {loader.report().tuning}"
        yield list(loop(loader))


def most_chosen(loader: SwiftLoader) -> int:
    return max((int(number) for line in changes(loader) for number in re.findall(r"→ (\d+):", line)), default=1)


def changes(loader: SwiftLoader) -> tuple[str, ...]:
    """Return what the loader did about the number of its workers, one line each."""
    return loader.report().tuning[:-1]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    be_hasty(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_while_it_adds_workers_the_loop_gets_the_same_batches(kind: str) -> None:
    is_thread = kind == "threads"  # threads draw from the loop's generators, so only the samples can be compared
    with auto_loader(SleepingCounting if is_thread else SleepingChecked, **WORKERS[kind]) as loader:
        loader.start(0)
        assert loader.worker_per_consumer == 1
        number = count()
        expected = make_loader(datasets.Counting, workers=0, **OPTIONS)
        for batches in [list(loop(loader)), *passes_until(lambda: most_chosen(loader) > 1, loader)]:
            got = [digest(batch) for batch in batches]
            if is_thread:
                assert got == [digest(batch) for batch in expected]
            else:
                reference.compare(got, next(number), in_order=True)
        assert loader.report()["worker_restarts"] == 0
        await_workers(loader, loader.worker_per_consumer)


@pytest.mark.alone
def test_it_grows_to_enough_workers() -> None:
    with auto_loader() as loader:
        list(loop(loader))
        for _ in passes_until(lambda: is_settled(loader), loader):
            pass
        assert most_chosen(loader) >= NUM_NEEDED - 1


def test_a_state_of_the_middle_resumes_with_a_fixed_number_and_with_auto() -> None:
    def take(loader: SwiftLoader, is_enough: Callable[[int], bool]) -> dict[str, Any]:
        while True:
            for number, batch in enumerate(loop(loader)):
                got.append(digest(batch))
                if is_enough(number) and number % NUM_BATCHES < NUM_BATCHES - 1:
                    return loader.state_dict()

    got: list[bytes] = []
    with auto_loader() as loader:
        loader.start(0)
        state = take(loader, lambda number: number > 5 and most_chosen(loader) > 1)
        json.dumps(state)
    with make_loader(SleepingChecked, workers=2, **OPTIONS) as loader:
        loader.load_state_dict(state)
        state = take(loader, lambda number: number == 20)
    with auto_loader() as loader:
        loader.load_state_dict(state)
        take(loader, lambda number: number > 5 and most_chosen(loader) > 1)
    with make_loader(Checked, workers=0, **OPTIONS) as loader:
        expected = [digest(batch) for _ in range(-(-len(got) // NUM_BATCHES)) for batch in loader]
    assert got == expected[: len(got)]


@pytest.mark.alone
def test_a_load_that_changes_twice_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_until(condition: Callable[[], bool], sample_s: float, step_s: float) -> None:
        path.write_text(f"{sample_s}")
        deadline_s = time.monotonic() + HANG_S
        while not condition():
            for _ in loop(loader, step_s):
                assert time.monotonic() < deadline_s, f"not within {HANG_S} s: {loader.report().tuning}"
                if condition():
                    break

    be_hasty(monkeypatch, 0.5)
    path = tmp_path / "seconds"
    path.write_text("0.001")
    with auto_loader(tuning.Following, kwargs={"path": str(path)}) as loader:
        loader.start(0)
        run_until(lambda: is_settled(loader), 0.001, 0.02)
        assert loader.worker_per_consumer <= 2
        run_until(lambda: loader.worker_per_consumer >= 4, 0.01, 0.005)
        run_until(lambda: loader.worker_per_consumer <= 3, 0.001, 0.02)
        assert sorted(ids_of(loader)) == list(range(200))


def test_a_resize_by_hand_ends_the_tuning() -> None:
    with auto_loader() as loader:
        loader.start(0)
        list(loop(loader))
        for batches in passes_until(lambda: changes(loader), loader):
            assert len(batches) == NUM_BATCHES
        loader.resize(2)
        for _ in range(2):
            assert len(list(loop(loader))) == NUM_BATCHES
            assert loader.worker_per_consumer == 2
        assert loader.report().tuning == ()
        await_workers(loader, 2)


def test_a_resize_before_the_start_leaves_nothing_to_tune() -> None:
    with auto_loader() as loader:
        loader.resize(3)
        assert len(list(loop(loader, 0))) == NUM_BATCHES
        assert (loader.worker_per_consumer, loader.report().tuning) == (3, ())


def test_it_never_has_more_workers_than_the_given_queue_keeps_busy() -> None:
    with auto_loader(data_queue_size=3) as loader:  # a warning would be an error
        list(loop(loader))
        for _ in passes_until(lambda: is_settled(loader), loader):
            assert loader.worker_per_consumer <= 3
        assert most_chosen(loader) <= 3


def test_the_report_says_what_it_did_and_why() -> None:
    with auto_loader() as loader:
        assert loader.report().tuning == ()
        loader.start(0)
        next(iter(loader))
        begun = loader.worker_per_consumer  # it follows from the first batch, which a busy machine makes slower
        assert loader.report().tuning == (f"now {begun}: nothing was measured yet",)
        for _ in passes_until(lambda: changes(loader), loader):
            pass
        report = loader.report()
        assert re.match(rf"after \d+ s, {begun} → \d+: the loop waited .* of its time with {begun}$", report.tuning[0])
        assert report.tuning[-1].startswith(f"now {loader.worker_per_consumer}: ")
        assert f"workers: {report.tuning[-1]}" in repr(report)
        assert json.loads(report.to_json())["tuning"] == list(report.tuning)


@pytest.mark.parametrize("num_batches", [exhaustive(1), 30])
def test_after_a_break_the_next_pass_begins_afresh(num_batches: int) -> None:
    with auto_loader() as loader:
        for number in range(4):
            loader.set_epoch(number % 2)
            got = [digest(batch) for batch in islice(loop(loader), num_batches)]
            reference.compare(got, number % 2, in_order=True, is_whole=False)
        reference.compare([digest(batch) for batch in loop(loader)], 2, in_order=True)


def test_what_it_cannot_work_with_is_refused() -> None:
    with pytest.raises(ValueError, match="benchmark=False measures nothing"):
        auto_loader(benchmark=False)
    with pytest.raises(TypeError, match="worker_per_consumer='Auto'"):
        SwiftLoader(datasets.Counting, worker_per_consumer="Auto")  # type: ignore[arg-type]
    options: dict[str, Any] = {"worker_type": "thread", "worker_per_consumer": "auto", "dataset_per_worker": True}
    with pytest.raises(ValueError, match=r"worker threads can't be added .* give dataset_class"):
        SwiftLoader(dataset=datasets.Counting(), **options)


def test_a_change_that_has_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resize, has_begun = Session.resize, False
    failed: list[int] = []
    done: list[int] = []

    def fail_once(session: Session, options: Any) -> None:
        if has_begun and not failed:
            failed.append(options.delivery.num_workers)
            raise RuntimeError("planted")
        resize(session, options)
        if failed:
            done.append(options.delivery.num_workers)

    monkeypatch.setattr(Session, "resize", fail_once)
    deadline_s = time.monotonic() + HANG_S
    with auto_loader() as loader:
        while not done:
            assert time.monotonic() < deadline_s, loader.report().tuning
            try:
                for _ in loop(loader):
                    has_begun = True
            except RuntimeError:
                assert failed
    assert done[0] == failed[0]


def test_the_machine_is_only_asked_when_there_is_something_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    be_hasty(monkeypatch, window_s=HANG_S)
    num_asked = 0

    def asked() -> int:
        nonlocal num_asked
        num_asked += 1
        return 0

    monkeypatch.setattr(observer, "available_memory", asked)
    with auto_loader() as loader:
        assert len(list(loop(loader))) == NUM_BATCHES
    assert num_asked == 0
