"""Samples of all kinds for collating, as hypothesis strategies, and what to compare the batches by."""

from __future__ import annotations

import array
import collections
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

Column = list[Any]
"""What the samples of one batch have at one place."""

# Leaves ---------------------------------------------------------------------------------------------------------------

SHAPES = [(), (0,), (1,), (3, 2), (1, 3), (2, 0, 3), (90, 100)]

ARRAY_DTYPES = [*"?bBhHiIqQefdFD", ">i4", "g", "S3", "U2", "O", "M8[s]", "m8[s]", "i4,f4"]

TENSOR_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.float64,
    torch.complex64,
]


class TensorOfUser(torch.Tensor):
    """A subclass of Tensor."""


def _read_only(values: Any) -> Any:
    values.flags.writeable = False
    return values


def _one_field_of_a_record(values: Any) -> Any:
    record = np.zeros(values.shape, [("x", "i1"), ("y", values.dtype)])
    record["y"] = values
    return record["y"]


ARRAY_VIEWS: list[Callable[[Any], Any]] = [
    lambda values: values,
    lambda values: values[::-1] if values.ndim else values,
    lambda values: values[::2] if values.ndim else values,
    lambda values: values.T,
    np.asfortranarray,
    lambda values: np.broadcast_to(values[:1], values.shape) if values.ndim and values.size else values,
    _read_only,
    _one_field_of_a_record,
    lambda values: values.view(np.memmap) if values.dtype != object else values,
    lambda values: np.ma.array(values) if values.dtype != object else values,
]

TENSOR_VIEWS: list[Callable[[Any], Any]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.mT if tensor.ndim > 1 else tensor,
    lambda tensor: tensor[::2] if tensor.ndim else tensor,
    lambda tensor: tensor.conj(),
    lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor,
    lambda tensor: tensor.requires_grad_() * 1 if tensor.dtype == torch.float32 else tensor,
    lambda tensor: tensor.as_subclass(TensorOfUser),
    lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    lambda tensor: tensor.to_sparse() if tensor.dtype == torch.float32 else tensor,
    lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8) if tensor.dtype == torch.float32 else tensor,
    lambda tensor: torch.nested.nested_tensor([tensor]) if tensor.dtype == torch.float32 else tensor,
]


def _array(dtype: str, shape: tuple[int, ...], view: Callable[[Any], Any], start: int) -> Any:
    count = int(np.prod(shape))
    plain = np.arange(start, start + count).reshape(shape)
    if dtype == "i4,f4":
        return view(np.zeros(shape, dtype))
    return view(np.asarray(plain % 2 == 0 if dtype == "?" else plain % 100).astype(dtype))


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], view: Callable[[Any], Any], start: int) -> Any:
    return view(torch.arange(start, start + int(np.prod(shape))).remainder(100).reshape(shape).to(dtype))


def _of_same_kind(make: Callable[..., Any], *choices: Sequence[Any]) -> st.SearchStrategy[Callable[[int], Any]]:
    """Return functions that make the leaf of a sample from its number; all choices but the number are the same."""
    return st.tuples(*map(st.sampled_from, choices)).map(lambda chosen: lambda number: make(*chosen, number))


ARRAYS = _of_same_kind(_array, ARRAY_DTYPES, SHAPES, ARRAY_VIEWS)
TENSORS = _of_same_kind(_tensor, TENSOR_DTYPES, SHAPES, TENSOR_VIEWS)
SCALARS = _of_same_kind(lambda dtype, number: _array(dtype, (1,), ARRAY_VIEWS[0], number)[0], ARRAY_DTYPES)

NUMBERS = st.one_of(
    st.integers(-5, 5), st.integers(-(2**65), 2**65), st.booleans(), st.floats(), st.complex_numbers(), st.just(None)
)

Flag = type("Flag", (int,), {})
"""A subclass of int."""

OTHERS = st.sampled_from(
    [[], (), {}, "text", b"bytes", "", Flag(3), object(), len, {1}, np.str_("x"), np.float64(2), slice(1)]
)

CONSTANTS = st.one_of(NUMBERS, OTHERS).map(lambda leaf: lambda _: leaf)

LEAVES = st.one_of(ARRAYS, TENSORS, SCALARS, CONSTANTS)


def _several(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Callable[[int], Any]]]:
    return st.lists(values.map(lambda leaf: lambda _: leaf), min_size=1, max_size=3)


KINDS = [
    ARRAYS.map(lambda leaf: [leaf]),
    TENSORS.map(lambda leaf: [leaf]),
    SCALARS.map(lambda leaf: [leaf]),
    _several(st.integers()),
    _several(st.floats()),
    _several(st.booleans()),
    st.lists(ARRAYS, min_size=2, max_size=2),
    st.lists(TENSORS, min_size=2, max_size=2),
    st.lists(LEAVES, min_size=1, max_size=2),
]
"""Leaves of one kind, or of several."""


def leaf_columns(num_samples: int) -> st.SearchStrategy[Column]:
    """Return a leaf for each sample."""
    return st.one_of(KINDS).map(lambda leaves: [leaves[number % len(leaves)](number) for number in range(num_samples)])


