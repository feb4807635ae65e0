"""Which datasets need a fork of the trainer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_loader.executors.process.fork_need import why_fork_is_needed
from tests.support.specs import spec_of

_CONTEXT = multiprocessing.get_context("fork")
_KEEPS_ARENA = _CONTEXT.RawValue("i", 0)
"""multiprocessing keeps a file open for all such values, from the first one on."""


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: torch.zeros(2).share_memory_(), "a tensor in shared memory"),  # type: ignore[no-untyped-call]
        (lambda: _CONTEXT.Value("i", 0), "multiprocessing.heap.BufferWrapper"),
        (lambda: _CONTEXT.RawValue("i", 0), "BufferWrapper"),
        (_CONTEXT.Lock, "Lock"),
        (_CONTEXT.Event, "Lock"),
        (_CONTEXT.SimpleQueue, "SimpleQueue"),
    ],
)
def test_what_processes_share_by_inheritance_is_found(make: Callable[[], Any], named: str) -> None:
    shared = make()
    dataset = [{"deep": SimpleNamespace(attribute=[shared])}]
    reason = why_fork_is_needed(spec_of(dataset=dataset))
    assert reason.startswith("dataset holds a ")
    assert named in reason
    assert why_fork_is_needed(spec_of(collate_fn=lambda samples: (samples, shared))).startswith("collate_fn holds")


def test_ordinary_datasets_need_no_fork() -> None:
    dataset = [torch.zeros(2), {"x": torch.zeros(2).to_sparse()}, [1, "two"], object()]
    assert not why_fork_is_needed(spec_of(dataset=dataset, collate_fn=lambda samples: samples))
