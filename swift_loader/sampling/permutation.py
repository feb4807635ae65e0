"""A keyed permutation of `range(size)` that is computed, never stored.

Guarantees: a bijection for every size and key; O(1) memory in the size; random access to any position. Assumes:
`0 <= size <= 2**63`. The quality is that of a good hash, not of a cipher.

The construction is a Feistel network over a rectangle of height x width cells, just large enough for `size` (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Each round adds a keyed hash of one coordinate to the other.
The few results outside `size` go through the network again until they are inside ("cycle walking").
"""

from __future__ import annotations

from enum import Enum
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


def derive_keys(base: int, numbers: Positions) -> Positions:
    """Return a 64-bit key for each number, `(n,) -> (n,)`: `derive_key` for many numbers with the same base."""
    keys: Positions = numbers ^ np.uint64(base)
    keys += np.uint64(_GOLDEN)
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(multiplier)
    keys ^= keys >> np.uint64(31)
    return keys


def permute(positions: Positions, size: int, keys: Positions) -> Positions:
    """Return the image of each position under the permutation of `range(size)` that its key selects.

    `positions`: `(n,)`, each below `size`. `keys`: `(1,)` for one permutation, or `(n,)` for one key per position.
    Returns `(n,)`, a new array.
    """
    if size <= 1:
        return np.zeros_like(positions)
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    width = _NARROW if columns <= 1 << 16 else _WIDE
    permuted = _feistel(positions, rows, columns, keys, width)
    limit = np.uint64(size)
    while (outside := np.flatnonzero(permuted >= limit)).size:
        walking_keys = keys if keys.size == 1 else keys[outside]
        permuted[outside] = _feistel(permuted[outside], rows, columns, walking_keys, width)
    return permuted


def _feistel(cells: Positions, num_rows: int, num_columns: int, keys: Positions, width: _Width) -> Positions:
    divisor = np.uint64(num_columns)
    wide_rows = cells // divisor
    columns = (cells - wide_rows * divisor).astype(width.dtype)
    rows = wide_rows.astype(width.dtype)
    for round_index in range(NUM_ROUNDS):
        round_keys = keys + np.uint64(_GOLDEN * (round_index + 1) & _MASK)
        round_keys ^= round_keys >> np.uint64(32)
        round_keys = round_keys.astype(width.dtype)
        if round_index % 2:
            _add_hash(columns, num_columns, rows, round_keys, width)
        else:
            _add_hash(rows, num_rows, columns, round_keys, width)
    cells = np.multiply(rows, divisor, dtype=np.uint64)  # NumPy 1 would take a narrower type
    cells += columns
    return cells


def _add_hash(target: Halves, bound: int, source: Halves, keys: Halves, width: _Width) -> None:
    """Add a keyed hash of `source` to `target`, modulo `bound`, in place."""
    limit = width.dtype(bound)
    hashed = source ^ keys
    hashed *= width.multiplier_1
    hashed ^= hashed >> width.half
    hashed *= width.multiplier_2
    hashed >>= width.half
    hashed *= limit  # the upper half of the product is uniform below the bound, without a division
    hashed >>= width.half
    target += hashed
    np.minimum(target, target - limit, out=target)  # modulo the bound: if target < bound, the subtraction wraps around


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * _MULTIPLIER_1 & _MASK
    value = (value ^ value >> 27) * _MULTIPLIER_2 & _MASK
    return value ^ value >> 31
