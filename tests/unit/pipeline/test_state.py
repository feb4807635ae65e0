from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader import StateMismatch
from swift_loader.pipeline.state import PipelineState

PLACES = st.recursive(st.integers(0, 2**40), lambda parts: st.lists(parts, max_size=4).map(tuple), max_leaves=8)


@given(
    st.integers(0, 2**60),
    st.none() | st.lists(PLACES, min_size=1).map(tuple),
    st.integers(0, 2**64),
    st.none() | st.integers(0),
)
def test_a_state_survives_json(epoch: int, place: Any, seed: int, told: int | None) -> None:
    state = PipelineState(epoch, place, seed, ("shuffle 3",), (None, (3, {"a": 1})), told)
    assert PipelineState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 2}, "version 2"),
        ({"epoch": -1}, "epoch=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"more": 1}, "more"),
        ({"sources": None}, "sources=None"),
        ({"parameters": 1}, "parameters=1"),
        ({"told": "x"}, "told='x'"),
    ],
)
def test_what_is_no_state_is_refused(changes: dict[str, Any], told: str) -> None:
    state = {**PipelineState(0, None, 1).to_dict(), **changes}
    with pytest.raises(StateMismatch, match=told):
        PipelineState.from_dict(state)


def test_a_state_of_an_earlier_version_says_not_what_sources_were_told() -> None:
    state = PipelineState(3, (4,), 1, told=3)
    before = {name: value for name, value in state.to_dict().items() if name != "told"}
    assert PipelineState.from_dict(before) == PipelineState(3, (4,), 1)
