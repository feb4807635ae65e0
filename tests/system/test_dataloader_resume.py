"""Chains of stops of the drop-in DataLoader: the parts together are exactly a run that isn't stopped."""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from swift_loader import DataLoader, ShuffleBatchSampler, StateMismatch, SwiftLoaderWarning
from tests.support.chains import Chain, Make, plain, run_whole, seed_all
from tests.support.helpers import every, exhaustive, exhaustive_unless
from tests.support.resumable import (
    DRAWING,
    SAMPLED,
    SHARED,
    SHARED_DRAWING,
    STREAMS,
    Drawing,
    Numbers,
    Remembering,
    Shards,
    drawing_collate,
    streaming,
)
from tests.support.samplers import Counting

NUM_STOPS = 50
NUM_EPOCHS = 14

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.parametrize("name", exhaustive_unless(every(3, SAMPLED), SAMPLED))
def test_a_sampler_continues_after_50_stops(name: str) -> None:
    whole = run_whole(SAMPLED[name], 0, NUM_EPOCHS)
    assert Chain(SAMPLED[name], (0,)).run(NUM_STOPS, NUM_EPOCHS) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_later_epochs_take_their_order_from_torchs_generator(num_workers: int) -> None:
    seed_all(1)
    loader = SAMPLED["shuffle"](num_workers)
    iterator = iter(loader)
    found, state, generator = [plain(next(iterator))], loader.state_dict(), torch.get_rng_state()
    found += [plain(batch) for batch in (*iterator, *loader)]
    seed_all(2)
    resumed = SAMPLED["shuffle"](num_workers)
    resumed.load_state_dict(state)
    rest = [plain(batch) for batch in resumed]
    torch.set_rng_state(generator)
    assert found[1:] == rest + [plain(batch) for batch in resumed]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "num_stops", "num_epochs"),
    [("shuffle", 4, 3), ("np.random", 4, 3), ("buckets", 4, 3), ("single samples, iterators with a state", 4, 3)]
    + [exhaustive(name, NUM_STOPS, NUM_EPOCHS) for name in SAMPLED],
)
def test_a_sampler_continues_after_many_stops_with_other_numbers_of_workers(
    name: str, num_stops: int, num_epochs: int
) -> None:
    whole = run_whole(SAMPLED[name], 1, num_epochs)
    assert Chain(SAMPLED[name], (0, 1, 2, 3)).run(num_stops, num_epochs) == whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "num_stops", "num_epochs"),
    [
        ("shuffle", 3, 3),
        *[exhaustive(name, 12, 4) for name in every(2, DRAWING)],
        *[exhaustive(name, NUM_STOPS, NUM_EPOCHS) for name in DRAWING],
    ],
)
def test_what_samples_draw_is_the_same_with_other_numbers_of_workers(
    name: str, num_stops: int, num_epochs: int
) -> None:
    whole = run_whole(DRAWING[name], 2, num_epochs)
    assert Chain(DRAWING[name], (1, 2, 3)).run(num_stops, num_epochs) == whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "num_workers", "num_stops", "num_epochs"),
    [
        *[(name, 0, NUM_STOPS, NUM_EPOCHS) for name in STREAMS],
        *[exhaustive(name, 2, 12, 4) for name in every(3, STREAMS)],
        *[exhaustive(name, 2, NUM_STOPS, NUM_EPOCHS) for name in STREAMS],
    ],
)
def test_a_stream_continues_after_many_stops(name: str, num_workers: int, num_stops: int, num_epochs: int) -> None:
    whole = run_whole(STREAMS[name], num_workers, num_epochs)
    assert Chain(STREAMS[name], (num_workers,)).run(num_stops, num_epochs) == whole


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_stream_continues_after_50_stops(name: str) -> None:
    whole = run_whole(SHARED[name], 0, NUM_EPOCHS)
    assert Chain(SHARED[name], (0,)).run(NUM_STOPS, NUM_EPOCHS) == whole


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "num_stops", "num_epochs"),
    [
        ("iterator, rare snapshots", 4, 3),
        exhaustive("no state", 12, 4),
        *[exhaustive(name, NUM_STOPS, NUM_EPOCHS) for name in ("no state", "dataset")],
    ],
)
def test_a_shared_stream_continues_with_other_numbers_of_workers(name: str, num_stops: int, num_epochs: int) -> None:
    whole = run_whole(SHARED[name], 0, num_epochs)
    assert Chain(SHARED[name], (0, 1, 2, 3)).run(num_stops, num_epochs) == whole


