"""The proof for users' own datasets: accepts what is exact, and names what isn't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swift_loader import DataLoader, SwiftLoader, sample_rng
from swift_loader.pipeline import Pipeline
from swift_loader.testing import assert_resume_exact
from tests.support import datasets
from tests.support.helpers import exhaustive, make_loader


class OwnGenerator(datasets.Counting):
    """Draws from a generator that it holds, at one index."""

    def __init__(self) -> None:
        super().__init__(50)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = self.rng.random() if index == 17 else 0.0
        return {"id": index, "nested": [np.full(3, index), noise]}


class Remembers(datasets.Counting):
    """Tells what it was asked for before."""

    last = -1

    def __getitem__(self, index: int) -> dict[str, Any]:
        before, self.last = self.last, index
        return {"id": index, "text": f"{before} before"}


class Varied(datasets.Counting):
    """Exact, with many kinds of parts."""

    def __getitem__(self, index: int) -> Any:
        import torch

        return {
            "id": index,
            "noise": (torch.randn(3), sample_rng().random(2)),
            "half": torch.randn(2).bfloat16(),
            "text": "x" * (index % 3),
            "none": None,
            "set": {str(number) for number in range(index % 4)},
        }


@pytest.mark.parametrize(
    ("dataset", "workers", "num_cuts"),
    [
        (datasets.Counting, 2, 1),
        (datasets.AugmentingWithAll, 0, 5),
        (Varied, 0, 5),
        exhaustive(datasets.Counting, 0, 5),
        exhaustive(datasets.AugmentingWithAll, 2, 1),
        exhaustive(Varied, 2, 1),
    ],
)
def test_a_dataset_that_depends_on_the_index_alone_passes(dataset: type[Any], workers: int, num_cuts: int) -> None:
    assert_resume_exact(
        lambda: make_loader(dataset, workers=workers, kwargs={"num_samples": 50}), num_batches=20, num_cuts=num_cuts
    )


def test_a_generator_that_the_dataset_holds_is_found_with_the_index() -> None:
    with pytest.raises(AssertionError, match=r"dataset index 17, in batch\['nested'\]\[1\]\. A sample"):
        assert_resume_exact(lambda: make_loader(OwnGenerator, workers=0))


def test_a_memory_of_other_samples_is_found_with_its_place() -> None:
    with pytest.raises(AssertionError, match=r"stopped at batch \d+, .* dataset index \d+, in batch\['text'\]\. "):
        assert_resume_exact(lambda: make_loader(Remembers, workers=0, collate_fn=None))


def test_what_differs_even_without_a_stop_is_said_to() -> None:
    calls = iter(range(100))

    def collate(samples: list[Any]) -> Any:
        return [next(calls)]

    with pytest.raises(
        AssertionError, match=r"run again, without being stopped, .* dataset indices \[.*\], in batch\[0\]"
    ):
        assert_resume_exact(lambda: make_loader(datasets.Counting, workers=0, collate_fn=collate))


class BatchMates(datasets.Counting):
    """Tells who is in the same batch, which is another in a batch of another size."""

    def __getitems__(self, indices: Any) -> list[dict[str, Any]]:
        return [{"id": index, "first": indices[0]} for index in indices]


@pytest.mark.slow
def test_another_batch_size_can_go_on() -> None:
    def make(batch_size: int, dataset: type[Any]) -> SwiftLoader:
        return make_loader(dataset, workers=0, batch_size=batch_size)

    for dataset in (datasets.AugmentingWithAll, Varied):
        assert_resume_exact(lambda: make(8, dataset), resume_with=lambda: make(5, dataset))  # noqa: B023
    assert_resume_exact(lambda: make(8, BatchMates))
    with pytest.raises(AssertionError, match=r"stopped at batch 1, .* dataset index \d+, in batch\['first'\]"):
        assert_resume_exact(lambda: make(8, BatchMates), resume_with=lambda: make(5, BatchMates))


@pytest.mark.slow
def test_a_data_loader_with_a_seed_and_a_pipeline_pass() -> None:
    dataset: Any = datasets.AugmentingWithAll(50)

    def make(workers: int = 2, **seed: Any) -> DataLoader[Any]:
        return DataLoader(dataset, 8, shuffle=True, num_workers=workers, collate_fn=list, **seed)

    assert_resume_exact(lambda: make(seed=1), num_batches=10, num_cuts=1)
    assert_resume_exact(lambda: make(seed=1), resume_with=lambda: make(0), num_batches=10, num_cuts=1)
    with pytest.raises(AssertionError, match=r"differs at sample \d+, in batch.*\. Give a DataLoader seed="):
        assert_resume_exact(make, num_batches=10)
    assert_resume_exact(lambda: Pipeline(range(50), seed=1).shuffle(20).batch(8), num_batches=20)


def test_the_same_loader_twice_and_no_batches_are_refused() -> None:
    loader = make_loader(datasets.Counting, workers=0)
    with pytest.raises(ValueError, match="the same loader twice"):
        assert_resume_exact(lambda: loader, num_batches=3)
    with pytest.raises(ValueError, match="has no batches"):
        assert_resume_exact(lambda: SwiftLoader(dataset=[], worker_per_consumer=0))
