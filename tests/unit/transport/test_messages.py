from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import ProtocolError
from swift_loader.transport.messages import (
    _HEAD,
    Batch,
    BuildReport,
    Built,
    Exited,
    Failure,
    FailureStage,
    Fork,
    Forked,
    Frame,
    Identity,
    Kind,
    Ready,
    SampleFailed,
    SegmentGone,
    SegmentMade,
    State,
    StreamEnded,
    pack_frame,
    unpack_frame,
)
from swift_loader.transport.task import _TASK, IndexArray, LostKeys, Task

bits_31 = st.integers(-(2**31), 2**31 - 1)
bits_32 = st.integers(0, 2**32 - 1)
bits_63 = st.integers(-(2**63), 2**63 - 1)
bits_64 = st.integers(0, 2**64 - 1)
indices = st.lists(bits_63, max_size=20)
slots = st.lists(bits_32, max_size=20).map(tuple)
metas = st.binary(min_size=1, max_size=100)


failures = st.builds(
    Failure,
    bits_32,
    bits_64,
    st.sampled_from(FailureStage),
    st.none() | bits_63,
    st.none() | st.binary(),
    bits_32,
    st.text(),
    st.text(),
    st.text(),
)
reports = st.builds(BuildReport, bits_64, bits_63, st.lists(st.tuples(bits_63, bits_32), max_size=6).map(tuple))
messages = st.one_of(
    st.builds(Task, bits_32, bits_64, bits_63, bits_63, st.none() | indices, slots, slots),
    st.builds(Task, bits_32, bits_64, bits_63, bits_63, st.none(), slots, slots, bits_63),
    st.builds(Identity, bits_32, bits_32),
    st.builds(State, st.binary()),
    st.builds(StreamEnded, bits_32, bits_64),
    st.builds(SegmentMade, bits_32, bits_64),
    st.builds(SegmentGone, bits_32),
    failures,
    st.builds(SampleFailed, bits_32, st.none() | bits_63, failures),
    st.builds(Built, reports, st.booleans(), st.text()),
    st.builds(Ready, bits_64, reports),
    st.builds(Fork, bits_32, st.booleans()),
    st.builds(Forked, bits_32, bits_32),
    st.builds(Exited, bits_32, bits_31),
    st.builds(
        lambda meta, *rest: Batch(rest[0], meta, rest[1], rest[2], rest[3], rest[4], len(meta), *rest[5:]),
        metas,
        bits_32,
        bits_64,
        bits_32,
        bits_32,
        bits_64,
        bits_32,
        bits_64,
        bits_64,
        bits_64,
        bits_64,
        bits_64,
        bits_63,
        bits_63,
        bits_63,
        bits_64,
    ),
)

A_BATCH = Batch(1, b"", 2, 3, 4, 5, 0, 7, 8, 9, 10)


def frame_of(message: bytes) -> Frame:
    return unpack_frame(memoryview(message))


@given(message=messages)
@settings(max_examples=300, deadline=None)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert type(message).unpack(frame_of(message.pack())) == message


@given(chosen=indices, released=slots, retired=slots)
def test_a_task_with_indices_holds_them_after_its_slots(
    chosen: list[int], released: tuple[int, ...], retired: tuple[int, ...]
) -> None:
    planned, with_indices = (
        Task(1, 2, 3, 4, given, released, retired).pack()[_HEAD.size :] for given in (None, chosen)
    )
    assert with_indices[len(planned) :] == np.array(chosen, "<i8").tobytes()


@pytest.mark.parametrize(
    "keys",
    [["a", ("b", 1)], "one", 7, (1, 2), [True, 1], [2**70], [None], [np.int64(3)], [[1, 2], [3]], {1}],
    ids=repr,
)
def test_the_keys_of_a_task_arrive_as_they_are(keys: Any) -> None:
    arrived = Task.unpack(frame_of(Task(1, 2, 3, 4, keys, (5,), (6, 7)).pack()))
    assert arrived == Task(1, 2, 3, 4, keys, (5,), (6, 7))
    assert type(arrived.indices) is type(keys)
    if isinstance(keys, list):
        assert list(map(type, arrived.indices)) == list(map(type, keys))


class OneWay:
    """Can be pickled, but not be rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@given(indices)
def test_an_array_of_indices_arrives_as_a_list(indices: list[int]) -> None:
    packed = IndexArray(np.array(indices, np.int64))
    arrived = Task.unpack(frame_of(Task(1, 2, 3, 4, packed, (5,), (6, 7)).pack()))
    assert arrived == Task(1, 2, 3, 4, packed.to_list(), (5,), (6, 7))


@pytest.mark.parametrize(
    ("key", "reason"), [(lambda: 0, "a list, can't be sent: .*Error"), (OneWay(), "can't be rebuilt in .*: ValueError")]
)
def test_keys_that_cannot_travel_arrive_as_the_reason(key: Any, reason: str) -> None:
    lost = Task.unpack(frame_of(Task(1, 2, 3, 4, [key]).pack())).indices
    assert isinstance(lost, LostKeys)
    assert re.search(reason, lost.reason)


@pytest.mark.parametrize("num_indices", [-4, -3, 3, 2**31 - 1])
def test_a_task_with_another_length_than_it_says_is_refused(num_indices: int) -> None:
    body = _TASK.pack(2, 3, 4, 0, 0, num_indices) + bytes(16)
    with pytest.raises(ProtocolError, match="malformed"):
        Task.unpack(frame_of(pack_frame(Kind.TASK, body)))


@pytest.mark.parametrize("meta", [b"ab", b"abcd"])
def test_a_batch_whose_structure_has_another_length_is_refused(meta: bytes) -> None:
    batch = A_BATCH._replace(meta=meta, meta_nbytes=3)
    with pytest.raises(ProtocolError, match="3 bytes of structure"):
        Batch.unpack(frame_of(batch.pack()))
