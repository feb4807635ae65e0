"""What other systems are told of a loader."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from swift_loader.integrations.wandb import log_metrics
from tests.support.measured import MeasuredLoader


def test_prometheus_gets_the_loaders_figures_in_base_units_while_there_is_the_loader() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from swift_loader.integrations.prometheus import LoaderCollector

    loader, registry = MeasuredLoader(), prometheus.CollectorRegistry()
    registry.register(LoaderCollector(loader, rank="3"))
    metrics = loader.metrics(prefix="")
    assert registry.get_sample_value("swift_loader_delivered_batches_total", {"rank": "3"}) == 100
    labels = {"rank": "3", "stage": "fetch", "quantile": "0.99"}
    fetch_s = registry.get_sample_value("swift_loader_stage_duration_seconds", labels)
    assert fetch_s == pytest.approx(metrics["fetch_ms_p99"] / 1000)
    del loader
    gc.collect()
    assert prometheus.generate_latest(registry) == b""


def test_opentelemetry_gets_the_loaders_figures() -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from swift_loader.integrations.opentelemetry import observe

    loader, reader = MeasuredLoader(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe(loader, provider.get_meter("test"), {"rank": 3})
    data: Any = reader.get_metrics_data()
    found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    (point,) = found["swift_loader.delivered.batches"].data.data_points
    assert (point.value, dict(point.attributes)) == (100, {"rank": 3})
    assert len(found["swift_loader.stage.duration"].data.data_points) == 12
    provider.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_torchs_writer_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from swift_loader.integrations.tensorboard import write_metrics, write_report

    loader = MeasuredLoader()
    with SummaryWriter(str(tmp_path)) as writer:
        write_metrics(writer, loader, 5)
        write_report(writer, loader, 5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(loader.metrics())
    assert events.Tags()["images"] == ["swift_loader/report"]


def test_weights_and_biases_joins_the_step_that_the_loop_commits() -> None:
    class Run:
        def log(self, *logged: Any, **options: Any) -> None:
            calls.append((logged, options))

    calls: list[Any] = []
    loader = MeasuredLoader()
    log_metrics(Run(), loader, 4)
    assert calls == [((loader.metrics(),), {"step": 4, "commit": False})]
