from __future__ import annotations

import gc
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest

from swift_loader import SwiftLoaderError
from tests.support.helpers import make_loader
from tests.support.torch_mode import begin_keys, begin_stream, rest_of, started

MAX_STEPS = 20_000
"""Python calls that this many batches never need."""


def local_classes() -> tuple[type, type]:
    @dataclass
    class Sample:
        x: int

    class Failed(Exception):
        pass

    return Sample, Failed


def test_samples_of_classes_that_cannot_be_imported_arrive_as_these() -> None:
    sample_class, other_class = local_classes()

    class Data:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"sample": sample_class(index), "class": other_class}

    with make_loader(Data, workers=0, batch_size=4) as loader:
        for batch in loader:
            assert type(batch["sample"]) is sample_class
            assert batch["class"] == [other_class] * 4


@pytest.mark.filterwarnings("ignore:epoch 0:swift_loader.SwiftLoaderWarning")
def test_an_exception_that_cannot_be_imported_arrives_as_itself_in_the_list_of_failures() -> None:
    _, failed_class = local_classes()

    class Data:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise failed_class("three")
            return index

    with make_loader(Data, workers=0, batch_size=4, on_error="skip") as loader:
        for _ in loader:
            continue
        assert [type(failure.exception) for failure in loader.failures] == [failed_class]


def test_what_is_made_anew_for_each_sample_is_not_kept() -> None:
    made: list[weakref.ref[Callable[[], int]]] = []

    class Data:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Callable[[], int]:
            function = lambda: index  # noqa: E731
            made.append(weakref.ref(function))
            return function

    with make_loader(Data, workers=0, batch_size=4, shuffle=False, validate=False) as loader:
        for number, batch in enumerate(loader):
            assert batch[0]() == 4 * number
            gc.collect()
            assert sum(ref() is not None for ref in made) <= 12


class Alarm(Exception):
    """What the handler raises."""


class Six:
    """Six samples."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


class Hung(BaseException):
    """The loop has run for too long."""


def deliver_with_an_alarm(at: int, **options: Any) -> tuple[list[list[int]], SwiftLoaderError | None, bool]:
    """Return the batches, the error at their end, and whether the alarm came: at this call of ours within `next`."""
    num_calls, num_ours, got, has_rung = 0, 0, list[list[int]](), False

    def ring(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls, num_ours, has_rung
        num_calls += event == "call"
        if num_calls > MAX_STEPS:
            raise Hung
        # Python runs signal handlers when it enters a function, and after it has called one that is written in C.
        is_ours = any(f"swift_loader/{name}" in frame.f_code.co_filename for name in ("delivery", "executors"))
        if is_ours and event in ("call", "c_return") and not has_rung:
            num_ours += 1
            if num_ours == at:
                has_rung = True
                signal.raise_signal(signal.SIGALRM)

    with make_loader(Six, batch_size=2, shuffle=False, collate_fn=list, **options) as loader:
        loader.start(0)
        iterator = iter(loader)
        while True:
            sys.setprofile(ring)
            try:
                got.append(iterator.__next__())
            except Alarm:
                continue
            except StopIteration:
                return got, None, has_rung
            except SwiftLoaderError as error:
                return got, error, has_rung
            finally:
                sys.setprofile(None)


@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"workers": 2, "worker_type": "thread"}], ids=["inline", "threads"]
)
def test_an_interrupt_at_any_point_loses_nothing_unless_an_error_says_so(options: dict[str, Any]) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Alarm

    before, at, has_rung = signal.signal(signal.SIGALRM, handle), 0, True
    try:
        while has_rung:
            at += 1
            got, error, has_rung = deliver_with_an_alarm(at, **options)
            assert got == [[0, 1], [2, 3], [4, 5]][: len(got)]
            assert len(got) == 3 or (error is not None and "interrupted" in str(error)), at
    finally:
        signal.signal(signal.SIGALRM, before)
    assert at > 30


def test_any_keys_are_fetched_and_an_error_says_which() -> None:
    with started({"a": 1, "b": 2}, num_workers=0) as dispatcher:
        begin_keys(dispatcher, [["a", "b"], ["b", "no"], ["a"]])
        deliveries = rest_of(dispatcher)
        assert [delivery.batch for delivery in deliveries] == [[1, 2], None, [1]]
        error = deliveries[1].error
        assert type(error) is KeyError
        assert "batch 1 of epoch 0 (dataset indices 'b', 'no')" in str(error.__cause__)


def test_a_stream_is_iterated_in_the_loops_process() -> None:
    with started(range(5), num_workers=0, is_stream=True, snapshot_every=2) as dispatcher:
        for _ in range(2):
            begin_stream(dispatcher, 1)
            deliveries = rest_of(dispatcher)
            assert [delivery.batch for delivery in deliveries] == [[0, 1], [2, 3], [4]]
            assert [delivery.state is None for delivery in deliveries] == [False, True, False]
