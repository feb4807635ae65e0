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
    Become,
    BuildReport,
    Built,
    Exited,
    Failure,
    FailureStage,
    Fork,
    Forked,
    Hung,
    Identity,
    Message,
    NewPlan,
    NoBatch,
    PayloadRead,
    Ready,
    Refused,
    SampleFailed,
    SegmentGone,
    SegmentMade,
    State,
    Warmed,
    unpack,
)
from swift_loader.transport.payload import PayloadLayout
from swift_loader.transport.task import Task

A_PLAN = PlanSettings(OrderSettings.of(seed=1, shuffle=True, window=40, batch_size=8), 8, 1, 0, Uneven.PAD, False)
FAILURE = Failure(1, 2, FailureStage.FETCH, 13, b"pickled", 0, "ValueError", "no luck", "Traceback")
EXAMPLES: list[Any] = [
    PayloadLayout(4096, 100, 200, 300, 5),
    Built(BuildReport(100, 7), "because", is_odd=True),
    Fork(3, ("torch",)),
    Forked(3, 1234),
    Exited(3, -9),
    Become(3),
    PayloadRead(),
    Refused(3, False, "because"),
    Warmed(3),
    Ready(4096, BuildReport(100, 7, ((3, 99),))),
    Task(1, 2, 3, 4, [8, -9, 8], (5, 6), (7,)),
    SegmentMade(1, 4096),
    SegmentGone(3),
    Batch(1, b"structure", 2, 3, 4, 0, 9, 8, 10, 11, 12),
    FAILURE,
    SampleFailed(4, None, FAILURE),
    NewPlan(1, A_PLAN),
    Hung(1, 13, "because"),
    Identity(2, 3),
    State(b"snapshot"),
    NoBatch(1, 2),
]


def test_each_message_arrives_as_it_is() -> None:
    assert {Batch, *Message.__subclasses__()} >= set(map(type, EXAMPLES))
    assert {cls.__name__ for cls in Message.__subclasses__()} <= {type(message).__name__ for message in EXAMPLES}
    for message in EXAMPLES:
        arrived = unpack(message.pack())
        if isinstance(arrived, Task):
            arrived.rebuild_keys()
        assert arrived == message


@given(message=st.sampled_from(EXAMPLES), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_message_cut_short_is_refused(message: Any, data: st.DataObject) -> None:
    whole = message.pack()
    with pytest.raises(ProtocolError):
        unpack(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("message", [b"", b"abc", b"HTTP/1.1"])
def test_a_message_of_another_program_is_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"{len(message)} bytes that begins with"):
        unpack(memoryview(message))
