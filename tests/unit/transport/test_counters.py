from __future__ import annotations

import mmap
import os
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.transport.counters import NUM_BEGUN, UNKNOWN_ADDRESS, CounterReader, CounterWriter, read_word
from swift_loader.transport.segments import Segment
from tests.support.forked import run_in_fork

pytestmark = pytest.mark.processes

FETCH, LEAVE_OUT = "fetch", "leave out"


def page_of(writer: CounterWriter) -> Segment:
    return Segment.attach(writer.share(), mmap.PAGESIZE)


def shared() -> tuple[CounterWriter, CounterReader]:
    writer = CounterWriter()
    return writer, CounterReader(page_of(writer), partial(read_word, os.getpid(), writer.length_address()))


@given(batches=st.lists(st.lists(st.sampled_from([FETCH, LEAVE_OUT]), max_size=20), max_size=5))
def test_the_position_counts_fetched_and_left_out_samples(batches: list[list[str]]) -> None:
    writer, reader = shared()
    for batch in batches:
        samples = writer.begin(in_bulk=False)
        for position, event in enumerate(batch):
            assert reader.position_in_batch() == position
            if event == FETCH:
                samples.append(object())
            else:
                writer.leave_out()
        assert reader.position_in_batch() == len(batch)


def test_the_position_is_unknown_while_all_samples_are_fetched_at_once() -> None:
    writer, reader = shared()
    samples = writer.begin(in_bulk=True)
    assert reader.position_in_batch() is None
    writer.fetch_one_by_one()
    assert reader.position_in_batch() == 0
    samples.append(1)
    assert reader.position_in_batch() == 1


def test_the_position_is_unknown_without_an_address_and_without_a_process() -> None:
    writer = CounterWriter()
    assert read_word(os.getpid(), UNKNOWN_ADDRESS) is None
    assert read_word(2**22 + 1, writer.length_address()) is None
    assert CounterReader(page_of(writer), lambda: None).position_in_batch() is None


def test_the_tasks_begun_can_be_read_after_the_workers_death() -> None:
    writer, reader = shared()

    def work() -> None:
        writer.words[NUM_BEGUN] += 3
        os._exit(1)

    assert run_in_fork(work) == 1
    assert reader.num_begun == 3
