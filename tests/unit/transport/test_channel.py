from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from swift_loader.errors import NoDescriptorsLeft, ProtocolError
from swift_loader.transport import channel
from swift_loader.transport.channel import MAX_MESSAGE_BYTES, Channel

pytestmark = pytest.mark.processes


@pytest.fixture(name="pair")
def _pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = Channel.pair()
    yield one, other
    one.close()
    other.close()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_longest_message_arrives_whole(pair: tuple[Channel, Channel]) -> None:
    message = bytes(range(256)) * (MAX_MESSAGE_BYTES // 256)
    pair[0].send(message)
    received = pair[1].receive()
    assert received is not None
    assert bytes(received.data) == message


@pytest.mark.parametrize("nbytes", [MAX_MESSAGE_BYTES + 1, 5_000_000])
def test_a_longer_message_arrives_whole_with_its_descriptors(pair: tuple[Channel, Channel], nbytes: int) -> None:
    message = os.urandom(nbytes)
    before = num_open()
    with open(os.devnull, "rb") as file:
        pair[0].send(message, [file.fileno()])
    received = pair[1].receive()
    assert received is not None
    assert bytes(received.data) == message
    (descriptor,) = received.descriptors
    assert os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull
    os.close(descriptor)
    assert num_open() == before


def test_a_message_that_is_too_long_is_not_sent(pair: tuple[Channel, Channel], monkeypatch: Any) -> None:
    monkeypatch.setattr(channel, "MAX_FILE_BYTES", 100_000)
    with pytest.raises(ProtocolError, match="100001 bytes is longer than 100000"):
        pair[0].send(b"x" * 100_001)


@pytest.mark.parametrize(("nbytes", "announced"), [(10, 11), (11, 10), (0, 2**63)])
def test_a_file_of_another_length_than_announced_is_an_error(
    pair: tuple[Channel, Channel], nbytes: int, announced: int
) -> None:
    before = num_open()
    with tempfile.TemporaryFile() as file, open(os.devnull, "rb") as other:
        file.write(bytes(nbytes))
        file.flush()
        mark = channel._MARK.pack(channel._MARK_BEGIN, announced)
        pair[0].send(mark, [other.fileno(), file.fileno()])
        with pytest.raises(ProtocolError, match=f"{announced} bytes came in a file of {nbytes}"):
            pair[1].receive()
    assert num_open() == before


def test_a_message_that_arrives_cut_short_is_an_error(pair: tuple[Channel, Channel]) -> None:
    with open(os.devnull, "rb") as file:
        pair[0]._socket.sendmsg([b"x" * (MAX_MESSAGE_BYTES + 1)], [_rights([file.fileno()])])
        before = num_open()
        with pytest.raises(ProtocolError, match="longer than 65536"):
            pair[1].receive()
        assert num_open() == before


def test_more_descriptors_than_any_message_has_are_an_error(pair: tuple[Channel, Channel]) -> None:
    with open(os.devnull, "rb") as file:
        pair[0].send(b"x", [file.fileno()] * 5)
        before = num_open()
        with pytest.raises(ProtocolError, match="more than 4 descriptors"):
            pair[1].receive()
        assert num_open() == before


@pytest.mark.parametrize("num_free", [0, 1])
def test_a_process_that_can_open_no_more_files_says_what_to_raise(pair: tuple[Channel, Channel], num_free: int) -> None:
    with open(os.devnull, "rb") as file:
        pair[0].send(b"x", [file.fileno()] * 2)
        pair[0].send(b"next")
        before = num_open() - 1  # without the one that lists them
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        taken = [os.dup(0) for _ in range(highest - before + 4)]  # no gaps among the numbers
        limit = max(taken) + 1 + num_free
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            with pytest.raises(NoDescriptorsLeft, match=rf"may have {limit} of them .*ulimit -n"):
                pair[1].receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in taken:
                os.close(descriptor)
        assert num_open() - 1 == before
    received = pair[1].receive()
    assert received is not None
    assert bytes(received.data) == b"next"


def _rights(descriptors: list[int]) -> tuple[int, int, bytes]:
    import array
    import socket

    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes()
