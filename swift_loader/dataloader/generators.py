"""The states of the random generators that a sampler may draw from, as plain values for `state_dict()`.

Samplers draw from a `torch.Generator` of their own, from torch's default generator, from `random` or from the legacy
`numpy.random`. A sampler without a `state_dict` is resumed by drawing again from the same states.
"""

from __future__ import annotations

import base64
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class GlobalStates:
    """The states of the global generators. None: this one doesn't matter."""

    torch_state: torch.Tensor | None
    python_state: tuple[Any, ...] | None
    numpy_state: tuple[Any, ...] | None

    @classmethod
    def of_all(cls) -> GlobalStates:
        """Return the present states of all of them."""
        return cls(torch.default_generator.get_state(), random.getstate(), _numpy_state())

    def now(self) -> GlobalStates:
        """Return the present states of the generators that have a state here."""
        return GlobalStates(
            None if self.torch_state is None else torch.default_generator.get_state(),
            None if self.python_state is None else random.getstate(),
            None if self.numpy_state is None else _numpy_state(),
        )

    def where_changed(self, before: GlobalStates, after: GlobalStates) -> GlobalStates:
        """Return these states, but only of the generators that were drawn from between two moments."""
        numpy_changed = after.numpy_state is None or not _equal_numpy(before.numpy_state, after.numpy_state)
        torch_changed = after.torch_state is None or not _equal_torch(before.torch_state, after.torch_state)
        return GlobalStates(
            self.torch_state if torch_changed else None,
            self.python_state if before.python_state != after.python_state else None,
            self.numpy_state if numpy_changed else None,
        )

    def merged(self, other: GlobalStates) -> GlobalStates:
        """Return these states, and the other ones where these have none."""
        return GlobalStates(
            self.torch_state if self.torch_state is not None else other.torch_state,
            self.python_state if self.python_state is not None else other.python_state,
            self.numpy_state if self.numpy_state is not None else other.numpy_state,
        )

    def only(self, other: GlobalStates) -> GlobalStates:
        """Return these states, but only of the generators of which the other ones have a state."""
        return GlobalStates(
            self.torch_state if other.torch_state is not None else None,
            self.python_state if other.python_state is not None else None,
            self.numpy_state if other.numpy_state is not None else None,
        )

    def matches(self, other: GlobalStates) -> bool:
        """Return whether the generators that have a state here have the same there."""
        return (
            (self.torch_state is None or _equal_torch(self.torch_state, other.torch_state))
            and (self.python_state is None or self.python_state == other.python_state)
            and (self.numpy_state is None or _equal_numpy(self.numpy_state, other.numpy_state))
        )

    def apply(self) -> None:
        """Set the generators to these states."""
        if self.torch_state is not None:
            torch.default_generator.set_state(self.torch_state)
        if self.python_state is not None:
            random.setstate(self.python_state)
        if self.numpy_state is not None:
            np.random.set_state(self.numpy_state)  # noqa: NPY002

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the generators to these states, and afterwards to those that they had before."""
        before = self.now()
        self.apply()
        try:
            yield
        finally:
            before.apply()

    def pack(self) -> dict[str, Any]:
        """Return JSON types."""
        packed: dict[str, Any] = {}
        if self.torch_state is not None:
            packed["torch"] = _packed(self.torch_state.numpy().tobytes())
        if self.python_state is not None:
            version, words, gauss = self.python_state
            packed["python"] = [version, _packed(np.array(words, np.uint32).tobytes()), gauss]
        if self.numpy_state is not None:
            name, words, *rest = self.numpy_state
            packed["numpy"] = [str(name), _packed(np.asarray(words, np.uint32).tobytes()), *map(float, rest)]
        return packed

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> GlobalStates:
        """Return the states that `pack` was called on."""
        torch_state = python_state = numpy_state = None
        if "torch" in packed:
            torch_state = _as_torch(packed["torch"])
        if "python" in packed:
            version, words, gauss = packed["python"]
            python_state = (version, tuple(np.frombuffer(_unpacked(words), np.uint32).tolist()), gauss)
        if "numpy" in packed:
            name, words, position, has_gauss, gauss = packed["numpy"]
            numpy_state = (name, np.frombuffer(_unpacked(words), np.uint32), int(position), int(has_gauss), gauss)
        return cls(torch_state, python_state, numpy_state)


NO_STATES = GlobalStates(None, None, None)


class Substitute:
    """Stands for the global generators in a loader that has loaded a state.

    A sampler that draws from the global generators continues as in the run that was saved, in all its later epochs. The
    user's generators aren't touched. If they have the saved states themselves, because the user has restored them,
    there is nothing to substitute.
    """

    def __init__(self) -> None:
        self._states: GlobalStates | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to substitute."""
        return self._states is None

    def load(self, states: GlobalStates) -> None:
        """Continue with these states, unless the global generators have them."""
        is_same = states.matches(GlobalStates.of_all())
        self._states = None if is_same else states

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the substitutes in the place of the global generators."""
        if self._states is None:
            yield
            return
        with self._states.applied():
            try:
                yield
            finally:
                self._states = self._states.now()

    def advance(self, states: GlobalStates) -> None:
        """Continue with these states, where they have one."""
        if self._states is None:
            states.apply()
        else:
            self._states = states.merged(self._states)

    def present(self) -> GlobalStates:
        """Return the states that the sampler would draw from next."""
        now = GlobalStates.of_all()
        return now if self._states is None else self._states.merged(now)


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002 - samplers use the legacy generator


def generators_of(*owners: Any) -> list[torch.Generator]:
    """Return the different generators that these objects have as `generator`, in order."""
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def pack_generators(generators: list[torch.Generator]) -> list[str]:
    """Return the states of these generators as text."""
    return [_packed(generator.get_state().numpy().tobytes()) for generator in generators]


def unpack_generators(generators: list[torch.Generator], packed: list[str]) -> None:
    """Set these generators to the states that `pack_generators` returned."""
    for generator, state in zip(generators, packed, strict=True):
        generator.set_state(_as_torch(state))


@lru_cache(maxsize=16)  # Accelerate asks for the state after each batch, and most generators stay as they are
def _packed(state: bytes) -> str:
    return base64.b64encode(zlib.compress(state, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _as_torch(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_unpacked(text)), dtype=torch.uint8)


def _equal_torch(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _equal_numpy(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    return one is not None and other is not None and one[2:] == other[2:] and np.array_equal(one[1], other[1])
