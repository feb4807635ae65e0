"""What a DataLoader is, apart from its workers: it is copied, freed, placed at epochs and refuses wrong options."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler
from torch.utils.data import dataloader as torch_iterators
from torch.utils.data.distributed import DistributedSampler

from swift_loader import DataLoader, ShuffleBatchSampler, SwiftLoader
from swift_loader.pipeline import Pipeline
from tests.support.helpers import ROOT

NUMBERS: Any = list(range(8))


def pickled(given: Any) -> Any:
    return pickle.loads(pickle.dumps(given))


@pytest.mark.parametrize("take_copy", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_loader_that_is_iterated_over_begins_afresh(take_copy: Callable[[Any], Any]) -> None:
    loader: Any = DataLoader([1, 2, 3], collate_fn=list, batch_size=2)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    copied = take_copy(loader)
    assert list(copied) == [[1, 2], [3]]
    assert list(iterator) == [[3]]
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        copied.batch_size = 3


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("num_steps", "shuffle"), [(0, False), (1, True), (9, False), (9, True)])
def test_a_loader_is_freed_with_its_last_reference(num_steps: int, shuffle: bool) -> None:
    loader: Any = DataLoader(NUMBERS, shuffle=shuffle)
    iterator = iter(loader)
    for _ in range(num_steps):
        next(iterator, None)
    loader.state_dict()
    is_freed = weakref.ref(loader)
    del loader, iterator
    assert is_freed() is None


def sampler_at(epoch: int) -> DistributedSampler[int]:
    sampler: DistributedSampler[int] = DistributedSampler(NUMBERS, num_replicas=1, rank=0)
    sampler.set_epoch(epoch)
    return sampler


def test_a_samplers_epoch_counts_if_it_is_set_after_iter() -> None:
    sampler = sampler_at(1)
    batches = iter(DataLoader(NUMBERS, 1, sampler=sampler))
    sampler.set_epoch(2)
    assert [int(batch) for batch in batches] == list(sampler_at(2))


def test_a_position_is_resumed_in_its_own_epoch_whatever_the_sampler_has_been_set_to() -> None:
    sampler = sampler_at(4)
    loader = DataLoader(NUMBERS, 2, sampler=sampler)
    seen = next(iter(loader)).tolist()
    resumed_sampler = sampler_at(0)
    resumed = DataLoader(NUMBERS, 2, sampler=resumed_sampler)
    resumed.load_state_dict(loader.state_dict())
    for batch in resumed:
        seen += batch.tolist()
    assert seen == list(sampler_at(4))
    assert resumed_sampler.epoch == 0, "it isn't this loader's to change"


class ByEpoch(list[int]):
    """A dataset, a sampler or a batch sampler that depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: Any) -> Any:
        return 100 * self.epoch + super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


class Batches(ByEpoch):
    def __iter__(self) -> Iterator[Any]:
        return ([number] for number in super().__iter__())


ROWS: Any = range(300)
PERSISTS: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": ByEpoch([1, 2])},
        {"dataset": ROWS, "sampler": ByEpoch([1, 2])},
        {"dataset": ROWS, "batch_sampler": Batches([1, 2])},
        {"dataset": ROWS, "batch_sampler": BatchSampler(ByEpoch([1, 2]), 1, drop_last=False)},
        {"dataset": ByEpoch([1, 2]), **PERSISTS},
        {"dataset": ByEpoch([1, 2]), "worker_type": "thread", **PERSISTS},
    ],
)
@pytest.mark.parametrize("is_source", [False, True])
def test_set_epoch_reaches_samplers_and_dataset(options: Any, is_source: bool) -> None:
    loader: Any = DataLoader(**options)
    outer: Any = Pipeline(loader) if is_source else loader
    for epoch in (0, 2):
        outer.set_epoch(epoch)
        assert [int(number) for number in outer] == [100 * epoch + 1, 100 * epoch + 2]
    with pytest.raises(ValueError, match="epoch=-1 is too small"):
        outer.set_epoch(-1)


@pytest.mark.parametrize("options", [{"seed": 1}, {}, PERSISTS])
def test_set_epoch_changes_nothing_where_nobody_takes_it(options: Any) -> None:
    def epochs(*numbers: int) -> list[Any]:
        torch.manual_seed(3)
        loader: Any = DataLoader(NUMBERS, 2, shuffle=True, **options)
        found = []
        for number in numbers:
            if number >= 0:
                loader.set_epoch(number)
            found.append([batch.tolist() for batch in loader])
        return [*found, torch.rand(1).item()]

    assert epochs(7, 7, 0) == epochs(-1, -1, -1)


WRONG: list[dict[str, Any]] = [
    {"worker_type": "fiber"},
    {"worker_type": None},
    {"worker_restarts": -1},
    {"worker_restarts": "3"},
    {"stall_warning": -0.5},
    {"stall_warning": "soon"},
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_wrong_value_gets_the_error_of_the_swift_loader(options: dict[str, Any], num_workers: int) -> None:
    with pytest.raises((TypeError, ValueError)) as expected:
        SwiftLoader(dataset=NUMBERS, **options)
    with pytest.raises(expected.type) as caught:
        DataLoader(NUMBERS, num_workers=num_workers, **options)
    assert str(caught.value) == str(expected.value)


def test_an_argument_that_is_wrong_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"rng='samples' is unknown; it must be one of 'sample'"):
        DataLoader([1, 2], rng="samples")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch_factor=0 is too small"):
        DataLoader(NUMBERS, num_workers=1, prefetch_factor=0)
    with pytest.raises(TypeError, match="dataset is the class list; give an instance"):
        list(DataLoader(list, num_workers=1))  # type: ignore[arg-type]


