"""The global random generators of a process: `random`, the legacy `numpy.random`, and torch's default generator.

Only libraries that are already imported are touched. A snapshot copies from the generators' memory, because the
documented functions are too slow to call after every batch: 10 us for Python's state, 44 us for NumPy's.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.random  # NumPy does it when it is first used, which takes 15 ms in each worker

Snapshot = tuple[object, ...]
"""Two snapshots are equal if nothing was drawn or seeded in between, and torch wasn't imported in between."""

_NUM_WORDS = 624
"""32-bit words in the state of a Mersenne twister. A 32-bit index is before them (Python) or after them (NumPy)."""

_STATE_BYTES = 4 * (_NUM_WORDS + 1)

_LOOKED_AT_BYTES = 4 * (4 + 1)
"""The index and the four words next to it. Each draw moves the index. When it has the same value again, the words are
new."""

_SEED_OF_A_FRESH_TORCH = 67280421310721
"""`c10::default_rng_seed_val`."""


def seed_generators(key: int) -> None:
    """Seed all of them with a 64-bit key."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the legacy generator; a 64-bit seed takes 6 times as long
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(key)


def snapshot_generators() -> Snapshot:
    """Return a snapshot, to compare with a later one. It takes 0.5 us, with torch 2.5 us."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _snapshot_python(), _snapshot_numpy()
    state = torch.default_generator.get_state()
    return _snapshot_python(), _snapshot_numpy(), ctypes.string_at(state.data_ptr(), state.numel())


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The full states of the generators, to continue with later. Taking them takes 50 us."""

    python: tuple[Any, ...]
    numpy_generator: Any
    """The user may have set another one."""
    numpy_state: Any
    torch: Any
    """None: torch wasn't imported."""

    @classmethod
    def take(cls) -> GeneratorStates:
        """Return the present states."""
        torch = sys.modules.get("torch")
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        torch_state = None if torch is None else torch.default_generator.get_state()
        numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the legacy generator
        return cls(random.getstate(), generator, numpy_state, torch_state)

    def restore(self) -> None:
        """Continue with these states."""
        random.setstate(self.python)
        if np.random.get_bit_generator() is not self.numpy_generator:  # type: ignore[attr-defined]
            np.random.set_bit_generator(self.numpy_generator)  # type: ignore[attr-defined]
        np.random.set_state(self.numpy_state)  # noqa: NPY002 - the legacy generator
        if self.torch is not None:
            sys.modules["torch"].default_generator.set_state(self.torch)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators' states afterwards, for code that runs in the user's own process."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch_state = torch.default_generator.get_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None and torch_state is not None:
            torch.default_generator.set_state(torch_state)
        elif "torch" in sys.modules:
            sys.modules["torch"].default_generator.manual_seed(_SEED_OF_A_FRESH_TORCH)


def _snapshot_python() -> object:
    address = _address_of_python()
    return random.getstate() if address is None else ctypes.string_at(address, _LOOKED_AT_BYTES)


def _snapshot_numpy() -> object:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:  # the user has set another one
        return pickle.dumps(generator.state)
    end = generator.ctypes.state_address + _STATE_BYTES
    return ctypes.string_at(end - _LOOKED_AT_BYTES, _LOOKED_AT_BYTES)


@cache
def _address_of_python() -> int | None:
    """Return the address of the state of `random`, right after the object's header; None if it isn't there.

    The layout is private to CPython, so this function checks it first.
    """
    generator: Any = random._inst  # noqa: SLF001
    address = id(generator) + object.__basicsize__
    if type(generator).__basicsize__ < object.__basicsize__ + _STATE_BYTES:
        return None
    for _ in range(2):
        *words, index = generator.getstate()[1]
        expected = np.array([index, *words], np.uint32).tobytes()
        if ctypes.string_at(address, _STATE_BYTES) != expected:
            return None
        before = generator.getstate()
        generator.getrandbits(32)
        moved = ctypes.string_at(address, _STATE_BYTES) != expected
        generator.setstate(before)
        if not moved:
            return None
    return address
