from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_loader import DataLoader, SwiftLoader
from swift_loader.metrics.observations import NAMES, flat_metrics
from swift_loader.report.report import Report
from tests.support.observed import observe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning isn't installed"),
]

KEYS = {f"swift_loader/{name}" for name in NAMES}


ROWS: Any = [torch.full((4,), float(index)) for index in range(48)]


class MeasuredLoader:
    """Has the methods that monitoring asks a loader for."""

    observations = observe(num_batches=100)

    def metrics(self, prefix: str = "swift_loader/") -> dict[str, float]:
        return flat_metrics(self.observations, prefix)

    def report(self) -> Report:
        return Report(self.observations)


@pytest.mark.filterwarnings("ignore")
def test_a_trainers_loader_is_logged_as_often_as_the_trainer_logs(tmp_path: Path) -> None:
    from swift_loader.integrations.lightning import LoaderMetrics
    from tests.system.integrations.lightning_fit import fit

    kept = fit(DataLoader(ROWS, batch_size=4), LoaderMetrics(), tmp_path)
    counts = {step: logged["swift_loader/batches_total"] for step, logged in kept.logged if logged.keys() == KEYS}
    assert counts == {4: 5, 9: 10, 14: 15, 19: 20}
    shares = [logged["swift_loader/epoch_wait_share"] for _, logged in kept.logged if logged.keys() != KEYS]
    assert len(shares) == 2
    assert all(0 <= share <= 1 for share in shares)


@pytest.mark.filterwarnings("ignore")
def test_a_swift_loader_is_logged_every_n_steps(tmp_path: Path) -> None:
    from swift_loader.integrations.lightning import LoaderMetrics
    from tests.system.integrations.lightning_fit import fit

    with SwiftLoader(dataset=ROWS, batch_size=4, worker_per_consumer=2) as loader:
        kept = fit(loader, LoaderMetrics(loader, every_n_steps=3), tmp_path)
    metrics = [logged for _, logged in kept.logged if logged.keys() == KEYS]
    assert len(metrics) == 8
    assert metrics[-1]["swift_loader/num_workers"] == 2


def test_the_verdict_of_the_epoch_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    from swift_loader.integrations.lightning import LoaderMetrics

    said: list[str] = []
    monkeypatch.setattr("swift_loader.integrations.lightning.rank_zero_info", said.append)
    loader, callback = MeasuredLoader(), LoaderMetrics()
    trainer: Any = SimpleNamespace(
        train_dataloader=loader,
        current_epoch=3,
        loggers=[],
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=100)),
    )
    model: Any = None
    callback._before = dict.fromkeys(NAMES, 0.0)
    callback.on_train_epoch_end(trainer, model)
    share = loader.metrics(prefix="")["waited_s_total"] / loader.metrics(prefix="")["elapsed_s_total"]
    assert said == [
        f"epoch 3: data-bound, the loop waited for data {100 * share:.0f} % of {loader.observations.elapsed_s:.3g} s"
    ]


def test_a_loader_without_metrics_is_refused() -> None:
    from swift_loader.integrations.lightning import LoaderMetrics

    trainer: Any = SimpleNamespace(train_dataloader=torch.utils.data.DataLoader(ROWS))
    model: Any = None
    with pytest.raises(TypeError, match=r"train loader is a DataLoader, which has no metrics; make it a swift_loader"):
        LoaderMetrics().on_train_epoch_start(trainer, model)


def test_it_is_logged_at_least_every_step() -> None:
    from swift_loader.integrations.lightning import LoaderMetrics

    with pytest.raises(ValueError, match="every_n_steps=0 must be at least 1"):
        LoaderMetrics(every_n_steps=0)
