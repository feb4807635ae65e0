from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.transport.messages import Kind, pack_frame, unpack_frame

KIND_BYTE = 4
HEAD_NBYTES = 20

kinds = st.sampled_from(Kind)
bodies = st.binary(max_size=200)
generations = st.integers(0, 2**32 - 1)


@given(kind=kinds, body=bodies, generation=generations)
@settings(max_examples=100, deadline=None)
def test_a_message_arrives_as_it_was_sent(kind: Kind, body: bytes, generation: int) -> None:
    frame = unpack_frame(memoryview(pack_frame(kind, body, generation)))
    assert (frame.kind, frame.generation, bytes(frame.body)) == (kind, generation, body)


def test_the_body_is_a_view_of_the_message() -> None:
    data = bytearray(pack_frame(Kind.BATCH, b"abc"))
    frame = unpack_frame(memoryview(data))
    data[HEAD_NBYTES] = ord("x")
    assert bytes(frame.body) == b"xbc"


@given(noise=st.binary(max_size=100))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_frame(memoryview(noise))


def test_unknown_kinds_are_refused() -> None:
    for kind in set(range(256)) - set(Kind):
        message = bytearray(pack_frame(Kind.READY))
        message[KIND_BYTE] = kind
        with pytest.raises(ProtocolError):
            unpack_frame(memoryview(message))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"short", "5 bytes"),
        (b"HTTP" + pack_frame(Kind.READY)[4:], "HTTP"),
        (pack_frame(Kind.READY, b"abc")[:-1], "length or checksum"),
    ],
)
def test_the_error_says_what_was_found(message: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        unpack_frame(memoryview(message))
