from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.transport.bodies import FixedBody, PickledBody
from swift_loader.transport.frames import Frame, Kind, pack_frame, unpack_frame


@dataclass(frozen=True, slots=True)
class Span(FixedBody):
    KIND = Kind.FORK
    LAYOUT = struct.Struct("<IB")

    start: int
    length: int

    def __post_init__(self) -> None:
        if not self.length:
            raise ValueError("empty")


@dataclass(slots=True)
class Note(PickledBody):
    KIND = Kind.BUILT

    text: str
    number: int = 3


def frame_of(message: bytes) -> Frame:
    return unpack_frame(memoryview(message))


@given(start=st.integers(0, 2**32 - 1), length=st.integers(1, 255))
def test_a_fixed_body_holds_the_fields_in_their_order(start: int, length: int) -> None:
    frame = frame_of(Span(start, length).pack())
    assert (frame.kind, bytes(frame.body)) == (Kind.FORK, struct.pack("<IB", start, length))
    assert Span.unpack(frame) == Span(start, length)


@given(body=st.binary(max_size=12).filter(lambda body: len(body) != 5))
def test_a_fixed_body_of_another_length_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"kind FORK has a malformed body of {len(body)} bytes"):
        Span.unpack(frame_of(pack_frame(Kind.FORK, body)))


def test_values_that_the_class_refuses_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="kind FORK has a malformed body of 5 bytes") as caught:
        Span.unpack(frame_of(pack_frame(Kind.FORK, bytes(5))))
    assert str(caught.value.__cause__) == "empty"


@given(text=st.text(), number=st.integers())
def test_a_pickled_body_holds_the_fields(text: str, number: int) -> None:
    frame = frame_of(Note(text, number).pack())
    assert (frame.kind, pickle.loads(frame.body)) == (Kind.BUILT, (text, number))
    assert Note.unpack(frame) == Note(text, number)


@pytest.mark.parametrize("content", [None, 7, (), ("a", 1, 2)])
def test_a_pickle_of_other_fields_is_refused(content: object) -> None:
    with pytest.raises(ProtocolError, match="kind BUILT has a malformed body"):
        Note.unpack(frame_of(pack_frame(Kind.BUILT, pickle.dumps(content))))
