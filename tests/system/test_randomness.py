"""Augmentations as a user gets them: the same bytes however they come about."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift_loader import SwiftLoader, sample_rng
from tests.support import datasets
from tests.support.checked import digest
from tests.support.helpers import ROOT, exhaustive, make_loader, run_script


def digests(loader: SwiftLoader) -> list[list[bytes]]:
    """Two epochs."""
    return [list(map(digest, loader)) for _ in range(2)]


@pytest.mark.slow
def test_the_number_of_workers_does_not_show_in_the_bytes() -> None:
    found = []
    for workers in (0, 1, 2, 4):
        with make_loader(datasets.AugmentingWithAll, workers=workers) as loader:
            found.append(digests(loader))
    assert found == [found[0]] * 4
    assert found[0][0] != found[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["template", "spawn"])
def test_pythonhashseed_does_not_show_in_the_bytes(start_method: str, tmp_path: Path) -> None:
    code = f"""
        from tests.support import datasets
        from tests.support.helpers import make_loader
        from tests.system.test_randomness import digests
        with make_loader(datasets.AugmentingWithAll, workers=2, start_method={start_method!r}) as loader:
            print(digests(loader))
    """
    found = {
        run_script(code, folder=tmp_path, environment={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)})
        for seed in ("1", "2")
    }
    assert len(found) == 1


class SplitsAtRandom(datasets.Counting):
    """Chooses its samples when it is built, as a random split does."""

    def __init__(self, *, opens_a_file: bool = False) -> None:
        super().__init__(30)
        self.chosen = random.sample(range(10**6), 30)
        self.noise = np.random.rand(30)
        self.file = Path(__file__).open() if opens_a_file else None

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": self.chosen[index], "noise": self.noise[index], "pid": os.getpid()}


@pytest.mark.parametrize("opens_a_file", [exhaustive(False), True])
def test_a_dataset_that_draws_when_it_is_built_is_the_same_in_all_workers_and_runs(opens_a_file: bool) -> None:
    found = []
    for workers in (1, 2, 3):
        with make_loader(SplitsAtRandom, workers=workers, kwargs={"opens_a_file": opens_a_file}) as loader:
            found.append([(batch["id"].tolist(), batch["noise"].tolist()) for batch in loader])
    assert found == [found[0]] * 3
    with make_loader(SplitsAtRandom, workers=0) as loader:
        before = random.getstate()
        assert [(batch["id"].tolist(), batch["noise"].tolist()) for batch in loader] == found[0]
        assert random.getstate() == before


class DrawsTwice(datasets.Counting):
    """Draws from the generator for new code."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "first": sample_rng().random(), "second": sample_rng().standard_normal(2)}


def test_sample_rng_gives_the_same_with_any_number_of_workers() -> None:
    found = []
    for workers in (0, 1, 3):
        with make_loader(DrawsTwice, workers=workers) as loader:
            found.append(digests(loader))
    assert found == [found[0]] * 3
    assert found[0][0] != found[0][1]
    assert isinstance(DrawsTwice()[3]["first"], float)


def test_rng_by_worker_gives_each_worker_numbers_of_its_own_and_the_run_the_same_again() -> None:
    runs = []
    for _ in range(2):
        with make_loader(datasets.Augmenting, workers=1, rng="worker") as loader:
            runs.append([number for _ in range(2) for batch in loader for number in batch["py"].tolist()])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 200
    with make_loader(datasets.Augmenting, workers=2, rng="worker") as loader:
        assert len({number for batch in loader for number in batch["py"].tolist()}) == 100


def test_without_rng_nothing_is_seeded() -> None:
    with make_loader(datasets.Augmenting, workers=0, rng=None) as loader:
        random.seed(11)
        expected = [random.random() for _ in range(8)]
        random.seed(11)
        assert next(iter(loader))["py"].tolist() == expected


def test_an_unknown_rng_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rng='batch' is unknown; it must be one of 'sample', 'worker', 'none'"):
        make_loader(datasets.Counting, rng="batch")
