from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from functools import partial, wraps
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swift_loader.batch.collate import BatchMemory, collate_into, default_collate
from swift_loader.transport.arena import Arena
from tests.support.containers import FrozenPair, Pair, Point, Shelf
from tests.support.memories import MEMORIES, collated


@pytest.mark.parametrize(
    "wrap",
    [
        lambda leaf: [leaf],
        lambda leaf: (leaf,),
        lambda leaf: {"key": leaf},
        lambda leaf: collections.OrderedDict(b=leaf, a=leaf),
        lambda leaf: collections.UserDict(key=leaf),
        lambda leaf: MappingProxyType({"key": leaf}),
        lambda leaf: Shelf({"key": leaf}),
        lambda leaf: Point(leaf, leaf),
        lambda leaf: Pair(leaf, leaf),
        lambda leaf: FrozenPair(leaf, leaf),
        lambda leaf: {"a": [Point(leaf, (Pair(leaf, {}),))]},
    ],
    ids=[
        "list",
        "tuple",
        "dict",
        "OrderedDict",
        "UserDict",
        "proxy",
        "mapping",
        "namedtuple",
        "dataclass",
        "frozen",
        "nested",
    ],
)
def test_containers_keep_their_type_and_the_samples_their_contents(wrap: Callable[[Any], Any]) -> None:
    for make in MEMORIES:
        samples = [wrap(1), wrap(2)]
        batch = default_collate(samples, make())
        assert type(batch) is type(samples[0])
        assert leaves_of(batch)[0].tolist() == [1, 2]
        assert [leaves_of(sample) for sample in samples] == [leaves_of(wrap(1)), leaves_of(wrap(2))]


def leaves_of(thing: Any) -> list[Any]:
    if isinstance(thing, (Pair, FrozenPair)):
        return leaves_of(thing.left) + leaves_of(thing.right)
    if isinstance(thing, (dict, collections.UserDict, MappingProxyType, Shelf)):
        return list(itertools.chain(*(leaves_of(part) for part in thing.values())))
    if isinstance(thing, (list, tuple)):
        return list(itertools.chain(*map(leaves_of, thing)))
    return [thing]


def test_the_order_of_keys_is_that_of_the_first_sample() -> None:
    batch = default_collate([{"b": 1, "a": 2}, {"a": 3, "b": 4}])
    assert list(batch) == ["b", "a"]
    assert batch["a"].tolist() == [2, 3]


def test_one_sample_is_a_batch_of_one() -> None:
    for batch in collated([{"x": np.ones((2, 3), np.float32), "y": 1, "name": "a"}]):
        assert batch["x"].shape == (1, 2, 3)
        assert batch["y"].tolist() == [1]
        assert batch["name"] == ["a"]


def test_what_fits_the_arena_is_written_straight_into_it() -> None:
    memory = np.zeros(1 << 12, np.uint8)
    batch = default_collate([{"x": np.full(8, 3, np.uint8), "t": torch.ones(2), "n": 5}] * 2, Arena(memory))
    assert all(np.shares_memory(memory, part) for part in (batch["x"], batch["t"].numpy(), batch["n"]))


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([np.ones(3), np.ones(3), np.ones(4)], r"^sample: .*shape \(3,\).*\(4,\) in sample 2"),
        ([{"x": np.ones(3)}, {"x": np.ones((3, 1))}], r"^sample\['x'\]: .*\(3, 1\) in sample 1"),
        ([[torch.ones(2)], [torch.ones(3)]], r"^sample\[0\]: .*shape \(2,\).*\(3,\) in sample 1"),
        ([Point(1, [1, 2]), Point(1, [1])], r"^sample\.y: .*length 2.* 1 in sample 1"),
        ([Pair(1, (1,)), Pair(1, ())], r"^sample\.right: .*length 1.* 0 in sample 1"),
        ([{"a": 1}, {"a": 1, "b": 2}], r"""^sample: .*\["'a'"\].*"'b'".* in sample 1"""),
        ([{"a": {"b": 1}}, {"a": 3}], r"^sample\['a'\]: .*int in sample 1"),
    ],
)
def test_samples_that_differ_are_named_by_path_and_number(samples: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        default_collate(samples)
    assert "collate_fn" in str(caught.value)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        default_collate([])


def with_memory(samples: list[Any], memory: BatchMemory) -> NDArray[Any]:
    batch = memory.empty((len(samples),), np.int64)
    batch[:] = samples
    return batch


def with_own_memory(samples: list[int], memory: Any = None) -> tuple[list[int], Any]:
    return samples, memory


class OwnMemory:
    def __call__(self, samples: list[int], memory: int = 3) -> tuple[list[int], Any]:
        return samples, memory

    def collate(self, samples: list[int], *, memory: object = "own") -> tuple[list[int], Any]:
        return samples, memory


def with_options(samples: list[int], **options: Any) -> tuple[list[int], Any]:
    return samples, options


@wraps(default_collate)
def like_default(samples: list[int]) -> tuple[list[int], Any]:
    return samples, None


def with_bound(samples: list[int], memory: BatchMemory | int = 0) -> tuple[list[int], Any]:
    return samples, memory


@pytest.mark.parametrize(
    ("collate_fn", "memory"),
    [
        (with_own_memory, None),
        (like_default, None),
        (partial(with_own_memory, memory=[7]), [7]),
        (partial(with_bound, memory=7), 7),
        (OwnMemory(), 3),
        (OwnMemory().collate, "own"),
        (with_options, {}),
        (lambda samples, memory=5: (samples, memory), 5),
    ],
)
def test_a_parameter_memory_without_the_annotation_is_the_users(collate_fn: Any, memory: Any) -> None:
    assert collate_into(collate_fn)([1, 2], Arena(np.zeros(64, np.uint8))) == ([1, 2], memory)


class CallableCollate:
    """One that is an object."""

    def __call__(self, samples: list[Any], memory: BatchMemory | None = None) -> NDArray[Any]:
        assert memory is not None
        return with_memory(samples, memory)


@pytest.mark.parametrize("collate_fn", [None, with_memory, CallableCollate(), default_collate])
def test_a_collate_function_that_takes_memory_writes_into_it(collate_fn: Callable[..., Any] | None) -> None:
    slot = np.zeros(4096, np.uint8)
    batch = collate_into(collate_fn)([1, 2, 3], Arena(slot))
    assert batch.tolist() == [1, 2, 3]
    assert np.shares_memory(batch, slot)
