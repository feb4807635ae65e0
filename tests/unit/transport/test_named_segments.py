from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from swift_loader import SharedMemoryFull
from swift_loader.transport.portable import SegmentNames, attach, create, map_buffer, unlink
from tests.support.forked import run_in_fork

pytestmark = pytest.mark.processes


@pytest.fixture
def names() -> Iterator[SegmentNames]:
    names = SegmentNames()
    yield names
    names.unlink_from(0)


def exists(name: str) -> bool:
    return Path(f"/dev/shm/{name}").exists()


def test_both_sides_see_the_same_bytes_and_the_name_is_gone(names: SegmentNames) -> None:
    ours = create(names.of(0), 10_000)
    ours.array()[:] = 7
    theirs = attach(names.of(0), 10_000)
    assert not exists(names.of(0))
    theirs.array()[0] = 8
    del theirs
    assert ours.array()[0] == 8
    assert (ours.array()[1:] == 7).all()


def test_memory_outlives_the_process_that_created_it(names: SegmentNames) -> None:
    def work() -> None:
        segment = create(names.of(3), 4096)
        segment.array()[:] = 5
        os._exit(0)

    assert run_in_fork(work) == 0
    attached = attach(names.of(3), 4096)
    assert (attached.array() == 5).all()


def test_a_segment_that_is_shorter_than_announced_is_refused(names: SegmentNames) -> None:
    create(names.of(0), 4096)
    with pytest.raises(SharedMemoryFull, match="a segment of 4096 bytes was announced with 8192"):
        attach(names.of(0), 8192)


def test_without_memory_the_error_says_how_much_was_needed_and_no_name_stays(names: SegmentNames) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(SharedMemoryFull, match="reserving 100000 bytes of shared memory failed"):
            create(names.of(0), 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not exists(names.of(0))


def test_what_was_never_announced_is_found_by_its_number(names: SegmentNames) -> None:
    for slot in (None, 0, 1, 2, 3):
        create(names.of(slot), 4096)
    attach(names.of(0), 4096)
    names.unlink_from(1)
    assert not any(exists(names.of(slot)) for slot in (None, 0, 1, 2, 3))
    assert not unlink(names.of(1))


def test_names_are_short_enough_for_macos_and_nobody_elses() -> None:
    assert SegmentNames().prefix != SegmentNames().prefix
    assert len("/" + SegmentNames(f"swl_{2**22}_{0:08x}").of(10**6)) < 31


def test_shared_memory_of_windows_is_mapped_where_its_buffer_is_and_closed_with_the_segment() -> None:
    closed = []
    buffer = bytearray(5000)
    memory = SimpleNamespace(buf=memoryview(buffer), close=lambda: closed.append(True))
    segment = map_buffer(memory, 4096)
    segment.array()[:3] = [1, 2, 3]
    assert bytes(buffer[:4]) == b"\1\2\3\0"
    assert segment.address == ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))
    assert len(segment.array()) == 4096
    assert np.shares_memory(segment.array(), np.frombuffer(buffer, np.uint8))
    assert not closed
    del segment
    assert closed
