"""The rank that loads, with a channel's end in the place of another rank."""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader.errors import LoaderClosed, NoDescriptorsLeft, SwiftLoaderError
from swift_loader.executors.group.leader import GroupLeader
from swift_loader.executors.group.messages import Awaited, End, Ended, Push
from swift_loader.transport.channel import MAX_MESSAGE_BYTES, Channel
from swift_loader.transport.frames import Kind
from tests.support.group_ends import descriptors_left, new_leader, new_pair, next_frame
from tests.support.helpers import allowed_s
from tests.support.specs import spec_of

AWAITED = Awaited(1, 7, 0, 1).pack()
"""The batch after the first one."""


@pytest.fixture
def ends() -> Iterator[tuple[GroupLeader, Channel]]:
    ours, theirs = new_pair()
    leader = new_leader(ours, max_ahead=1)
    leader.use_plan(1, spec_of().plan)
    yield leader, theirs
    leader.close()
    theirs.close()


def worker_at(step: int) -> Any:
    """Return a worker whose oldest task is this step."""
    work = SimpleNamespace(epoch=0, step=step)
    return SimpleNamespace(
        serial=0, worker_id=0, process=SimpleNamespace(pid=1), tasks=deque([SimpleNamespace(work=work)])
    )


def ended_of(channel: Channel) -> Ended:
    frame = next_frame(channel)
    assert frame is not None
    assert frame.kind is Kind.ENDED
    return Ended.unpack(frame)


def test_a_message_that_cannot_be_sent_is_an_error_on_all_ranks(ends: tuple[GroupLeader, Channel]) -> None:
    leader, theirs = ends
    with descriptors_left(0):  # so long a message travels in a file
        leader.publish_failure(worker_at(0), 0, bytes(MAX_MESSAGE_BYTES))
        assert not leader.may_go_on
        with pytest.raises(NoDescriptorsLeft):
            leader.await_others(None, allowed_s(10))
    ended = ended_of(theirs)
    assert ended.why is End.FAILED
    assert ended.text.startswith("NoDescriptorsLeft: ")


def test_a_rank_that_is_gone_is_no_error(ends: tuple[GroupLeader, Channel]) -> None:
    leader, theirs = ends
    leader.note_taken(0, 0)
    theirs.close()
    leader.publish_failure(worker_at(0), 0, b"frame")
    leader.await_others(None, allowed_s(10))
    assert leader.may_go_on


def test_a_failure_of_the_thread_is_an_error_on_all_ranks(ends: tuple[GroupLeader, Channel]) -> None:
    leader, theirs = ends

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    leader.on_awaited = fail
    leader.note_taken(0, 0)
    theirs.send(AWAITED)
    with pytest.raises(SwiftLoaderError, match=re.escape("RuntimeError: can't start new thread")) as caught:
        leader.await_others(None, allowed_s(10))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert ended_of(theirs).why is End.FAILED


def test_its_own_thread_may_close_it(ends: tuple[GroupLeader, Channel]) -> None:
    leader, theirs = ends
    [thread] = [thread for thread in threading.enumerate() if thread.name == "swift_loader-group"]
    leader.on_awaited = leader.close
    leader.note_taken(0, 0)
    theirs.send(AWAITED)
    with pytest.raises(LoaderClosed):
        leader.await_others(None, allowed_s(10))
    thread.join(allowed_s(10))
    assert not thread.is_alive()
    assert leader._error is None
    assert ended_of(theirs).why is End.CLOSED


def test_a_batch_of_a_plan_that_nobody_uses_any_more_is_not_handed_on(ends: tuple[GroupLeader, Channel]) -> None:
    leader, theirs = ends
    for generation in range(2, 5):
        leader.use_plan(generation, spec_of().plan)
    leader.publish_failure(worker_at(6), 1, b"old")
    leader.publish_failure(worker_at(7), 4, b"new")
    frames = [next_frame(theirs) for _ in range(4)]
    assert [frame.kind for frame in frames if frame is not None] == [Kind.DROPPED] * 3 + [Kind.PUSH]
    assert frames[3] is not None
    assert Push.unpack(frames[3]).batch_id.step == 7


def test_a_rank_that_sends_what_it_may_not_is_left_out_and_its_descriptor_closed(
    ends: tuple[GroupLeader, Channel],
) -> None:
    leader, theirs = ends
    leader.note_taken(0, 0)
    with open(os.devnull, "rb") as file:
        theirs.send(b"nonsense", [file.fileno()])
    leader.await_others(None, allowed_s(10))
    assert len(leader._followers) == 0


@pytest.mark.parametrize("number", range(3))
def test_a_leader_that_cannot_be_made_leaves_nothing_open(number: int) -> None:
    ours, theirs = new_pair()
    with descriptors_left(number), pytest.raises(NoDescriptorsLeft):
        new_leader(ours)
    assert ours.fileno() < 0
    theirs.close()
