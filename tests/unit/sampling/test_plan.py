from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swift_loader.sampling.plan import BatchPlan, Plan, PlanReader, PlanSettings, Uneven
from swift_loader.sampling.shuffle import Order, OrderSettings, local_window


def settings_of(
    *,
    batch_size: int = 8,
    world_size: int = 1,
    rank: int = 0,
    seed: int = 3,
    shuffle: bool = True,
    window: int | None = 0,
    uneven: Uneven = Uneven.PAD,
    drop_last: bool = False,
) -> PlanSettings:
    order = OrderSettings.of(seed=seed, shuffle=shuffle, window=window, batch_size=batch_size)
    return PlanSettings(order, batch_size, world_size, rank, uneven, drop_last)


SETTINGS = settings_of()

sizes = st.one_of(st.integers(0, 40), st.integers(0, 3000))
windows = st.one_of(st.none(), st.just(0), st.integers(1, 40), st.integers(41, 5000))
plan_settings = st.builds(
    settings_of,
    batch_size=st.one_of(st.integers(1, 9), st.integers(1, 200)),
    world_size=st.integers(1, 7),
    rank=st.just(0),
    seed=st.integers(0, 2**64),
    shuffle=st.booleans(),
    window=windows,
    uneven=st.sampled_from(Uneven),
    drop_last=st.booleans(),
)


def plans_of_all_ranks(num_samples: int, chosen: PlanSettings) -> list[Plan]:
    return [Plan.of(num_samples, replace(chosen, rank=rank)) for rank in range(chosen.world_size)]


def all_batches(plan: Plan, epoch: int = 0) -> list[BatchPlan]:
    return plan.batches(epoch, 0, plan.num_batches(epoch)) if plan.num_batches(epoch) else []


def whole_order(plan: Plan, epoch: int = 0) -> list[int]:
    return [int(index) for index in plan.order.indices(epoch, np.arange(plan.order.num_samples))]


def by_step(ranks: list[list[BatchPlan]]) -> list[list[int]]:
    """The samples of each global step, rank after rank."""
    num_steps = max(map(len, ranks))
    return [
        [index for batches in ranks if step < len(batches) for index in batches[step].indices.tolist()]
        for step in range(num_steps)
    ]


