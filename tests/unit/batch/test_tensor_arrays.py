from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import default_collate

from swift_loader.batch.collate import collate_to_send
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode, encode
from tests.support.memories import arena
from tests.support.torch_samples import batches_of_samples, outcome

pytestmark = pytest.mark.filterwarnings("ignore")

NO_DEFINITIONS = Definitions()


class Pair(NamedTuple):
    first: Any
    second: Any


class Frozen(dict[str, Any]):
    pass


def sent(batch: Any, memory: Arena) -> Any:
    encoded = encode(batch, memory, NO_DEFINITIONS)
    slot = np.empty(memory.used, np.uint8)
    memory.move_to(slot)
    return decode(memoryview(encoded.meta), encoded.num_blocks, slot, NO_DEFINITIONS)


def assert_alike(samples: list[Any]) -> None:
    expected = outcome(lambda given: sent(default_collate(given), arena()), samples)
    for memory in (arena(), Arena(np.empty(0, np.uint8))):
        found = outcome(lambda given, memory=memory: sent(collate_to_send(given, memory), memory), samples)  # type: ignore[misc]
        assert found == expected, samples


@given(samples=batches_of_samples())
@settings(max_examples=100, deadline=None)
def test_any_samples_arrive_as_what_torch_gives(samples: list[Any]) -> None:
    assert_alike(samples)


SAMPLES: list[Any] = [
    1,
    True,
    1.5,
    "text",
    b"bytes",
    np.float32(1),
    np.float64(1),
    np.uint64(1),
    np.bool_(True),
    np.longdouble(1),
    np.ones(()),
    np.ones((2, 3), np.float16),
    np.ones((1, 3)),
    np.ones((0, 3)),
    np.ones((3, 0), np.int64),
    np.ones((2, 3)).T,
    np.ones((4, 4))[::2, ::-1],
    np.ones(3, ">f4"),
    np.ones(3, "M8[s]"),
    np.array(["a"]),
    torch.ones(2, 3),
    torch.ones(2, 3).T,
    torch.ones(0),
    torch.ones(2, requires_grad=True),
    torch.ones(2, dtype=torch.bfloat16),
    torch.ones(2).to_sparse(),
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
    {},
    [],
    (),
    {"a": 1, 2: [1.5, ("x", np.ones(2))]},
    Pair(1, np.ones(2)),
    Frozen(a=np.ones(2)),
    None,
    range(2),
]


@pytest.mark.parametrize("num_samples", [1, 40])
def test_each_kind_of_sample_arrives_as_what_torch_gives(num_samples: int) -> None:
    for sample in SAMPLES:
        assert_alike([sample] * num_samples)


def test_arrays_are_made_where_they_are_sent_and_memory_of_an_attempt_is_used_again() -> None:
    memory = arena()
    unusual = {"x": np.ones(100), "y": Pair(1, 2)}
    collate_to_send([unusual] * 2, memory)
    assert memory.used < 2 * 2 * 100 * 8
    memory = arena()
    batch = collate_to_send([{"x": np.ones(100), "y": 1}] * 2, memory)
    used = memory.used
    assert all(memory.find(leaf) is not None for leaf in batch.values())
    encode(batch, memory, NO_DEFINITIONS)
    assert memory.used == used


def test_a_batch_that_is_not_sent_has_tensors() -> None:
    assert torch.equal(collate_to_send([np.ones(2)] * 3), torch.ones((3, 2), dtype=torch.float64))


def test_the_default_dtype_counts_as_with_torch() -> None:
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert_alike([np.float64(0.1)] * 2)
            assert_alike([0.1] * 2)
    finally:
        torch.set_default_dtype(before)
