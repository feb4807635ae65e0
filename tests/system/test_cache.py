"""A cached dataset: the same batches as without a cache, each sample made once, and errors for what it can't keep."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import swift_loader
from swift_loader import CacheMismatch, DataLoader, EncodeError, SwiftLoader, cached, sample_rng
from tests.support.group import run_ranks

LENGTH = 40


class Pair(NamedTuple):
    """A sample."""

    image: np.ndarray[Any, np.dtype[np.uint8]]
    tensor: torch.Tensor
    label: int
    name: str


class Photos:
    """Notes in a file which samples were made."""

    def __init__(self, log: Path, length: int = LENGTH) -> None:
        self.log = str(log)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Pair:
        with open(self.log, "a", encoding="ascii") as log:
            log.write(f"{index}\n")
        image = np.arange(3000, dtype=np.uint8).reshape(20, 50, 3) + np.uint8(index)
        return Pair(image, torch.full((7,), float(index)), index, f"photo {index}")


def augment(pair: Pair) -> dict[str, Any]:
    """Draw from all generators, and change the sample in place."""
    top = random.randrange(10)
    pair.image[:] += np.uint8(np.random.randint(5))
    pair.tensor.add_(torch.rand(7)).add_(sample_rng().random())
    return {"image": pair.image[top : top + 10], "tensor": pair.tensor, "label": pair.label, "name": pair.name}


class Augmented:
    """The same without a cache."""

    def __init__(self, photos: Photos) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return augment(self.photos[index])


def made(log: Path) -> list[int]:
    """Return which samples were made, in the order of their indices."""
    return sorted(map(int, log.read_text().split())) if log.exists() else []


def swift(dataset: Any) -> SwiftLoader:
    return SwiftLoader(dataset=dataset, batch_size=8, shuffle=True, seed=3, worker_per_consumer=2, validate=False)


def drop_in(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 8, shuffle=True, seed=3, num_workers=2)


def taken(loader: Iterable[Any], epochs: int = 2) -> list[bytes]:
    """Return the bytes of some epochs."""
    return [
        np.asarray(batch[name]).tobytes() if name != "name" else repr(batch[name]).encode()
        for _ in range(epochs)
        for batch in loader
        for name in ("image", "tensor", "label", "name")
    ]


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("make", [swift, drop_in])
def test_batches_are_those_without_a_cache_and_each_sample_is_made_once(
    make: Callable[[Any], Any], where: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    kept = cached(Photos(log), augment, where=where if where == "memory" else tmp_path / "cache")
    loader = make(kept)
    batches = taken(loader)
    assert made(log) == list(range(LENGTH))
    assert "40 of them kept" in repr(kept)
    if where == "file":
        again = cached(Photos(log), augment, where=tmp_path / "cache")
        log.unlink()  # of the samples that were compared
        assert taken(make(again)) == batches
        assert made(log) == []
    plain = make(Augmented(Photos(tmp_path / "other")))
    assert taken(plain) == batches
    for each in (loader, plain):
        if isinstance(each, SwiftLoader):
            each.close()


def test_torchs_loader_fills_it_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    kept = cached(Photos(log))
    loader = TorchLoader(kept, 8, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type, var-annotated]
    first, second = ([batch.label.tolist() for batch in loader] for _ in range(2))
    assert first == second
    assert made(log) == list(range(LENGTH))


class Wrapped:
    """Changes the samples of a dataset, and has its attributes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return -int(self.dataset[index].label)


@pytest.mark.parametrize("make", [swift, drop_in])
def test_what_wraps_a_cache_makes_the_samples(make: Callable[[Any], Any], tmp_path: Path) -> None:
    loader = make(Wrapped(cached(Photos(tmp_path / "log"))))
    assert sorted(int(label) for batch in loader for label in batch) == list(range(1 - LENGTH, 1))
    if isinstance(loader, SwiftLoader):
        loader.close()


