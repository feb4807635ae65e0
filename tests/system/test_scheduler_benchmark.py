"""The benchmark of the scheduler: all of it runs, and its check of the batches can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from swift_loader.scheduler.batches import Batch
from swift_loader.scheduler.ledger import Ledger
from tests.support.helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"
TIMEOUT_S = 50


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of the benchmarks, for the time of a test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_benchmark_runs_and_writes_its_figures(tmp_path: Path) -> None:
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    figures = tmp_path / "figures.json"
    arguments = ["--rounds", "1", "--workers", "1,40", "--nodes", "2", "--batches", "3000", "--json", str(figures)]
    subprocess.run(
        [sys.executable, str(BENCHMARKS / "scheduler.py"), *arguments],
        env={**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    results = json.loads(figures.read_text())["results"]
    assert {result["case"] for result in results} == {
        *("1 worker", "40 workers"),
        *(
            f"{nbytes} MB, {lost} lost"
            for nbytes in (1, 10)
            for lost in ("0 nodes and 0 workers", "20 nodes and 50 workers")
        ),
        *("1e06 samples, 1 ranks", "1e09 samples, 64 ranks", "1e12 samples, 4096 ranks"),
    }
    assert all(result["median"] > 0 for result in results)


def make_cluster(load: Callable[[str], ModuleType], **options: Any) -> Any:
    settings = load("scheduling.settings").ClusterSettings(2, 4, build_s=0.1, **options)
    return load("scheduling.cluster").Cluster(settings)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_simulated_loop_gets_each_batch_although_nodes_die(load: Callable[[str], ModuleType], in_order: bool) -> None:
    cluster = make_cluster(load, in_order=in_order, latency_s=1e-3, batch_nbytes=10**6)
    outcome = cluster.run(500, lambda number: None if number % 50 else cluster.nodes.kill_a_node())
    assert outcome.num_batches == 500
    assert outcome.num_rebuilt > 10
    assert outcome.num_events > 2 * 500


def test_a_simulated_cluster_is_as_fast_as_its_workers_or_its_slowest_link(load: Callable[[str], ModuleType]) -> None:
    rates = {}
    for trainer_gbit in (400.0, 0.4):
        cluster = make_cluster(load, build_sigma=0.0, batch_nbytes=10**6, trainer_gbit=trainer_gbit)
        cluster.run(50)
        outcome = cluster.run(400)
        rates[trainer_gbit] = 400 / outcome.virtual_s
    assert rates[400.0] == pytest.approx(8 / 0.1, rel=0.05)
    assert rates[0.4] == pytest.approx(0.4e9 / 8e6, rel=0.05)


def test_a_simulated_loop_refuses_a_batch_that_comes_twice(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Ledger.deliver
    last: list[Batch[Any]] = []

    def deliver(self: Ledger[Any]) -> Batch[Any] | None:
        batch = real(self)
        if batch is None and last:
            return last[0]
        last[:] = [batch] if batch is not None else []
        return batch

    monkeypatch.setattr(Ledger, "deliver", deliver)
    for in_order in (True, False):
        with pytest.raises(RuntimeError, match="the loop got"):
            make_cluster(load, in_order=in_order).run(100)
