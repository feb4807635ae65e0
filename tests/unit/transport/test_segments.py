from __future__ import annotations

import errno
import gc
import os
import resource
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import SharedMemoryFull
from swift_loader.transport import segments
from swift_loader.transport.segments import Segment, capacity_for

pytestmark = pytest.mark.processes

PAGE_NBYTES = os.sysconf("SC_PAGESIZE")


def made(nbytes: int) -> Segment:
    segment, descriptor = Segment.create(nbytes)
    os.close(descriptor)
    return segment


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(nbytes=st.integers(1, 2**40))
@settings(max_examples=200, deadline=None)
def test_a_capacity_is_whole_pages_and_at_most_an_eighth_more(nbytes: int) -> None:
    capacity = capacity_for(nbytes)
    assert capacity % PAGE_NBYTES == 0
    assert nbytes <= capacity <= max(nbytes + PAGE_NBYTES, nbytes * 9 / 8)


@given(small=st.integers(0, 2**40), more=st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_capacities_grow_with_the_need(small: int, more: int) -> None:
    assert capacity_for(small) <= capacity_for(small + more)


def test_what_is_written_on_one_side_is_read_on_the_other() -> None:
    segment, descriptor = Segment.create(2 * PAGE_NBYTES)
    other = Segment.attach(descriptor, 2 * PAGE_NBYTES)
    segment.array()[:] = np.arange(2 * PAGE_NBYTES) % 251
    assert np.array_equal(other.array(), segment.array())
    other.memory[5] = 7
    assert segment.array()[5] == 7


def test_private_writes_stay_private() -> None:
    segment, descriptor = Segment.create(PAGE_NBYTES)
    segment.array()[0] = 1
    private = Segment.attach(descriptor, PAGE_NBYTES, private=True)
    private.array()[0] = 2
    assert segment.array()[0] == 1
    assert private.array()[0] == 2


def test_attaching_closes_the_descriptor_and_keeps_none() -> None:
    before = num_descriptors()
    segment, descriptor = Segment.create(PAGE_NBYTES)
    other = Segment.attach(descriptor, PAGE_NBYTES)
    assert num_descriptors() == before
    assert segment.nbytes == other.nbytes == PAGE_NBYTES


def test_a_segment_announced_larger_than_it_is_is_refused_and_its_descriptor_closed() -> None:
    before = num_descriptors()
    _, descriptor = Segment.create(PAGE_NBYTES)
    with pytest.raises(SharedMemoryFull, match=rf"{PAGE_NBYTES} bytes was announced with {PAGE_NBYTES + 1}"):
        Segment.attach(descriptor, PAGE_NBYTES + 1)
    assert num_descriptors() == before


def test_memory_that_cannot_be_had_is_an_error_with_need_and_remedy() -> None:
    before = num_descriptors()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SharedMemoryFull, match=r"reserving 2097152 bytes .* batch_size") as caught:
            Segment.create(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno
    assert num_descriptors() == before


def mapped_nbytes() -> int:
    """Of all anonymous files of ours in this process."""
    with open("/proc/self/maps") as maps:
        extents = [line.split()[0].split("-") for line in maps if "memfd:swift_loader" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in extents)


def test_the_mapping_goes_with_the_segment() -> None:
    gc.collect()
    before = mapped_nbytes()
    segment = made(16 * PAGE_NBYTES)
    assert mapped_nbytes() == before + 16 * PAGE_NBYTES
    gone = weakref.ref(segment)
    del segment
    gc.collect()
    assert gone() is None
    assert mapped_nbytes() == before


def test_new_memory_is_zero_and_writable() -> None:
    array = (segment := made(PAGE_NBYTES)).array()
    assert not array.any()
    assert array.flags.writeable
    assert repr(segment) == f"<Segment of {PAGE_NBYTES} bytes>"


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_a_file_has_the_pieces_however_little_the_kernel_takes_at_once(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.pwritev

    def write(descriptor: int, views: list[memoryview], position: int) -> int:
        return own(descriptor, [b"".join(views)[:most]], position)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(segments, "_MAX_PIECES", 3)
    pieces = [np.arange(size, dtype=np.uint8) for size in (0, 5, 1, 0, 20, 3, 0, 0)]
    descriptor = segments.new_file(pieces, 4096)
    try:
        content = np.frombuffer(os.pread(descriptor, 5000, 0), np.uint8)
        assert len(content) == 4096
        assert (content[:29] == np.concatenate(pieces)).all()
        assert not content[29:].any()
        with pytest.raises(OSError, match="not permitted"):
            os.write(descriptor, b"x")
    finally:
        os.close(descriptor)


def test_a_file_that_does_not_fit_says_what_limits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "pwritev", write)
    with pytest.raises(SharedMemoryFull, match="reserving 4096 bytes"):
        segments.new_file([np.zeros(1, np.uint8)], 4096)
