"""The content of `state_dict()`: the position of a run, its order and what it skips, as plain JSON types. Pure.

The state is the same on every rank. It doesn't contain the number of ranks, the number of workers or the batch size,
because they may change when the run resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.integers import MAX_BITS, as_integer, shown
from swift_loader.sampling.plan import MAX_EPOCH, Position
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.sampling.skips import NO_SKIPS, Skips

__all__ = ["Checkpoint"]

VERSION = 1
"""Version of the state's fields and of the permutation. With another version, the order would be another one."""

_SMALLEST = {"seed": 0, "epoch": 0, "position": 0, "shuffle": 0, "nearby_shuffle": 0, "run_length": 1}
_OPTIONAL = {"num_samples": 0}
_SKIPPED = "skipped"
"""The field of the skips. A run that skips nothing doesn't have it."""

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The position of a run, its order, and what it skips."""

    order: OrderSettings
    position: Position
    num_samples: int | None
    """Length of the dataset; None if it wasn't known, because the loader wasn't started."""
    skips: Skips = NO_SKIPS

    def to_dict(self) -> dict[str, Any]:
        """Return the dict that `state_dict()` returns."""
        state: dict[str, Any] = {
            "version": VERSION,
            "seed": self.order.seed,
            "epoch": self.position.epoch,
            "position": self.position.num_samples,
            "shuffle": int(self.order.shuffle),
            "nearby_shuffle": self.order.window,
            "run_length": self.order.run_length,
        }
        if self.num_samples is not None:
            state["num_samples"] = self.num_samples
        if self.skips:
            state[_SKIPPED] = self.skips.to_list()
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Checkpoint:
        """Return the state from a dict made by `to_dict`.

        Raises:
            TypeError: `state` isn't a mapping.
            StateMismatch: A field is missing, unknown or invalid; the message names it.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a {type(state).__name__}; pass the dict that state_dict() returned")
        fields = _checked_fields(state)
        num_samples, position = fields.get("num_samples"), fields["position"]
        if num_samples is not None and position > num_samples:
            raise StateMismatch(
                f"the state's position={position} is greater than its num_samples={num_samples}; pass the dict that "
                f"state_dict() returned, unchanged"
            )
        order = OrderSettings(fields["seed"], bool(fields["shuffle"]), fields["nearby_shuffle"], fields["run_length"])
        skips = Skips.from_list(state.get(_SKIPPED, []), num_samples)
        return cls(order, Position(fields["epoch"], position), num_samples, skips)


def _checked_fields(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields as Python integers. A checkpoint may have converted them to NumPy's or torch's."""
    if "version" not in state:
        keys = ", ".join(sorted(map(repr, state))[:_MAX_SHOWN])
        raise StateMismatch(
            f"the state has no version, but the keys {keys}; pass the dict that state_dict() returned, such as "
            f"checkpoint['loader']"
        )
    if as_integer(state["version"]) != VERSION:
        raise StateMismatch(
            f"the state's version is {shown(state['version'])}, but this loader can only resume version {VERSION}. The "
            f"state is from another release of swift_loader, or from another program; resume with the same release"
        )
    unknown = sorted(map(str, set(state) - {"version", *_SMALLEST, *_OPTIONAL, _SKIPPED}))
    if unknown:
        raise StateMismatch(
            f"the state has the unknown fields {', '.join(unknown)}; pass the dict that state_dict() returned, "
            f"unchanged"
        )
    fields = {}
    for name, smallest in (_SMALLEST | _OPTIONAL).items():
        if name not in state:
            if name in _OPTIONAL:
                continue
            raise StateMismatch(f"the state has no field {name!r}; pass the dict that state_dict() returned, unchanged")
        value = as_integer(state[name])
        if value is None or value < smallest:
            raise StateMismatch(f"the state's {name}={shown(state[name])} must be an integer of at least {smallest}")
        if value.bit_length() > MAX_BITS:
            raise StateMismatch(f"the state's {name}={shown(value)} is too large; it must be below 2**{MAX_BITS}")
        fields[name] = value
    if max(fields["epoch"], fields["position"]) > MAX_EPOCH:
        raise StateMismatch(
            f"the state's epoch={fields['epoch']} or position={fields['position']} is too large; both must be at most "
            f"{MAX_EPOCH}"
        )
    return fields