def test_what_a_shared_stream_draws_is_the_same_with_other_numbers_of_workers() -> None:
    whole = run_whole(SHARED_DRAWING, 1, 3)
    assert Chain(SHARED_DRAWING, (0, 1, 2, 3)).run(5, 3) == whole


@pytest.mark.slow
def test_streams_of_datasets_continue() -> None:
    pytest.importorskip("datasets")
    for make, numbers in ((streaming("shuffled", shard_stream=True), (0, 1, 2)), (streaming("interleaved"), (2,))):
        assert Chain(make, numbers).run(12, 5) == run_whole(make, numbers[-1], 5)


@pytest.mark.parametrize("name", ["in order", "shuffle", "np.random", "own shuffle", *STREAMS])
def test_resuming_leaves_the_global_generators_as_they_are(name: str) -> None:
    make = {**SAMPLED, **STREAMS}[name]
    loader = make(0)
    next(iter(loader))
    resumed = make(0)
    resumed.load_state_dict(loader.state_dict())
    seed_all(5)
    iterator = iter(resumed)
    drawn = torch.rand(()), random.random(), np.random.random()
    seed_all(5)
    assert drawn == (torch.rand(()), random.random(), np.random.random())
    del iterator


class Dice(Shards):
    """Its workers draw what they give."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(1000, ())) for _ in range(20))


def test_a_loader_that_keeps_its_workers_goes_back_to_the_beginning_of_an_epoch() -> None:
    loader = DataLoader(Dice(), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    iterator = iter(loader)
    state = loader.state_dict()
    first = [plain(batch) for batch in iterator]
    loader.load_state_dict(state)
    assert [plain(batch) for batch in loader] == first


@pytest.mark.parametrize("workers", [0, 2])
def test_what_came_early_out_of_order_does_not_come_again(workers: int) -> None:
    def loader_of(num_workers: int) -> DataLoader[Any]:
        return DataLoader(range(40), 4, num_workers=num_workers, in_order=False)  # type: ignore[arg-type]

    epoch = [plain(batch) for batch in loader_of(0)]
    loader = loader_of(0)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    state["_snapshot"]["_main_snapshot"]["ahead"] = [4, 6]  # as after steps 0, 1, 2, 4 and 6
    state["_snapshot"]["_snapshot_step"] = 5
    resumed = loader_of(workers)
    resumed.load_state_dict(state)
    seen = [plain(next(iter(resumed)))]
    again = loader_of(0)
    again.load_state_dict(resumed.state_dict())
    assert sorted(seen + [plain(batch) for batch in again]) == sorted(
        batch for step, batch in enumerate(epoch) if step not in (0, 1, 2, 4, 6)
    )


def test_an_iterator_goes_on_beside_one_that_begins_after_a_load() -> None:
    dataset: Any = list(range(8))
    loader: Any = DataLoader(dataset, 2, num_workers=1, persistent_workers=True)
    first = iter(loader)
    found = [plain(next(first))]
    loader.load_state_dict(DataLoader(dataset, 2, num_workers=1, persistent_workers=True).state_dict())
    second = [plain(batch) for batch in loader]
    assert found + [plain(batch) for batch in first] == second == [[0, 1], [2, 3], [4, 5], [6, 7]]


class ByEpoch(Sampler[int]):
    """Draws each index from torch's generator. Has an epoch, so a resume draws again with the first batch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(100, ())) for _ in range(12))


