from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.metrics.observations import BATCH, Setup, SlowSample
from swift_loader.report.report import Report, html_table
from tests.support.observed import SETUP, Costs, observe, with_workers

COUNTS = {"batches_delivered": 300, "stages": {"fetch": {"p50_ms": 10.0}}}
SLOW = Costs(fetch_ms=10, collate_ms=1, step_ms=2, cpu_share=0.02)


def slow_report() -> Report:
    slowest = tuple(SlowSample(index, 0.1, 0) for index in range(20))
    return Report(observe(SLOW, with_workers(2), slowest=slowest), COUNTS)


def test_an_empty_report_is_false_and_equal_to_an_empty_dict() -> None:
    assert not Report()
    assert Report() == {}
    assert Report().to_dict() == {}
    assert Report().advice == ()
    assert repr(Report()) == "<Report: nothing is measured>"


@pytest.mark.parametrize("ask", [lambda: Report().verdict, lambda: Report().breakdown])
def test_an_empty_report_says_how_to_measure(ask: object) -> None:
    with pytest.raises(ValueError, match="ask again once the loop got a batch"):
        ask()  # type: ignore[operator]


def test_the_json_has_verdict_parts_workers_and_advice() -> None:
    found = json.loads(slow_report().to_json())
    assert found["verdict"]["bound"] == "data-bound"
    assert [part["name"] for part in found["breakdown"]["parts"]][:3] == ["read", "fetch", "collate"]
    assert len(found["breakdown"]["workers"]) == 2
    assert found["advice"][0]["action"] == "worker_per_consumer=6"
    assert found["slowest"][0] == {"index": 0, "seconds": 0.1, "epoch": 0}


def test_the_repr_says_verdict_parts_and_advice() -> None:
    text = repr(slow_report())
    lines = text.splitlines()
    assert lines[0] == "data-bound: the loop waits for data 64 % of its time"
    assert any(line.split() == ["fetch", "10", "ms", "10", "ms", "82", "%"] for line in lines)
    assert "slowest samples: 0 (100 ms), 1 (100 ms)" in text
    assert lines[-1].startswith("worker_per_consumer=6 would bring up to +1")


def test_more_reads_are_advised_if_building_waits_for_them() -> None:
    observations = observe(SLOW, with_workers(2))
    observations.batches["read_ns"] = observations.batches["fetch_ns"] * 4 // 5
    observations.batches["reading_ns"] = observations.batches["fetch_ns"] * 3
    report = Report(observations, COUNTS)
    assert [part.name for part in report.breakdown.parts if part.share > 0.3] == ["read"]
    assert report.advice[0].action == "mapped(reads=6)"
    assert "; each reads 2.7" in repr(report)


def test_a_page_has_the_report_and_its_picture_and_needs_nothing_else() -> None:
    report = slow_report()
    page = report.to_html()
    assert report._repr_html_() in page
    assert "colspan='4'>data-bound: the loop waits for data 64 % of its time</td>" in page
    assert ">wait for the loop</td>" in page
    assert page.count("<img") == page.count("src='data:image/png;base64,iVBOR") == 1
    assert not any(word in page for word in ("<script", "http:", "https:", "<link"))
    assert "<img" not in Report().to_html()
    assert "<td>" not in html_table("<td>", [["<td>"]])


@pytest.mark.parametrize(
    ("costs", "setup", "actions"),
    [
        (Costs(fetch_ms=10, step_ms=2), with_workers(2), ["worker_per_consumer=5"]),
        (Costs(fetch_ms=10, step_ms=2), replace(with_workers(0), max_in_flight=1), ["worker_per_consumer=5"]),
        (Costs(fetch_ms=10, step_ms=10), with_workers(2), []),  # the model is the limit
        (Costs(fetch_ms=10, step_ms=0, cpu_share=1.0), with_workers(4), []),  # the cores are
        (Costs(fetch_ms=10, step_ms=0, cpu_share=1.0), with_workers(2), ["worker_per_consumer=4"]),
        (
            Costs(fetch_ms=10, step_ms=0, cpu_share=1.0, trainer_cpu_ms=10.0),
            replace(with_workers(2), worker_type="thread"),
            ["worker_per_consumer=4"],
        ),
        (
            Costs(fetch_ms=10, step_ms=2),
            replace(with_workers(2), max_in_flight=3, is_in_flight_chosen=False),
            ["worker_per_consumer=5 and data_queue_size=None"],
        ),
    ],
)
def test_the_advice_is_the_number_of_workers_that_loop_and_cores_allow(
    costs: Costs, setup: Setup, actions: list[str]
) -> None:
    report = Report(observe(costs, setup), COUNTS)
    assert [advice.action for advice in report.advice] == actions
    assert all(advice.gain > 0.9 for advice in report.advice)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("delay_share", [0.0, 0.45])
