"""With `validate`, starting waits for the first batch, which the loop gets if it begins there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift_loader.batch.collate import default_collate
from swift_loader.worker.fingerprint import chosen_indices
from tests.support import datasets
from tests.support.helpers import exhaustive, ids_of, make_loader, needs_template


class OfAnySize:
    """Sample i has i numbers: no two of them can be stacked."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return np.full(index, index)


class SortedByClass(datasets.Counting):
    """Half of the samples belong to each of two classes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "class": int(index >= self.num_samples // 2)}


class Listed(datasets.Counting):
    """Keeps a list of what was asked for."""

    def __init__(self, num_samples: int = 24, *, folder: str) -> None:
        super().__init__(num_samples)
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Path(self.folder, "asked").open("a") as asked:
            asked.write(f"{index}\n")
        return super().__getitem__(index)


def without_look(indices: list[int], num_samples: int) -> list[int]:
    """Return what was asked for after the look at some samples that each build begins with."""
    looked_at = [index for index in chosen_indices(num_samples) for _ in range(2)]
    while looked_at != indices[: len(looked_at)]:
        del looked_at[-2:]  # it ends when it has taken too long
    return indices[len(looked_at) :]


def collate_only(samples: list[Any], num_samples: int) -> Any:
    """Refuse any other number of samples."""
    if len(samples) != num_samples:
        raise ValueError(f"{len(samples)} samples")
    return default_collate(samples)


def collate_both_classes(samples: list[Any]) -> Any:
    if {sample["class"] for sample in samples} != {0, 1}:
        raise ValueError("one of the classes is missing")
    return default_collate(samples)


def collate_nothing(samples: list[Any]) -> Any:
    raise KeyError("no such field")


def asked(folder: Path) -> list[int]:
    return [int(index) for index in Path(folder, "asked").read_text().split()]


def test_samples_of_any_size_make_batches_of_one() -> None:
    with make_loader(OfAnySize, batch_size=1, shuffle=False) as loader:
        loader.start(0)
        assert [batch.shape for batch in loader] == [(1, size) for size in range(12)]


@pytest.mark.parametrize(("num_samples", "batch_size", "drop_last"), [(24, 8, False), (20, 8, True), (3, 8, False)])
def test_a_collate_function_that_needs_a_whole_batch_gets_one(
    num_samples: int, batch_size: int, drop_last: bool
) -> None:
    whole = min(batch_size, num_samples)
    collate = partial(collate_only, num_samples=whole)
    options: dict[str, Any] = {"kwargs": {"num_samples": num_samples}, "drop_last": drop_last}
    with make_loader(datasets.Counting, batch_size=batch_size, collate_fn=collate, **options) as loader:
        loader.start(0)
        assert len(ids_of(loader)) == num_samples // whole * whole


def test_a_collate_function_that_needs_both_classes_gets_both_from_sorted_data() -> None:
    options: dict[str, Any] = {"kwargs": {"num_samples": 1000}, "collate_fn": collate_both_classes}
    with make_loader(SortedByClass, batch_size=50, **options) as loader:
        loader.start(0)
        assert sorted(ids_of(loader)) == list(range(1000))


@pytest.mark.parametrize("options", [{"kwargs": {"num_samples": 0}}, {"kwargs": {"num_samples": 5}, "drop_last": True}])
def test_where_there_is_no_batch_there_is_no_trial(options: dict[str, Any]) -> None:
    with make_loader(datasets.Counting, collate_fn=collate_nothing, **options) as loader:
        loader.start(0)
        assert list(loader) == []


@pytest.mark.filterwarnings("ignore:data_queue_size=1 keeps:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=needs_template)])
def test_what_was_tried_is_what_the_loop_gets_first(workers: int, tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path)}
    with make_loader(Listed, workers=workers, kwargs=kwargs, data_queue_size=1) as loader:
        loader.start(0)
        iterator = iter(loader)
        first = ids_of([next(iterator)])
        got = first + ids_of(iterator)
        loader.close()
    assert sorted(got) == list(range(24))
    assert without_look(asked(tmp_path), 24)[:24] == got, "batch by batch, and the first of them once"
    with make_loader(datasets.Counting, workers=0, kwargs={"num_samples": 24}) as loader:
        assert ids_of(loader) == got


@pytest.mark.parametrize(
    "options", [{}, exhaustive({"in_order": False}), exhaustive({"on_error": "skip"}), {"validate": False}]
)
def test_a_loop_that_begins_elsewhere_does_not_get_what_was_tried(options: dict[str, Any]) -> None:
    with make_loader(datasets.Counting, workers=0) as loader:
        epochs = [ids_of(loader) for _ in range(3)]
        other = ids_of(make_loader(datasets.Counting, workers=0, seed=8))
        state = loader.state_dict() | {"epoch": 0, "position": 40}
    with make_loader(datasets.Counting, workers=1, **options) as loader:
        loader.load_state_dict(state)
        loader.start(0)
        assert ids_of(loader) == epochs[0][40:]
        assert ids_of(loader) == epochs[1]
    with make_loader(datasets.Counting, workers=1, **options) as loader:
        loader.start(0)
        loader.set_epoch(1)
        assert ids_of(loader) == epochs[1]
        loader.set_epoch(0)
        assert ids_of(loader) == epochs[0]
    with make_loader(datasets.Counting, workers=1, seed=None, **options) as loader:
        loader.start(0)
        loader.load_state_dict(state | {"seed": 8, "position": 0})
        assert ids_of(loader) == other


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_tries_its_own_first_batch(rank: int) -> None:
    both = [make_loader(datasets.Counting, workers=0, nb_consumer=2, drop_last=True) for _ in range(2)]
    both[rank].start(rank)
    expected = ids_of(both[rank])
    collate = partial(collate_only, num_samples=8)
    with make_loader(datasets.Counting, workers=1, nb_consumer=2, drop_last=True, collate_fn=collate) as loader:
        loader.start(rank)
        assert ids_of(loader) == expected


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_what_fails_in_the_trial_fails_in_start_and_is_named(worker_type: str) -> None:
    options: dict[str, Any] = {"batch_size": 3, "shuffle": False, "collate_fn": collate_nothing}
    options["worker_type"] = worker_type
    with make_loader(datasets.Counting, **options) as loader, pytest.raises(KeyError) as caught:
        loader.start(0)
    assert "batch 0 of epoch 0 (dataset indices 0, 1, 2)" in str(caught.value.__cause__)