@pytest.mark.parametrize("num_taken", [0, 1])
def test_a_sampler_with_an_epoch_draws_the_rest_from_the_saved_generator(num_taken: int) -> None:
    loaders: list[Any] = [DataLoader(Numbers(), 3, sampler=ByEpoch()) for _ in range(2)]  # type: ignore[arg-type]
    iterator = iter(loaders[0])
    for _ in range(num_taken):
        next(iterator)
    loaders[1].load_state_dict(loaders[0].state_dict())
    rest = [plain(batch) for batch in iterator]
    seed_all(9)
    assert [plain(batch) for batch in loaders[1]] == rest


@pytest.mark.parametrize("num_left", [0, 1])
def test_the_epoch_after_one_with_nothing_left_continues_persistent_datasets(num_left: int) -> None:
    options: Any = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    datasets: Any = Remembering(), Remembering()
    loaders: list[Any] = [DataLoader(dataset, 50, **options) for dataset in datasets]
    iterator = iter(loaders[0])
    for _ in range(3 - num_left):
        next(iterator)
    loaders[1].load_state_dict(loaders[0].state_dict())
    rest = [[plain(batch) for batch in epoch] for epoch in (iterator, loaders[0], loaders[0])]
    assert [[plain(batch) for batch in loaders[1]] for _ in range(3)] == rest


def test_a_stream_at_the_end_of_its_epoch_takes_another_number_of_workers() -> None:
    make = STREAMS["iterator"]
    loader = make(0)
    list(loader)
    other = make(1)
    other.load_state_dict(loader.state_dict())
    assert [plain(batch) for batch in other] == [plain(batch) for batch in make(0)]


@pytest.mark.parametrize(
    ("saved", "loaded", "told"),
    [
        (STREAMS["iterator"], lambda _: STREAMS["iterator"](2), "num_workers=0 in the middle .* has num_workers=2"),
        (STREAMS["iterator"], SAMPLED["in order"], "of an IterableDataset, but this loader has a map-style dataset"),
        (STREAMS["no state"], SHARED["no state"], "the dataset shares out itself, but here the loader shares out to 1"),
        (SHARED["no state"], STREAMS["no state"], "the loader shares out to 1 ranks, but here the dataset shares out"),
        (SHARED["no state"], SHARED["no state, single samples"], "this loader has batch_size=None"),
    ],
)
def test_a_state_in_the_middle_of_a_stream_is_refused_elsewhere(saved: Make, loaded: Make, told: str) -> None:
    loader, other = saved(0), loaded(0)
    next(iter(loader))
    with pytest.raises(StateMismatch, match=told):
        other.load_state_dict(loader.state_dict())
    assert isinstance(other.state_dict(), dict)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (2, 1), (0, 2), (2, 0)])
def test_states_of_workers_are_not_lost_with_another_number_of_them(before: int, after: int) -> None:
    def make(num_workers: int) -> Any:
        dataset: Any = Remembering()
        return DataLoader(dataset, 20, num_workers=num_workers)

    loader, other = make(before), make(after)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    if {before, after} == {0, 2}:
        with pytest.raises(
            StateMismatch, match=f"num_workers={before} in .* has num_workers={after}. .* different states"
        ):
            other.load_state_dict(state)
        return
    other.load_state_dict(state)
    warns: Any = pytest.warns(SwiftLoaderWarning, match="datasets of 2 workers .* num_workers=1 counts from the next")
    with warns if (before, after) == (2, 1) else nullcontext():
        rest = [plain(batch) for batch in other]
    assert rest == [plain(batch) for batch in iterator]
    assert other.num_workers == after


