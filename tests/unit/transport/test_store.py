from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.messages import SegmentGone, SegmentMade
from swift_loader.transport.segments import Segment
from swift_loader.transport.slots import SMALL_AFTER
from swift_loader.transport.store import SegmentStore

pytestmark = pytest.mark.processes


class Trainer:
    """What the trainer hears of the segments."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.segments: dict[int, Segment] = {}
        self.gone: list[int] = []

    def listen(self) -> None:
        while True:
            try:
                received = self._channel.receive(wait=False)
            except BlockingIOError:
                return
            assert received is not None
            frame = unpack_frame(received.data)
            if frame.kind is Kind.SEGMENT_GONE:
                self.gone.append(SegmentGone.unpack(frame).slot)
            else:
                made = SegmentMade.unpack(frame)
                self.segments[made.slot] = Segment.attach(received.descriptors[0], made.nbytes)


@pytest.fixture(name="ends")
def _ends() -> Iterator[tuple[SegmentStore, Trainer]]:
    ours, theirs = Channel.pair()
    yield SegmentStore.of_memfds(theirs), Trainer(ours)
    ours.close()
    theirs.close()


def test_what_is_written_to_a_slot_is_what_the_trainer_sees(ends: tuple[SegmentStore, Trainer]) -> None:
    store, trainer = ends
    slot, memory = store.take(5000)
    memory[:5000] = 7
    trainer.listen()
    assert len(memory) == trainer.segments[slot].nbytes >= 5000
    assert (trainer.segments[slot].array()[:5000] == 7).all()


def test_a_slot_is_reused_once_it_is_given_back(ends: tuple[SegmentStore, Trainer]) -> None:
    store, trainer = ends
    first, _ = store.take(100)
    second, _ = store.take(100)
    store.release(first)
    assert store.take(100)[0] == first != second
    trainer.listen()
    assert sorted(trainer.segments) == [first, second]
    with pytest.raises(KeyError):
        store.release(99)


def test_the_trainer_hears_of_slots_that_became_too_small(ends: tuple[SegmentStore, Trainer]) -> None:
    store, trainer = ends
    small, _ = store.take(100)
    store.release(small)
    for _ in range(2 * SMALL_AFTER):
        slot, _ = store.take(100_000)
        store.release(slot)
    trainer.listen()
    assert trainer.gone == [small]


def test_a_segment_that_cannot_be_announced_leaves_no_descriptor(ends: tuple[SegmentStore, Trainer]) -> None:
    store, trainer = ends
    trainer._channel.close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        store.take(100)
    assert len(os.listdir("/proc/self/fd")) == before
