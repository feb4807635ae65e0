from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from swift_loader.batch.lent import LentMemory
from swift_loader.batch.torch_collate import torch_collate
from tests.support.memories import MEMORIES, arena


@pytest.mark.parametrize("make", MEMORIES)
def test_memory_is_not_kept_once_the_batch_is_gone(make: Callable[[], Any]) -> None:
    memory = LentMemory(make())
    batch = torch_collate([{"x": torch.ones(2), "y": 1}] * 3, memory)
    assert memory.is_kept
    del batch
    memory = LentMemory(arena())
    assert not memory.is_kept


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[0],
        lambda tensor: tensor.detach().view(-1),
        lambda tensor: tensor.numpy(),
        lambda tensor: memoryview(tensor.numpy())[:1],
        lambda tensor: tensor.untyped_storage(),
    ],
    ids=["itself", "item", "view", "array", "buffer", "storage"],
)
def test_memory_is_kept_while_a_view_is_alive(view: Callable[[torch.Tensor], Any]) -> None:
    slot = arena()
    memory = LentMemory(slot)
    kept = view(torch_collate([torch.ones(2)] * 3, memory))
    del slot
    vars(memory)["_memory"] = None
    assert memory.is_kept
    del kept
    assert not memory.is_kept


def test_a_copy_does_not_keep_memory() -> None:
    memory = LentMemory(arena())
    kept = torch_collate([torch.ones(2)] * 3, memory).clone()
    vars(memory)["_memory"] = None
    assert not memory.is_kept
    assert kept.tolist() == [[1, 1]] * 3


def test_arrays_are_made_in_the_memory() -> None:
    slot = arena()
    assert slot.find(LentMemory(slot).empty((2, 3), "f4")) is not None
