"""Samples that fail, without a process: what a worker makes of a batch depends on its samples alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader import SwiftLoader, TooManyErrors, sample_rng
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.store import HeapStore
from swift_loader.transport.task import Task
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError
from swift_loader.worker.fetch import MAX_REPLACEMENTS, OnError
from swift_loader.worker.seeding import Rng, preserved_generators
from swift_loader.worker.spec import WorkerSpec

SEED = 3


class BadError(Exception):
    """Of a sample that fails."""


def nothing() -> float:
    return 0.0


DRAWS: list[Callable[[], float]] = [nothing, random.random, lambda: float(sample_rng().random())]


class Single:
    """Sample i is (i, what is drawn for it); some fail, after having drawn."""

    def __init__(self, num_samples: int, bad: frozenset[int], draw: Callable[[], float] = nothing) -> None:
        self.num_samples, self.bad, self.draw = num_samples, bad, draw

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        drawn = self.draw()
        if index in self.bad:
            raise BadError(index)
        return index, drawn


class Both(Single):
    """Gives many at once, too."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, float]]:
        return [Single.__getitem__(self, index) for index in indices]


class BulkOnly(torch.utils.data.Dataset[Any]):
    """Inherits a `__getitem__` that raises."""

    def __init__(self, *arguments: Any) -> None:
        self.inner = Single(*arguments)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, float]]:
        return [self.inner[index] for index in indices]


class Built:
    """What came of a batch: its samples and failures, or the error."""

    def __init__(self, builder: BatchBuilder, batches: list[Any], step: int) -> None:
        self.samples: list[Any] = []
        self.error: BaseException | None = None
        self.note = ""
        try:
            with preserved_generators():
                batch = builder.build(HeapStore(), Task(1, 0, 0, step))
            self.samples = batches[-1]
            assert batch.num_samples == len(self.samples)
        except BuildError as failed:
            self.error, self.note = failed.__cause__, failed.note
        self.failures = [(one.position, one.failure.index, one.replaced_by) for one in builder.failures]

    @property
    def indices(self) -> list[int]:
        return [index for index, _ in self.samples]


def make_builder(
    dataset: Any, on_error: OnError, batch_size: int = 4, rng: Rng = Rng.SAMPLE
) -> tuple[BatchBuilder, list[Any]]:
    order = OrderSettings(SEED, shuffle=False, window=0, run_length=1)
    plan = PlanSettings(order, batch_size, 1, 0, Uneven.PAD, drop_last=False)
    batches: list[Any] = []

    def keep(samples: list[Any]) -> list[Any]:
        batches.append(samples)
        return [0]

    options = SwiftLoader(dataset=dataset)._options.workers
    spec = WorkerSpec(replace(options, rng=rng, collate_fn=keep, on_error=on_error), plan)
    return BatchBuilder(dataset, len(dataset), spec, Definitions()), batches


def build(dataset: Any, on_error: OnError, step: int = 0, *, before: Sequence[int] = (), **options: Any) -> Built:
    """Build one batch in a worker that has built others before."""
    builder, batches = make_builder(dataset, on_error, **options)
    for earlier in before:
        Built(builder, batches, earlier)
    return Built(builder, batches, step)


