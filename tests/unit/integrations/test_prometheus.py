from __future__ import annotations

import gc

import pytest

from tests.support.measured import MeasuredLoader

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from swift_loader.integrations.prometheus import LoaderCollector  # noqa: E402


def test_a_scrape_has_the_loaders_figures_in_base_units() -> None:
    loader, registry = MeasuredLoader(), CollectorRegistry()
    registry.register(LoaderCollector(loader, rank="3"))
    metrics = loader.metrics(prefix="")
    assert registry.get_sample_value("swift_loader_delivered_batches_total", {"rank": "3"}) == 100
    assert registry.get_sample_value("swift_loader_wait_ratio", {"rank": "3"}) == metrics["wait_share"]
    assert registry.get_sample_value("swift_loader_waited_seconds_total", {"rank": "3"}) == metrics["waited_s_total"]
    labels = {"rank": "3", "stage": "fetch", "quantile": "0.99"}
    fetch_s = registry.get_sample_value("swift_loader_stage_duration_seconds", labels)
    assert fetch_s == pytest.approx(metrics["fetch_ms_p99"] / 1000)


def test_the_names_are_these() -> None:
    loader, registry = MeasuredLoader(), CollectorRegistry()
    registry.register(LoaderCollector(loader))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    assert {family.name: family.type for family in families} == {
        "swift_loader_batches_per_second": "gauge",
        "swift_loader_samples_per_second": "gauge",
        "swift_loader_wait_ratio": "gauge",
        "swift_loader_ready_batches": "gauge",
        "swift_loader_current_workers": "gauge",
        "swift_loader_stage_duration_seconds": "gauge",
        "swift_loader_delivered_batches": "counter",
        "swift_loader_delivered_samples": "counter",
        "swift_loader_waited_seconds": "counter",
        "swift_loader_run_seconds": "counter",
        "swift_loader_worker_restarts": "counter",
    }


def test_loaders_of_different_labels_share_a_registry() -> None:
    train, val, registry = MeasuredLoader(), MeasuredLoader(), CollectorRegistry()
    registry.register(LoaderCollector(train, split="train"))
    registry.register(LoaderCollector(val, split="val"))
    for split in ("train", "val"):
        assert registry.get_sample_value("swift_loader_delivered_batches_total", {"split": split}) == 100


def test_a_loader_that_is_gone_tells_nothing() -> None:
    loader, registry = MeasuredLoader(), CollectorRegistry()
    registry.register(LoaderCollector(loader))
    del loader
    gc.collect()
    assert generate_latest(registry) == b""
