from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_loader import DataLoader, SwiftLoader
from tests.support.helpers import exhaustive
from tests.system.integrations.checks import assert_complete
from tests.system.integrations.ranks import run_ranks
from tests.system.integrations.training import NUM_EPOCHS, NUM_STEPS

NUM_CHECKPOINTS = {
    "trainer alone": NUM_EPOCHS * (NUM_STEPS + 1),
    "callback with OneCycleLR": NUM_STEPS + 1,
    "callback and trainer": NUM_STEPS + 1,
}
"""After each step and at the end of each epoch, or of the second one."""


@pytest.mark.slow
@pytest.mark.timeout(125)
def test_a_fit_resumes_exactly_in_the_midst_of_an_epoch(tmp_path: Path) -> None:
    case, num_steps = "callback with OneCycleLR", NUM_STEPS + 2
    (rank,) = run_ranks("lightning_script.py", 0, tmp_path, case, str(num_steps), timeout_s=100, needs="lightning")

    whole, (resumed,) = rank[case]["uninterrupted"], rank[case]["resumed"]
    assert_complete([whole["seen"]])
    assert resumed["seen"] == whole["seen"][num_steps:]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.exhaustive
@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_ranks", [exhaustive(1), 2])
def test_a_fit_resumes_exactly_from_every_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    launched = 0 if num_ranks == 1 else num_ranks
    ranks = run_ranks("lightning_script.py", launched, tmp_path, timeout_s=120, needs="lightning")

    for case, num_checkpoints in NUM_CHECKPOINTS.items():
        assert_complete([rank[case]["uninterrupted"]["seen"] for rank in ranks])
        for rank in ranks:
            whole, resumed = rank[case]["uninterrupted"], rank[case]["resumed"]
            assert len(resumed) == num_checkpoints
            for run in resumed:
                assert run["seen"] == whole["seen"][run["num_steps"] :], (case, run["place"])
                assert run["weights"] == whole["weights"], (case, run["place"])


ROWS: Any = list(torch.arange(80.0).view(20, 4))
LIMITED: Any = {"limit_train_batches": 3}
OVERFIT: Any = {"overfit_batches": 3}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (partial(DataLoader, ROWS, 5, shuffle=True, seed=3), LIMITED),
        (partial(DataLoader, ROWS, 5, shuffle=True, seed=3), OVERFIT),
        (partial(SwiftLoader, dataset=ROWS, batch_size=5, worker_per_consumer=0, seed=3), LIMITED),
        (partial(SwiftLoader, dataset=ROWS, batch_size=5, worker_per_consumer=0, shuffle=False), OVERFIT),
    ],
)
def test_a_fit_goes_on_behind_a_limited_epoch(make: Any, limit: Any, tmp_path: Path) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    from tests.system.integrations.lightning_fit import fit

    save = partial(callbacks.ModelCheckpoint, tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    whole = fit(make(), save(), tmp_path, **limit).seen
    resumed = fit(make(), save(), tmp_path, tmp_path / "step=3.ckpt", **limit).seen
    assert (len(whole), resumed) == (6, whole[3:])
    with pytest.raises(ValueError, match=r"give SwiftLoader\(shuffle=False\)"):
        fit(SwiftLoader(dataset=ROWS), save(), tmp_path, **OVERFIT)