@given(num_samples=sizes, chosen=plan_settings, epoch=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_every_sample_is_used_as_uneven_says(num_samples: int, chosen: PlanSettings, epoch: int) -> None:
    ranks = [all_batches(plan, epoch) for plan in plans_of_all_ranks(num_samples, chosen)]
    batches = [batch for rank in ranks for batch in rank]
    used = Counter(index for batch in batches for index in batch.indices.tolist())
    num_padding = sum(batch.num_padding for batch in batches)
    global_batch = chosen.batch_size * chosen.world_size

    assert set(used) <= set(range(num_samples))
    assert all(len(batch.indices) > 0 for batch in batches)
    assert all(len(batch.indices) <= chosen.batch_size for batch in batches)
    if chosen.drop_last:
        assert set(used.values()) <= {1}
        assert len(used) == num_samples - num_samples % global_batch
        assert num_padding == 0
    elif chosen.uneven is Uneven.PAD:
        assert len(used) == num_samples
        assert used.total() - num_samples == num_padding
        assert num_padding < chosen.world_size
        assert chosen.world_size > 1 or num_padding == 0
    elif chosen.uneven is Uneven.DROP:
        assert set(used.values()) <= {1}
        assert num_samples - len(used) < chosen.world_size
        assert num_padding == 0
    else:
        assert set(used.values()) <= {1}
        assert len(used) == num_samples
        assert num_padding == 0


@given(num_samples=sizes, chosen=plan_settings)
@settings(max_examples=75, deadline=None)
def test_all_ranks_have_equally_many_batches_of_equal_size_unless_exact(num_samples: int, chosen: PlanSettings) -> None:
    plans = plans_of_all_ranks(num_samples, chosen)
    counts = {plan.num_batches(0) for plan in plans}
    lengths = {tuple(len(batch.indices) for batch in all_batches(plan)) for plan in plans}
    if chosen.uneven is Uneven.EXACT and not chosen.drop_last:
        assert max(counts) - min(counts) <= 1
        totals = [sum(rank) for rank in lengths]
        assert max(totals) - min(totals) <= 1
    else:
        assert len(counts) == len(lengths) == 1


@given(num_samples=sizes, chosen=plan_settings, epoch=st.integers(0, 3))
@settings(max_examples=75, deadline=None)
def test_after_any_step_what_was_used_is_a_prefix_of_the_order(
    num_samples: int, chosen: PlanSettings, epoch: int
) -> None:
    plans = plans_of_all_ranks(num_samples, chosen)
    order = whole_order(plans[0], epoch)
    steps = by_step([all_batches(plan, epoch) for plan in plans])
    used = [index for step in steps for index in step]
    num_repeated = max(0, len(used) - num_samples)
    assert used == (order + order * num_repeated)[: len(used)]
    global_batch = chosen.batch_size * chosen.world_size
    assert all(len(step) == global_batch for step in steps[:-1])


@given(num_samples=st.integers(1, 3000), chosen=plan_settings, others=st.tuples(st.integers(1, 64), st.integers(1, 5)))
@settings(max_examples=60, deadline=None)
def test_another_batch_size_and_number_of_ranks_goes_on_where_the_first_stopped(
    num_samples: int, chosen: PlanSettings, others: tuple[int, int]
) -> None:
    batch_size, world_size = others
    plan = Plan.of(num_samples, chosen)
    exact = replace(chosen, uneven=Uneven.EXACT)
    for planned in (exact, replace(exact, batch_size=batch_size, world_size=world_size)):
        ranks = [all_batches(each) for each in plans_of_all_ranks(num_samples, planned)]
        used = [index for step in by_step(ranks) for index in step]
        assert used == whole_order(plan)[: len(used)]


@given(num_samples=sizes, seed=st.integers(0, 2**64), window=windows, batch_size=st.integers(1, 64))
@settings(max_examples=75, deadline=None)
def test_an_order_is_a_permutation(num_samples: int, seed: int, window: int | None, batch_size: int) -> None:
    order = Order(num_samples, OrderSettings.of(seed=seed, shuffle=True, window=window, batch_size=batch_size))
    for epoch in (0, 1, 10**9):
        indices = order.indices(epoch, np.arange(num_samples))
        assert np.array_equal(np.sort(indices), np.arange(num_samples))


@given(
    num_samples=st.integers(50, 3000),
    seed=st.integers(0, 2**40),
    window=windows,
    epochs=st.tuples(*[st.integers(0, 9)] * 2),
)
@settings(max_examples=100, deadline=None)
def test_epochs_and_seeds_differ_and_the_same_call_gives_the_same(
    num_samples: int, seed: int, window: int | None, epochs: tuple[int, int]
) -> None:
    assume(epochs[0] != epochs[1])
    plan = Plan.of(num_samples, settings_of(seed=seed, window=window))
    other = Plan.of(num_samples, settings_of(seed=seed + 1, window=window))
    first = whole_order(plan, epochs[0])
    assert first == whole_order(plan, epochs[0])
    assert first != whole_order(plan, epochs[1])
    assert first != whole_order(other, epochs[0])


@given(num_samples=st.integers(1, 3000), chosen=plan_settings, data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_reader_gives_what_the_plan_gives_in_any_order_of_asking(
    num_samples: int, chosen: PlanSettings, data: st.DataObject
) -> None:
    plan = Plan.of(num_samples, chosen)
    assume(plan.num_batches(0))
    reader = PlanReader(plan)
    asked = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, plan.num_batches(0) - 1)), max_size=12))
    for epoch, step in asked:
        read, planned = reader.batch(epoch, step), plan.batch(epoch, step)
        assert np.array_equal(read.indices, planned.indices)
        assert read.num_padding == planned.num_padding


def test_a_reader_crosses_the_ends_of_its_blocks_and_of_epochs() -> None:
    plan = Plan.of(20_000, settings_of(batch_size=7, window=35))
    reader = PlanReader(plan)
    for epoch in (0, 1):
        read = [reader.batch(epoch, step).indices for step in range(plan.num_batches(epoch))]
        assert np.array_equal(np.concatenate(read), whole_order(plan, epoch))


@pytest.mark.parametrize("steps", [(-1, 0), (0, 0), (3, 2), (0, 4), (3, 4)])
def test_steps_outside_the_epoch_are_refused(steps: tuple[int, int]) -> None:
    plan = Plan.of(20, SETTINGS)
    with pytest.raises(IndexError, match="3 batches"):
        plan.batches(0, *steps)


