from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader import Mixture, StateMismatch
from swift_loader.sampling.mixture import Mix, mix_of
from swift_loader.sampling.shuffle import Order, OrderSettings

ORDERS = [OrderSettings(7, True, 0, 1), OrderSettings(7, True, 24, 4), OrderSettings(7, False, 0, 1)]
NUM_POSITIONS = 600


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    weights = st.lists(st.floats(0, 10) | st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))
    usable = weights.filter(lambda one: sum(one) > 0.01).map(lambda one: tuple(map(float, one)))
    begins = [0, *sorted(draw(st.sets(st.integers(1, NUM_POSITIONS), max_size=4)))]
    changes = tuple((begin, draw(usable)) for begin in begins)
    return Mix(tuple(map(str, range(len(lengths)))), tuple(lengths), 100, changes, "")


@st.composite
def mixes_without_rows(draw: st.DrawFn, order: OrderSettings) -> tuple[Mix, dict[tuple[int, int], int]]:
    """A mix, and from which position on it has no more of each row that is excluded."""
    mix, out = draw(mixes()), dict[tuple[int, int], int]()
    for position in sorted(draw(st.lists(st.integers(0, NUM_POSITIONS), max_size=3))):
        source = draw(st.integers(0, len(mix.lengths) - 1))
        rows = draw(st.sets(st.integers(0, mix.lengths[source] - 1), max_size=5))
        if len(rows | {row for of, row in out if of == source}) < mix.lengths[source]:
            mix = mix.excluding(order, position, [sum(mix.lengths[:source]) + row for row in rows])
            out = {(source, row): position for row in rows} | out
    return mix, out


