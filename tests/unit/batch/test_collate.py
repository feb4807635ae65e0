from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swift_loader.batch.collate import default_collate
from tests.support.memories import collated


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


def test_arrays_of_every_dtype_are_stacked() -> None:
    for dtype, shape in product([*map(np.dtype, DTYPES), STRUCTURED], [(), (1,), (3, 2), (0,), (2, 0, 3), (3000,)]):
        samples = [np.zeros(shape, dtype), np.ones(shape, dtype) if dtype.kind not in "VM" else np.zeros(shape, dtype)]
        for batch in collated(samples):
            assert_same(batch, np.stack(samples).astype(dtype))


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
def test_arrays_that_are_not_contiguous_are_stacked(view: Callable[[Any], Any]) -> None:
    for size in (4, 60):
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


# Tensors --------------------------------------------------------------------------------------------------------------


TENSOR_DTYPES = [
    torch.bool,
    torch.uint16,
    torch.int64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.complex64,
]


def test_tensors_of_every_dtype_are_stacked() -> None:
    for dtype, shape in product(TENSOR_DTYPES, [(), (1,), (3, 2), (0,), (2, 0, 3)]):
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
        ([np.datetime64("2020-01-01"), np.datetime64("NaT", "D")], "M8[D]"),
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


def test_numbers_become_tensors_only_beside_a_tensor() -> None:
    when = np.datetime64(1, "s")
    image, target, times = default_collate([(torch.ones(2), {"label": 3, "weight": np.float32(0.5)}, when)] * 2)
    assert image.shape == (2, 2)
    assert target["label"].dtype is torch.int64
    assert target["weight"].tolist() == [0.5, 0.5]
    assert target["weight"].dtype is torch.float32
    assert isinstance(times, np.ndarray)
    assert isinstance(default_collate([(np.ones(2), 3)] * 2)[1], np.ndarray)
