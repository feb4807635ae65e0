"""Pipelines that are mixed by weight: shares, ends, and weights that change in a run or between two."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader import StateMismatch
from swift_loader.pipeline import Pipeline
from tests.support import stage_functions as functions
from tests.support.stage_functions import AsyncCounted, Counted, OwnEpochs

NUM = 200
NAMES = ("web", "code", "books")

Weights = dict[str, float]

weights_by_name: Any = st.fixed_dictionaries(dict.fromkeys(NAMES, st.floats(0, 10) | st.integers(0, 9))).filter(
    lambda weights: sum(weights.values()) > 0.01
)


@st.composite
def schedules(draw: st.DrawFn) -> dict[int, Weights]:
    return {begin: draw(weights_by_name) for begin in [0, *draw(st.sets(st.integers(1, NUM - 1), max_size=3))]}


def mixed(weights: Any, size: int = NUM, **options: Any) -> Pipeline[tuple[str, int]]:
    return Pipeline.mix(
        {name: Pipeline([(name, number) for number in range(size)]) for name in NAMES}, weights, **options
    )


def taken(pipeline: Pipeline[Any], num: int, state: Any = None) -> tuple[list[Any], Any]:
    """Return items, and the state after them."""
    if state is not None:
        pipeline.load_state_dict(state)
        pipeline.set_epoch(state["epoch"])  # nothing may be left of it
    items = list(itertools.islice(pipeline, num)) if num else []
    return items, json.loads(json.dumps(pipeline.state_dict()))


@given(schedule=schedules())
@settings(max_examples=80)
def test_each_pipeline_has_had_its_share_of_any_number_of_items(schedule: dict[int, Weights]) -> None:
    items, _ = taken(mixed(schedule), NUM)
    begins = sorted(schedule)
    shares = np.array([[float(schedule[begin][name]) for name in NAMES] for begin in begins])
    shares /= shares.sum(axis=1, keepdims=True)
    wanted = np.cumsum(shares[np.searchsorted(begins, np.arange(NUM), side="right") - 1], axis=0)
    had = np.cumsum(np.array([name for name, _ in items])[:, None] == np.array(NAMES), axis=0)
    assert np.abs(had - wanted).max() < 2.5
    for name in NAMES:
        own = [number for of, number in items if of == name]
        assert own == list(range(len(own)))


@given(schedule=schedules(), stops=st.sets(st.integers(0, NUM), max_size=4), size=st.sampled_from([40, NUM]))
@settings(max_examples=80)
def test_weights_changed_on_a_resume_are_as_those_of_a_schedule(
    schedule: dict[int, Weights], stops: set[int], size: int
) -> None:
    whole, _ = taken(mixed(schedule, size), NUM)
    items: list[Any] = []
    state, current = None, schedule[0]
    for begin, end in itertools.pairwise(sorted({0, NUM, *schedule, *stops})):
        current = schedule.get(begin, current)
        if begin == len(items) and (state is None or not state["epoch"]):  # else all have ended
            part, state = taken(mixed(current, size), end - begin, state)
            items += part
    assert items == whole or (size < NUM and items == whole[: len(items)])  # a schedule knows who comes later


@pytest.mark.parametrize(("on_end", "num"), [("continue", 9 + 3 + 30), ("stop", 3 * 3)])
def test_at_an_end_the_others_go_on_or_the_epoch_ends(on_end: Any, num: int) -> None:
    sizes = {"web": 9, "code": 3, "books": 30}
    parts = {name: Pipeline([name] * size) for name, size in sizes.items()}
    pipeline: Pipeline[str] = Pipeline.mix(parts, dict.fromkeys(sizes, 1), on_end=on_end)
    for _ in range(2):
        items = list(pipeline)
        assert len(items) == num
        assert items[:9] == items[:3] * 3
    assert set(items[9:21]) <= {"web", "books"}


@pytest.mark.parametrize("num_taken", [0, 20, 50, 55])
@pytest.mark.parametrize("ramp", [False, True])
def test_pipelines_whose_weight_comes_later_go_on_if_the_others_have_ended(num_taken: int, ramp: bool) -> None:
    schedule = {0: {"easy": 1, "hard": 0}, 60: {"easy": 1, "hard": 0}, 80: {"easy": 1, "hard": 1}}

    def make() -> Pipeline[str]:
        return Pipeline.mix({name: Pipeline([name] * 50) for name in ("easy", "hard")}, schedule, ramp=ramp)

    assert len(make()) == 100
    first, state = taken(make(), num_taken)
    rest, _ = taken(make(), 100, state)
    assert first + rest == ["easy"] * 50 + ["hard"] * 50


def test_pipelines_whose_last_weight_is_0_do_not_come_again() -> None:
    schedule = {0: [0, 1, 1], 6: [1, 1, 0]}
    assert (
        sorted(Pipeline.mix([Pipeline([number] * 4) for number in range(3)], schedule)) == [0] * 4 + [1] * 4 + [2] * 3
    )
    assert list(Pipeline.mix([Pipeline([0] * 9), Pipeline([1])], {0: [0, 1], 4: [0, 1]})) == [1]


class Told(Counted):
    """A source with a state. Its items say the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((self.epoch, number) for number in super().__iter__())


