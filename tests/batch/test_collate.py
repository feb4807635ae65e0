from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from swift_loader.batch.collate import BatchMemory, HeapMemory, collate_into, default_collate
from swift_loader.transport.arena import Arena


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Pair:
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class FrozenPair:
    left: Any
    right: Any


class Shelf(MutableMapping[str, Any]):
    """Keeps its items in a dict that a shallow copy shares."""

    def __init__(self, items: dict[str, Any] | None = None) -> None:
        self.items_of = dict(items or {})

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


def arena() -> Arena:
    return Arena(np.empty(1 << 16, np.uint8))


MEMORIES: list[Callable[[], BatchMemory]] = [HeapMemory, arena, lambda: Arena(np.empty(0, np.uint8))]


def collated(samples: list[Any]) -> list[Any]:
    """The batch, once in each kind of memory."""
    return [default_collate(samples, make()) for make in MEMORIES]


def assert_same(batch: object, expected: NDArray[Any]) -> None:
    assert isinstance(batch, np.ndarray)
    assert (batch.dtype, batch.shape) == (expected.dtype, expected.shape)
    assert batch.flags.c_contiguous
    if expected.dtype.hasobject:
        assert batch.tolist() == expected.tolist()
    else:
        assert batch.tobytes() == expected.tobytes()


# Arrays ---------------------------------------------------------------------------------------------------------------

DTYPES = ["?", "b", "H", ">i4", "q", "Q", "e", "f", ">f8", "g", "F", "D", "S3", "U4", ">U2", "V5", "M8[ns]", "m8[us]"]
STRUCTURED = np.dtype([("id", "<i4"), ("box", "<f4", (2, 2))], align=True)


@pytest.mark.parametrize("dtype", [*map(np.dtype, DTYPES), STRUCTURED], ids=str)
def test_arrays_of_every_dtype_are_stacked(dtype: np.dtype[Any]) -> None:
    for shape in [(), (1,), (3, 2), (0,), (2, 0, 3), (3000,)]:
        samples = [np.zeros(shape, dtype), np.ones(shape, dtype) if dtype.kind not in "VM" else np.zeros(shape, dtype)]
        for batch in collated(samples):
            assert_same(batch, np.stack(samples).astype(dtype))


@given(
    samples=st.tuples(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_dims=3)).flatmap(
        lambda kind: st.lists(hnp.arrays(*kind), min_size=1, max_size=4)
    )
)
@settings(max_examples=150, deadline=None)
def test_any_arrays_of_one_kind_are_stacked(samples: list[NDArray[Any]]) -> None:
    for batch in collated(list(samples)):
        assert_same(batch, np.stack(samples).astype(samples[0].dtype))


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[::2],
        lambda array: array[::-1],
        lambda array: array.T,
        np.asfortranarray,
        lambda array: np.broadcast_to(array[:1], array.shape),
    ],
    ids=["strided", "reversed", "transposed", "fortran", "broadcast"],
)
@pytest.mark.parametrize("size", [4, 60])
def test_arrays_that_are_not_contiguous_are_stacked(view: Callable[[Any], Any], size: int) -> None:
    samples = [view(np.arange(start, start + size * size).reshape(size, size)) for start in (0, 1000)]
    for batch in collated(samples):
        assert_same(batch, np.stack(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [np.array([1]), np.array([1.5])],
        [np.array([1], ">i4"), np.array([1], "<i4")],
        [np.array(["a"]), np.array(["abc"])],
        [np.array("a"), np.array("abc")],
        [np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-01T10"], "M8[h]")],
        [np.array([True]), np.array([3], np.int8)],
        [np.array([None]), np.array([{"a": 1}])],
    ],
    ids=["int and float", "byte orders", "strings", "0-d strings", "units", "bool and int", "objects"],
)
def test_arrays_of_several_dtypes_are_promoted(samples: list[Any]) -> None:
    for batch in collated(samples):
        assert_same(batch, np.stack(samples))


def test_memory_maps_become_arrays(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("maps") / "values"
    file.write_bytes(np.arange(10, dtype=np.int32).tobytes())
    mapped = np.memmap(file, np.int32, "r")
    for batch in collated([mapped, mapped]):
        assert_same(batch, np.stack([np.arange(10, dtype=np.int32)] * 2))
        assert type(batch) is np.ndarray


def test_masked_arrays_keep_their_masks_in_a_list() -> None:
    sample = np.ma.array([1, 2], mask=[False, True])
    for batch in collated([sample, sample]):
        assert batch == [sample, sample] or [part.tolist() for part in batch] == [[1, None]] * 2


# Tensors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.int64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float32,
        torch.complex64,
    ],
    ids=str,
)
def test_tensors_of_every_dtype_are_stacked(dtype: torch.dtype) -> None:
    for shape in [(), (1,), (3, 2), (0,), (2, 0, 3)]:
        samples = [torch.zeros(shape).to(dtype), torch.ones(shape).to(dtype)]
        for batch in collated(samples):
            assert (batch.dtype, batch.shape) == (dtype, (2, *shape))
            assert torch.equal(
                batch.to(torch.complex64), torch.stack([sample.to(torch.complex64) for sample in samples])
            )


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3.0).expand(4, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=["transposed", "expanded", "conjugated", "negated", "leaf", "result", "parameter"],
)
def test_unusual_tensors_are_stacked_without_a_graph(sample: torch.Tensor) -> None:
    for batch in collated([sample, sample]):
        assert type(batch) is torch.Tensor
        assert not batch.requires_grad
        assert torch.equal(batch, torch.stack([sample.detach()] * 2))


