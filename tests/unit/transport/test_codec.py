from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swift_loader.errors import ProtocolError
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import BatchEncoder, decode, encode
from swift_loader.transport.encoder import Encoded
from tests.support.helpers import slow

quiet_torch = pytest.mark.filterwarnings(
    "ignore:.*quantized tensor creation:UserWarning",
    "ignore:.*TypedStorage is deprecated:UserWarning",
    "ignore:.*nested tensors is in prototype:UserWarning",
    "ignore:.*Sparse:UserWarning",
    "ignore:.*ComplexHalf:UserWarning",
    "ignore:.*BComplex32 support is experimental:UserWarning",
)
"""What torch itself says about making or rebuilding these tensors."""


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenPair:
    left: Any
    right: Any


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1


class Graph:
    """Moves itself."""

    def __init__(self, nodes: torch.Tensor, name: str) -> None:
        self.nodes, self.name = nodes, name

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device), self.name)

    def pin_memory(self) -> Graph:
        return self


class Offering:
    """Offers its bytes out of band, as other libraries do."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: object) -> Any:
        return Offering, (pickle.PickleBuffer(self.data),)


def memory_of(arena: Arena) -> NDArray[np.uint8]:
    memory = np.empty(arena.used, np.uint8)
    arena.move_to(memory)
    return memory


def encoded(batch: object, capacity: int = 0) -> tuple[Encoded, Arena]:
    arena = Arena(np.empty(capacity, np.uint8))
    return encode(batch, arena, Definitions()), arena


def round_trip(batch: object, capacity: int = 1 << 12) -> Any:
    sent, arena = encoded(batch, capacity)
    return decode(memoryview(sent.meta), sent.num_blocks, memory_of(arena), Definitions())


def assert_same_array(arrived: object, sent: NDArray[Any]) -> None:
    assert type(arrived) is type(sent)
    assert isinstance(arrived, np.ndarray)
    assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
    assert arrived.flags.writeable
    if sent.dtype.hasobject:
        assert arrived.tolist() == sent.tolist()
    else:
        assert arrived.tobytes() == sent.tobytes()


def assert_same_tensor(arrived: object, sent: torch.Tensor) -> None:
    assert type(arrived) is type(sent)
    assert isinstance(arrived, torch.Tensor)
    assert (arrived.dtype, arrived.shape, arrived.layout) == (sent.dtype, sent.shape, sent.layout)
    assert arrived.requires_grad == sent.requires_grad
    assert arrived.is_leaf
    ours, theirs = (tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in (sent, arrived))
    assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


# NumPy ----------------------------------------------------------------------------------------------------------------

STRUCTURED = np.dtype([("id", "<i4"), ("box", "<f4", (2, 2)), ("name", "U3")], align=True)
DTYPES = [*"?bBhHiIlLqQefdgFDG", "S3", "U4", "V5", "M8[ns]", "M8[D]", "m8[us]", ">i4", ">f8", ">U2", ">M8[s]", ">c8"]


def array_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    nbytes = int(np.prod(shape)) * dtype.itemsize
    values = np.frombuffer(bytes(position % 2 for position in range(nbytes)), np.uint8)
    return np.ndarray(shape, dtype, buffer=values.copy()) if nbytes else np.empty(shape, dtype)


def test_arrays_of_every_dtype_arrive_in_every_shape() -> None:
    dtypes = [*map(np.dtype, DTYPES), STRUCTURED]
    for dtype, shape in product(dtypes, [(), (1,), (3, 2), (0,), (2, 0, 3), (300,)]):
        array = array_of(dtype, shape)
        assert_same_array(round_trip(array), array)
        assert_same_array(round_trip(array[..., None].T), array[..., None].T)


ARRAYS: dict[str, Callable[[], NDArray[Any]]] = {
    "sliced": lambda: np.arange(60).reshape(6, 10)[1:5:2, ::3],
    "reversed": lambda: np.arange(10)[::-1],
    "transposed": lambda: np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "Fortran order": lambda: np.asfortranarray(np.arange(12).reshape(3, 4)),
    "broadcast": lambda: np.broadcast_to(np.arange(3), (4, 3)),
    "field of a structure": lambda: np.zeros(4, [("a", "i1"), ("b", "f8")])["b"],
    "read-only": lambda: np.frombuffer(b"abcdef", np.uint8),
    "objects": lambda: np.array([1, "a", None, (2, 3)], dtype=object),
    "an object": lambda: np.array(None, dtype=object),
    "structure with objects": lambda: np.array([(1, "x")], dtype=[("a", "i4"), ("b", "O")]),
    "nan and negative zero": lambda: np.array([np.nan, -0.0, np.inf, -np.nan]),
    "not a time": lambda: np.array(["NaT", "2020-02-29"], "M8[D]"),
    "unaligned": lambda: np.frombuffer(b"x" * 41, np.uint8)[1:].view("f8"),
    "record": lambda: np.rec.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "matrix of strings": lambda: np.array([["a", "bcd"], ["", "ü"]]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_unusual_arrays_arrive_intact_and_writable(name: str) -> None:
    array = ARRAYS[name]()
    arrived = round_trip(array)
    assert_same_array(arrived, array)
    assert arrived.flags.f_contiguous or not array.flags.f_contiguous


def test_masked_arrays_keep_their_mask() -> None:
    arrived = round_trip(np.ma.array([1, 2, 3], mask=[False, True, False], fill_value=7))
    assert isinstance(arrived, np.ma.MaskedArray)
    assert arrived.tolist() == [1, None, 3]
    assert arrived.fill_value == 7


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1 has no such strings")
def test_strings_of_any_length_arrive() -> None:
    array = np.array(["a", "long " * 20], dtype=np.dtypes.StringDType())
    assert_same_array(round_trip(array), array)


@pytest.mark.parametrize(
    "scalar", [np.float32(1.5), np.int8(-3), np.bool_(True), np.datetime64("2020-01-01"), np.str_("x")]
)
def test_numpy_scalars_keep_their_type(scalar: np.generic) -> None:
    arrived = round_trip(scalar)
    assert type(arrived) is type(scalar)
    assert arrived == scalar


# Tensors --------------------------------------------------------------------------------------------------------------

TENSOR_DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.tensor([position % 2 for position in range(count)], dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@quiet_torch
def test_tensors_of_every_dtype_arrive_in_every_shape() -> None:
    for dtype, shape in product(TENSOR_DTYPES, [(), (1,), (3, 2), (0,), (2, 0, 3), (300,)]):
        tensor = tensor_of(dtype, shape)
        assert_same_tensor(round_trip(tensor), tensor)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sliced": lambda: torch.arange(60.0).view(6, 10)[1:5:2, ::3],
    "transposed": lambda: torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "channels last": lambda: torch.arange(96.0).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "overlapping": lambda: torch.arange(5.0).as_strided((3, 3), (1, 1)),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "a conjugated number": lambda: torch.tensor(1 + 2j).conj(),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "requires grad, sliced": lambda: torch.ones(6)[::2].requires_grad_(True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 2)),
    "empty, strided": lambda: torch.empty(2, 0, 3).transpose(0, 2),
    "not a number": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_unusual_tensors_arrive_intact_and_writable(name: str) -> None:
    tensor = TENSORS[name]()
    arrived = round_trip(tensor)
    assert_same_tensor(arrived, tensor)
    assert not arrived.is_conj()
    assert not arrived.is_neg()
    with torch.no_grad():
        arrived.fill_(1)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


@quiet_torch
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
def test_sparse_tensors_keep_their_layout(layout: str) -> None:
    matrix = torch.tensor([[0, 1.5, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0]])
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "coo": lambda: matrix.to_sparse(),  # noqa: PLW0108 - has overloads that mypy can't choose from
        "csr": matrix.to_sparse_csr,
        "csc": matrix.to_sparse_csc,
        "bsr": lambda: matrix.to_sparse_bsr((2, 2)),
    }
    tensor = makers[layout]()
    arrived = round_trip(tensor)
    assert arrived.layout is tensor.layout
    assert torch.equal(dense(arrived), matrix)


@quiet_torch
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32], ids=str)
def test_quantised_tensors_keep_scale_and_zero_point(dtype: torch.dtype) -> None:
    tensor = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, dtype)
    arrived = round_trip(tensor)
    assert (arrived.dtype, arrived.q_scale(), arrived.q_zero_point()) == (dtype, 0.5, 3)
    assert torch.equal(dense(arrived), dense(tensor))


@quiet_torch
@pytest.mark.parametrize("layout", [torch.strided, slow(torch.jagged)], ids=str)
def test_nested_tensors_keep_their_parts(layout: torch.layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which torch makes when it first meets such a tensor
    parts = [torch.ones(2, 3), torch.zeros(4, 3)]
    arrived = round_trip(torch.nested.nested_tensor(parts, layout=layout))
    assert arrived.is_nested
    assert arrived.layout is layout
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(parts, arrived.unbind(), strict=True))


# Structure ------------------------------------------------------------------------------------------------------------

PLAIN: list[Any] = [
    None,
    True,
    -(10**30),
    1.5,
    2j,
    "text\0ü\N{GRINNING FACE}",
    b"bytes",
    bytearray(b"more"),
    ...,
    [],
    (),
    {},
    set(),
    [1, [2, (3, "four")]],
    {"a": {"b": [1]}, 3: None, (1, 2): "x"},
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter("aab"),
    collections.deque([1, 2], 5),
    {1, "two"},
    frozenset({1}),
    range(3, 9, 2),
    slice(1, None),
    Point(1, "y"),
    Pair(1, [2]),
    FrozenPair("a", None),
    Colour.RED,
    Decimal("1.10"),
    datetime.timedelta(3),
    Path("some/where"),
    int,
    Point,
    len,
    np.dtype("f4"),
    np.float32,
    torch.float32,
    torch.Size([1, 2]),
    torch.device("cpu"),
    type(None),
]


def test_plain_values_arrive_with_their_type() -> None:
    for value in PLAIN:
        arrived = round_trip(value)
        assert arrived == value
        assert type(arrived) is type(value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda leaf: [leaf],
        lambda leaf: (leaf, 1),
        lambda leaf: {"key": leaf},
        lambda leaf: collections.OrderedDict(key=leaf),
        lambda leaf: Point(leaf, 1),
        lambda leaf: Pair(leaf, None),
        lambda leaf: FrozenPair(leaf, None),
        lambda leaf: Graph(leaf, "g"),
    ],
    ids=["list", "tuple", "dict", "OrderedDict", "namedtuple", "dataclass", "frozen dataclass", "custom"],
)
def test_bulk_data_stay_out_of_the_structure_in_any_container(wrap: Callable[[Any], Any]) -> None:
    for leaf in (np.arange(10_000), torch.arange(10_000)):
        batch = wrap(leaf)
        sent, arena = encoded(batch)
        assert len(sent.meta) < 500
        assert arena.used >= 80_000
        assert type(round_trip(batch)) is type(batch)


@pytest.mark.parametrize("leaf", [np.arange(100), torch.arange(5), torch.ones(2, requires_grad=True)], ids=type)
def test_two_references_to_one_leaf_stay_one(leaf: Any) -> None:
    arrived = round_trip({"a": leaf, "b": [leaf]})
    assert arrived["a"] is arrived["b"][0]
    assert encoded([leaf, leaf])[1].used == encoded([leaf])[1].used > 0


def test_small_arrays_go_into_the_structure_and_arrive_alike() -> None:
    small = np.arange(6, dtype=np.int16)
    leaves = [small, small[::2], small.reshape(2, 3), small.reshape(2, 3).T, np.array(3.5), np.empty((0, 3), "M8[s]")]
    batch = [*leaves, small]
    assert encoded(batch)[1].used == 64  # the one whose order is another
    arrived = round_trip(batch)
    assert arrived[0] is arrived[-1]
    for array, original in zip(arrived, batch, strict=True):
        assert (array.dtype, array.shape, array.tolist()) == (original.dtype, original.shape, original.tolist())
        assert array.flags.writeable
        assert array.flags.aligned


def test_a_structure_that_holds_itself_arrives() -> None:
    batch: list[Any] = [np.arange(3)]
    batch.append(batch)
    arrived = round_trip(batch)
    assert arrived[1] is arrived


@pytest.mark.parametrize("data", [b"", b"some bytes", bytearray(b"more")])
def test_buffers_of_other_libraries_travel_as_bulk_data(data: bytes | bytearray) -> None:
    arrived = round_trip(Offering(data))
    assert bytes(arrived.data) == bytes(data)
    assert memoryview(arrived.data).readonly == isinstance(data, bytes)
    assert encoded(Offering(b"x" * 1000))[1].used >= 1000


# Memory ---------------------------------------------------------------------------------------------------------------

STORAGE = 100_000


def slice_with_attribute() -> torch.Tensor:
    tensor = torch.zeros(STORAGE)[:4]
    tensor.label = "cat"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(STORAGE)[:4],
        lambda: np.zeros((100, STORAGE // 100))[:, 0],
        lambda: np.broadcast_to(np.zeros(1), (100,)),
        lambda: torch.zeros(STORAGE)[:4],
        lambda: torch.zeros(100, STORAGE // 100)[:, 0],
        lambda: torch.zeros(STORAGE)[:4].requires_grad_(True),
        lambda: torch.nn.Parameter(torch.zeros(STORAGE)[:4]),
        slice_with_attribute,
        lambda: list(torch.zeros(STORAGE).view(-1, 4)[:: STORAGE // 16]),
    ],
    ids=["array", "column", "broadcast", "tensor", "tensor column", "grad", "parameter", "attribute", "rows"],
)
def test_a_slice_does_not_ship_its_storage(make: Callable[[], Any]) -> None:
    sent, arena = encoded(make())
    assert arena.used + len(sent.meta) < 2000


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize(("is_in_arena", "whole_first"), [(False, False), (False, True), (True, False)])
def test_views_of_one_tensor_share_memory_and_travel_once(
    dtype: torch.dtype, is_in_arena: bool, whole_first: bool
) -> None:
    arena = Arena(np.empty(1 << 12, np.uint8))
    tokens = arena.empty_tensor((4, 32), dtype) if is_in_arena else torch.empty((4, 32), dtype=dtype)
    tokens[:] = torch.arange(128).reshape(4, 32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "columns": tokens.t(), "half": tokens[2:]}
    batch = {"whole": tokens, **batch} if whole_first else {**batch, "whole": tokens}
    with torch.device("meta"):  # a program's default device
        sent = encode(batch, arena, Definitions())
    assert arena.used == tokens.nbytes
    arrived = decode(memoryview(sent.meta), sent.num_blocks, memory_of(arena), Definitions())
    for name, expected in batch.items():
        assert torch.equal(arrived[name], expected)
    arrived["inputs"][2, 5] = 99
    assert arrived["targets"][2, 4] == arrived["columns"][5, 2] == arrived["half"][0, 5] == arrived["whole"][2, 5] == 99


def test_what_was_made_in_the_arena_is_not_copied() -> None:
    arena = Arena(np.empty(1 << 12, np.uint8))
    array, tensor = arena.empty((4,), "i8"), arena.empty_tensor((4,), torch.int64)
    array[:], tensor[:] = 5, torch.tensor(6)
    used = arena.used
    sent = encode({"a": array, "t": tensor, "again": array}, arena, Definitions())
    assert arena.used == used
    arrived = decode(memoryview(sent.meta), sent.num_blocks, memory_of(arena), Definitions())
    assert arrived["a"].tolist() == [5] * 4
    assert arrived["t"].tolist() == [6] * 4
    assert arrived["again"] is arrived["a"]


def leaves_in(arena: Arena, number: int) -> tuple[NDArray[Any], torch.Tensor]:
    array, tensor = arena.empty((2, 3), "i4"), arena.empty_tensor((4,), torch.int64)
    array[:], tensor[:] = number, number
    return array, tensor


FLAT: dict[str, Callable[[Any, Any], Any]] = {
    "a dict": lambda a, t: {"a": a, "t": t},
    "other names": lambda a, t: {"a": a, "u": t},
    "names that are equal": lambda a, t: {1: a, 2: t},
    "and of another type": lambda a, t: {True: a, 2: t},
    "a list": lambda a, t: [a, t],
    "a tuple": lambda a, t: (a, t),
    "one twice": lambda a, t: [a, a],
    "another order": lambda a, t: [t, a],
    "another shape": lambda a, t: [a.reshape(3, 2), t],
    "a gradient": lambda a, t: [a, t.float().requires_grad_()],
}


def test_a_batch_arrives_alike_whatever_the_one_before_was() -> None:
    encoder = BatchEncoder(Definitions())
    for first, second in product(FLAT.values(), repeat=2):
        for number, make in enumerate([first, second, second]):
            arena = Arena(np.empty(1 << 12, np.uint8))
            batch = make(*leaves_in(arena, number))
            sent = encoder.encode(batch, arena)
            arrived = decode(memoryview(sent.meta), sent.num_blocks, memory_of(arena), Definitions())
            assert repr(arrived) == repr(batch)
            leaves = list(arrived.values()) if isinstance(arrived, dict) else arrived
            assert (leaves[0] is leaves[1]) == (make is FLAT["one twice"])


def test_arrivals_are_views_of_the_memory() -> None:
    sent, arena = encoded([np.zeros(1000, np.uint8), torch.zeros(1000, dtype=torch.uint8)])
    memory = memory_of(arena)
    array, tensor = decode(memoryview(sent.meta), sent.num_blocks, memory, Definitions())
    memory[:] = 7
    assert array.tolist() == tensor.tolist() == [7] * 1000


# Refusals -------------------------------------------------------------------------------------------------------------


ROW = struct.Struct("<QQ")


@pytest.mark.parametrize("row", [(0, 801), (1, 800), (801, 0), (2**63, 2**63), (2**64 - 1, 1), (0, 2**64 - 2)])
def test_a_buffer_outside_the_memory_is_refused(row: tuple[int, int]) -> None:
    sent, arena = encoded(np.arange(100))
    memory = memory_of(arena)[:800]
    meta = ROW.pack(*row) + sent.meta[ROW.size :]
    with pytest.raises(ProtocolError, match="outside a slot of 800 bytes"):
        decode(memoryview(meta), 1, memory, Definitions())
