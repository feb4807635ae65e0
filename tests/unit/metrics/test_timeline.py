from __future__ import annotations

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.metrics.observations import BATCH
from swift_loader.metrics.timeline import CAPACITY, Timeline

FULL = Timeline()
for _number in range(CAPACITY + 100):
    FULL.add((0, _number, *range(12)), 0, _number, 0, 1)


def numbers_of(timeline: Timeline, number: int) -> list[int]:
    steps: list[int] = timeline.since(number)["step"].tolist()
    return steps


def test_each_field_of_a_row_arrives_in_its_column() -> None:
    timeline = Timeline()
    values = [number + 1 for number in range(len(BATCH.names or ()))]
    number = timeline.add(tuple(values[:14]), *values[14:18])
    timeline.set_copy(number, values[18])
    assert timeline.since(0).tolist() == [tuple(values)]


def test_columns_hold_negative_and_large_numbers() -> None:
    timeline = Timeline()
    timeline.add((2**62, *[0] * 10, -1, 0, 0), 2**62, 2**62, 0, 1)
    row = timeline.since(0)[0]
    assert (row["epoch"], row["run_delay_ns"], row["asked_ns"]) == (2**62, -1, 2**62)


@given(number=st.integers(-10, 3 * CAPACITY))
@settings(max_examples=100, deadline=None)
def test_a_full_ring_has_the_last_rows_in_order(number: int) -> None:
    assert numbers_of(FULL, number) == list(range(max(number, 100), CAPACITY + 100))


@given(num_rows=st.integers(0, 40), number=st.integers(0, 45))
@settings(max_examples=100, deadline=None)
def test_a_ring_that_is_not_full_has_all_rows(num_rows: int, number: int) -> None:
    timeline = Timeline()
    for step in range(num_rows):
        assert timeline.add((0, step, *range(12)), 0, 0, 0, 1) == step
    assert numbers_of(timeline, number) == list(range(number, num_rows))


def test_rows_that_were_read_do_not_change() -> None:
    timeline = Timeline()
    timeline.add((0, 7, *range(12)), 0, 0, 0, 1)
    rows = timeline.since(0)
    for _ in range(CAPACITY):
        timeline.add((0, 8, *range(12)), 0, 0, 0, 1)
    assert rows["step"].tolist() == [7]


def test_a_copy_is_set_in_its_row_alone() -> None:
    timeline = Timeline()
    numbers = [timeline.add((0, step, *range(12)), 0, 0, 0, 1) for step in range(3)]
    timeline.set_copy(numbers[1], 55)
    assert timeline.since(0)["copy_ns"].tolist() == [0, 55, 0]


def test_a_copy_of_a_row_that_is_gone_is_ignored() -> None:
    timeline = Timeline()
    for step in range(CAPACITY + 1):
        timeline.add((0, step, *range(12)), 0, 0, 0, 1)
    timeline.set_copy(0, 55)
    assert not timeline.since(0)["copy_ns"].any()


def test_a_row_is_as_long_as_the_columns() -> None:
    codes = {np.dtype(np.int64): "q", np.dtype(np.int32): "i"}
    assert BATCH.names is not None
    layout = "<" + "".join(codes[BATCH[name]] for name in BATCH.names)
    assert struct.calcsize(layout) == BATCH.itemsize