def test_the_repr_says_what_it_is_and_where_the_loop_is() -> None:
    class Broken(list[int]):
        def __len__(self) -> int:
            raise ValueError("not now")

    loader: Any = DataLoader(NUMBERS, 4)
    of = f"<DataLoader: {len(NUMBERS)} samples of {type(NUMBERS).__name__}, {len(loader)} batches of 4, 0 workers"
    assert repr(loader) == f"{of}, not started>"
    iterator = iter(loader)
    next(iterator)
    assert repr(iterator) == "<LoaderIterator: running, epoch 0, batch 1>"
    assert repr(loader) == f"{of}, running, epoch 0, batch 1>"
    state = loader.state_dict()
    list(iterator)
    assert repr(loader) == f"{of}, over, epoch 0, batch {len(loader)}>"
    loader.load_state_dict(state)
    assert repr(loader) == f"{of}, resumes in epoch 0 at batch 1>"
    list(loader)
    loader.load_state_dict(loader.state_dict())
    assert repr(loader) == f"{of}, resumes in epoch 1 at batch 0>"
    loader.num_workers = -1
    assert repr(loader) == repr(DataLoader.__new__(DataLoader)) == "<DataLoader: not usable>"
    broken: Any = Broken()
    assert repr(DataLoader(broken, None, sampler=[1])) == "<DataLoader: Broken, batches, 0 workers, not started>"
    assert "<td style='text-align:left' colspan='1'>not usable</td>" in loader._repr_html_()


def test_a_change_of_torchs_iterators_finds_what_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SpeechBrain resumes so: it leaves out what came before."""
    make: Any = torch_iterators._BaseDataLoaderIter.__init__

    def leave_out(self: Any, loader: Any) -> None:
        make(self, loader)
        for number in range(loader.num_to_leave_out):
            next(self._sampler_iter)
            self._num_yielded = number + 1

    monkeypatch.setattr(torch_iterators._BaseDataLoaderIter, "__init__", leave_out)
    loaders: list[Any] = [DataLoader(NUMBERS, 2, shuffle=True, seed=1) for _ in range(2)]
    for loader, number in zip(loaders, (0, 3), strict=True):
        loader.num_to_leave_out = number
    iterator = iter(loaders[1])
    assert isinstance(iterator, torch_iterators._BaseDataLoaderIter)
    assert iterator._num_yielded == 3
    epochs = [[[batch.tolist() for batch in loaders[0]] for _ in range(2)]]
    assert [iterator._next_data().tolist()] == epochs[0][0][3:]
    assert list(iterator) == []
    loaders[1].num_to_leave_out = 0
    assert [batch.tolist() for batch in loaders[1]] == epochs[0][1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_that_are_left_out_count_also_if_the_sampler_has_a_state(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(NUMBERS, batch_sampler=ShuffleBatchSampler(NUMBERS, 2, seed=1), num_workers=num_workers)

    whole, loader, other = [batch.tolist() for batch in make()], make(), make()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator._sampler_iter)
    assert next(iterator).tolist() == whole[2]
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in iterator] == whole[3:]


@pytest.mark.parametrize("made", [map, lambda _, indices: islice(indices, 3), lambda _, indices: (i for i in indices)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_of_indices_may_be_any_iterable(made: Callable[..., Any], num_workers: int) -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return (made(int, iter(part)) for part in ([0, 1], [2, 3, 4]))

    loader: Any = DataLoader(NUMBERS, batch_sampler=Batches(), num_workers=num_workers)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3, 4]]


class Hooked(DataLoader[Any]):
    """Overrides torch's hooks, as NodeLoader of PyG does."""

    def _get_iterator(self) -> Any:
        return Doubled(super()._get_iterator())

    @property
    def _index_sampler(self) -> Any:
        return [[0, 1], [5]]


class Doubled:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return (next(self.inner) * 2).tolist()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.inner._reset(loader, first_iter)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_a_subclass_may_override_torchs_hooks(options: Any) -> None:
    loader = Hooked(NUMBERS, 4, **options)
    assert [list(loader) for _ in range(2)] == [[[0, 2], [10]]] * 2


def test_a_subclass_may_take_samples_for_batches() -> None:
    class Single(DataLoader[Any]):
        _auto_collation = False  # type: ignore[assignment] # torch's is a property

    assert list(Single(NUMBERS, 4)) == NUMBERS


OF_EXIT = """
import builtins, sys
from swift_loader import DataLoader, SwiftLoader
from swift_loader.pipeline import Pipeline
from swift_loader.pipeline import Pipeline
numbers = list(range(8))
made = [DataLoader(numbers, 2), DataLoader(numbers, 2, num_workers=1), Pipeline(numbers).map(str).batch(2)]
made.append(SwiftLoader(dataset=numbers, batch_size=2, worker_per_consumer=1))
builtins.kept = [(iterator, next(iterator)) for iterator in map(iter, made)], made
"""


@pytest.mark.slow
def test_what_still_exists_when_the_interpreter_ends_says_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", OF_EXIT], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stderr == ""