class Weights(torch.nn.Module):
    """A dataset that is a module: what it gives is its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.arange(20_000))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return int(self.get_buffer("numbers")[index])


class WeightsStream(Weights, IterableDataset[int]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(20))


@pytest.mark.parametrize("dataset", [Weights(), WeightsStream()], ids=["map", "stream"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_type": "thread"}], ids=["inline", "thread"])
def test_the_weights_of_a_module_are_no_place_in_it(dataset: Any, options: dict[str, Any]) -> None:
    loaders: list[Any] = [DataLoader(dataset, 2, **options) for _ in range(2)]
    iterator = iter(loaders[0])
    for _ in range(4):
        next(iterator)
    state = loaders[0].state_dict()
    assert len(json.dumps(state)) < 20_000
    loaders[1].load_state_dict(state)
    assert [plain(batch) for batch in loaders[1]] == [plain(batch) for batch in iterator]


class Bulk(Numbers):
    """Its state is large, and changes with one sample only."""

    num_had = 0
    asked: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> int:
        self.num_had += index == 50
        return index + self.num_had

    def state_dict(self) -> dict[str, Any]:
        self.asked.append(self.num_had)
        return {"num_had": self.num_had, "bulk": bytes(100_000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_had = state["num_had"]


def test_a_large_state_that_stays_the_same_is_asked_for_ever_more_rarely() -> None:
    Bulk.asked.clear()
    datasets: Any = Bulk(), Bulk()
    loaders: list[Any] = [DataLoader(one, 1, num_workers=1, worker_type="thread", rng=None) for one in datasets]
    iterator = iter(loaders[0])
    for _ in range(100):
        next(iterator)
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert [plain(batch) for batch in loaders[1]] == [plain(batch) for batch in iterator] == [[101], [102], [103]]
    assert 2 < len(Bulk.asked) < 30


@pytest.mark.parametrize("num_stops", [1, exhaustive(15)])
def test_out_of_order_nothing_is_lost_or_repeated(num_stops: int) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for part in range(num_stops + 1):
        loader = SAMPLED["shuffle"](2)
        loader = type(loader)(
            loader.dataset, 4, shuffle=True, num_workers=2, multiprocessing_context="fork", in_order=False
        )
        if state is not None:
            loader.load_state_dict(state)
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if part < num_stops and number >= part % 2:
                break
        state = json.loads(json.dumps(loader.state_dict()))
        del loader
    assert sorted(seen) == list(range(103))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch_size": 8}, "batch_size=4 in the middle of an epoch, but this loader has batch_size=8"),
        ({"shuffle": False}, "4, RandomSampler of 40' .* but this loader has .*SequentialSampler of 40"),
        ({"dataset": list(range(60))}, "RandomSampler of 40' .* but this loader has .*RandomSampler of 60"),
    ],
)
def test_a_state_in_the_middle_that_counts_other_batches_is_refused(
    change: dict[str, Any], told: str, num_workers: int
) -> None:
    options: dict[str, Any] = {"dataset": list(range(40)), "batch_size": 4, "shuffle": True, "num_workers": num_workers}
    loader = DataLoader(**options)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    with pytest.raises(StateMismatch, match=told):
        DataLoader(**{**options, **change}).load_state_dict(state)
    list(iterator)
    DataLoader(**{**options, **change}).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        ({"sampler": list(range(12))}, {"sampler": list(range(8))}),
        ({"batch_sampler": [[1], [2], [3]]}, {"batch_sampler": [[1], [2]]}),
        ({"sampler": DistributedSampler(range(12), 2, 0)}, {"sampler": DistributedSampler(range(12), 3, 0)}),  # type: ignore[arg-type]
    ],
)
def test_a_state_of_another_sampler_is_refused(saved: Any, other: Any) -> None:
    numbers: Any = list(range(12))
    loader = DataLoader(numbers, **saved)
    next(iter(loader))
    with pytest.raises(StateMismatch, match="Give the former one"):
        DataLoader(numbers, **other).load_state_dict(loader.state_dict())


class Fetches:
    """A dataset that counts what each worker fetches."""

    num = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        self.num += 1
        return self.num

    def state_dict(self) -> Any:
        return {"num": self.num}

    def load_state_dict(self, state: Any) -> None:
        self.num = state["num"]


class Failing(IterableDataset[int]):
    """A stream that goes on after an error."""

    def __iter__(self) -> Iterator[int]:
        return map(self.checked, range(12))

    def checked(self, number: int) -> int:
        if number in {2, 7}:
            raise ValueError(number)
        return number


def taken(iterator: Any, limit: int = 99) -> list[Any]:
    found: list[Any] = []
    while len(found) < limit:
        try:
            found.append(next(iterator).tolist())
        except ValueError as error:
            found.append(str(error).partition(" ")[0])
        except StopIteration:
            break
    return found


def test_a_batch_of_a_stream_that_failed_counts() -> None:
    whole = taken(iter(DataLoader(Failing(), 2)))
    for number in range(1, len(whole)):
        loader, other = DataLoader(Failing(), 2), DataLoader(Failing(), 2)
        first = taken(iter(loader), number)
        other.load_state_dict(loader.state_dict())
        assert first + taken(iter(other)) == whole


class _Fragile:
    """A dataset with a sample that can't be built."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError("sample 3 is bad")
        return index


