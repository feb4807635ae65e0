"""All at once, at random: equal to the inline executor, or a typed error for which there was a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import exhaustive
from tests.support.storm import Storm, draw_case

SEEDS = [
    (2, "arrays"),
    (137, None),
    (1892, None),
    (2969, None),
    *[exhaustive(seed, None) for seed in range(100, 150)],
]
"""Loaders of all kinds, kills, forks, changes of the trainer, data that grow: about a second each."""


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(("seed", "kind"), SEEDS)
def test_a_storm_ends_in_equal_bytes_or_a_typed_error(
    seed: int, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Storm(draw_case(seed, kind), tmp_path, monkeypatch).run()
