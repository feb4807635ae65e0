from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.measured import MeasuredLoader

pytest.importorskip("opentelemetry.sdk.metrics")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from swift_loader.integrations.opentelemetry import observe


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader: InMemoryMetricReader) -> Iterator[Any]:
    provider = MeterProvider([reader])
    yield provider.get_meter("test")
    provider.shutdown()


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: metric for of in data.resource_metrics for scope in of.scope_metrics for metric in scope.metrics
    }


def test_a_collection_has_the_loaders_figures(reader: InMemoryMetricReader, meter: Any) -> None:
    loader = MeasuredLoader()
    observe(loader, meter, {"rank": 3})
    found = collected(reader)
    metrics = loader.metrics(prefix="")
    (point,) = found["swift_loader.delivered.batches"].data.data_points
    assert (point.value, dict(point.attributes)) == (100, {"rank": 3})
    assert found["swift_loader.delivered.batches"].data.is_monotonic
    (wait,) = found["swift_loader.wait"].data.data_points
    assert (wait.value, found["swift_loader.wait"].unit) == (metrics["wait_share"], "1")
    stages = {
        (point.attributes["stage"], point.attributes["quantile"]): point.value
        for point in found["swift_loader.stage.duration"].data.data_points
    }
    assert len(stages) == 12
    assert stages["collate", "0.5"] == pytest.approx(metrics["collate_ms_p50"] / 1000)
    assert found["swift_loader.stage.duration"].unit == "s"


def test_the_names_are_these(reader: InMemoryMetricReader, meter: Any) -> None:
    loader = MeasuredLoader()
    observe(loader, meter)
    assert {name: metric.unit for name, metric in collected(reader).items()} == {
        "swift_loader.batch.rate": "{batches/s}",
        "swift_loader.sample.rate": "{samples/s}",
        "swift_loader.wait": "1",
        "swift_loader.ready.batches": "{batches}",
        "swift_loader.current.workers": "{workers}",
        "swift_loader.stage.duration": "s",
        "swift_loader.delivered.batches": "{batches}",
        "swift_loader.delivered.samples": "{samples}",
        "swift_loader.waited": "s",
        "swift_loader.run": "s",
        "swift_loader.worker.restarts": "{restarts}",
    }


def test_a_loader_that_is_gone_is_not_observed(reader: InMemoryMetricReader, meter: Any) -> None:
    loader = MeasuredLoader()
    observe(loader, meter)
    del loader
    gc.collect()
    assert not any(metric.data.data_points for metric in collected(reader).values())


def test_without_a_meter_the_global_one_is_taken() -> None:
    observe(MeasuredLoader())  # its provider does nothing here