def rows_of(mix: Mix, order: OrderSettings, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Source, row and epoch at each position."""
    return list(zip(*(one.tolist() for one in mix.rows(order, np.arange(begin, end))), strict=True))  # type: ignore[arg-type]


@given(data=st.data(), order=st.sampled_from(ORDERS), cut=st.integers(0, NUM_POSITIONS))
@settings(max_examples=50)
def test_each_source_is_visited_epoch_by_epoch_and_without_what_is_excluded(
    data: st.DataObject, order: OrderSettings, cut: int
) -> None:
    mix, out = data.draw(mixes_without_rows(order))
    found = rows_of(mix, order, 0, NUM_POSITIONS)
    assert rows_of(mix, order, 0, cut) + rows_of(mix, order, cut, NUM_POSITIONS) == found
    assert rows_of(mix, order, cut, cut + 1) == found[cut : cut + 1] or cut == NUM_POSITIONS
    for source, length in enumerate(mix.lengths):
        visits = [(position, row, epoch) for position, (at, row, epoch) in enumerate(found) if at == source]
        assert not any(position >= out.get((source, row), NUM_POSITIONS) for position, row, _ in visits)
        epochs = [epoch for _, _, epoch in visits]
        assert epochs == sorted(epochs)
        for epoch in set(epochs):
            came = [row for _, row, of in visits if of == epoch]
            assert len(came) == len(set(came))
            if epoch < epochs[-1]:  # it is over
                end = min(position for position, _, of in visits if of > epoch)
                assert {row for row in range(length) if out.get((source, row), NUM_POSITIONS) > end} <= set(came)


@given(mix=mixes(), order=st.sampled_from(ORDERS))
@settings(max_examples=60)
def test_at_each_position_each_source_has_had_its_share(mix: Mix, order: OrderSettings) -> None:
    sources = np.array([source for source, _, _ in rows_of(mix, order, 0, NUM_POSITIONS)])
    begins = [begin for begin, _ in mix.changes]
    shares = np.array([np.array(weights) / sum(weights) for _, weights in mix.changes])
    wanted = np.cumsum(shares[np.searchsorted(begins, np.arange(NUM_POSITIONS), side="right") - 1], axis=0)
    had = np.cumsum(sources[:, None] == np.arange(len(mix.lengths)), axis=0)
    assert np.abs(had - wanted).max() < 2.5


@given(counts=st.lists(st.integers(1, 400), min_size=1, max_size=9))
def test_shares_of_integer_weights_are_exact(counts: list[int]) -> None:
    changes = ((0, tuple(map(float, counts))),)
    mix = Mix(tuple(map(str, counts)), tuple(counts), sum(counts), changes, "")
    for epoch in range(2):
        found = rows_of(mix, ORDERS[0], epoch * sum(counts), (epoch + 1) * sum(counts))
        assert sorted(found) == [(source, row, epoch) for source, count in enumerate(counts) for row in range(count)]


def test_large_equal_weights_are_exact_and_a_rare_source_comes() -> None:
    big = 3 * 10**9
    for lengths, rare in (((big, big, big), None), ((big, 1), 1)):
        mix = mix_of(Mixture({str(number): range(length) for number, length in enumerate(lengths)}))
        assert mix is not None
        counts = mix._tables.counts(10 * sum(lengths))
        assert counts == [10 * big] * 3 if rare is None else 5 <= counts[rare] <= 20


@pytest.mark.parametrize("num_out", [1, 2])
def test_a_tiny_source_without_some_rows_goes_through_many_epochs_at_once(num_out: int) -> None:
    mix = mix_of(Mixture({"tiny": range(3), "big": range(10**6)}, {"tiny": 1, "big": 1}))
    assert mix is not None
    mix = mix.excluding(ORDERS[0], 10, range(num_out))
    sources, rows, _ = mix.rows(ORDERS[0], np.arange(4000, 10_000))
    came = np.bincount(rows[sources == 0].astype(np.int64), minlength=3)
    assert came.tolist()[num_out:] == pytest.approx([3000 / (3 - num_out)] * (3 - num_out), abs=1)
    assert not came[:num_out].any()


def test_10_000_samples_of_64_sources_have_their_shares_within_1_in_10_000() -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(64, 0.5))
    changes = ((0, tuple(weights.tolist())),)
    mix = Mix(tuple(map(str, range(64))), (10**9,) * 64, 10**12, changes, "")
    for begin in (0, 10**11):
        sources, _, _ = mix.rows(ORDERS[1], np.arange(begin, begin + 10_000))
        shares = np.bincount(sources, minlength=64) / 10_000
        assert np.abs(shares - weights).max() <= (1e-4 if begin == 0 else 2e-4)  # both ends of the second part count


@given(mix=mixes(), at=st.integers(0, NUM_POSITIONS), order=st.sampled_from(ORDERS))
@settings(max_examples=50)
def test_a_change_leaves_the_past_and_a_saved_mix_is_the_same(mix: Mix, at: int, order: OrderSettings) -> None:
    mix = mix.excluding(order, at, [0]) if mix.lengths[0] > 1 else mix
    saved = Mix.of_state(json.loads(json.dumps(mix.state)))
    assert saved == mix
    new = (1.0,) * (len(mix.names) + 1)
    wider = Mix((*mix.names, "new"), (*mix.lengths, 20), 100, ((0, new),), "another")
    resumed = wider.resumed(saved, at)
    assert rows_of(resumed, order, 0, at) == rows_of(mix, order, 0, at)
    assert any(source == len(mix.names) for source, _, _ in rows_of(resumed, order, at, at + 3 * len(new)))
    same = Mix(mix.names, mix.lengths, 100, mix.changes, mix.given)
    assert same.resumed(saved.reweighted(at, new[1:]), at + 5) == mix.reweighted(at, new[1:])


@pytest.mark.parametrize(
    "damage",
    [
        {"sources": [["a", 5]]},
        {"weights": [[3, [1.0, 1.0]]]},
        {"weights": [[0, [1.0]]]},
        {"weights": [[0, [0.0, -1.0]]]},
        {"epoch_size": "many"},
        {"excluded": [[5, [[0, 0, "0:1"]]]]},
        {"excluded": [[0, [[0, 0, "0:100"]]]]},
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    mix = mix_of(Mixture({"a": range(5), "b": range(7)}))
    assert mix is not None
    with pytest.raises(StateMismatch, match="mixture"):
        Mix.of_state({**mix.state, **damage})


def test_an_index_names_a_row() -> None:
    mixture = Mixture({"web": range(5), "code": range(100, 107)}, {"web": 1, "code": 3}, epoch_size=40)
    assert (len(mixture), mixture.locate(11)) == (40, ("code", 6, 0))
    order = Order(40, OrderSettings(0, True, 0, 1, mix_of(mixture)))
    indices = order.indices(1, np.arange(40))
    assert len(set(indices.tolist())) == 40
    rows = [mixture.locate(index) for index in indices.tolist()]
    assert [mixture[index] for index in indices.tolist()] == [mixture.sources[one.source][one.row] for one in rows]
    assert sum(one.source == "web" for one in rows) == 10
    assert (mixture[mixture.index("web", 4)], mixture[np.int64(mixture.index("code", 6))]) == (4, 106)
    with pytest.raises(IndexError):
        mixture.index("code", 7)
    for wrong in (-1, 12, int(indices.max()) + 100):
        with pytest.raises(IndexError, match="beyond"):
            mixture.locate(wrong)


def test_the_rows_of_a_mixture_have_no_weights_and_its_row_numbers_are_refused() -> None:
    mixture = Mixture({"web": range(5), "code": range(100, 107)}, {"web": 1, "code": 3}, epoch_size=40)
    rows: Any = mixture.rows
    assert (len(rows), list(rows), rows[-1]) == (12, [*range(5), *range(100, 107)], 106)
    with pytest.raises(IndexError):
        rows[12]
    for number in (0, 11, 39, -1):
        with pytest.raises(ValueError, match=rf"^{number} is no index of this Mixture.*mixture\.rows"):
            mixture[number]
    with pytest.raises(ValueError, match="row number"):
        list(mixture)  # type: ignore[call-overload]


def test_weights_may_ramp_and_have_a_temperature() -> None:
    sources = {"a": range(1000), "b": range(1000)}
    ramped = mix_of(Mixture(sources, {0: {"a": 1, "b": 0}, 6400: {"a": 0, "b": 1}}, ramp=True))
    assert ramped is not None
    found = np.array([source for source, _, _ in rows_of(ramped, ORDERS[0], 0, 7000)])
    assert found[:50].sum() <= 1
    assert abs(int(found[:3200].sum()) - 800) <= 2
    assert abs(int(found[:6400].sum()) - 3200) <= 2
    assert found[6400:].all()
    same = mix_of(Mixture(sources, {np.int64(0): {"a": 1, "b": 0}, np.int64(6400): {"a": 0, "b": 1}}, ramp=True))
    assert json.dumps(same.state if same else 0) == json.dumps(ramped.state)
    flat = mix_of(Mixture({"a": range(1000), "b": range(10)}, temperature=2.0))
    assert flat is not None
    assert flat.changes[0][1] == pytest.approx((1, 0.1))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sources": {}}, ValueError),
        ({"sources": [range(3)]}, TypeError),
        ({"sources": {"a": iter("abc")}}, TypeError),
        ({"sources": {"a": []}}, ValueError),
        ({"sources": {"a": Mixture({"b": range(3)})}}, TypeError),
        ({"weights": {"a": 1}}, ValueError),
        ({"weights": {"a": 0, "b": 0}}, ValueError),
        ({"weights": {"a": 1, "b": float("nan")}}, ValueError),
        ({"weights": {5: {"a": 1, "b": 1}}}, ValueError),
        ({"weights": [7, 3]}, ValueError),
        ({"weights": {"a": 1e308, "b": 1e308}}, ValueError),
        ({"temperature": 0}, ValueError),
        ({"epoch_size": 0}, ValueError),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Mixture(**{"sources": {"a": range(3), "b": range(4)}, **arguments})
