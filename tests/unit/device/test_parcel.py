"""What is copied together: the tensors of a batch that lie beside each other, and those that are tiny."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swift_loader.device.move import Parcel

KIB = 1 << 10


def slot_of(*arrays: NDArray[Any]) -> tuple[list[NDArray[Any]], NDArray[np.uint8]]:
    """Return the arrays as they lie in a slot, each at a multiple of 64 bytes, and the slot."""
    ends = np.cumsum([-(-array.nbytes // 64) * 64 for array in arrays])
    memory = np.empty(int(ends[-1]) + 4096, np.uint8)
    placed = []
    for array, end in zip(arrays, ends, strict=True):
        begin = int(end) - -(-array.nbytes // 64) * 64
        there = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        there[...] = array
        placed.append(there)
    return placed, memory


def copied(parcel: Parcel) -> Any:
    return parcel.copied([span.clone() for span in parcel.spans], lambda thing: thing).batch


def rows(number: int, nbytes: int) -> list[NDArray[Any]]:
    return [np.full(nbytes // 4, value, np.float32) for value in range(number)]


def test_thirty_small_tensors_are_four_copies_and_keep_their_values() -> None:
    arrays, memory = slot_of(*rows(30, 128 * KIB))
    parcel = Parcel.pack({f"x{number}": array for number, array in enumerate(arrays)}, memory)
    assert len(parcel.spans) == 5
    batch = copied(parcel)
    assert [int(tensor[-1]) for tensor in batch.values()] == [*range(30)]
    assert all(
        torch.equal(tensor, torch.from_numpy(array)) for tensor, array in zip(batch.values(), arrays, strict=True)
    )


def test_a_label_that_is_kept_keeps_no_image() -> None:
    arrays, memory = slot_of(np.arange(64), np.ones((64, 3, 64, 64), np.uint8), np.arange(64.0))
    label, image, other = copied(Parcel.pack(arrays, memory))
    assert image.untyped_storage().nbytes() == image.nbytes, "it is copied alone"
    assert label.untyped_storage().nbytes() < 1 << 20
    assert torch.equal(other, torch.arange(64.0, dtype=torch.float64))


def test_however_many_are_kept_together_they_keep_less_than_a_mebibyte() -> None:
    arrays, memory = slot_of(*rows(500, 5 * KIB))
    batch = copied(Parcel.pack(arrays, memory))
    assert max(tensor.untyped_storage().nbytes() for tensor in batch) < 1 << 20
    assert [int(tensor[0]) for tensor in batch] == [*range(500)]


def test_a_write_to_one_of_them_is_none_to_another_for_autograd() -> None:
    arrays, memory = slot_of(np.ones(200, np.float32), np.ones(200, np.float32))
    x, mask = copied(Parcel.pack(arrays, memory))
    assert x.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
    weight = torch.ones(200, requires_grad=True)
    loss = (weight * x).sum()
    mask.zero_()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 200
    assert x._base is None


ODD: list[Any] = [
    np.float64(3.5),
    np.array(7, np.int8),
    np.arange(3, dtype=np.int16),
    np.zeros((0, 4)),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    torch.arange(12).reshape(3, 4).T,
    torch.arange(4.0, requires_grad=True),
    torch.arange(6.0).reshape(1, 6)[:, 4],
    torch.arange(6.0).reshape(1, 6)[:, 5],
    torch.eye(3).to_sparse(),
    torch.complex(torch.ones(2), torch.ones(2)).conj(),
    np.array(["text"]),
    None,
    "text",
]


def test_tiny_tensors_are_gathered_and_odd_ones_are_what_they_are() -> None:
    parcel = Parcel.pack({"list": ODD, "dict": {"x": np.arange(5)}})
    assert len(parcel.spans) == 6
    batch = copied(parcel)
    assert batch["dict"]["x"].tolist() == [0, 1, 2, 3, 4]
    for one, other in zip(batch["list"], ODD, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one.to_dense() if one.is_sparse else one, other.to_dense() if other.is_sparse else other)
            assert (one.stride() == other.stride()) if not one.is_sparse else True
        elif isinstance(one, torch.Tensor):
            assert np.array_equal(one.numpy(), other)
            assert one.numpy().dtype == other.dtype
        else:
            assert one is other


def test_kernels_find_each_tensor_at_a_multiple_of_16_bytes() -> None:
    arrays, memory = slot_of(*(np.zeros(length, np.float32) for length in (3, 700, 1001, 5000)))
    views = torch.arange(3000.0).split(1001)
    for batch in (copied(Parcel.pack(arrays, memory)), copied(Parcel.pack([*arrays, *views]))):
        begin = min(tensor.untyped_storage().data_ptr() % 16 for tensor in batch)
        assert begin == 0
        assert not any(tensor.data_ptr() % 16 for tensor in batch)


@pytest.mark.parametrize(
    ("batch", "is_all"),
    [
        ({"x": np.ones(3), "y": [torch.ones(2), 3, "text", None, np.float32(1)]}, True),
        ({"x": np.ones(3), "words": np.array(["a"])}, False),
        ([np.ones(3), object()], False),
        (torch.nn.utils.rnn.pack_sequence([torch.ones(2)]), False),
    ],
)
def test_it_knows_whether_a_part_stays_where_it_is(batch: Any, is_all: bool) -> None:
    assert Parcel.pack(batch).is_all_moved is is_all


def test_views_of_one_storage_lie_beside_each_other() -> None:
    whole = torch.arange(20_000.0)
    parts = [*whole.split(5000)]
    parcel = Parcel.pack(parts)
    assert len(parcel.spans) == 1
    assert torch.equal(torch.cat(copied(parcel)), whole)


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_tensors_that_overlap_or_lie_at_odd_places_keep_their_values(shift: int) -> None:
    memory = np.arange(40_000, dtype=np.uint8)
    arrays: list[Any] = [
        memory[shift : shift + 8000].view(np.float32),
        memory[4000 + shift : 14_000 + shift],
        memory[5:6005],
    ]
    arrays.append(memory[20_001:28_001].view(np.int64))
    batch = copied(Parcel.pack([array.copy() * 0 + array for array in arrays], None))
    packed = copied(Parcel.pack(arrays, memory))
    for one, other in zip(packed, batch, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    packed[1].zero_()
    assert packed[0].numpy().tobytes() == batch[0].numpy().tobytes(), "as with torch, each is a tensor of its own"


def test_memories_that_happen_to_be_neighbours_are_copied_alone() -> None:
    memory = np.arange(20_000, dtype=np.uint8)
    first, second = memory[:8000], memory[8000:16_000]
    spans = Parcel.pack([first, second], first).spans
    assert len(spans) == 2, "only the first is in the memory that is known"
