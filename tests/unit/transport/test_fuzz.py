"""Messages that no sender of ours writes: refused by name, never a crash and never a large allocation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
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

A_PLAN = PlanSettings(OrderSettings.of(seed=1, shuffle=True, window=40, batch_size=8), 8, 1, 0, Uneven.PAD, False)
FAILURE = Failure(1, 2, FailureStage.FETCH, 13, b"pickled", 0, "ValueError", "no luck", "Traceback")
EXAMPLES: dict[Kind, Any] = {
    Kind.PAYLOAD: PayloadLayout(4096, 100, 200, 300, 5),
    Kind.BUILT: Built(BuildReport(100, 7), "because", is_odd=True),
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


def packed(kind: Kind) -> bytes:
    if kind in BARE:
        return pack_frame(kind, generation=1)
    data: bytes = EXAMPLES[kind].pack()
    return data


def frame_of(kind: Kind, body: bytes) -> Frame:
    return unpack_frame(memoryview(pack_frame(kind, body, generation=1)))


def with_type(kind: Kind) -> Any:
    return type(EXAMPLES[kind])


def test_there_is_an_example_of_each_kind() -> None:
    assert {*EXAMPLES, *BARE} == set(Kind)
    for kind, message in EXAMPLES.items():
        assert with_type(kind).unpack(unpack_frame(memoryview(packed(kind)))) == message


@given(kind=st.sampled_from(sorted(EXAMPLES)), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_body_cut_short_is_refused(kind: Kind, data: st.DataObject) -> None:
    body = bytes(unpack_frame(memoryview(packed(kind))).body)
    end = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolError):
        with_type(kind).unpack(frame_of(kind, body[:end]))


@pytest.mark.parametrize("message", [b"", b"abc", b"HTTP/1.1"])
def test_a_message_of_another_kind_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"{len(message)} bytes that begins with"):
        unpack_frame(memoryview(message))
