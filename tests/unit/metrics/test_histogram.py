from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.metrics.observations import Histogram


def histogram_of(durations_ns: list[int]) -> Histogram:
    histogram = Histogram()
    histogram.note_all(np.array(durations_ns, np.int64))
    return histogram


durations = st.one_of(st.integers(0, 20), st.integers(0, 10**12))


@given(noted=st.lists(durations, min_size=1, max_size=60), share=st.floats(0.01, 1))
@settings(max_examples=200, deadline=None)
def test_a_quantile_is_at_most_a_quarter_too_long(noted: list[int], share: float) -> None:
    histogram = histogram_of(noted)
    rank = next(rank for rank in range(1, len(noted) + 1) if rank >= share * len(noted))
    exact = sorted(noted)[rank - 1]
    assert exact <= histogram.quantile_ns(share) <= max(noted)
    assert histogram.quantile_ns(share) <= 1.25 * exact


@given(noted=st.lists(durations, max_size=60))
@settings(max_examples=60, deadline=None)
def test_count_total_and_maximum_are_exact(noted: list[int]) -> None:
    histogram = histogram_of(noted)
    assert (histogram.count, histogram.total_ns, histogram.max_ns) == (len(noted), sum(noted), max(noted, default=0))


@given(noted=st.lists(durations, max_size=30))
@settings(max_examples=60, deadline=None)
def test_quantiles_grow_with_the_share(noted: list[int]) -> None:
    histogram = histogram_of(noted)
    quantiles = [histogram.quantile_ns(share / 10) for share in range(11)]
    assert quantiles == sorted(quantiles)


def test_no_durations_give_zeros() -> None:
    assert set(Histogram().summary().values()) == {0.0}


def test_a_summary_is_in_milliseconds() -> None:
    summary = histogram_of([1_000_000, 2_000_000, 3_000_000]).summary()
    assert summary["mean_ms"] == pytest.approx(2)
    assert summary["max_ms"] == pytest.approx(3)
    assert summary["total_s"] == pytest.approx(0.006)
    assert summary["p50_ms"] == pytest.approx(2, rel=0.25)
