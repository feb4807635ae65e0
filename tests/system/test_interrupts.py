"""What the handler of a signal raises inside `next` comes out of it, and is no error of the loader."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from swift_loader import DataLoader, SwiftLoader, SwiftLoaderWarning
from swift_loader.engine.session import Session
from tests.support import datasets
from tests.support.helpers import ids_of, loader_processes, make_loader


class Alarm(Exception):
    """What these handlers raise: an ordinary exception, as a time-out of the user's own."""


@pytest.fixture
def alarm_after() -> Iterator[Callable[[float], object]]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupted_next(iterator: Any, alarm_after: Callable[[float], object], seconds: float) -> tuple[Any, bool]:
    """Return the next batch, if it came, and whether the alarm did."""
    batch = None
    try:
        alarm_after(seconds)
        batch = iterator.__next__()  # `next` may be interrupted after it, too, as it returns
        alarm_after(0)
    except Alarm:
        return batch, True
    return batch, False


def test_a_pass_goes_on_where_it_was_after_an_alarm_while_it_waited(alarm_after: Callable[[float], object]) -> None:
    with make_loader(datasets.Slow, kwargs={"num_samples": 12, "seconds": 0.3}, batch_size=2, shuffle=False) as loader:
        loader.start(0)
        for _ in range(2):
            iterator, got, num_alarms = iter(loader), list[int](), 0
            while len(got) < 12:
                batch, is_alarmed = interrupted_next(iterator, alarm_after, 0.17)
                num_alarms += is_alarmed
                if batch is not None:
                    got += batch["id"].tolist()
            assert got == list(range(12))
            assert num_alarms


@pytest.mark.parametrize("options", [{"start_method": "template"}, {"workers": 0}])
def test_a_time_out_of_the_user_in_the_first_next_comes_out_once(options: dict[str, Any], tmp_path: Path) -> None:
    def build() -> datasets.Counting:
        while not (tmp_path / "alarm").exists():
            time.sleep(0.01)
        return datasets.Counting(8)

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, before)
        (tmp_path / "alarm").touch()
        raise TimeoutError("the user's")

    before = signal.signal(signal.SIGALRM, handle)
    with make_loader(build, shuffle=False, **options) as loader:
        iterator = iter(loader)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="the user's"):
            next(iterator)
        assert ids_of(iterator) == list(range(8))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_without_workers_an_alarm_comes_out_and_no_sample_is_lost(
    on_error: str, alarm_after: Callable[[float], object]
) -> None:
    options: dict[str, Any] = {
        "kwargs": {"num_samples": 12, "seconds": 0.05},
        "batch_size": 2,
        "shuffle": False,
        "on_error": on_error,
    }
    with make_loader(datasets.Slow, workers=0, **options) as loader:
        iterator, got, num_alarms = iter(loader), list[int](), 0
        while len(got) < 12:
            batch, is_alarmed = interrupted_next(iterator, alarm_after, 0.03 if num_alarms < 3 else 0)
            num_alarms += is_alarmed
            if batch is not None:
                got += batch["id"].tolist()
        assert got == list(range(12))
        assert num_alarms == 3
        assert loader.failures == []


def raise_alarm() -> None:
    signal.raise_signal(signal.SIGALRM)


class Bulk(datasets.Counting):
    """Is interrupted once, in `__getitems__`."""

    is_due = True

    def __getitems__(self, indices: list[int]) -> Any:
        if self.is_due and 5 in indices:
            self.is_due = False
            raise_alarm()
        return [self[index] for index in indices]


class Replaced(datasets.Counting):
    """Is interrupted once, as it gives another sample for the one that fails."""

    num_fetched = 0

    def __getitem__(self, index: int) -> Any:
        self.num_fetched += 1
        if self.num_fetched == 3:
            raise_alarm()
        if index == 1:
            raise ValueError
        return super().__getitem__(index)


@pytest.mark.parametrize(("dataset_class", "on_error"), [(Bulk, "skip"), (Bulk, "replace"), (Replaced, "replace")])
@pytest.mark.usefixtures("alarm_after")
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_what_a_handler_raises_is_no_failed_sample(dataset_class: Any, on_error: Any) -> None:
    dataset = dataset_class(12)
    with SwiftLoader(dataset=dataset, batch_size=2, shuffle=False, worker_per_consumer=0, on_error=on_error) as loader:
        iterator, got = iter(loader), list[int]()
        with pytest.raises(Alarm):
            got += (number for batch in iterator for number in batch["id"].tolist())
        got += (number for batch in iterator for number in batch["id"].tolist())
    assert [index for index in got if index != 1][-9:] == list(range(3, 12))
    assert len(got) == 12


class Numbers(IterableDataset[int]):
    """Is interrupted as it gives number 2. It can go on."""

    def __init__(self, *, is_due: bool) -> None:
        self.numbers = iter(range(12))
        self.is_due = is_due

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        number = next(self.numbers)
        if self.is_due and number == 2:
            raise_alarm()
        return number


@pytest.mark.parametrize(("options", "num_ranks"), [({}, 1), ({"shard_stream": True}, 1), ({"shard_stream": True}, 2)])
@pytest.mark.usefixtures("alarm_after")
def test_what_a_handler_raises_in_a_sample_that_is_left_out_comes_out(
    options: dict[str, Any], num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    monkeypatch.setenv("RANK", str(num_ranks - 1))  # of two, the second leaves out number 2
    loader, resumed = (DataLoader(Numbers(is_due=is_due), 1, **options) for is_due in (False, True))
    iterator = iter(loader)
    for _ in range(4 if num_ranks == 1 else 0):
        next(iterator)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(Alarm):
        list(resumed)


def test_an_interrupt_before_anything_was_closed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Session.close, list[Session]()

    def close(session: Session) -> None:
        calls.append(session)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(session)

    monkeypatch.setattr(Session, "close", close)
    loader = make_loader(datasets.Counting)
    next(iter(loader))
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    assert not loader_processes()


def test_a_stall_warning_that_is_an_error_replaces_no_worker() -> None:
    with make_loader(datasets.Slow, kwargs={"seconds": 0.7}, batch_size=1, stall_warning=0.2, validate=False) as loader:
        iterator, found = iter(loader), list[Any]()
        with pytest.raises(SwiftLoaderWarning, match="has been"):
            next(iterator)
        workers = {process.pid for process in loader_processes()}
        while len(found) < 2:
            with suppress(SwiftLoaderWarning):
                found += next(iterator)["id"].tolist()
        assert {process.pid for process in loader_processes()} == workers