def test_what_does_not_fit_is_made_on_each_access(tmp_path: Path) -> None:
    log = tmp_path / "log"
    kept = cached(Photos(log), budget=LENGTH // 2 * 3392)
    for _ in range(2):
        assert [kept[index].label for index in range(LENGTH)] == list(range(LENGTH))
    assert made(log) == sorted([*range(LENGTH), *range(LENGTH // 2, LENGTH)])
    assert "20 of them kept in memory: 66.25 KiB of 66.25 KiB" in repr(kept)


def test_one_may_write_to_what_one_gets(tmp_path: Path) -> None:
    kept = cached(Photos(tmp_path / "log"))
    for _ in range(3):
        sample = kept[-1]
        assert sample.tensor.tolist() == [LENGTH - 1.0] * 7
        assert sample.image[0, 0, 0] == LENGTH - 1
        sample.tensor.zero_()
        sample.image[:] = 0


class Drawing(Photos):
    """Draws in one of several ways."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(Path(os.devnull))
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return self.draw()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1), lambda: sample_rng().random()])
def test_random_samples_are_refused(draw: Callable[[], Any]) -> None:
    with pytest.raises(
        ValueError, match=r"sample 3 of a cached dataset, a .*Drawing, draws random numbers.*transform="
    ):
        cached(Drawing(draw))[3]


class Local(NamedTuple):
    """Can't be imported, as if it were a script's."""

    value: int


def test_what_can_not_be_kept_is_named() -> None:
    kept = cached(Drawing(lambda: (1, lambda: 2)))
    with pytest.raises(EncodeError, match="sample 0 of a cached dataset"):
        kept[0]
    with pytest.raises(IndexError, match="index 40 of a cached dataset of 40 samples"):
        kept[LENGTH]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda log: Photos(log, 41), "its length is 40, not 41"),
        (lambda log: Drawing(lambda: 0), r"its class is '.*\.Photos', not '.*\.Drawing'"),
        (lambda log: Photos(Path(f"{log}2")), "another attribute log"),
    ],
)
def test_the_file_of_another_dataset_is_refused_by_name(
    other: Callable[[Path], Any], difference: str, tmp_path: Path
) -> None:
    path = tmp_path / "cache"
    cached(Photos(tmp_path / "log"), where=path)
    with pytest.raises(CacheMismatch, match=f"the cache '{path}' is that of another dataset: {difference}"):
        cached(other(tmp_path / "log"), where=path)


def test_the_cache_of_another_dataset_may_be_copied_over_one_in_use(tmp_path: Path) -> None:
    kept = cached(Photos(tmp_path / "log"), where=tmp_path / "cache")
    other = cached([{"label": index} for index in range(LENGTH)], where=tmp_path / "other")
    assert [kept[index].label for index in range(3)] == [other[index]["label"] for index in range(3)]
    (tmp_path / "cache").write_bytes((tmp_path / "other").read_bytes())
    assert [kept[index].name for index in range(3)] == ["photo 0", "photo 1", "photo 2"]


def test_a_version_stands_for_the_attributes(tmp_path: Path) -> None:
    path, log = tmp_path / "cache", tmp_path / "log"
    cached(Photos(log), where=path, version="2")[5]
    assert cached(Photos(tmp_path / "other"), where=path, version="2")[5].label == 5
    for version, other in [("3", "'3'"), (None, "None")]:
        with pytest.raises(CacheMismatch, match=f"its version is '2', not {other}"):
            cached(Photos(log), where=path, version=version)


def test_bad_arguments_are_refused_at_once(tmp_path: Path) -> None:
    photos = Photos(tmp_path / "log")
    wrong: list[tuple[Any, str]] = [
        ("many", "must be a number of bytes"),
        (0, "at least 1 byte"),
        (True, "number of bytes"),
    ]
    for budget, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            cached(photos, budget=budget)
    with pytest.raises(TypeError, match="transform"):
        cached(photos, 5)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError):
        cached(photos, where=tmp_path)
    assert swift_loader.cached is cached


RANKS = """
    class Still(Dataset):
        def __getitem__(self, index):
            with open(f"{folder}/fetched", "a") as file:
                file.write(f"{index}\\n")
            return {"index": index}
    photos = cached(Still(), budget="10MB")
    with SwiftLoader(dataset=photos, batch_size=8, worker_per_consumer=2, seed=5, validate=False) as loader:
        seen = [int(index) for batch in loader for index in batch["index"]]
    dist.barrier()
    report([seen, num_fetched(), sum(photos[index]["index"] for index in range(96)), repr(photos)])
    dist.barrier()  # the other rank has counted, too
    other = cached(Still(length=5 + rank), budget="1MB")  # not the same on all ranks, so each has its own
    report([other[4 + rank]["index"], repr(other)])
    finish()
"""


def test_the_ranks_of_a_machine_share_one_copy(tmp_path: Path) -> None:
    first, second = run_ranks(RANKS, 2, tmp_path)
    assert sorted(first[0][0] + second[0][0]) == list(range(96))
    assert first[0][1:] == second[0][1:]
    assert first[0][1:3] == [96, sum(range(96))]
    assert "96 of them kept in memory" in first[0][3]
    assert first[1][0] == 4
    assert second[1][0] == 5
    assert "1 of them kept" in second[1][1]
