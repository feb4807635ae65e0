"""Messages that no sender of ours writes: refused by name, never a crash and never a large allocation."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.transport.channel import MAX_MESSAGE_BYTES
from swift_loader.transport.messages import (
    Batch,
    Blank,
    BuildReport,
    Built,
    Exited,
    Failure,
    FailureStage,
    Fork,
    Forked,
    Frame,
    Hung,
    Identity,
    Kind,
    NewPlan,
    PickledBody,
    Ready,
    Refused,
    SampleFailed,
    SegmentGone,
    SegmentMade,
    State,
    StreamEnded,
    Warmed,
    pack_frame,
    unpack_frame,
)
from swift_loader.transport.payload import PayloadLayout
from swift_loader.transport.task import Task

MAX_ALLOCATED_BYTES = 16 * MAX_MESSAGE_BYTES
"""What unpacking one message may take; a length out of a body could be 2**64."""

A_PLAN = PlanSettings(OrderSettings.of(seed=1, shuffle=True, window=40, batch_size=8), 8, 1, 0, Uneven.PAD, False)
FAILURE = Failure(1, 2, FailureStage.FETCH, 13, b"pickled", 0, "ValueError", "no luck", "Traceback")
EXAMPLES: dict[Kind, Any] = {
    Kind.PAYLOAD: PayloadLayout(4096, 100, 200, 300, 5),
    Kind.BUILT: Built(BuildReport(100, 7), forkable=True, reason="because"),
    Kind.FORK: Fork(3, False),
    Kind.FORKED: Forked(3, 1234),
    Kind.EXITED: Exited(3, -9),
    Kind.BLANK: Blank(3, ("torch",)),
    Kind.REFUSED: Refused(3, False, "because"),
    Kind.WARMED: Warmed(3),
    Kind.READY: Ready(4096, BuildReport(100, 7, ((3, 99),))),
    Kind.TASK: Task(1, 2, 3, 4, [8, -9, 8], (5, 6), (7,)),
    Kind.SEGMENT: SegmentMade(1, 4096),
    Kind.SEGMENT_GONE: SegmentGone(3),
    Kind.BATCH: Batch(1, b"structure", 2, 3, 4, 0, 9, 8, 10, 11, 12),
    Kind.FAILURE: FAILURE,
    Kind.SAMPLE_FAILED: SampleFailed(4, None, FAILURE),
    Kind.PLAN: NewPlan(1, A_PLAN),
    Kind.HUNG: Hung(1, 13, "because"),
    Kind.IDENTITY: Identity(2, 3),
    Kind.STATE: State(b"snapshot"),
    Kind.STREAM_ENDED: StreamEnded(1, 2),
}
BARE = [Kind.SKIPPED]
PICKLED = [kind for kind, message in EXAMPLES.items() if isinstance(message, PickledBody)]
"""Not for noise: an opcode of pickle may ask for any amount of memory."""
PACKED = [kind for kind in EXAMPLES if kind not in PICKLED]


def packed(kind: Kind) -> bytes:
    if kind in BARE:
        return pack_frame(kind, generation=1)
    data: bytes = EXAMPLES[kind].pack()
    return data


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a message with bits flipped, cut short, prolonged, or with a run of noise in it."""
    damaged = bytearray(data)
    how = rng.choice(["flip", "cut", "prolong", "noise", "zero"])
    at = rng.randrange(len(damaged))
    if how == "flip":
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del damaged[at:]
    elif how == "prolong":
        damaged += rng.randbytes(rng.randint(1, 40))
    elif how == "noise":
        noise = rng.randbytes(rng.randint(1, 40))
        damaged[at : at + len(noise)] = noise
    else:
        damaged[at:] = bytes(len(damaged) - at)
    return bytes(damaged)


def frame_of(kind: Kind, body: bytes) -> Frame:
    return unpack_frame(memoryview(pack_frame(kind, body, generation=1)))


def unpack_or_refuse(kind: Kind, body: bytes) -> None:
    """Unpack a frame whose checksum is right; refusing it is as good."""
    frame = frame_of(kind, body)
    tracemalloc.start()
    try:
        with_type(kind).unpack(frame)
    except ProtocolError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MAX_ALLOCATED_BYTES


def with_type(kind: Kind) -> Any:
    return type(EXAMPLES[kind])


def test_there_is_an_example_of_each_kind() -> None:
    assert {*EXAMPLES, *BARE} == set(Kind)
    for kind, message in EXAMPLES.items():
        assert with_type(kind).unpack(unpack_frame(memoryview(packed(kind)))) == message


@given(kind=st.sampled_from(Kind), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_a_damaged_frame_is_refused_or_the_same(kind: Kind, seed: int) -> None:
    whole = packed(kind)
    damaged = mutate(whole, random.Random(seed))
    try:
        frame = unpack_frame(memoryview(damaged))
    except ProtocolError:
        return
    assert Frame(frame.kind, frame.generation, memoryview(bytes(frame.body))) == unpack_frame(memoryview(whole))


@given(kind=st.sampled_from(PACKED), body=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_noise_under_a_right_checksum_is_a_value_or_a_protocol_error(kind: Kind, body: bytes) -> None:
    unpack_or_refuse(kind, body)


@given(kind=st.sampled_from(PACKED), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_a_damaged_body_under_a_right_checksum_is_a_value_or_a_protocol_error(kind: Kind, seed: int) -> None:
    body = bytes(unpack_frame(memoryview(packed(kind))).body)
    unpack_or_refuse(kind, mutate(body, random.Random(seed)))


@given(kind=st.sampled_from(PICKLED), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_pickled_body_cut_short_is_refused(kind: Kind, data: st.DataObject) -> None:
    body = bytes(unpack_frame(memoryview(packed(kind))).body)
    end = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolError):
        with_type(kind).unpack(frame_of(kind, body[:end]))


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
