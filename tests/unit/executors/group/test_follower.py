"""A rank that shares batches, with a channel's end in the place of the rank that loads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from swift_loader.errors import LoaderClosed, NoDescriptorsLeft, ProtocolError
from swift_loader.executors.group.follower import GroupFollower
from swift_loader.executors.group.messages import Welcome
from swift_loader.scheduler.events import Ready
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import new_memfd
from swift_loader.transport.frames import Kind, pack_frame
from swift_loader.transport.messages import SegmentMade
from tests.support.group_ends import descriptors_left, new_follower, new_pair
from tests.support.helpers import allowed_s

MALFORMED = {
    "another kind": pack_frame(Kind.TAKEN, b""),
    "no frame": b"nonsense",
    "a segment of no size": pack_frame(Kind.SEGMENT, b"x"),
    "a segment larger than its file": SegmentMade(1, 1 << 20).pack(),
}


@pytest.fixture
def ends() -> Iterator[tuple[GroupFollower, Channel]]:
    ours, theirs = new_pair()
    follower = new_follower(ours)
    yield follower, theirs
    follower.close()
    theirs.close()


def test_it_starts_once_the_dataset_is_built(ends: tuple[GroupFollower, Channel]) -> None:
    follower, theirs = ends
    theirs.send(Welcome(12, []).pack())
    follower.start()
    assert follower.plan.order.num_samples == 12
    assert follower.inboxes[0].wait(allowed_s(10)) == [Ready(0, 0)]


def test_a_start_that_another_thread_ends_says_so_and_does_not_warn(ends: tuple[GroupFollower, Channel]) -> None:
    follower, _ = ends
    follower.stop()
    with pytest.raises(LoaderClosed, match="closed while it started"):
        follower.start()


def test_another_thread_may_close_it_while_it_starts(ends: tuple[GroupFollower, Channel]) -> None:
    follower, _ = ends
    errors: list[BaseException] = []

    def start() -> None:
        try:
            follower.start()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    follower.stop()
    follower.close()
    thread.join(allowed_s(10))
    assert [type(error) for error in errors] == [LoaderClosed]


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_is_an_error_and_leaves_no_descriptor(
    ends: tuple[GroupFollower, Channel], message: bytes
) -> None:
    follower, theirs = ends
    file = new_memfd("test")
    theirs.send(message, [file])
    os.close(file)
    with pytest.raises((ProtocolError, OSError)):
        follower.start()


@pytest.mark.parametrize("number", range(6))
def test_a_follower_that_cannot_be_made_leaves_nothing_open(number: int) -> None:
    ours, theirs = new_pair()
    with descriptors_left(number), pytest.raises(NoDescriptorsLeft):
        new_follower(ours)
    assert ours.fileno() < 0
    theirs.close()