def replacement(num_samples: int, bad: frozenset[int], index: int) -> int | None:
    """Return which sample is to take the place of one."""
    for attempt in range(MAX_REPLACEMENTS):
        key = derive_key(SEED, Purpose.REPLACEMENT.value, 0, index, attempt)
        other = (index + 1 + key % (num_samples - 1)) % num_samples
        if other not in bad:
            return other
    return None


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, frozenset[int], int, int, list[int]]:
    num_samples = draw(st.integers(2, 24))
    bad = draw(st.frozensets(st.integers(0, num_samples - 1)))
    batch_size = draw(st.integers(1, 8))
    num_steps = -(-num_samples // batch_size)
    steps = st.integers(0, num_steps - 1)
    return num_samples, bad, batch_size, draw(steps), draw(st.lists(steps, max_size=3))


@pytest.mark.parametrize("kind", [Single, Both, BulkOnly])
@given(case=cases(), draw=st.sampled_from(DRAWS))
@settings(max_examples=150)
def test_skipped_samples_are_missing_and_all_others_are_as_ever(kind: Any, draw: Any, case: Any) -> None:
    num_samples, bad, batch_size, step, before = case
    built = build(kind(num_samples, bad, draw), OnError.SKIP, step, before=before, batch_size=batch_size)
    planned = list(range(step * batch_size, min(num_samples, (step + 1) * batch_size)))
    good = [index for index in planned if index not in bad]
    assert built.indices == good
    if good:
        assert built.failures == [(position, index, None) for position, index in enumerate(planned) if index in bad]
        assert built.error is None
    else:
        assert isinstance(built.error, TooManyErrors)
        assert ", ".join(map(str, planned)) in str(built.error)
        assert isinstance(built.error.__cause__, BadError)
        assert built.error.__cause__.args == (planned[-1],)
        assert built.failures == []
    if kind is not BulkOnly:
        alone = [build(Single(num_samples, frozenset(), draw), OnError.RAISE, index, batch_size=1) for index in good]
        assert built.samples == [one.samples[0] for one in alone]


@pytest.mark.parametrize("kind", [Single, Both, BulkOnly])
@given(case=cases(), draw=st.sampled_from(DRAWS))
@settings(max_examples=150)
def test_replacements_follow_from_the_index_and_are_as_they_are_elsewhere(kind: Any, draw: Any, case: Any) -> None:
    num_samples, bad, batch_size, step, before = case
    built = build(kind(num_samples, bad, draw), OnError.REPLACE, step, before=before, batch_size=batch_size)
    planned = list(range(step * batch_size, min(num_samples, (step + 1) * batch_size)))
    others = {index: replacement(num_samples, bad, index) for index in planned if index in bad}
    hopeless = [index for index, other in others.items() if other is None]
    if hopeless:
        assert isinstance(built.error, BadError)
        assert built.error.args == (hopeless[0],)
        assert f"dataset index {hopeless[0]} (on_error='replace')" in built.note
        assert built.failures == []
        return
    expected = [others.get(index, index) for index in planned]
    assert built.indices == expected
    assert built.failures == [
        (position, index, others[index]) for position, index in enumerate(planned) if index in others
    ]
    if kind is not BulkOnly:
        alone = [
            build(Single(num_samples, frozenset(), draw), OnError.RAISE, int(i or 0), batch_size=1) for i in expected
        ]
        assert built.samples == [one.samples[0] for one in alone]


@pytest.mark.parametrize("rng", Rng)
@pytest.mark.parametrize("on_error", [OnError.SKIP, OnError.REPLACE])
def test_a_sample_that_fails_by_its_own_draw_fails_in_every_worker(rng: Rng, on_error: OnError) -> None:
    class Moody(Single):
        def __getitem__(self, index: int) -> tuple[int, float]:
            drawn = float(sample_rng().random())
            if drawn < 0.3:
                raise BadError(index)
            return index, drawn

    found = [build(Moody(40, frozenset()), on_error, 3, before=before, rng=rng) for before in ([], [7, 1])]
    assert found[0].samples == found[1].samples
    assert found[0].failures == found[1].failures
    everything = build(Moody(40, frozenset()), OnError.SKIP, batch_size=40, rng=rng)
    assert 5 < len(everything.failures) < 20


@pytest.mark.parametrize("on_error", [OnError.SKIP, OnError.REPLACE])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_of_the_sample_is_not_caught(on_error: OnError, error: type[BaseException]) -> None:
    class Ends(Single):
        def __getitem__(self, index: int) -> Any:
            raise error

    with pytest.raises(error):
        build(Ends(4, frozenset()), on_error)


@pytest.mark.parametrize("num_given", [0, 3, 5])
def test_a_dataset_that_gives_too_few_at_once_is_asked_one_by_one(num_given: int) -> None:
    class Miscounts(Both):
        def __getitems__(self, indices: Sequence[int]) -> list[Any]:
            return [(0, 0.0)] * num_given

    assert build(Miscounts(8, frozenset({1})), OnError.SKIP).indices == [0, 2, 3]
    assert isinstance(build(Miscounts(8, frozenset({1})), OnError.RAISE).error, ValueError)


def test_a_trial_batch_does_without_samples_that_fail() -> None:
    builder, batches = make_builder(Single(8, frozenset({0, 1})), OnError.SKIP)
    builder.build(HeapStore(), Task(0, 0, 0, 0))
    assert batches[-1] == [(2, 0.0), (3, 0.0)]
    builder, _ = make_builder(Single(8, frozenset({0, 1, 2, 3})), OnError.SKIP)
    with pytest.raises(BuildError):
        builder.build(HeapStore(), Task(0, 0, 0, 0))
