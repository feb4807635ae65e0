from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.errors import EncodeError
from swift_loader.transport.messages import unpack
from swift_loader.transport.task import IndexArray, LostKeys, Task


def arrived_of(sent: Task) -> Task:
    task = unpack(sent.pack())
    assert isinstance(task, Task)
    task.rebuild_keys()
    return task


@pytest.mark.parametrize(
    "keys",
    [["a", ("b", 1)], "one", 7, (1, 2), [True, 1], [2**70], [None], [np.int64(3)], [[1, 2], [3]], {1}],
    ids=repr,
)
def test_the_keys_of_a_task_arrive_as_they_are(keys: Any) -> None:
    arrived = arrived_of(Task(1, 2, 3, 4, keys, (5,), (6, 7)))
    assert arrived == Task(1, 2, 3, 4, keys, (5,), (6, 7))
    assert type(arrived.indices) is type(keys)
    if isinstance(keys, list):
        assert list(map(type, arrived.indices)) == list(map(type, keys))


class OneWay:
    """Can be pickled, but not be rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_an_array_of_indices_arrives_as_a_list(indices: list[int]) -> None:
    packed = IndexArray(np.array(indices, np.int64))
    arrived = arrived_of(Task(1, 2, 3, 4, packed, (5,), (6, 7)))
    assert arrived == Task(1, 2, 3, 4, packed.to_list(), (5,), (6, 7))


def test_keys_that_cannot_be_rebuilt_arrive_as_the_reason() -> None:
    lost = arrived_of(Task(1, 2, 3, 4, [OneWay()])).indices
    assert isinstance(lost, LostKeys)
    assert "can't be rebuilt in" in lost.reason
    assert "ValueError" in lost.reason


def test_keys_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(EncodeError, match=r"a list, can't be sent: .*Error"):
        Task(1, 2, 3, 4, [lambda: 0]).pack()
