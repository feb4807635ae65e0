from __future__ import annotations

from swift_loader.integrations.figures import FIGURES, Kind
from swift_loader.report.flat import NAMES, TOTALS


def test_each_metric_is_in_one_figure() -> None:
    assert sorted(key for figure in FIGURES for key in figure.keys) == sorted(NAMES)


def test_what_only_grows_is_a_total() -> None:
    assert {key for figure in FIGURES if figure.kind is Kind.TOTAL for key in figure.keys} == set(TOTALS)


def test_each_metric_has_a_value_for_each_label() -> None:
    assert all(len(values) == len(figure.labels) for figure in FIGURES for values in figure.keys.values())