# Containers -----------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A namedtuple of any length isn't possible, so this one has two fields."""

    x: Any
    y: Any


class Named(dict[str, Any]):
    """A dict with an attribute."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.name = "a name"


class FixedMapping(Mapping[str, Any]):
    """A Mapping that can't be changed, but can be made."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class ClosedMapping(FixedMapping):
    """A Mapping that can't be made from a dict."""

    def __init__(self, items: Mapping[str, Any], _secret: int) -> None:
        super().__init__(items)


class OpenMapping(FixedMapping, MutableMapping[str, Any]):
    """A Mapping that can be changed."""

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __copy__(self) -> OpenMapping:
        return type(self)(self._items)


class FixedSequence(Sequence[Any]):
    """A Sequence that can't be changed, but can be made."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class ClosedSequence(FixedSequence):
    """A Sequence that can't be made from a list."""

    def __init__(self, items: Sequence[Any], _secret: int) -> None:
        super().__init__(items)


class OpenSequence(FixedSequence, MutableSequence[Any]):
    """A Sequence that can be changed."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self._items[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._items[index]

    def insert(self, index: int, value: Any) -> None:
        self._items.insert(index, value)

    def __copy__(self) -> OpenSequence:
        return type(self)(self._items)


class StubbornSequence(OpenSequence):
    """A MutableSequence that refuses other items."""

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("no")


class ListOfUser(list[Any]):
    """A subclass of list."""


def _keyed(values: Sequence[Any]) -> dict[str, Any]:
    return {f"k{place}": value for place, value in enumerate(values)}


CONTAINERS: list[Callable[[Sequence[Any]], Any]] = [
    list,
    tuple,
    ListOfUser,
    collections.deque,
    FixedSequence,
    OpenSequence,
    StubbornSequence,
    lambda values: ClosedSequence(values, 1),
    lambda values: Point(*(list(values) * 2)[:2]) if values else (),
    _keyed,
    lambda values: Named(_keyed(values)),
    lambda values: collections.OrderedDict(_keyed(values)),
    lambda values: collections.defaultdict(int, _keyed(values)),
    lambda values: collections.Counter(_keyed(values)),
    lambda values: collections.UserDict(_keyed(values)),
    lambda values: types.MappingProxyType(_keyed(values)),
    lambda values: FixedMapping(_keyed(values)),
    lambda values: ClosedMapping(_keyed(values), 1),
    lambda values: OpenMapping(_keyed(values)),
]

FIXED_ROWS = [range(2), array.array("i", [1, 2]), array.array("d", [1, 2]), bytearray(b"ab"), memoryview(b"ab")]


@st.composite
def container_columns(draw: st.DrawFn, num_samples: int, inner: st.SearchStrategy[Column]) -> Column:
    """Return containers of other columns, whose lengths sometimes differ."""
    columns = draw(st.lists(inner, max_size=3))
    make = draw(st.sampled_from(CONTAINERS))
    rows = [[column[number] for column in columns] for number in range(num_samples)]
    if draw(st.integers(0, 20)) == 0 and num_samples > 1:
        rows[-1] = rows[-1][:-1]
    if draw(st.integers(0, 20)) == 0:
        return [draw(st.sampled_from(FIXED_ROWS))] * num_samples
    return [make(row) for row in rows]


def batches_of_samples() -> st.SearchStrategy[list[Any]]:
    """Return the samples of a batch: most can be collated, and some can't."""
    return st.sampled_from([1, 2, 3, 40]).flatmap(
        lambda num_samples: st.recursive(
            leaf_columns(num_samples), lambda inner: container_columns(num_samples, inner), max_leaves=4
        )
    )


# Comparing ------------------------------------------------------------------------------------------------------------


def described(thing: Any) -> Any:
    """Return what two batches must have in common, as something that can be compared."""
    kind = type(thing)
    if isinstance(thing, torch.Tensor):
        return kind, *_described_tensor(thing)
    if isinstance(thing, Mapping):
        extra = {name: value for name, value in getattr(thing, "__dict__", {}).items() if name == "name"}
        items = [(key, described(thing[key])) for key in thing]
        return kind, items, extra, getattr(thing, "default_factory", None)
    if isinstance(thing, np.ndarray):
        return kind, thing.dtype, thing.shape, thing.tolist()
    if isinstance(thing, Sequence) and not isinstance(thing, (str, bytes)):
        return kind, [described(part) for part in thing]
    return kind, repr(thing)


def _described_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    kept = tensor.dtype, tensor.layout, tensor.device, tensor.requires_grad, tensor.is_leaf
    if tensor.is_quantized or tensor.layout is not torch.strided:
        return *kept, tensor.shape, repr(tensor)
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return *kept, tensor.shape, tensor.stride(), plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def outcome(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Return the described batch, or the type and message of the error."""
    try:
        batch = collate(samples)
    except Exception as error:
        return type(error), str(error)
    return described(batch)
