from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from swift_loader.transport.private_pages import PrivatePages
from swift_loader.transport.segments import Segment

NBYTES = 64 * 4096


@pytest.fixture
def mappings() -> tuple[Segment, Segment]:
    """The same memory as its writer has it, and mapped privately."""
    writer, descriptor = Segment.create(NBYTES)
    writer.array()[:] = 1
    return writer, Segment.attach(descriptor, NBYTES, private=True)


@pytest.fixture
def pages() -> Iterator[PrivatePages]:
    made = PrivatePages()
    yield made
    made.close()


def test_reading_is_not_writing(mappings: tuple[Segment, Segment], pages: PrivatePages) -> None:
    writer, private = mappings
    assert not pages.has_written(private)
    assert private.array().sum() == NBYTES
    writer.array()[5] = 2
    assert private.array()[5] == 2
    assert not pages.has_written(private)


@pytest.mark.parametrize("place", [0, 7 * 4096 + 3, NBYTES - 1])
def test_one_byte_is_noticed_and_discarded(mappings: tuple[Segment, Segment], pages: PrivatePages, place: int) -> None:
    writer, private = mappings
    private.array()[place] = 9
    assert writer.array()[place] == 1
    assert pages.has_written(private)
    writer.array()[place] = 3
    pages.restore(private)
    assert private.array()[place] == 3
    assert not pages.has_written(private)


def test_without_a_page_map_all_pages_count_as_written(
    mappings: tuple[Segment, Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    pages = PrivatePages()
    assert pages.fileno() == -1
    assert pages.has_written(mappings[1])
    pages.close()