@pytest.mark.parametrize("num_before", [2, 3, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_went_on_after_an_error_resumes_with_its_next_batch(num_workers: int, num_before: int) -> None:
    def taken(loader: DataLoader[Any], num_batches: int) -> list[Any]:
        batches, got = iter(loader), []
        for _ in range(num_batches):
            try:
                got.append(next(batches).tolist())
            except ValueError:
                got.append("error")
        return got

    loader: DataLoader[Any] = DataLoader(_Fragile(), batch_size=2, num_workers=num_workers)  # type: ignore[arg-type]
    before = taken(loader, num_before)
    resumed: DataLoader[Any] = DataLoader(_Fragile(), batch_size=2, num_workers=num_workers)  # type: ignore[arg-type]
    resumed.load_state_dict(loader.state_dict())
    assert [*before, *taken(resumed, 6 - num_before)] == [[0, 1], "error", [4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize(("num_workers", "resumed_with"), [(0, 2), (2, 0), exhaustive(1, 3)])
def test_with_a_seed_a_resumed_run_is_exact_whatever_the_loop_draws(num_workers: int, resumed_with: int) -> None:
    dataset: Any = Drawing()

    def make(num_workers: int, **seed: Any) -> Any:
        return DataLoader(dataset, 20, shuffle=True, num_workers=num_workers, collate_fn=drawing_collate, **seed)

    def drawn() -> tuple[torch.Tensor, float, float]:
        return torch.rand(()), random.random(), np.random.random()

    loader, states, seen = make(num_workers, seed=7), [], []
    for _ in range(3):
        for batch in loader:
            seen.append(plain(batch))
            states.append(loader.state_dict())
            drawn()
    assert seen[:6] != seen[6:12] != seen[12:]
    for cut in (2, 5, 9):
        seed_all(cut)
        loader = make(resumed_with)  # the state has the seed
        loader.load_state_dict(states[cut])
        rest = [plain(batch) for _ in range(3 - cut // 6) for batch in loader]
        now = drawn()
        assert rest[: 17 - cut] == seen[cut + 1 :]
        seed_all(cut)
        assert now == drawn()


@pytest.mark.parametrize("rng", ["sample", "worker"])
def test_with_a_seed_an_epoch_is_the_same_whether_workers_persist(rng: Any) -> None:
    def make(*, persists: bool) -> Any:
        dataset: Any = Drawing()
        return DataLoader(dataset, 16, shuffle=True, num_workers=2, rng=rng, seed=7, persistent_workers=persists)

    loader = make(persists=True)
    seen = [[plain(batch) for batch in loader] for _ in range(3)]
    assert seen == [[plain(batch) for batch in loader] for loader in [make(persists=False)] for _ in range(3)]
    loader = make(persists=True)
    next(iter(loader))
    resumed = make(persists=False)
    resumed.load_state_dict(loader.state_dict())
    assert [[one[0] for one in map(plain, resumed)], [plain(batch) for batch in resumed]] == [
        [one[0] for one in seen[0][1:]],
        seen[1],
    ]


ORDERED_BY: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": dict,
    "seed=5": lambda: {"seed": 5},
    "seed=6": lambda: {"seed": 6},
    "generator": lambda: {"generator": torch.Generator().manual_seed(1)},
}
"""What may determine the order of `shuffle=True`."""


@pytest.mark.parametrize("is_seed_saved", [True, False])  # it isn't in states of earlier versions
@pytest.mark.parametrize("loaded", ORDERED_BY)
@pytest.mark.parametrize("saved", ["torch", "seed=5", "generator"])
def test_what_another_order_resumes_is_exact_or_refused(saved: str, loaded: str, is_seed_saved: bool) -> None:
    dataset: Any = Numbers()

    def make(by: str) -> Any:
        return DataLoader(dataset, 20, shuffle=True, **ORDERED_BY[by]())

    def epoch_of(loader: Any) -> list[int]:
        return [number for batch in loader for number in plain(batch)]

    def resume(state: dict[str, Any]) -> tuple[list[list[int]], str]:
        """Return two epochs, and the error that came instead of the state's."""
        seed_all(2)
        if not is_seed_saved:
            del state["batching"]["seed"]
        resumed, told = make(loaded), ""
        if not loaded.startswith("seed"):  # the next state replaces what this one brings
            resumed.load_state_dict(make("seed=6").state_dict())
        try:
            resumed.load_state_dict(state)
        except StateMismatch as error:
            told = str(error)
        return [epoch_of(resumed), epoch_of(resumed)], told

    loader = make(saved)
    iterator = iter(loader)
    next(iterator)
    midway = loader.state_dict()
    unbroken, at_end = [epoch_of(iterator)], loader.state_dict()
    unbroken.append(epoch_of(loader))

    epochs, told = resume(midway)
    is_same, num_own = saved == loaded, {"torch": 0, "seed=5": 1, "seed=6": 1, "generator": 1}
    if is_seed_saved and loaded.startswith("seed") and not is_same:
        assert f"was saved with seed={5 if saved == 'seed=5' else None}, but this loader has {loaded}; give" in told
    elif is_seed_saved and saved == "seed=5":
        assert epochs == unbroken
    elif num_own[saved] != num_own[loaded]:
        assert f"came from {num_own[saved]} generators of the loader and its samplers, but these have" in told
    else:
        assert epochs[0] == unbroken[0]
    assert not told or sorted(epochs[0]) == list(range(103))

    (epoch, _), told = resume(at_end)
    assert bool(told) == (is_seed_saved and (saved, loaded) == ("seed=5", "seed=6"))
    assert sorted(epoch) == list(range(103))
    assert epoch == unbroken[1] or saved == "torch" or not is_same


@pytest.mark.parametrize(
    "kind", ["counts at once", "counts at the first item", "counts at the end", "tells blocks", "global generator"]
)
@pytest.mark.parametrize("in_batches", [False, True], ids=["indices", "batches"])
def test_a_sampler_whose_state_does_not_tell_the_place_is_drawn_again(kind: str, in_batches: bool) -> None:
    def make() -> Any:
        sampler = Counting(kind, 3 if in_batches else None)
        place: Any = {"batch_sampler": sampler} if in_batches else {"sampler": sampler, "batch_size": 3}
        return DataLoader(range(30), **place)  # type: ignore[arg-type]

    torch.manual_seed(5)
    loader, found, states = make(), list[Any](), list[Any]()
    for _ in range(3):
        iterator = iter(loader)
        states.append((len(found), torch.get_rng_state(), loader.state_dict()))
        for batch in iterator:
            found.append(batch.tolist())
            states.append((len(found), torch.get_rng_state(), loader.state_dict()))
        states[-1] = len(found), torch.get_rng_state(), loader.state_dict()
    assert sorted(index for batch in found[:10] for index in batch) == list(range(30))
    for num_found, saved, state in states[:27]:
        following, stopped, generator = list[Any](), state, saved
        for _ in range(2):  # with a stop after one more batch
            resumed = make()
            resumed.load_state_dict(stopped)
            torch.set_rng_state(generator)
            iterator = iter(resumed)
            following += [batch.tolist() for batch in itertools.islice(iterator, 1)]
            stopped, generator = resumed.state_dict(), torch.get_rng_state()
        following += [batch.tolist() for batches in (iterator, resumed) for batch in batches]
        assert following[:5] == found[num_found : num_found + 5], num_found


class ToldEpoch(Dataset[int]):
    """Has an epoch once it was told one."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 10 * self.epoch + index


def test_only_an_epoch_that_a_dataset_had_is_told_again() -> None:
    def make(epoch: int | None) -> Any:
        dataset = ToldEpoch()
        if epoch is not None:
            dataset.set_epoch(epoch)
        return DataLoader(dataset)

    untold, told = make(None), make(3)
    iterators = iter(untold), iter(told)
    begun = [untold.state_dict(), told.state_dict()]
    next(iterators[1])
    for state, epoch, expected in (
        (begun[0], 1, [10, 11, 12, 13]),
        (begun[1], 1, [30, 31, 32, 33]),
        (told.state_dict(), 1, [31, 32, 33]),
        (told.state_dict(), None, [31, 32, 33]),
    ):
        resumed = make(epoch)
        resumed.load_state_dict(state)
        assert [batch.item() for batch in resumed] == expected
    for state in (begun[1], told.state_dict()):
        other: Any = DataLoader(range(4))  # type: ignore[arg-type]
        with pytest.raises(StateMismatch, match=r"in epoch 3, but a range has no set_epoch\(\) to be told it; give"):
            other.load_state_dict(state)
        assert [batch.item() for batch in other] == [0, 1, 2, 3]
    list(iterators[1])
    other.load_state_dict(told.state_dict())  # another epoch begins


class Shuffled(Sampler[int]):
    """Draws from a generator that it holds, under some name."""

    def __init__(self, generator: Any) -> None:
        self.rngs, self.indices = {"order": [generator]}, list(range(100_000))

    def __iter__(self) -> Iterator[int]:
        (rng,) = self.rngs["order"]
        if isinstance(rng, torch.Generator):
            return iter(torch.randperm(12, generator=rng).tolist())
        return iter(rng.sample(range(12), 12) if isinstance(rng, random.Random) else rng.permutation(12).tolist())


@pytest.mark.parametrize(
    "make_generator",
    [
        torch.Generator,
        lambda: random.Random(3),
        lambda: np.random.RandomState(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda: np.random.Generator(np.random.Philox(3)),
    ],
    ids=["torch", "random", "RandomState", "PCG64", "MT19937", "Philox"],
)
@pytest.mark.parametrize("is_over", [False, True])
def test_a_sampler_with_a_generator_of_its_own_is_drawn_again_in_any_epoch(
    make_generator: Callable[[], Any], is_over: bool
) -> None:
    numbers: Any = range(12)
    loaders: list[Any] = [DataLoader(numbers, 3, sampler=Shuffled(make_generator())) for _ in range(2)]
    list(loaders[0])
    iterator = iter(loaders[0])
    for _ in iterator if is_over else range(2):
        next(iterator, None)
    loaders[1].load_state_dict(json.loads(json.dumps(loaders[0].state_dict())))
    rest = [plain(batch) for batch in iterator]
    if not is_over:
        assert [plain(batch) for batch in loaders[1]] == rest
    assert [plain(batch) for batch in loaders[1]] == [plain(batch) for batch in loaders[0]]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, "handler"])
def test_without_workers_an_interrupted_batch_comes_again(interrupt: Any) -> None:
    def handle(number: int, frame: Any) -> None:
        raise TimeoutError

    class Interrupted(Numbers):
        is_due = True

        def __getitem__(self, index: int) -> Any:
            if self.is_due and index == 10:
                self.is_due = False
                if interrupt is KeyboardInterrupt:
                    raise KeyboardInterrupt
                signal.raise_signal(signal.SIGUSR1)
            return index

    datasets: Any = Interrupted(), Numbers()
    loaders: list[Any] = [DataLoader(dataset, 3) for dataset in datasets]
    iterator, found = iter(loaders[0]), list[Any]()
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises((KeyboardInterrupt, TimeoutError)):
            found += (plain(batch) for batch in iterator)
    finally:
        signal.signal(signal.SIGUSR1, before)
    states, rest = [loaders[0].state_dict()], [plain(next(iterator))]
    states.append(loaders[0].state_dict())
    rest += [plain(batch) for batch in iterator]
    assert rest[0] == [9, 10, 11]
    for num_taken, state in enumerate(states):
        loaders[1].load_state_dict(state)
        assert [plain(batch) for batch in loaders[1]] == rest[num_taken:]


def test_an_empty_state_changes_nothing() -> None:
    loaders: list[Any] = [DataLoader(list(range(8)), 2, shuffle=True, seed=1) for _ in range(2)]  # type: ignore[arg-type]
    epochs = [[plain(batch) for batch in loaders[0]] for _ in range(3)]
    iterator = iter(loaders[1])
    next(iterator)
    loaders[1].load_state_dict({})
    assert [plain(batch) for batch in iterator] == epochs[0][1:]
    state = loaders[1].state_dict()
    assert [[plain(batch) for batch in loaders[1]] for _ in range(2)] == epochs[1:]
    loaders[1].load_state_dict(state)
    loaders[1].load_state_dict({})
    assert [plain(batch) for batch in loaders[1]] == epochs[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_asking_for_the_state_before_the_first_epoch_draws_and_starts_nothing(num_workers: int) -> None:
    generator = torch.Generator().manual_seed(3)
    numbers: Any = Numbers()
    loader: Any = DataLoader(numbers, 3, shuffle=True, num_workers=num_workers, generator=generator)
    before, seed = generator.get_state(), torch.get_rng_state()
    state = loader.state_dict()
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), seed)
    assert "not started" in repr(loader)
    assert state["epoch"] == 0
    resumed: Any = DataLoader(numbers, 3, shuffle=True, num_workers=num_workers, generator=torch.Generator())
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert [[plain(batch) for batch in resumed] for _ in range(2)] == [
        [plain(batch) for batch in loader] for _ in range(2)
    ]


class Place(IterableDataset[int]):
    """Says where it is in a state that gets longer."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 8:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "seen": {str(place): torch.ones(1) for place in range(self.place)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


NUMBERS: Any = Numbers()

OF_CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(Place(), 2),
    "global generators": lambda: DataLoader(NUMBERS, 3, shuffle=True),
    "a sampler with a state": lambda: DataLoader(NUMBERS, batch_sampler=ShuffleBatchSampler(NUMBERS, 3, seed=1)),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", OF_CHECKPOINTS)
def test_a_distributed_checkpoint_has_all_of_a_state(name: str, tmp_path: Path) -> None:
    loader, resumed = OF_CHECKPOINTS[name](), OF_CHECKPOINTS[name]()
    iterator = iter(loader)
    next(iterator)
    state_dict_saver.save({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
    state_dict_loader.load({"loader": resumed}, checkpoint_id=tmp_path, no_dist=True)
    assert [plain(batch) for batch in resumed] == [plain(batch) for batch in iterator]


def test_a_state_of_version_1_is_resumed() -> None:
    draws = {"_num_workers": 0, "ahead": [], "_IterableDataset_len_called": None, "num_sharing": 0, "_base_seed": 7}
    draws |= {"epoch": 0, "_sampler_iter_yielded": 1, "_index_sampler_state": None, "_sampler_iter_state": None}
    draws |= {"generators": [], "global_states": {}, "is_begun": True, "draws_seed": True, "begins_twice": False}
    draws |= {"sampler_epochs": [], "dataset_epoch": None}
    worker = {"dataset_state": {"place": 2}, "fetcher_state": {"dataset_iter_state": None, "fetcher_ended": False}}
    worker |= {"has_ended": False, "steps_since_snapshot": 0, "num_batches": 0, "num_to_skip": 0, "next_batch": None}
    snapshot = {"_main_snapshot": draws, "_snapshot_step": 1, "_last_yielded_worker_id": -1}
    snapshot["_worker_snapshots"] = {"worker_0": worker}
    state = {"version": 1, "_steps_since_snapshot": 0, "_snapshot": snapshot, "_iterator_finished": False, "epoch": 0}
    loader: Any = DataLoader(Place(), 2)
    loader.load_state_dict(state | {"batching": {"batch_size": 2, "seed": None}})
    assert [plain(batch) for batch in loader] == [[2, 3], [4, 5], [6, 7]]
