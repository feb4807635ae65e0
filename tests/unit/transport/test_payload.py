from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import SwiftLoader
from swift_loader.errors import EncodeError
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.frames import unpack_frame
from swift_loader.transport.payload import (
    Environment,
    HeapMemory,
    PayloadLayout,
    chosen_threads,
    pack_payload,
    read_environment,
    read_payload,
    write_payload,
)
from swift_loader.transport.segments import Segment

ENVIRONMENT = Environment(["train.py", "--fast"], "float64", 3)


def sent(content: object) -> tuple[PayloadLayout, Segment, Definitions]:
    """Return what the other process gets hold of."""
    layout, descriptor, definitions = write_payload(content, ENVIRONMENT)
    return layout, Segment.attach(descriptor, layout.total_nbytes, private=True), definitions


@pytest.mark.parametrize("content", [None, 3, {"a": [1, "b"]}, [], "x" * 100_000])
def test_a_plain_object_arrives(content: object) -> None:
    layout, segment, _ = sent(content)
    arrived, definitions = read_payload(layout, segment)
    assert arrived == content
    assert len(definitions) == 0


def test_bulk_data_arrive_as_views_of_the_segment() -> None:
    content: dict[str, Any] = {"array": np.arange(100_000), "tensor": torch.arange(1000.0), "empty": np.empty((0, 3))}
    layout, segment, _ = sent(content)
    arrived, _ = read_payload(layout, segment)
    assert np.array_equal(arrived["array"], content["array"])
    assert torch.equal(arrived["tensor"], torch.arange(1000.0))
    assert arrived["empty"].shape == (0, 3)
    assert np.shares_memory(arrived["array"], segment.array())
    assert layout.bulk_nbytes >= 804_000
    assert layout.structure_nbytes < 1000


def test_the_environment_can_be_read_on_its_own() -> None:
    layout, segment, _ = sent([np.arange(10), lambda: 3])
    assert read_environment(layout, segment) == ENVIRONMENT


def test_a_payload_that_does_not_begin_with_an_environment_is_refused() -> None:
    layout, segment, _ = sent(1)
    start = layout.bulk_nbytes
    wrong = pickle.dumps(12345)
    segment.memory[start : start + len(wrong)] = wrong
    with pytest.raises(TypeError, match="int instead of an Environment"):
        read_environment(layout, segment)


def test_the_layout_arrives_as_it_was_sent() -> None:
    layout = PayloadLayout(2**40, 2**39, 3, 4, 5)
    assert PayloadLayout.unpack(unpack_frame(memoryview(layout.pack()))) == layout


def test_the_parts_lie_one_after_the_other_in_the_segment() -> None:
    layout, segment, _ = sent([np.arange(1000), lambda: 3])
    assert list(layout.ends) == sorted(layout.ends)
    assert layout.ends[-1] <= layout.total_nbytes == segment.nbytes


def test_what_cannot_be_imported_gets_the_same_numbers_on_both_sides() -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    def double(point: Point) -> Point:
        return Point(2 * point.x)

    layout, segment, ours = sent({"point": Point(4), "double": double})
    arrived, theirs = read_payload(layout, segment)
    assert len(ours) == len(theirs) >= 2
    number = ours.number_of(Point)
    assert number is not None
    assert theirs[number] is type(arrived["point"])
    assert theirs[number] is not Point
    doubled = arrived["double"](arrived["point"])
    assert (type(doubled), doubled.x) == (theirs[number], 8)


def test_the_environment_has_what_the_trainer_chose_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "x"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Environment.of_this_process(("a.module",)) == Environment(
        ["script", "x"], "", 3, sys.getrecursionlimit(), ("a.module",)
    )
    torch.set_default_dtype(torch.float64)
    try:
        assert Environment.of_this_process().torch_dtype == "float64"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("variable", "chosen"), [("", 1), ("2", 2), ("0", 1), ("many", 1), ("4,2", 1)])
def test_workers_have_one_thread_unless_the_environment_says_more(
    monkeypatch: pytest.MonkeyPatch, variable: str, chosen: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert chosen_threads() == chosen


def test_a_number_of_threads_that_was_set_by_hand_holds_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(23)
    try:
        assert chosen_threads() == 23
    finally:
        torch.set_num_threads(before)
    assert chosen_threads() == 1 or before > 1


def test_a_part_that_cannot_be_sent_is_named_with_the_remedy() -> None:
    expected = r"\['file'\] is a _io.BufferedReader.*to the workers.*dataset_class="
    with open(os.devnull, "rb") as file, pytest.raises(EncodeError, match=expected):
        write_payload({"fine": 1, "file": file}, ENVIRONMENT)


def test_what_was_written_to_what_arrived_is_gone_when_it_is_read_again() -> None:
    layout, segment, _ = sent({"array": np.zeros(100_000), "list": []})
    for _ in range(2):
        arrived, _ = read_payload(layout, segment)
        assert not arrived["array"].any()
        assert arrived["list"] == []
        arrived["array"] += 1
        arrived["list"].append(1)


def test_writing_to_what_arrived_leaves_the_senders_object_alone() -> None:
    content = np.zeros(10)
    layout, segment, _ = sent(content)
    arrived, _ = read_payload(layout, segment)
    arrived += 1
    assert not content.any()


@pytest.mark.parametrize("named", [r"dataset_kwargs\['file'\]", r"dataset\.file"])
def test_a_part_that_cannot_be_sent_is_named_by_its_option(named: str) -> None:
    with open(os.devnull, "rb") as file:
        options: dict[str, Any] = {"dataset_class": SimpleDataset, "dataset_kwargs": {"file": file}}
        if named.startswith(r"dataset\."):
            options = {"dataset": SimpleDataset(file)}
        loader = SwiftLoader(**options, nb_consumer=1, worker_per_consumer=1)
        with loader, pytest.raises(EncodeError, match=f"^{named} is a _io.BufferedReader"):
            loader.start(0)


class SimpleDataset:
    def __init__(self, file: object) -> None:
        self.file = file

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def test_a_payload_packed_into_memory_arrives_as_one_in_a_file() -> None:
    content: dict[str, Any] = {"x": np.arange(10_000.0), "text": "x" * 1000}
    layout, packed, definitions = pack_payload(content, ENVIRONMENT)
    memory = HeapMemory(layout.total_nbytes)
    memory.array()[:] = packed
    assert layout.total_nbytes == layout.ends[-1] == len(packed)
    assert read_environment(layout, memory) == ENVIRONMENT
    arrived, _ = read_payload(layout, memory)
    arrived["x"][0] = 5  # writable, although it is a view
    assert memory.array()[:8].view(np.float64)[0] == 5
    assert (arrived["x"][1:] == content["x"][1:]).all()
    assert arrived["text"] == content["text"]
    assert len(definitions) == 0


def test_the_number_of_threads_is_known_where_the_system_has_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity")
    assert chosen_threads() >= 1
