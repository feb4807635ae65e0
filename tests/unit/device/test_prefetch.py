from __future__ import annotations

import signal
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest

from swift_loader.delivery.delivery import Delivery
from swift_loader.device.in_flight import CopiesInFlight
from swift_loader.device.prefetch import LazyPass, PrefetchQueue
from swift_loader.device.streams import NoStream
from swift_loader.device.transfer import Transfer
from swift_loader.errors import LoaderClosed


class FakeSource:
    """Gives the numbers from 0 on, without end; a moved number is negative."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        """Take what the next moves raise; None: nothing."""
        self.num_pulled = 0
        self.has_more = True
        self._outcomes = deque(outcomes)

    def is_ready(self) -> bool:
        return self.has_more

    def pull(self) -> Delivery:
        self.num_pulled += 1
        return Delivery(self.num_pulled - 1, 0, self.num_pulled - 1)

    def move(self, delivery: Delivery, transfer: Transfer) -> Any:
        outcome = self._outcomes.popleft() if self._outcomes else None
        if outcome is not None:
            raise outcome
        return -delivery.batch


def source_of(fake: FakeSource, depth: int = 1, num_batches: int = 6) -> PrefetchQueue:
    return PrefetchQueue(fake, CopiesInFlight(NoStream()), depth, num_batches)


def take_all(source: PrefetchQueue, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        try:
            found.append(source.take().batch)
        except KeyboardInterrupt:
            found.append("interrupted")
    return found


@pytest.mark.parametrize("depth", [1, 2, 9])
@pytest.mark.parametrize("is_ready", [True, False])
def test_all_batches_come_moved_in_order_and_no_more_are_pulled(depth: int, is_ready: bool) -> None:
    fake = FakeSource()
    fake.has_more = is_ready
    assert take_all(source_of(fake, depth=depth), 6) == [0, -1, -2, -3, -4, -5]
    assert fake.num_pulled == 6


def test_batches_are_moved_ahead_only_when_they_are_ready() -> None:
    fake = FakeSource()
    source = source_of(fake, depth=2)
    source.take()
    assert fake.num_pulled == 3
    fake.has_more = False
    source.take()
    assert fake.num_pulled == 3


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("depth", [1, 3])
def test_a_ctrl_c_while_a_batch_is_moved_loses_nothing(at: int, depth: int) -> None:
    fake = FakeSource(*[None] * at, KeyboardInterrupt())
    found = take_all(source_of(fake, depth), 7)
    assert [batch for batch in found if batch != "interrupted"] == [0, -1, -2, -3, -4, -5]
    assert fake.num_pulled == 6


def test_a_ctrl_c_while_a_batch_is_handed_over_loses_nothing() -> None:
    class Interrupted(NoStream):
        num_tries = 0

        def hand_over(self, parts: Sequence[Any], event: Any) -> None:
            self.num_tries += 1
            if self.num_tries % 3 == 2:
                raise KeyboardInterrupt

    fake = FakeSource()
    source = PrefetchQueue(fake, CopiesInFlight(Interrupted()), 2, 6)
    found = take_all(source, 9)
    assert [batch for batch in found if batch != "interrupted"] == [0, -1, -2, -3, -4, -5]
    assert fake.num_pulled == 6


def test_an_error_comes_where_its_batch_would_have_come() -> None:
    source = source_of(FakeSource(None, None, ValueError("too large")), depth=3)
    assert take_all(source, 2) == [0, -1]
    for _ in range(2):
        assert str(source.take().error) == "too large"


def test_what_the_handler_of_a_signal_raises_is_no_error_of_the_batch() -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise ValueError("of the handler")

    class Interrupted(FakeSource):
        def move(self, delivery: Delivery, transfer: Transfer) -> Any:
            if delivery.batch == 2 and len(moved) == 2:
                moved.append("interrupted")
                signal.raise_signal(signal.SIGUSR1)
            moved.append(delivery.batch)
            return super().move(delivery, transfer)

    moved: list[Any] = []
    source = source_of(Interrupted(), depth=3)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(ValueError, match="of the handler"):
            source.take()
        assert take_all(source, 6) == [0, -1, -2, -3, -4, -5]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert moved == [0, 1, "interrupted", 2, 3, 4, 5]


def test_why_there_is_no_batch_comes_where_the_batch_would_have_come_and_is_not_moved() -> None:
    class Closed(FakeSource):
        def pull(self) -> Delivery:
            return Delivery(None, 0, 2, error=stop) if self.num_pulled == 2 else super().pull()

    stop = LoaderClosed("closed")
    source = source_of(Closed(), depth=3)
    assert take_all(source, 2) == [0, -1]
    assert [source.take().error for _ in range(2)] == [stop, stop]


def test_an_abandoned_queue_drops_its_batches_and_pulls_no_more() -> None:
    fake, gone = FakeSource(None, KeyboardInterrupt()), RuntimeError("gone")
    source = source_of(fake, depth=3)
    with pytest.raises(KeyboardInterrupt):
        source.take()
    were_over = [source.is_over]
    source.abandon(gone)
    were_over.append(source.is_over)
    assert were_over == [False, True]
    assert [source.take().error for _ in range(2)] == [gone, gone]
    assert fake.num_pulled == 2


def test_a_pass_begins_with_the_first_next_and_again_if_that_fails() -> None:
    begun, outcomes = list[int](), [OSError("not yet")]

    def begin() -> Any:
        begun.append(len(begun))
        if outcomes:
            raise outcomes.pop()
        return iter("ab").__next__

    batches = LazyPass(begin)
    assert iter(batches) is batches
    assert not begun
    with pytest.raises(OSError, match="not yet"):
        next(batches)
    assert list(batches) == ["a", "b"]
    assert begun == [0, 1]
