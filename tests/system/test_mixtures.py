"""Mixtures through the doors: any ranks, workers and batch sizes, resumed and changed anywhere, through kills."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.utils.data as torch_data
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader import (
    DataLoader,
    LengthBucketBatchSampler,
    Mixture,
    ShuffleBatchSampler,
    SwiftLoader,
    TokenBudgetBatchSampler,
    TooManyErrors,
    cached,
    distributed,
)
from swift_loader.__main__ import main
from swift_loader.pipeline import Pipeline
from tests.support.helpers import worker_processes


class Source:
    def __init__(self, size: int, name: int) -> None:
        self.size, self.name = size, name

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return np.array([self.name, index, np.random.randint(1 << 30)])


def mixture_of(weights: Any = None, **others: Any) -> Mixture:
    sources = {"a": Source(40, 0), "b": Source(7, 1), "c": Source(300, 2)}
    return Mixture(sources, weights or {"a": 5, "b": 3, "c": 2}, **{"epoch_size": 240, **others})


def mixture_in_a_worker() -> Mixture:
    return mixture_of()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: DataLoader(mixture_of(), batch_size=4, shuffle=True), ValueError),  # type: ignore[arg-type]
        (lambda: cached(mixture_of()), TypeError),
        (lambda: SwiftLoader(mixture_in_a_worker, worker_per_consumer=0).start(), TypeError),
    ],
    ids=["torch's order", "a cache", "made by a worker"],
)
def test_a_door_that_does_not_know_the_weights_refuses_a_mixture(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Mixture"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda m: DataLoader(m, batch_size=8, sampler=torch_data.DistributedSampler(m, 2, 1)),
        lambda m: DataLoader(m, batch_size=8, sampler=distributed(torch_data.RandomSampler(m), 1, 0, seed=0)),
        lambda m: DataLoader(m, batch_sampler=LengthBucketBatchSampler([1] * len(m), 8, seed=0)),
        lambda m: DataLoader(m, batch_sampler=TokenBudgetBatchSampler([1] * len(m), 8, seed=0), num_workers=1),
        lambda m: DataLoader(torch_data.random_split(m, [0.5, 0.5])[0], batch_size=8, shuffle=True),
        lambda m: DataLoader(torch_data.ConcatDataset([m, m.rows]), batch_size=8),
        lambda m: DataLoader(cached(torch_data.Subset(m, range(40))), batch_size=8),  # type: ignore[arg-type]
        lambda m: torch_data.DataLoader(m, batch_size=8, shuffle=True),
        lambda m: SwiftLoader(dataset=torch_data.Subset(m, range(40)), batch_size=8, worker_per_consumer=0, seed=0),
        lambda m: SwiftLoader(
            dataset=torch_data.Subset(m, range(40)), worker_per_consumer=0, seed=0, on_error="skip", validate=False
        ),
        Pipeline,
    ],
)
def test_what_reads_a_mixture_by_row_numbers_is_refused_in_the_loop(make: Any) -> None:
    loader = make(mixture_of())
    with pytest.raises((ValueError, TooManyErrors)) as caught:
        next(iter(loader))
    assert "row number" in f"{caught.value} {caught.value.__cause__}"


def test_the_rows_of_a_mixture_suit_any_sampler() -> None:
    rows = mixture_of().rows
    lengths = [1] * len(rows)
    loader: Any = DataLoader(rows, batch_sampler=LengthBucketBatchSampler(lengths, 8, seed=0))  # type: ignore[arg-type,var-annotated]
    found = [(name, row) for batch in loader for name, row, _ in batch.tolist()]
    assert sorted(found) == [(number, row) for number, size in enumerate((40, 7, 300)) for row in range(size)]


def test_a_wrapper_that_passes_the_indices_on_keeps_the_weights() -> None:
    class Mapped:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __len__(self) -> int:
            return len(self.inner)

        def __getitem__(self, index: int) -> Any:
            return self.inner[index][0]

    mixture = mixture_of()
    sampler = ShuffleBatchSampler(mixture, 12, seed=3)
    names = [name for batch in DataLoader(Mapped(mixture), batch_sampler=sampler) for name in batch.tolist()]  # type: ignore[arg-type,var-annotated]
    assert [names.count(number) for number in range(3)] == pytest.approx([120, 72, 48], abs=2)


def test_a_data_loader_with_a_sampler_gives_the_rows_of_a_swift_loader() -> None:
    mixture = mixture_of()
    with SwiftLoader(dataset=mixture, batch_size=12, worker_per_consumer=0, seed=3) as loader:
        expected = [batch[:, :2].tolist() for _ in range(2) for batch in loader]
    sampler = ShuffleBatchSampler(mixture, 12, seed=3)
    theirs: Any = DataLoader(mixture, batch_sampler=sampler)  # type: ignore[arg-type]
    assert [batch[:, :2].tolist() for _ in range(2) for batch in theirs] == expected


def test_what_a_source_raises_names_the_row() -> None:
    class Broken(Source):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("bad row")

    mixture = Mixture({"good": Source(5, 0), "bad": Broken(5, 1)}, {"good": 0, "bad": 1})
    with (
        pytest.raises(ValueError, match="bad row") as caught,
        SwiftLoader(dataset=mixture, worker_per_consumer=0, seed=0, validate=False) as loader,
    ):
        next(iter(loader))
    notes = getattr(caught.value, "__notes__", ["of the mixture's source 'bad'"])
    assert any("of the mixture's source 'bad'" in note for note in notes)


SOURCES = {"a": Source(40, 0), "b": Source(7, 1), "c": Source(300, 2)}
NAMES = st.sampled_from(sorted(SOURCES))
WEIGHTS = st.fixed_dictionaries({name: st.integers(1, 9) for name in SOURCES})


class Leg(NamedTuple):
    """A part of a run: a process per rank, from a saved state on."""

    num_ranks: int
    batch_size: int
    num_workers: int
    num_steps: int
    change: dict[str, int] | list[tuple[str, int]] | None
    """Weights from the middle of it on, or rows that are excluded."""
    is_new_program: bool
    """Whether the program has the other weights, instead of calling `reweight`."""
    kills: bool


LEGS = st.builds(
    Leg,
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 4, 6]),
    st.just(0),
    st.integers(1, 30),
    st.none() | WEIGHTS | st.lists(st.tuples(NAMES, st.integers(0, 6)), min_size=1, max_size=2),
    st.booleans(),
    st.just(False),
)


def run_leg(leg: Leg, weights: dict[str, int], state: Any) -> tuple[list[list[Any]], Any]:
    """Return what the ranks got at each step, in their order, and the state behind it."""
    got: list[list[Any]] = [[] for _ in range(leg.num_steps)]
    states = []
    for rank in range(leg.num_ranks):
        loader = SwiftLoader(
            dataset=Mixture(SOURCES, weights, epoch_size=240),
            batch_size=leg.batch_size,
            nb_consumer=leg.num_ranks,
            worker_per_consumer=leg.num_workers,
            validate=False,
            seed=11,
            worker_restarts=100,
        )
        with loader:
            if state is not None:
                loader.load_state_dict(state)
            loader.start(rank)
            batches = endless(loader)
            for step in range(leg.num_steps):
                if leg.kills and step == 2:
                    worker_processes()[0].kill()
                got[step] += next(batches)[: -loader.num_padding or None].tolist()
                if step == leg.num_steps // 2 and leg.change is not None and not leg.is_new_program:
                    change(loader, leg.change)
            states.append(loader.state_dict())
    assert all(one == states[0] for one in states)
    return got, states[0]


def endless(loader: SwiftLoader) -> Iterator[Any]:
    while True:
        yield from loader


def change(loader: SwiftLoader, to: Any) -> None:
    if isinstance(to, dict):
        loader.reweight(to)
    else:
        loader.exclude([loader.dataset.index(name, row) for name, row in to])


def expected(legs: list[Leg]) -> tuple[list[list[Any]], Any]:
    """The same by one process, sample by sample: what the positions have, given the changes there."""
    weights = {"a": 5, "b": 3, "c": 2}
    loader = SwiftLoader(
        dataset=Mixture(SOURCES, weights, epoch_size=240), batch_size=1, nb_consumer=1, worker_per_consumer=0, seed=11
    )
    steps: list[list[Any]] = []
    with loader:
        batches, num_left = endless(loader), 240
        for leg in legs:
            if leg.is_new_program and isinstance(leg.change, dict) and leg.change != weights:
                weights = leg.change
                loader.reweight(weights)
            for step in range(leg.num_steps):
                num_taken = min(leg.num_ranks * leg.batch_size, num_left)
                steps.append([row for _ in range(num_taken) for row in next(batches).tolist()])
                num_left = num_left - num_taken or 240
                if step == leg.num_steps // 2 and leg.change is not None and not leg.is_new_program:
                    change(loader, leg.change)
        return steps, loader.state_dict()


def check_chain(legs: list[Leg]) -> None:
    state: Any = None
    found, weights = list[list[Any]](), {"a": 5, "b": 3, "c": 2}
    for leg in legs:
        if leg.is_new_program and isinstance(leg.change, dict):
            weights = leg.change
        rows, state = run_leg(leg, weights, state)
        found += rows
    wanted, last = expected(legs)
    assert found == wanted
    places = ("epoch", "position", "num_samples", "seed")
    assert [state[name] for name in places] == [last[name] for name in places]


@pytest.mark.slow
@given(legs=st.lists(LEGS, min_size=1, max_size=3))
@settings(max_examples=8)
def test_a_run_that_is_stopped_rescaled_and_changed_anywhere_gives_the_same_samples(legs: list[Leg]) -> None:
    check_chain(legs)


@pytest.mark.filterwarnings("ignore:worker .* was ended by SIGKILL")
def test_workers_that_are_killed_and_changes_in_mid_epoch_leave_the_samples_as_they_are() -> None:
    check_chain(
        [
            Leg(1, 6, 2, 20, {"a": 1, "b": 1, "c": 8}, is_new_program=False, kills=True),
            Leg(2, 4, 1, 12, [("b", 3), ("c", 5)], is_new_program=False, kills=True),
            Leg(1, 6, 3, 15, {"a": 4, "b": 4, "c": 1}, is_new_program=True, kills=True),
        ]
    )


def test_weights_that_change_ten_times_are_kept_by_a_resume_between_any_two() -> None:
    def loader_of() -> SwiftLoader:
        sources = {f"source {number}": Source(10**9, number) for number in range(64)}
        return SwiftLoader(dataset=Mixture(sources), batch_size=50, worker_per_consumer=0, validate=False, seed=5)

    found, states = list[Any](), list[Any]()
    with loader_of() as loader:
        batches = iter(loader)
        for change_number in range(11):
            found.append([next(batches).tolist() for _ in range(4)])
            states.append(loader.state_dict())
            loader.reweight({f"source {number}": 1 + (number * change_number) % 7 for number in range(64)})
    for later, state in enumerate(states):
        with loader_of() as loader:
            loader.load_state_dict(state)
            loader.reweight({f"source {number}": 1 + (number * later) % 7 for number in range(64)})
            batches = iter(loader)
            assert [[next(batches).tolist() for _ in range(4)]] == found[later + 1 : later + 2] or later == 10
    assert len(states[-1]["mixture"]["weights"]) == 11


def test_a_saved_state_says_what_is_mixed_and_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SwiftLoader(dataset=mixture_of(), batch_size=6, worker_per_consumer=0, seed=1) as loader:
        next(iter(loader))
        loader.reweight({"a": 1, "b": 1, "c": 2})
        loader.exclude([loader.dataset.index("b", 3), loader.dataset.index("b", 5)])
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    assert main(["state", str(tmp_path / "state.json")]) == 0
    text = capsys.readouterr().out
    assert "mixture   a 0.25, b 0.25, c 0.5, 1 change" in text
    assert re.search(r"excluded  b: 2 rows from sample \d of epoch 0 on: 3, 5", text)


def test_steps_of_a_mixture_can_be_skipped() -> None:
    with SwiftLoader(dataset=mixture_of(), batch_size=6, worker_per_consumer=0, seed=1) as loader:
        whole = [batch.tolist() for batch in loader]
        loader.set_epoch(0)
        loader.skip([2, 5], 0)
        assert [batch.tolist() for batch in loader] == [one for step, one in enumerate(whole) if step not in (2, 5)]


@pytest.mark.parametrize("seed", range(5))
def test_padding_has_no_rows_that_were_excluded_in_its_epoch(seed: int) -> None:
    options: Any = {"batch_size": 4, "nb_consumer": 3, "worker_per_consumer": 0, "seed": seed}
    with SwiftLoader(dataset=mixture_of(epoch_size=50), **options) as loader:
        loader.start(2)
        batches = iter(loader)
        next(batches)
        out = [loader.dataset.locate(index) for index in loader.batch_indices]
        loader.exclude(loader.batch_indices)
        rest = [(batch[:, :2].tolist(), loader.num_padding) for batch in batches]
    assert rest[-1][1] > 0
    gone = [["abc".index(row.source), row.row] for row in out]
    assert not [row for batch, _ in rest for row in batch if row in gone]


def test_what_is_excluded_before_the_start_does_not_depend_on_the_seed_that_is_drawn() -> None:
    states = []
    for seed in range(12):
        with SwiftLoader(dataset=mixture_of(), worker_per_consumer=0, seed=seed) as loader:
            loader.exclude([0])
            loader.exclude([1])
            states.append(loader.state_dict()["mixture"])
    assert states == [states[0]] * 12
