from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.transport.by_value import Definitions
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

pytestmark = pytest.mark.processes

ENVIRONMENT = Environment(["train.py", "--fast"], "float64", 3)


def sent(content: object) -> tuple[PayloadLayout, Segment, Definitions]:
    """Return what the other process gets hold of."""
    layout, descriptor, definitions = write_payload(content, ENVIRONMENT)
    return layout, Segment.attach(descriptor, layout.total_nbytes, private=True), definitions


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


def test_what_was_written_to_what_arrived_is_gone_when_it_is_read_again() -> None:
    layout, segment, _ = sent({"array": np.zeros(100_000), "list": []})
    for _ in range(2):
        arrived, _ = read_payload(layout, segment)
        assert not arrived["array"].any()
        assert arrived["list"] == []
        arrived["array"] += 1
        arrived["list"].append(1)


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
