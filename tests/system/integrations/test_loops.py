from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tests.system.integrations.ranks import run_ranks
from tests.system.integrations.training import assert_resumed_exactly
from tests.system.integrations.uneven_script import BATCH_SIZE, NUM_EPOCHS, NUM_RANKS, metric

SHARES = {
    ("pad", 20): [7, 7, 7],
    ("pad", 23): [8, 8, 8],
    ("drop", 20): [6, 6, 6],
    ("drop", 23): [7, 7, 7],
    ("exact", 20): [7, 7, 6],
    ("exact", 23): [8, 8, 7],
}
"""How many samples each rank has in an epoch, repeats included."""


@pytest.mark.slow
@pytest.mark.timeout(125)
@pytest.mark.parametrize(("loop", "needs"), [("plain", "torch"), ("fabric", "lightning"), ("accelerate", "accelerate")])
def test_a_loop_resumes_exactly_from_what_it_saved(loop: str, needs: str, tmp_path: Path) -> None:
    assert_resumed_exactly(run_ranks("loops_script.py", 2, tmp_path, loop, timeout_s=100, needs=needs))


@pytest.mark.slow
@pytest.mark.timeout(125)
def test_ranks_that_cannot_share_evenly_neither_hang_nor_count_a_sample_wrongly(tmp_path: Path) -> None:
    ranks = run_ranks("uneven_script.py", NUM_RANKS, tmp_path, timeout_s=100)

    for (uneven, num_samples), shares in SHARES.items():
        runs = [rank[f"{uneven} {num_samples}"] for rank in ranks]
        for epoch in range(NUM_EPOCHS):
            batches = [run["epochs"][epoch] for run in runs]
            ids = [list(chain.from_iterable(rank_batches)) for rank_batches in batches]
            assert [len(rank_ids) for rank_ids in ids] == shares, uneven
            assert [len(rank_batches) for rank_batches in batches] == [-(-share // BATCH_SIZE) for share in shares]
            assert len(set(chain.from_iterable(ids))) == min(sum(shares), num_samples), uneven
        assert all(run["weights"] == runs[0]["weights"] for run in runs), uneven
        if uneven != "drop":
            everything = metric(np.arange(num_samples)).tolist()
            assert [run["metric"] for run in runs] == [everything] * NUM_RANKS, uneven
