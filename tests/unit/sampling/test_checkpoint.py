from __future__ import annotations

import json
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


def test_a_position_beyond_the_dataset_is_refused() -> None:
    with pytest.raises(StateMismatch, match="position=101 is greater than its num_samples=100"):
        Checkpoint.from_dict(STATE | {"position": 101})


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.array, torch.tensor])
def test_fields_may_be_any_kind_of_integer(kind: Any) -> None:
    saved = Checkpoint.from_dict({name: kind(value) for name, value in STATE.items()}).to_dict()
    assert saved == WHOLE
    assert all(type(saved[name]) is int for name in STATE)