@pytest.mark.parametrize("repeated", [Told(5), OwnEpochs(5), AsyncCounted(5)], ids=lambda source: type(source).__name__)
def test_a_continuous_pipeline_repeats_and_resumes_in_its_own_epoch(repeated: Any) -> None:
    def make() -> Pipeline[Any]:
        again = Pipeline(copy.deepcopy(repeated), continuous=True, seed=5).map(functions.draw, concurrency=2)
        pipeline = Pipeline.mix({"web": Pipeline(range(30)).prefetch(2), "code": again}, on_end="stop").prefetch(3)
        pipeline.set_epoch(7)
        return pipeline

    whole = list(make())
    code = [item for item in whole if isinstance(item, tuple)]
    assert len(whole) == 61  # the epoch ends where the 31st of the other one would come
    assert len(set(code)) == 31  # other draws each time
    if isinstance(repeated, Told):
        assert [told for (told, _), _ in code] == [7 + number // 5 for number in range(31)]
    items: list[Any] = []
    state = make().state_dict()
    while len(items) < 61:
        pipeline = make()
        pipeline.load_state_dict(state)
        if len(items) % 2:
            pipeline.set_epoch(7)
        part, state = taken(pipeline, 7)
        pipeline.close()
        items += part
    assert items == whole


def test_a_weight_of_0_leaves_a_pipeline_out_and_lists_have_weights_in_their_order() -> None:
    weights = {"web": 0, "code": 0, "books": 1}
    parts = [Pipeline(["a"] * 4), Pipeline(["b"] * 4), Pipeline(["c"] * 4)]
    assert sorted(Pipeline.mix(parts, [1, 0, 1])) == [*"aaaacccc"]
    assert len(Pipeline.mix(parts)) == 12
    with pytest.raises(TypeError, match="isn't known"):
        len(Pipeline.mix(parts, [1, 0, 1]))
    ramp = [name for name, _ in mixed({0: {"web": 1, "code": 0, "books": 0}, 100: weights}, ramp=True)]
    assert [ramp[:50].count("web"), ramp[50:100].count("web"), ramp[100:200].count("web")] == [37, 13, 0]
    assert "mix, web 1, code 0.333333, books 0.111111" in repr(mixed({"web": 81, "code": 9, "books": 1}, temperature=2))


def test_wrong_names_and_weights_and_other_pipelines_are_refused() -> None:
    parts = [Pipeline([1]), Pipeline([2])]
    for pipelines, weights, message in (
        (parts, [1], "weights must name each source once: '0', '1'; they are '0'"),
        (parts, [0, 0], "not all of them 0"),
        (parts, {10: [1, 2]}, "one of them must be 0"),
        (dict(zip("ab", parts, strict=True)), {"a": 1, "c": 2}, "'a', 'b'; they are 'a', 'c'"),
        (dict(enumerate(parts)), None, "names that aren't texts"),
        ([], None, "no pipelines to mix"),
    ):
        with pytest.raises(ValueError, match=message):
            Pipeline.mix(pipelines, weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_end='repeat' is unknown; it must be one of 'continue', 'stop'"):
        mixed(None, on_end="repeat")
    _, state = taken(mixed(None), 3)
    with pytest.raises(StateMismatch, match=r"mix of web, code, books.*mix of 0, 1, 2"):
        Pipeline.mix([Pipeline([1])] * 3).load_state_dict(state)
