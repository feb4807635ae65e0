from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swift_loader.sampling.permutation import derive_key, permute

keys_64 = st.integers(0, 2**64 - 1)


def key_array(*keys: int) -> NDArray[np.uint64]:
    return np.array(keys, np.uint64)


def images_of(position: int, size: int, num_keys: int) -> NDArray[np.uint64]:
    """Where one position goes under many keys."""
    keys = key_array(*(derive_key(17, number) for number in range(num_keys)))
    return permute(np.full(num_keys, position, np.uint64), size, keys)


def chi_square(counts: NDArray[np.int64]) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@given(size=st.integers(0, 5000), key=keys_64)
@settings(max_examples=150, deadline=None)
def test_every_size_and_key_gives_a_bijection(size: int, key: int) -> None:
    permuted = permute(np.arange(size, dtype=np.uint64), size, key_array(key))
    assert permuted.dtype == np.uint64
    assert np.array_equal(np.sort(permuted), np.arange(size))


@given(
    size=st.one_of(
        st.integers(2**32 - 100, 2**32 + 100), st.integers(2**62, 2**62 + 100), st.integers(2**63 - 100, 2**63)
    ),
    key=keys_64,
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_huge_sizes_keep_positions_apart_and_inside(size: int, key: int, seed: int) -> None:
    edges = key_array(0, 1, size - 1, size - 2)
    inner = np.random.default_rng(seed).integers(0, size, 500, np.uint64)
    positions = np.unique(np.concatenate([edges, inner]))
    permuted = permute(positions, size, key_array(key))
    assert len(np.unique(permuted)) == len(positions)
    assert int(permuted.max()) < size


@given(size=st.integers(1, 3000), keys=st.lists(keys_64, min_size=2, max_size=8), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_key_per_position_gives_what_each_key_gives_alone(size: int, keys: list[int], seed: int) -> None:
    positions = np.random.default_rng(seed).integers(0, size, len(keys), np.uint64)
    together = permute(positions, size, key_array(*keys))
    alone = [int(permute(positions[i : i + 1], size, key_array(key))[0]) for i, key in enumerate(keys)]
    assert together.tolist() == alone


@pytest.mark.parametrize("size", [16, 60, 64, 101])
@pytest.mark.parametrize("position", [0, 7])
def test_a_position_goes_everywhere_equally_often(size: int, position: int) -> None:
    counts = np.bincount(images_of(position, size, 6000).astype(np.int64), minlength=size)
    freedom = size - 1
    assert chi_square(counts) < freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [24, 160, 1000])
def test_neighbours_are_not_kept_together(size: int) -> None:
    first, second = (images_of(position, size, 20_000).astype(np.int64) for position in (3, 4))
    adjacent = int((np.abs(first - second) == 1).sum())
    expected = 20_000 * 2 / size
    assert abs(adjacent - expected) < 6 * expected**0.5


def test_pairs_of_positions_go_to_all_pairs_of_cells() -> None:
    size = 9
    first, second = (images_of(position, size, 30_000).astype(np.int64) for position in (0, 1))
    counts = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    pairs = counts[~np.eye(size, dtype=bool)] / (30_000 / (size * (size - 1)))
    assert counts.trace() == 0
    assert 0.7 < pairs.min() < pairs.max() < 1.3


@given(parts=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_key_depends_on_every_part(parts: list[int], data: st.DataObject) -> None:
    changed_at = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(st.integers(-(2**63), 2**64 - 1).filter(lambda part: (part - parts[changed_at]) % 2**64 != 0))
    changed = [*parts[:changed_at], other, *parts[changed_at + 1 :]]
    assert 0 <= derive_key(*parts) < 2**64
    assert derive_key(*parts) == derive_key(*parts)
    assert derive_key(*parts) != derive_key(*changed)


@pytest.mark.parametrize("part", [0, 1, 12345])
def test_a_part_wider_than_64_bits_counts_in_full(part: int) -> None:
    assert len({derive_key(part), derive_key(part + 2**64), derive_key(part + 2**65), derive_key(part + 2**130)}) == 4
