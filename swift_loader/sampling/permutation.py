"""A keyed permutation of `range(size)` that is computed, never stored; and the shuffling of epochs, which uses it.

Guarantees: a bijection for every size and key; O(1) memory in the size; random access to any position. Assumes:
`0 <= size <= 2**63`. The quality is that of a good hash, not of a cipher.

The construction is a Feistel network over a rectangle of height x width cells, just large enough for `size` (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Each round adds a keyed hash of one coordinate to the other.
The few results outside `size` go through the network again until they are inside ("cycle walking").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_loader.sampling.integers import ANY_COUNT, MAX_BITS, in_state, integer

Positions = NDArray[np.uint64]
Halves = NDArray[np.unsignedinteger[Any]]
"""Coordinates, with half the bits of a position."""

NUM_ROUNDS = 6
"""Three per coordinate. With four in all, neighbours stay neighbours 1.36 times too often (5,000 keys, 160 cells)."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# The multipliers of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


class _Width(NamedTuple):
    """The constants for one width of integers. Coordinates use half the bits, so that products fit."""

    dtype: type[np.unsignedinteger[Any]]
    half: np.unsignedinteger[Any]
    multiplier_1: np.unsignedinteger[Any]
    multiplier_2: np.unsignedinteger[Any]


_MAX_NARROW = 1 << 16
_NARROW = _Width(np.uint32, np.uint32(16), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
"""For sizes up to 2**32; takes half the time. The multipliers are from MurmurHash3's finaliser (Appleby)."""
_WIDE = _Width(np.uint64, np.uint64(32), np.uint64(_MULTIPLIER_1), np.uint64(_MULTIPLIER_2))


class Purpose(int, Enum):
    """What a key is for. It comes right after the seed, so keys with the same numbers differ between purposes."""

    WHOLE = 1
    WINDOW = 2
    RUNS = 3
    ROTATION = 4
    SAMPLE = 5
    COLLATE = 6
    GENERATOR = 7
    WORKER = 8
    REPLACEMENT = 9
    DEVICE = 10


def derive_key(*parts: int) -> int:
    """Return a 64-bit key that depends on every part and on their order."""
    key = 0
    for part in parts:
        key = _mix((key ^ (part & _MASK)) + _GOLDEN & _MASK)
        if part >> 64 not in (0, -1):  # all bits of wider parts count
            key ^= derive_key(part >> 64)
    return key


def derive_keys(base: int | Positions, numbers: Positions) -> Positions:
    """Return a 64-bit key for each number, `(n,) -> (n,)`: `derive_key` for many numbers with the same base, or with
    one base for each.
    """
    keys: Positions = numbers ^ np.asarray(base, np.uint64)
    keys += np.uint64(_GOLDEN)
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(multiplier)
    keys ^= keys >> np.uint64(31)
    return keys


def permute(positions: Positions, size: Any, keys: Positions, *, inverse: bool = False) -> Positions:
    """Return the image of each position under the permutation of `range(size)` that its key selects.

    `positions`: `(n,)`, each below its size. `size`: one, or `(n,)`, one per position. `keys`: `(1,)` for one
    permutation, or `(n,)` for one key per position. `inverse`: return the position of each image instead. Returns
    `(n,)`, a new array.
    """
    if isinstance(size, np.ndarray):
        if size.size and (size != size[0]).any():
            return _permute_each(positions, size, keys, inverse)
        size = size[0] if size.size else 0
    size = int(size)
    if size <= 1:
        return np.zeros_like(positions)
    columns = isqrt(size - 1) + 1
    shape = np.uint64(-(-size // columns)), np.uint64(columns), np.uint64(size)
    return _walk(positions, shape, keys, _NARROW if columns <= _MAX_NARROW else _WIDE, inverse)


def _permute_each(positions: Positions, sizes: Positions, keys: Positions, inverse: bool) -> Positions:
    """Do the work of `permute` if sizes differ."""
    distinct, which = np.unique(sizes, return_inverse=True)
    columns = np.array([isqrt(max(int(size) - 1, 0)) + 1 for size in distinct], np.uint64)
    rows = (distinct + columns - np.uint64(1)) // columns
    is_narrow = (columns <= np.uint64(_MAX_NARROW))[which]
    moved = np.zeros_like(positions)
    for width, members in ((_NARROW, is_narrow), (_WIDE, ~is_narrow)):
        chosen = np.flatnonzero(members & (sizes > np.uint64(1)))
        if chosen.size:
            shape = rows[which[chosen]], columns[which[chosen]], sizes[chosen]
            moved[chosen] = _walk(positions[chosen], shape, keys if keys.size == 1 else keys[chosen], width, inverse)
    return moved


_Shape = tuple[Any, Any, Any]
"""Rows and columns of the rectangle, and how many of its cells count: a number each, or `(n,)`."""


def _walk(positions: Positions, shape: _Shape, keys: Positions, width: _Width, inverse: bool) -> Positions:
    permuted = _feistel(positions, shape, keys, width, inverse)
    while (outside := np.flatnonzero(permuted >= shape[2])).size:
        walking_keys = keys if keys.size == 1 else keys[outside]
        walking: _Shape = shape if shape[2].ndim == 0 else (shape[0][outside], shape[1][outside], shape[2][outside])
        permuted[outside] = _feistel(permuted[outside], walking, walking_keys, width, inverse)
    return permuted


def _feistel(cells: Positions, shape: _Shape, keys: Positions, width: _Width, inverse: bool) -> Positions:
    num_rows, num_columns, _ = shape
    wide_rows = cells // num_columns
    columns = (cells - wide_rows * num_columns).astype(width.dtype)
    rows = wide_rows.astype(width.dtype)
    row_limit, column_limit = num_rows.astype(width.dtype), num_columns.astype(width.dtype)
    for round_index in range(NUM_ROUNDS)[:: -1 if inverse else 1]:
        round_keys = keys + np.uint64(_GOLDEN * (round_index + 1) & _MASK)
        round_keys ^= round_keys >> np.uint64(32)
        round_keys = round_keys.astype(width.dtype)
        if round_index % 2:
            _add_hash(columns, column_limit, rows, round_keys, width, inverse)
        else:
            _add_hash(rows, row_limit, columns, round_keys, width, inverse)
    cells = np.multiply(rows, num_columns, dtype=np.uint64)  # NumPy 1 would take a narrower type
    cells += columns
    return cells


def _add_hash(target: Halves, limit: Any, source: Halves, keys: Halves, width: _Width, inverse: bool) -> None:
    """Add a keyed hash of `source` to `target`, modulo `limit`, in place; `inverse` subtracts it."""
    hashed = source ^ keys
    hashed *= width.multiplier_1
    hashed ^= hashed >> width.half
    hashed *= width.multiplier_2
    hashed >>= width.half
    hashed *= limit  # the upper half of the product is uniform below the limit, without a division
    hashed >>= width.half
    if inverse:
        target -= hashed
        np.minimum(target, target + limit, out=target)  # modulo the limit: below 0, the subtraction wrapped around
    else:
        target += hashed
        np.minimum(target, target - limit, out=target)  # if target < limit, the subtraction wraps around


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * _MULTIPLIER_1 & _MASK
    value = (value ^ value >> 27) * _MULTIPLIER_2 & _MASK
    return value ^ value >> 31


# The order of an epoch: its positions are moved in windows, then in runs, then all of them are rotated ---------------

MAX_SAMPLES = 2**63 - 1
"""No dataset has more. Larger windows, runs and batches have the same effect as this value."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How the samples of each epoch are shuffled. A saved state has all of it."""

    seed: int = in_state(ANY_COUNT)
    shuffle: bool = in_state(ANY_COUNT._replace(read=lambda value: bool(ANY_COUNT.read(value)), write=int))
    window: int = in_state(ANY_COUNT, "nearby_shuffle")
    """Number of samples to shuffle together; 0: all of them."""
    run_length: int = in_state(integer(1, 2**MAX_BITS - 1))
    """Number of consecutive samples that stay in one window."""

    @property
    def rounded_window(self) -> int:
        """The window, rounded to whole runs; 0: all samples."""
        num_runs, rest = divmod(self.window, self.run_length)
        if 2 * rest > self.run_length - num_runs % 2:  # a half rounds to the even number
            num_runs += 1
        return max(1, num_runs) * self.run_length if self.window else 0


_Key = Callable[[Purpose], NDArray[np.uint64]]
"""Returns keys for a purpose: `(1,)`, or `(n,)` with one for each position."""


def visit(shuffle: Shuffle, positions: Positions, sizes: Any, key: _Key, *, inverse: bool = False) -> Positions:
    """Return the samples at these positions of epochs, `(n,) -> (n,)`; with `inverse`, the other way round.

    `sizes`: the length of the dataset, or `(n,)`: positions may be in datasets of different lengths, with their keys.
    """
    if not shuffle.shuffle or not positions.size:
        return positions
    if not shuffle.window:
        return permute(positions, sizes, key(Purpose.WHOLE), inverse=inverse)
    lengths = np.minimum(np.uint64(min(shuffle.run_length, MAX_SAMPLES)), sizes + np.uint64(1))
    if inverse:
        return _in_windows(shuffle, _in_runs(positions, sizes, lengths, key, inverse), sizes, key, inverse)
    return _in_runs(_in_windows(shuffle, positions, sizes, key, inverse), sizes, lengths, key, inverse)


def _in_windows(shuffle: Shuffle, positions: Positions, sizes: Any, key: _Key, inverse: bool) -> Positions:
    """Move each position within its window; the last window may be shorter than the others."""
    window = np.minimum(np.uint64(min(shuffle.rounded_window, MAX_SAMPLES)), sizes)
    window_of = positions // window
    first: Positions = window_of * window
    keys = key(Purpose.WINDOW) + window_of * np.uint64(0xD1B54A32D192ED03)
    moved: Positions = first + permute(positions - first, np.minimum(window, sizes - first), keys, inverse=inverse)
    return moved


def _in_runs(positions: Positions, sizes: Any, lengths: Any, key: _Key, inverse: bool) -> Positions:
    """Map positions to samples: runs in permuted order, then the remaining samples. The cuts change each epoch."""
    num_runs, rotation = sizes // lengths, key(Purpose.ROTATION) % sizes
    if inverse:
        positions = (positions + (sizes - rotation)) % sizes
    slots = positions // lengths
    runs = slots.copy()
    in_runs = slots < num_runs  # the others are the remaining samples, fewer than a run
    keys, counts = key(Purpose.RUNS), num_runs if num_runs.ndim == 0 else num_runs[in_runs]
    runs[in_runs] = _permuted_runs(slots[in_runs], counts, keys if keys.size == 1 else keys[in_runs], inverse)
    samples: Positions = runs * lengths + (positions - slots * lengths)
    return samples if inverse else (samples + rotation) % sizes


def _permuted_runs(slots: Positions, counts: Any, keys: Positions, inverse: bool) -> Positions:
    """Return the run that is visited in each slot. All samples of a run have the same slot."""
    if not slots.size:
        return slots
    first, last = slots.min(), slots.max()
    if counts.ndim or last - first >= slots.size:  # sparse: this rank's share, one of many
        return permute(slots, counts, keys, inverse=inverse)
    dense = np.arange(first, last + np.uint64(1))
    runs: Positions = permute(dense, counts, keys, inverse=inverse)[slots - first]
    return runs
