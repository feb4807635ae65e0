"""Where a run of a pipeline is, as plain types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.pipeline.items import Place

VERSION = 1

_PAIR = 2


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What a pipeline needs to continue."""

    epoch: int
    place: Place | None
    """Of the next item; None: the beginning of the epoch."""
    seed: int
    parameters: tuple[str, ...] = ()
    """What the meaning of the place depends on: `Chain.parameters`."""
    sources: tuple[Any, ...] = ()
    """For each source: (number of items, its own state) or None."""
    told: int | None = None
    """The epoch that the sources were told; None: none."""
    failures: tuple[int, ...] = ()
    """How many items each `map` has left out in the epoch, in the order of the pipeline."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types, if the sources' states are."""
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "place": None if self.place is None else _as_lists(self.place),
            "seed": self.seed,
            "parameters": list(self.parameters),
            "sources": [None if state is None else list(state) for state in self.sources],
            "told": self.told,
            "failures": list(self.failures),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PipelineState:
        """Return a state that `to_dict` gave.

        Raises `TypeError` if it isn't a dict, `StateMismatch` if it isn't a state of a pipeline.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a {type(state).__name__}; it must be the dict that state_dict() gave")
        expected = {"version", "epoch", "place", "seed", "parameters", "sources", "told", "failures"}
        if {*state, "told", "failures"} != expected:  # older states don't have these
            raise StateMismatch(
                f"the state has the entries {sorted(map(str, state))}; a pipeline's has {sorted(expected)}"
            )
        if state["version"] != VERSION:
            raise StateMismatch(
                f"the state has version {state['version']!r}; this swift_loader reads version {VERSION}"
            )
        epoch, seed = state["epoch"], state["seed"]
        if not isinstance(epoch, int) or epoch < 0 or not isinstance(seed, int):
            raise StateMismatch(
                f"the state has epoch={epoch!r} and seed={seed!r}; both must be integers, the epoch from 0"
            )
        given, texts = state["sources"], state["parameters"]
        if not isinstance(given, (list, tuple)) or not all(one is None or len(one) == _PAIR for one in given):
            raise StateMismatch(f"the state has sources={given!r}; it must be a list of pairs or None")
        if not isinstance(texts, (list, tuple)):
            raise StateMismatch(f"the state has parameters={texts!r}; it must be a list")
        told = state.get("told")
        if not (told is None or isinstance(told, int)):
            raise StateMismatch(f"the state has told={told!r}; it must be an epoch or None")
        failures = state.get("failures", ())
        if not isinstance(failures, (list, tuple)) or not all(isinstance(num, int) and num >= 0 for num in failures):
            raise StateMismatch(f"the state has failures={failures!r}; it must be a list of counts")
        place = None if state["place"] is None else _as_tuples(state["place"])
        sources = tuple(None if one is None else tuple(one) for one in given)
        return cls(epoch, place, seed, tuple(texts), sources, told, tuple(failures))


def _as_lists(place: Any) -> Any:
    return [_as_lists(part) for part in place] if isinstance(place, tuple) else place


def _as_tuples(place: Any) -> Any:
    return tuple(_as_tuples(part) for part in place) if isinstance(place, (list, tuple)) else place