def test_no_gain_is_more_than_that_of_the_number_of_workers(num_workers: int, delay_share: float) -> None:
    costs = Costs(fetch_ms=10, step_ms=0.1, cpu_share=0.04, delay_share=delay_share)
    (advice,) = Report(observe(costs, with_workers(num_workers)), COUNTS).advice
    assert 0 < advice.gain <= int(advice.action.split("=")[1]) / num_workers - 1


@pytest.mark.parametrize(
    ("delay_share", "setup", "who"),
    [
        (0.96, with_workers(1), "workers wait"),
        (0.0, replace(with_workers(0), max_in_flight=1, run_delay_ratio=24.0), "the loop waits"),
        (0.0, replace(with_workers(2), worker_type="thread", run_delay_ratio=24.0), "workers wait"),
    ],
)
def test_on_a_busy_machine_it_says_so_and_advises_nothing(delay_share: float, setup: Setup, who: str) -> None:
    report = Report(observe(Costs(fetch_ms=10, cpu_share=0.04, delay_share=delay_share), setup), COUNTS)
    assert report.observations is not None
    if not delay_share:
        report.observations.batches["run_delay_ns"] = -1
    assert report.advice == ()
    assert repr(report).endswith(f"{who} for a core 96 % of the time at a batch: the machine is busy")


def test_no_number_is_advised_while_the_loader_chooses_it() -> None:
    report = replace(slow_report(), tuning=("now 2: of 1, 2, 2 brought the most: 150 batches/s",))
    assert report.advice == ()
    assert "would" not in repr(report)


@given(seed=st.integers(0, 2**32), num_batches=st.integers(0, 60), num_workers=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_no_figures_are_too_strange_for_a_report(seed: int, num_batches: int, num_workers: int) -> None:
    draw = np.random.default_rng(seed)
    batches = np.zeros(num_batches, BATCH)
    for name in BATCH.names or ():
        largest = draw.choice([1, 2, 10**9])
        batches[name] = draw.integers(0, largest, num_batches)
    batches["run_delay_ns"] -= draw.integers(0, 2)
    setup = replace(with_workers(num_workers), in_order=bool(seed % 2))
    report = Report(replace(observe(SLOW, setup, 0), batches=batches, elapsed_s=draw.random()), COUNTS)
    assert json.loads(report.to_json())["verdict"]["wait_share"] <= 1
    assert len(repr(report).splitlines()) <= 25


@pytest.mark.parametrize(("num_batches", "start"), [(0, "<Report: no batches yet>"), (5, "starting: ")])
def test_the_repr_of_a_start_says_so(num_batches: int, start: str) -> None:
    assert repr(Report(observe(SLOW, SETUP, num_batches), COUNTS)).startswith(start)


def test_one_batch_has_no_speed() -> None:
    described = repr(Report(observe(SLOW, SETUP, 1), COUNTS))
    assert "1 batch in" in described
    assert "batches/s" not in described


@pytest.mark.parametrize(("num_remote", "who"), [(4, "4 Ray actors on"), (3, "3 Ray actors and 1 worker process on")])
def test_with_workers_elsewhere_it_names_them_and_advises_nothing(num_remote: int, who: str) -> None:
    report = Report(observe(SLOW, replace(with_workers(4), num_remote=num_remote)), COUNTS)
    assert report.advice == ()
    assert who in repr(report)
    assert "try RayExecutor(n)" in repr(report)
