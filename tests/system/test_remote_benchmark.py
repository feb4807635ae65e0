"""The benchmark of remote workers: its cost model, and that all of it runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"
TIMEOUT_S = 240

MB = 1_000_000


@pytest.fixture(scope="module")
def model() -> Iterator[ModuleType]:
    """Import the model for the time of this file: others may have modules of these names, too."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield import_module("remoting.model")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "").is_relative_to(BENCHMARKS):
                del sys.modules[name]


def costs(model: ModuleType, **changed: tuple[float, float]) -> Any:
    """Return costs in (ms per batch, ms per MB)."""
    given_ms = {
        "local_worker": (0.0, 0.0),
        "local_trainer": (1.0, 0.0),
        "remote_worker": (2.0, 1.0),
        "remote_trainer": (2.0, 0.0),
        "remote_raylet": (1.0, 1.0),
        "trainer_thread": (1.0, 0.0),
        "raylet_thread": (0.0, 0.5),
        **changed,
    }
    lines = {name: model.Line(fixed / 1e3, slope / 1e9) for name, (fixed, slope) in given_ms.items()}
    return model.Costs(**lines, link_bytes_per_s=1e9)


def test_a_line_goes_through_points_on_a_line(model: ModuleType) -> None:
    line = model.fit_line({nbytes: 0.001 + 2e-9 * nbytes for nbytes in (200_000, MB, 10 * MB)})

    assert line.fixed_s == pytest.approx(0.001)
    assert line.per_byte_s == pytest.approx(2e-9)
    assert line.at(5 * MB) == pytest.approx(0.011)


@pytest.mark.parametrize(
    ("points", "fixed_s", "per_byte_s"),
    [
        pytest.param({MB: 0.002}, 0.002, 0.0, id="one point"),
        pytest.param({MB: 0.004, 2 * MB: 0.002}, 0.0024, 0.0, id="falling"),
        pytest.param({MB: 0.001, 2 * MB: 0.004}, 0.0, 1.2e-9, id="steeper than its size"),
    ],
)
def test_a_line_has_no_negative_part(
    model: ModuleType, points: dict[int, float], fixed_s: float, per_byte_s: float
) -> None:
    line = model.fit_line(points)

    assert line.fixed_s == pytest.approx(fixed_s)
    assert line.per_byte_s == pytest.approx(per_byte_s)


def test_no_points_make_no_line(model: ModuleType) -> None:
    with pytest.raises(ValueError, match="at least one"):
        model.fit_line({})


@given(points=st.dictionaries(st.integers(1, 10**9), st.floats(-1.0, 1e3), min_size=1, max_size=5))
def test_a_fitted_line_is_never_negative(model: ModuleType, points: dict[int, float]) -> None:
    line = model.fit_line(points)

    assert line.fixed_s >= 0
    assert line.per_byte_s >= 0


def test_rates_of_a_load(model: ModuleType) -> None:
    load = model.Load(MB, 0.009)

    assert costs(model).local_s(load) == pytest.approx(0.010)
    assert costs(model).receive_s(load) == pytest.approx(0.004)
    assert costs(model).remote_rate(load) == pytest.approx(1 / 0.012)
    assert costs(model).gross_share(load) == pytest.approx(10 / 12)
    assert costs(model).net_share(load) == pytest.approx(10 / 12 * 0.6)


@pytest.mark.parametrize(
    ("changed", "num_cores", "name", "rate"),
    [
        pytest.param({}, None, "link", 1000.0, id="link"),
        pytest.param({"trainer_thread": (4.0, 0.0)}, None, "trainer", 250.0, id="thread of the trainer"),
        pytest.param({"raylet_thread": (0.0, 5.0)}, None, "raylet", 200.0, id="thread of the raylet"),
        pytest.param({}, 2, "cores", 500.0, id="cores"),
    ],
)
def test_the_narrowest_place_limits_remote_batches(
    model: ModuleType, changed: dict[str, tuple[float, float]], num_cores: int | None, name: str, rate: float
) -> None:
    limit = costs(model, **changed).limit(model.Load(MB, 0.009), num_cores)

    assert limit.name == name
    assert limit.rate == pytest.approx(rate)


def test_as_many_workers_saturate_as_the_limit_is_above_their_rate(model: ModuleType) -> None:
    load = model.Load(MB, 0.009)

    assert costs(model).num_saturating(load) == pytest.approx(12)
    assert costs(model).rate(load, 100, 12) == pytest.approx(costs(model).rate(load, 100, 13))
    assert costs(model).rate(load, 100, 11) < costs(model).rate(load, 100, 12)


def test_without_remote_workers_the_cores_build_all(model: ModuleType) -> None:
    assert costs(model).rate(model.Load(MB, 0.009), 4, 0) == pytest.approx(400)


def test_a_remote_worker_takes_cores_from_local_ones(model: ModuleType) -> None:
    load = model.Load(MB, 0.009)
    of_one = 1 / 0.012

    assert costs(model).rate(load, 4, 1) == pytest.approx(of_one + (4 - of_one * 0.004) / 0.010)
    assert costs(model).rate(load, 4, 1) - costs(model).rate(load, 4, 0) == pytest.approx(
        costs(model).net_share(load) / costs(model).local_s(load)
    )


@given(nbytes=st.integers(1000, 10**8), build_s=st.floats(1e-4, 10), num_cores=st.integers(1, 64))
def test_remote_workers_pay_off_above_the_least_build_time(
    model: ModuleType, nbytes: int, build_s: float, num_cores: int
) -> None:
    load, found = model.Load(nbytes, build_s), costs(model)
    more = found.rate(load, num_cores, 1) - found.rate(load, num_cores, 0)

    if build_s > found.least_build_s(nbytes) * 1.001:
        assert found.net_share(load) > 0
        assert more > 0
    elif build_s < found.least_build_s(nbytes) * 0.999:
        assert found.net_share(load) < 0


def test_small_and_large_batches_have_their_own_costs(model: ModuleType) -> None:
    small, large = costs(model), costs(model, remote_worker=(9.0, 0.0))
    both = model.CostsBySize(small, large, MB)

    assert both.of(MB) is small
    assert both.of(MB + 1) is large


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_all_parts_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    figures, chart = tmp_path / "figures.json", tmp_path / "chart.svg"
    options = ["--quick", "--only", "1 MB", "--json", str(figures), "--chart", str(chart)]
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "remote.py"), *options],
        env={**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    results = {
        (result["case"], result["system"], result["unit"]) for result in json.loads(figures.read_text())["results"]
    }
    for system in ("local", "ray, same node", "ray, other node"):
        assert ("1 MB, 1 workers", system, "rate") in results
        assert ("1 MB, transfer", system, "ms") in results or system == "local"
    assert "What one remote worker brings" in run.stdout
    assert re.search(r"^10 MB, 100 ms +16 ", run.stdout, re.MULTILINE)
    assert chart.read_text().startswith("<?xml")
