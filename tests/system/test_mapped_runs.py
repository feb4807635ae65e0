"""Reads that fail, wait and are made again, workers that are killed, resumes: equal to a plain dataset's bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.helpers import exhaustive, slow
from tests.support.mapped_runs import Run, draw_case

NUM_RUNS = int(os.environ.get("SWIFT_LOADER_TESTS_MAPPED_RUNS", "1000"))
"""Of a run of all cases."""

_SEEDS_PER_TEST = 50


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seeds", "processes"),
    [
        (range(12), False),
        (range(2), True),
        slow(range(12, 120), False),
        slow(range(2, 22), True),
        *[
            exhaustive(range(begin, min(begin + _SEEDS_PER_TEST, NUM_RUNS)), None)
            for begin in range(0, NUM_RUNS, _SEEDS_PER_TEST)
        ],
    ],
    ids=str,
)
def test_any_run_gives_the_bytes_of_a_plain_dataset(seeds: range, processes: bool | None, tmp_path: Path) -> None:
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        Run(draw_case(seed, processes=processes), folder).run()
