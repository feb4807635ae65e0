"""What `state_dict()` returns: where a run is, and the order it goes through, as plain integers. Pure.

The same on every rank, and free of everything that may be different when the run goes on: the number of ranks and of
workers, the batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.integers import MAX_BITS, as_integer, shown
from swift_loader.order import OrderSettings
from swift_loader.plan import MAX_EPOCH, Position

__all__ = ["SavedState"]

VERSION = 1
"""Of the state's fields and of the permutation: another one would continue another order."""

_SMALLEST = {"seed": 0, "epoch": 0, "position": 0, "shuffle": 0, "nearby_shuffle": 0, "run_length": 1}
_OPTIONAL = {"num_samples": 0}

_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SavedState:
    """Where a run is, and in which order."""

    order: OrderSettings
    position: Position
    num_samples: int | None
    """Length of the dataset; None if it wasn't known yet, because nothing had been started."""

    def to_dict(self) -> dict[str, int]:
        """Return the state as `state_dict()` does."""
        state = {
            "version": VERSION,
            "seed": self.order.seed,
            "epoch": self.position.epoch,
            "position": self.position.num_samples,
            "shuffle": int(self.order.shuffle),
            "nearby_shuffle": self.order.window,
            "run_length": self.order.run_length,
        }
        return state if self.num_samples is None else {**state, "num_samples": self.num_samples}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> SavedState:
        """Return the state that `to_dict` made a dict of.

        Raises:
            TypeError: It isn't a dict.
            StateMismatch: It isn't such a dict; the message names the field.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a {type(state).__name__}; give what state_dict() returned, a dict")
        fields = _checked_fields(state)
        num_samples, position = fields.get("num_samples"), fields["position"]
        if num_samples is not None and position > num_samples:
            raise StateMismatch(f"the state's position={position} lies beyond its num_samples={num_samples}")
        order = OrderSettings(fields["seed"], bool(fields["shuffle"]), fields["nearby_shuffle"], fields["run_length"])
        return cls(order, Position(fields["epoch"], position), num_samples)


def _checked_fields(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields as integers of Python: a checkpoint may have made NumPy's or torch's of them."""
    if "version" not in state:
        keys = ", ".join(sorted(map(repr, state))[:_MAX_SHOWN])
        raise StateMismatch(
            f"the state has no version, but the keys {keys}; give what state_dict() returned, such as "
            f"checkpoint['loader']"
        )
    if as_integer(state["version"]) != VERSION:
        raise StateMismatch(
            f"the state's version is {shown(state['version'])}, and this loader continues version {VERSION}: it was "
            f"saved by something else, or by another release of swift_loader"
        )
    unknown = sorted(map(str, set(state) - {"version", *_SMALLEST, *_OPTIONAL}))
    if unknown:
        raise StateMismatch(f"the state has the unknown fields {', '.join(unknown)}; give what state_dict() returned")
    fields = {}
    for name, smallest in (_SMALLEST | _OPTIONAL).items():
        if name not in state:
            if name in _OPTIONAL:
                continue
            raise StateMismatch(f"the state has no field {name!r}; give what state_dict() returned")
        value = as_integer(state[name])
        if value is None or value < smallest:
            raise StateMismatch(f"the state's {name}={shown(state[name])} isn't an integer of at least {smallest}")
        if value.bit_length() > MAX_BITS:
            raise StateMismatch(f"the state's {name}={shown(value)} is too large; it must be below 2**{MAX_BITS}")
        fields[name] = value
    if max(fields["epoch"], fields["position"]) > MAX_EPOCH:
        raise StateMismatch(
            f"the state's epoch={fields['epoch']} or position={fields['position']} is beyond {MAX_EPOCH}"
        )
    return fields