@pytest.mark.parametrize("chosen", [SETTINGS, settings_of(uneven=Uneven.EXACT, world_size=4, rank=3)])
def test_no_samples_make_no_batches(chosen: PlanSettings) -> None:
    plan = Plan.of(0, chosen)
    assert plan.num_batches(0) == 0
    with pytest.raises(IndexError):
        plan.batch(0, 0)


@pytest.mark.parametrize("window", [None, 0, 5 * 32])
def test_a_billion_samples_take_no_memory(window: int | None) -> None:
    chosen = settings_of(batch_size=32, world_size=4, rank=2, window=window)
    Plan.of(1000, chosen).batch(0, 0)  # what is allocated once, on first use
    tracemalloc.start()
    try:
        plan = Plan.of(10**9, chosen)
        for step in range(0, plan.num_batches(1), plan.num_batches(1) // 100):
            plan.batch(1, step)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@given(num_samples=st.integers(1, 3000), window=st.integers(1, 5000), batch_size=st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_a_window_is_made_of_whole_runs_and_about_as_large_as_asked(
    num_samples: int, window: int, batch_size: int
) -> None:
    order = Order(num_samples, OrderSettings.of(seed=1, shuffle=True, window=window, batch_size=batch_size))
    assert order.settings.rounded_window % order.settings.run_length == 0
    assert abs(order.settings.rounded_window - window) < order.settings.run_length


def test_a_sample_comes_at_every_place_of_a_window_equally_often() -> None:
    num_samples, num_epochs = 60, 1500
    plan = Plan.of(num_samples, settings_of(window=40))
    places = np.array([whole_order(plan, epoch).index(7) for epoch in range(num_epochs)])
    counts = np.bincount(places, minlength=num_samples)
    expected = num_epochs / num_samples
    freedom = num_samples - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * (2 * freedom) ** 0.5


def neighbours_and_near(num_samples: int, batch_size: int, window: int | None, epoch: int) -> tuple[float, float]:
    """The shares of samples that have the next one, and one less than 16 away, in their batch."""
    order = Order(num_samples, OrderSettings.of(seed=11, shuffle=True, window=window, batch_size=batch_size))
    num_full = num_samples // batch_size * batch_size
    ordered = np.sort(order.indices(epoch, np.arange(num_full)).reshape(-1, batch_size), axis=1)
    distances = np.diff(ordered, axis=1)
    close = distances < 16
    nothing = np.zeros((len(ordered), 1), bool)
    near = np.hstack([close, nothing]) | np.hstack([nothing, close])
    return (distances == 1).sum() / num_full, near.mean()


def variance_of_class_counts(num_samples: int, batch_size: int, window: int | None, num_epochs: int) -> float:
    """Of data sorted by ten classes, over that of drawing without replacement."""
    order_settings = OrderSettings.of(seed=11, shuffle=True, window=window, batch_size=batch_size)
    order = Order(num_samples, order_settings)
    num_full = num_samples // batch_size * batch_size
    sizes = np.bincount(np.arange(num_samples) * 10 // num_samples)
    squares = []
    for epoch in range(num_epochs):
        classes = order.indices(epoch, np.arange(num_full)).reshape(-1, batch_size) * 10 // num_samples
        for label, size in enumerate(sizes):
            squares.append((((classes == label).sum(axis=1) - batch_size * size / num_samples) ** 2).mean())
    shares = sizes / num_samples
    expected = (batch_size * shares * (1 - shares)).mean() * (num_samples - batch_size) / (num_samples - 1)
    return float(np.mean(squares) / expected)


@pytest.mark.parametrize(
    ("batch_size", "num_windows"), [(1, 1.5), (8, 0.3), (32, 2.01), (100, 1.05), (256, 6), (4096, 1.5)]
)
def test_by_default_a_batch_is_mixed_like_one_of_a_uniform_shuffle(batch_size: int, num_windows: float) -> None:
    num_samples = int(min(local_window(batch_size) * num_windows, 1_500_000))
    num_epochs = max(1, 200_000 // num_samples)
    assert variance_of_class_counts(num_samples, batch_size, None, num_epochs) <= 1.1
    neighbours, near = neighbours_and_near(num_samples, batch_size, None, 0)
    uniform_neighbours, uniform_near = neighbours_and_near(num_samples, batch_size, 0, 0)
    assert neighbours <= uniform_neighbours + 0.01
    assert neighbours <= 0.05
    assert near <= uniform_near + 0.04


@pytest.mark.parametrize("num_samples", [1, 2, 7, 100, 1797])
def test_by_default_a_small_dataset_is_shuffled_uniformly(num_samples: int) -> None:
    """The window has all of it, so that runs leave no trace: a sample comes after any other one equally often."""
    order = Order(num_samples, OrderSettings.of(seed=3, shuffle=True, window=None, batch_size=4))
    epochs = range(400 if num_samples > 2 else 1)
    follows = [(np.diff(order.indices(epoch, np.arange(num_samples))) == 1).sum() for epoch in epochs]
    assert np.mean(follows) <= 1 + 6 / len(epochs) ** 0.5  # (N - 1) / N per epoch


def test_by_default_reads_stay_local() -> None:
    """In a window, samples come in runs of eight: as many pages of eight are read as runs, and one more at most."""
    window = local_window(64)
    order = Order(20 * window, OrderSettings.of(seed=3, shuffle=True, window=None, batch_size=64))
    pages = np.unique(order.indices(0, np.arange(window)) // 8)
    assert len(pages) <= 2 * window / 8
    uniform = Order(20 * window, OrderSettings.of(seed=3, shuffle=True, window=0, batch_size=64))
    assert len(np.unique(uniform.indices(0, np.arange(window)) // 8)) >= 0.8 * window


@pytest.mark.parametrize(
    ("num_samples", "indices"),
    [
        (100, [15, 30, 43, 78, 29, 39, 96, 40, 28, 95, 0, 64, 7, 69, 62, 61]),
        (1000, [7, 810, 779, 186, 809, 911, 572, 776, 808, 639, 432, 324, 491, 261, 854, 853]),
    ],
)
def test_an_order_that_was_saved_stays_what_it_was(num_samples: int, indices: list[int]) -> None:
    """Those of the first release, whose default was a window of five batches in runs of four."""
    order = Order(num_samples, OrderSettings(7, shuffle=True, window=40, run_length=4))
    assert order.indices(2, np.arange(30, 46)).tolist() == indices


huge = st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30, 10**400])


@given(num_samples=st.integers(0, 100), run_length=st.integers(1, 5) | huge, window=st.integers(0, 50) | huge)
@settings(deadline=None)
def test_windows_and_runs_of_any_size_make_permutations(num_samples: int, run_length: int, window: int) -> None:
    order = Order(num_samples, OrderSettings(10**400, shuffle=True, window=window, run_length=run_length))
    assert np.array_equal(np.sort(order.indices(1, np.arange(num_samples))), np.arange(num_samples))


@given(batch_size=st.integers(1, 50) | huge, window=st.none() | st.integers(1, 50) | huge)
@settings(deadline=None)
def test_batches_of_any_size_take_what_there_is(batch_size: int, window: int | None) -> None:
    plan = Plan.of(100, settings_of(batch_size=batch_size, window=window, world_size=2))
    assert sum(len(batch.indices) for batch in all_batches(plan)) == 50


@pytest.mark.parametrize("uneven", Uneven)
@pytest.mark.parametrize("world_size", [10**9, 10**20, 10**30])
def test_any_number_of_ranks_is_planned_at_once(world_size: int, uneven: Uneven) -> None:
    for rank in (0, 9, world_size - 1):
        plan = Plan.of(10, settings_of(world_size=world_size, rank=rank, uneven=uneven))
        expected = {Uneven.PAD: 1, Uneven.DROP: 0, Uneven.EXACT: int(rank < 10)}[uneven]
        assert [len(batch.indices) for batch in all_batches(plan)] == [1] * expected


@given(
    num_samples=st.one_of(st.integers(1, 300), st.integers(1, 2**62)),
    window=st.one_of(st.just(0), st.integers(1, 400), st.integers(1, 2**70)),
    run_length=st.integers(1, 40),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2**62),
)
def test_the_positions_of_samples_are_the_inverse_of_the_samples_at_positions(
    num_samples: int, window: int, run_length: int, shuffle: bool, epoch: int
) -> None:
    order = Order(num_samples, OrderSettings(5, shuffle, window, run_length))
    positions = np.unique(np.linspace(0, num_samples - 1, 50).astype(np.int64))
    assert order.positions(epoch, order.indices(epoch, positions)).tolist() == positions.tolist()