def test_tensors_of_several_dtypes_are_promoted() -> None:
    for batch in collated([torch.tensor([1]), torch.tensor([1.5])]):
        assert batch.dtype == torch.float32
        assert batch.tolist() == [[1], [1.5]]


@pytest.mark.filterwarnings("ignore:.*Sparse:UserWarning")
def test_sparse_tensors_are_stacked() -> None:
    for batch in collated([torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()]):
        assert batch.is_sparse
        assert torch.equal(batch.to_dense(), torch.stack([torch.eye(2), torch.zeros(2, 2)]))


# Numbers and the rest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([True, False], "?"),
        ([1, 2], "i8"),
        ([1, 2.5], "f8"),
        ([1, True], "i8"),
        ([1j, 2.0], "c16"),
        ([np.float32(1), np.float32(2)], "f4"),
        ([np.int8(1), np.int8(2)], "i1"),
        ([np.datetime64("2020-01-01"), np.datetime64("NaT")], "M8[D]"),
        ([np.timedelta64(1, "s")] * 2, "m8[s]"),
        ([2**63, 2**63 + 5], "u8"),
    ],
)
def test_numbers_become_an_array(numbers: list[Any], dtype: str) -> None:
    for batch in collated(numbers):
        assert_same(batch, np.array(numbers, dtype))


@given(numbers=st.lists(st.integers(-(2**65), 2**65) | st.integers(2**63 - 2, 2**63 + 2), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_integers_of_any_size_keep_their_values(numbers: list[int]) -> None:
    batch = default_collate(numbers)
    assert [int(number) for number in batch] == numbers


@pytest.mark.parametrize(
    "samples",
    [["a", "bc"], [b"a", b"b"], [None, None], [{1}, {2}], [1, None], [1, "a"], [np.ones(2), 3], [len, len]],
    ids=str,
)
def test_everything_else_becomes_a_list(samples: list[Any]) -> None:
    for batch in collated(samples):
        assert type(batch) is list
        assert all(part is sample for part, sample in zip(batch, samples, strict=True))


# Structure ------------------------------------------------------------------------------------------------------------


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


class BareShelf(Shelf):
    """Is made empty."""

    def __init__(self) -> None:
        super().__init__()


def test_a_mapping_that_is_made_empty_is_collated() -> None:
    samples = [BareShelf(), BareShelf()]
    for number, sample in enumerate(samples):
        sample["key"] = number
    batch = default_collate(samples)
    assert type(batch) is BareShelf
    assert batch["key"].tolist() == [0, 1]
    assert [sample["key"] for sample in samples] == [0, 1]


def test_a_defaultdict_keeps_its_factory() -> None:
    batch = default_collate([collections.defaultdict(list, a=1), collections.defaultdict(list, a=2)])
    assert batch["a"].tolist() == [1, 2]
    assert batch["missing"] == []


def test_the_order_of_keys_is_that_of_the_first_sample() -> None:
    batch = default_collate([{"b": 1, "a": 2}, {"a": 3, "b": 4}])
    assert list(batch) == ["b", "a"]
    assert batch["a"].tolist() == [2, 3]


def test_a_column_of_differing_types_becomes_a_list() -> None:
    batch = default_collate([{"box": None}, {"box": np.ones(4)}])
    assert batch["box"][0] is None


def test_classes_are_no_instances_and_become_a_list() -> None:
    assert default_collate([Pair, Pair]) == [Pair, Pair]


def test_one_sample_is_a_batch_of_one() -> None:
    for batch in collated([{"x": np.ones((2, 3), np.float32), "y": 1, "name": "a"}]):
        assert batch["x"].shape == (1, 2, 3)
        assert batch["y"].tolist() == [1]
        assert batch["name"] == ["a"]


@pytest.mark.parametrize("empty", [{}, [], ()])
def test_empty_containers_stay_empty(empty: Any) -> None:
    assert default_collate([empty, empty]) == empty


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


@pytest.mark.parametrize("collate_fn", [list, lambda samples: samples, tuple])
def test_one_that_does_not_gets_the_samples_alone_in_a_list(collate_fn: Callable[..., Any]) -> None:
    assert list(collate_into(collate_fn)((1, 2), HeapMemory())) == [1, 2]
    assert type(collate_into(lambda samples: samples)((1, 2), HeapMemory())) is list
