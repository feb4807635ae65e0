"""Mixtures through the doors: any ranks, workers and batch sizes, resumed and changed anywhere, through kills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swift_loader import DataLoader, Mixture, ShuffleBatchSampler, SwiftLoader, cached
from swift_loader.vision import create_loader


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
        (lambda: create_loader(mixture_of(), (3, 8, 8), 4, num_batches=5), TypeError),
        (lambda: SwiftLoader(mixture_in_a_worker, worker_per_consumer=0).start(), TypeError),
    ],
    ids=["torch's order", "a cache", "images", "made by a worker"],
)
def test_a_door_that_does_not_know_the_weights_refuses_a_mixture(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Mixture"):
        make()


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
