from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.transport import portable
from swift_loader.transport.portable import PipeChannel, inheriting, new_pipe, open_inherited

pytestmark = pytest.mark.processes


@pytest.fixture
def ends() -> Iterator[tuple[PipeChannel, PipeChannel]]:
    ours, theirs = map(PipeChannel, new_pipe())
    yield ours, theirs
    ours.close()
    theirs.close()


def taken(channel: PipeChannel) -> bytes | None:
    received = channel.receive()
    return None if received is None else bytes(received.data)


@given(messages=st.lists(st.binary(max_size=3000), max_size=8))
def test_messages_arrive_whole_and_in_order(messages: list[bytes]) -> None:
    ours, theirs = map(PipeChannel, new_pipe())
    for message in messages:
        ours.send(message)
    ours.close()
    assert [taken(theirs) for _ in messages] == messages
    assert theirs.receive() is None
    theirs.close()


def test_without_a_message_it_says_so_if_it_may_not_wait(ends: tuple[PipeChannel, PipeChannel]) -> None:
    ours, theirs = ends
    with pytest.raises(BlockingIOError):
        theirs.receive(wait=False)
    ours.send(b"message")
    received = theirs.receive(wait=False)
    assert received is not None
    assert bytes(received.data) == b"message"
    assert received.descriptors == []


def test_the_end_of_the_peer_is_the_end_of_the_stream(ends: tuple[PipeChannel, PipeChannel]) -> None:
    ours, theirs = ends
    theirs.send(b"unread")
    ours.send(b"last")
    ours.close()
    assert taken(theirs) == b"last"
    assert theirs.receive() is None
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        theirs.send(b"too late")


def test_sending_on_a_closed_end_says_that_the_pipe_is_broken(ends: tuple[PipeChannel, PipeChannel]) -> None:
    ours, _ = ends
    ours.close()
    ours.close()
    with pytest.raises(BrokenPipeError):
        ours.send(b"too late")
    assert ours.receive() is None


def test_a_long_message_comes_in_parts_to_where_it_is_wanted(
    ends: tuple[PipeChannel, PipeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable, "CHUNK_NBYTES", 100_000)
    ours, theirs = ends
    sent = np.random.default_rng(0).integers(0, 256, 1_234_567, np.uint8)
    sender = threading.Thread(target=ours.send_long, args=(sent,))
    sender.start()
    received = np.zeros_like(sent)
    assert theirs.receive_long(received)
    sender.join()
    assert (received == sent).all()


def test_only_the_process_that_is_meant_inherits_an_end() -> None:
    ours, theirs = new_pipe()
    assert not os.get_inheritable(ours.fileno())
    assert not os.get_inheritable(theirs.fileno())
    assert inheriting(theirs) == {"pass_fds": [theirs.fileno()]}
    copy = os.dup(theirs.fileno())
    os.set_inheritable(copy, True)
    with open_inherited(copy) as end:
        assert not os.get_inheritable(copy)
        ours.send_bytes(b"to the copy")
        assert end.recv_bytes() == b"to the copy"
    ours.close()
    theirs.close()
