from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from swift_loader.worker import seeding
from swift_loader.worker.seeding import preserved_generators, seed_generators, snapshot_generators
from tests.support.draws import DRAWS


@pytest.fixture(params=["memory", "documented way"])
def python_state_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How the state of `random` is read: an interpreter may keep it elsewhere."""
    if request.param == "memory":
        assert seeding._address_of_python() is not None
    else:
        monkeypatch.setattr(seeding, "_address_of_python", lambda: None)
    return request.param


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_a_snapshot_shows_whether_something_was_drawn(draw: Callable[[], Any], python_state_from: str) -> None:
    with preserved_generators():
        seed_generators(3)
        before = snapshot_generators()
        assert snapshot_generators() == before
        draw()
        assert snapshot_generators() != before
        seed_generators(3)
        assert snapshot_generators() == before


def test_a_bit_generator_of_the_users_choice_is_looked_at_too() -> None:
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined]
    try:
        before = snapshot_generators()
        assert snapshot_generators() == before
        np.random.rand()
        assert snapshot_generators() != before
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]
