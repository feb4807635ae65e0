from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.metrics.observations import BATCH, CAPACITY, Timeline

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


@given(number=st.integers(-10, 3 * CAPACITY))
@settings(max_examples=100, deadline=None)
def test_a_full_ring_has_the_last_rows_in_order(number: int) -> None:
    assert numbers_of(FULL, number) == list(range(max(number, 100), CAPACITY + 100))


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
