from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_loader import StateMismatch
from swift_loader.sampling.plan import MAX_EPOCH
from swift_loader.sampling.run import Checkpoint
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.sampling.skips import Position

WHOLE = Checkpoint(OrderSettings(7, shuffle=True, window=40, run_length=4), Position(2, 30), 100).to_dict()
STATE = {name: value for name, value in WHOLE.items() if name not in ("skipped", "excluded")}

states = st.builds(
    Checkpoint,
    st.builds(OrderSettings, st.integers(0), st.booleans(), st.integers(0), st.integers(1)),
    st.builds(Position, st.integers(0, MAX_EPOCH), st.just(0)),
    st.none() | st.integers(0),
)


@given(state=states)
def test_a_state_survives_json(state: Checkpoint) -> None:
    saved = state.to_dict()
    assert all(type(value) is int or value in (None, []) for value in saved.values())
    assert Checkpoint.from_dict(json.loads(json.dumps(saved))) == state


def test_a_missing_field_is_named() -> None:
    for name in set(STATE) - {"num_samples", "version", "skipped", "excluded"}:
        with pytest.raises(StateMismatch, match=f"no field '{name}'"):
            Checkpoint.from_dict({key: value for key, value in STATE.items() if key != name})


def test_a_field_that_is_no_count_is_named_with_its_value() -> None:
    for name, value in product(set(STATE) - {"version", "skipped", "excluded"}, [-1, 1.0, "1", None, True]):
        if name == "num_samples" and value is None:
            continue  # not known yet
        with pytest.raises(StateMismatch, match=f"{name}={value!r}"):
            Checkpoint.from_dict(STATE | {name: value})


def test_a_whole_checkpoint_is_refused_with_a_hint() -> None:
    with pytest.raises(StateMismatch, match=r"the keys 'loader', 'model'; .* checkpoint\['loader'\]"):
        Checkpoint.from_dict({"model": {}, "loader": STATE})


@pytest.mark.parametrize("version", [None, 0, 2, "1"])
def test_another_version_is_refused(version: Any) -> None:
    with pytest.raises(StateMismatch, match=f"version is {version!r}"):
        Checkpoint.from_dict(STATE | {"version": version})


def test_fields_of_something_else_are_refused() -> None:
    with pytest.raises(StateMismatch, match="unknown fields _num_yielded"):
        Checkpoint.from_dict(STATE | {"_num_yielded": 3})


def test_a_position_beyond_the_dataset_is_refused() -> None:
    with pytest.raises(StateMismatch, match="position=101 is greater than its num_samples=100"):
        Checkpoint.from_dict(STATE | {"position": 101})


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.array, torch.tensor])
def test_fields_may_be_any_kind_of_integer(kind: Any) -> None:
    saved = Checkpoint.from_dict({name: kind(value) for name, value in STATE.items()}).to_dict()
    assert saved == WHOLE
    assert all(type(saved[name]) is int for name in STATE)


def test_any_other_value_is_refused_by_name() -> None:
    strange: tuple[Any, ...] = (
        -(10**5000),
        10**5000,
        np.array([1, 2]),
        float("nan"),
        float("inf"),
        1e300,
        b"1",
        [],
        object(),
    )
    for name, value in product(set(STATE) - {"skipped", "excluded"}, strange):
        with pytest.raises(StateMismatch, match=name):
            Checkpoint.from_dict({**STATE, name: value})


def test_something_that_is_no_dict_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="is a list"):
        Checkpoint.from_dict([1])  # type: ignore[arg-type]
