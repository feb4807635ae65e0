"""Accepts integers of Python, NumPy and torch, of any size. And the states of loaders and samplers. Pure."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import lru_cache
from typing import Any, NamedTuple, SupportsIndex, TypeVar

from swift_loader.errors import StateMismatch

MAX_BITS = 4096
"""Largest integer accepted. Python refuses to print more than 4,300 digits, and a state may be saved as JSON."""


def as_integer(value: Any) -> int | None:
    """Return the value as an integer. Return None for a bool, a float, an array of several numbers and the like."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return int(operator.index(value))
    except TypeError:  # an array or a tensor that isn't a single integer
        return None


def shown(value: Any) -> str:
    """Return the `repr` of a value for an error message, even for an integer that Python refuses to print."""
    number = as_integer(value)
    if number is not None and number.bit_length() > MAX_BITS:
        return f"<an integer of {number.bit_length()} bits>"
    return repr(value)


# The states of loaders and samplers -----------------------------------------------------------------------------------
#
# A state is a dict with a version and fields. A field stands at a path in it, as in "folder.name", and has a form. A
# record is a dataclass that declares its fields by `in_state`. All of them are always in a state, because
# torch.distributed.checkpoint loads only what the state of a new loader has. For the same reason, no field is ever
# added without a value for the states that lack it.

_MAX_SHOWN_KEYS = 5
_MAX_SHOWN_CHARS = 100

_KINDS = (
    ("DataLoader", {"_snapshot", "_iterator_finished"}),
    ("sampler", {"version", "epoch", "position", "sampler"}),
    ("sampler", {"version", "epoch", "position", "finished"}),
    ("SwiftLoader", {"version", "seed", "epoch", "position"}),
    ("Pipeline", {"version", "epoch", "place", "parameters"}),
)
"""What a state of each kind has. The first that fits counts. Our samplers that shuffle have a SwiftLoader's."""

_Record = TypeVar("_Record")


class Form(NamedTuple):
    """What values of a field are."""

    what: str
    read: Callable[[Any], Any]
    """Returns the value, as this package uses it. Raises any error if it isn't one."""
    write: Callable[[Any], Any] = lambda value: value
    """Returns what stands in the state for it. MISSING: nothing."""
    older: Any = MISSING
    """The value in states of earlier versions that lack the field. MISSING: all have it."""

    def or_none(self) -> Form:
        """Return the form of such a value or None."""
        read, write = (lambda value, do=do: None if value is None else do(value) for do in (self.read, self.write))
        return Form(f"{self.what}, or None", read, write)

    def several(self) -> Form:
        """Return the form of a list of such values."""

        def read(values: Any) -> list[Any]:
            if not isinstance(values, (list, tuple)):
                raise TypeError
            return [self.read(value) for value in values]

        return Form(f"a list, of which each is {self.what}", read, lambda values: [*map(self.write, values)])


def integer(smallest: int, largest: int) -> Form:
    """Return the form of a Python integer. A checkpoint may have converted it to NumPy's or torch's."""

    def read(value: Any) -> int:
        number = as_integer(value)
        if number is None or not smallest <= number <= largest:
            raise ValueError
        return number

    limit = f"at most {largest}" if largest.bit_length() < MAX_BITS else f"below 2**{MAX_BITS}"
    return Form(f"an integer of at least {smallest} and {limit}", read)


ANY_COUNT = integer(0, 2**MAX_BITS - 1)
ANYTHING = Form("anything", lambda value: value)
TEXT = Form("a text", str.__str__)


def in_state(form: Form | type, path: str = "", *, older: Any = MISSING, **default: Any) -> Any:
    """Declare a field of a record. `form`: or the class of a record whose fields are in the same state.

    `path`: where it stands, if not under its name. `older`: see `Form`; also the default.
    """
    form = form._replace(older=older) if isinstance(form, Form) else form
    return dataclasses.field(metadata={"path": path, "form": form}, **{"default": older, **default})


@lru_cache
def _places(record: Any) -> list[tuple[str, str, Any]]:
    """Return name, path and form of a record's fields."""
    declared = [(one.name, one.metadata) for one in dataclasses.fields(record) if one.metadata]
    return [(name, place["path"] or name, place["form"]) for name, place in declared]


def to_state(record: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Put a record into a state. Return the state."""
    for name, path, form in _places(record.__class__):
        value = getattr(record, name)
        if not isinstance(form, Form):
            to_state(value, state)
        elif (value := form.write(value)) is not MISSING:
            inner, last = state, path
            while "." in last:
                folder, _, last = last.partition(".")
                inner = inner.setdefault(folder, {})
            inner[last] = value
    return state


def from_state(record: Callable[..., _Record], state: Any, kind: str = "", version: int = 0, **others: Any) -> _Record:
    """Return the record of a state. `kind`, `version`: see `check_state`; without, it is a part of a state."""
    if kind:
        check_state(state, kind, version)
    for name, path, form in _places(record):
        others[name] = field_of(state, path, form) if isinstance(form, Form) else from_state(form, state)
    made = record(**others)
    if kind:
        check_known(state, to_state(made, {"version": version}))
    return made


def state_kind(state: Any) -> str | None:
    """Return which kind of state this is; None if it is no state."""
    return next((kind for kind, has in _KINDS if isinstance(state, Mapping) and state.keys() >= has), None)


def check_state(state: Any, kind: str, version: int) -> None:
    """Check that a state is a dict of this kind and version."""
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is a {type(state).__name__}; pass the dict that state_dict() returned")
    if (found := state_kind(state)) not in (None, kind):
        raise StateMismatch(f"the state is of a {found}; pass what the state_dict() of a {kind} returned")
    if "version" not in state:
        keys = ", ".join(sorted(map(repr, state))[:_MAX_SHOWN_KEYS])
        raise StateMismatch(
            f"the state has no version, but the keys {keys}; pass the dict that the state_dict() of swift_loader's "
            f"{kind} returned, such as checkpoint['loader']"
        )
    if as_integer(state["version"]) != version:
        raise StateMismatch(
            f"the state's version is {shown(state['version'])[:_MAX_SHOWN_CHARS]}, but this {kind} can only resume "
            f"version {version}. The state is from another release of swift_loader, or from another program; resume "
            f"with the same release"
        )


def check_known(state: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check that a state has nothing but what is in another one."""
    if unknown := sorted(map(str, state.keys() - known.keys())):
        raise damaged(f"the state has the unknown fields {', '.join(unknown)}")


def field_of(state: Any, path: str, form: Form = ANYTHING) -> Any:
    """Return what stands at a path in a state. Raises `StateMismatch` that names it if it is missing or wrong."""
    for name in path.split("."):
        if isinstance(state, Mapping) and name in state:
            state = state[name]
        elif form.older is not MISSING:
            return form.older
        else:
            raise damaged(f"the state has no field {path!r}")
    try:
        return form.read(state)
    except Exception as error:
        raise damaged(f"the state's {path}={shown(state)[:_MAX_SHOWN_CHARS]} must be {form.what}") from error


def damaged(problem: str) -> StateMismatch:
    """Return the error for a state that isn't as it was saved."""
    return StateMismatch(f"{problem}; pass the dict that state_dict() returned, unchanged")


def check_same(saved: Mapping[str, Any], present: Mapping[str, Any], whose: str) -> None:
    """Check that a state was saved with these values. `whose` they are, as in "this sampler has"."""
    for name, value in present.items():
        if saved[name] != value:
            raise StateMismatch(
                f"the state was saved with {name}={saved[name]}, but {whose} {name}={value}; give the saved value, or "
                f"start a new run without load_state_dict()"
            )
