"""Frameworks take the samplers: they neither replace them, nor lose their state or epoch, nor deal a batch twice."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from swift_loader import ShuffleSampler
from tests.support.samplers import MAKERS, NUM_SAMPLES

DATASET: Any = range(NUM_SAMPLES)

BATCH_SAMPLERS = ["shuffle batches", "buckets", "tokens", "random batches"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCH_SAMPLERS)
def test_accelerate_splits_one_that_is_not_split(name: str) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    whole = MAKERS[name](1, 0)
    whole.set_epoch(3)
    expected = list(whole)
    ranks = []
    for rank in range(2):
        loader: DataLoader[Any] = DataLoader(DATASET, batch_sampler=MAKERS[name](1, 0))
        prepared = data_loader.prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False)
        prepared.set_epoch(3)
        ranks.append([batch.tolist() for batch in prepared])
    dealt = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert dealt[: len(expected) - 1] == expected[:-1]
    assert dealt[len(expected) - 1][: len(expected[-1])] == expected[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCH_SAMPLERS)
def test_lightning_sets_the_epoch_and_says_why_it_cannot_replace_one(name: str) -> None:
    fabric = pytest.importorskip("lightning.fabric.utilities.data")
    loader: DataLoader[Any] = DataLoader(DATASET, batch_sampler=MAKERS[name](2, 0))
    fabric._set_sampler_epoch(loader, 5)
    assert loader.batch_sampler.epoch == 5  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="use_distributed_sampler=False"):
        fabric._update_dataloader(loader, DistributedSampler(DATASET, 2, 0))


@pytest.mark.slow
def test_lightning_leaves_a_sampler_of_indices_as_it_is() -> None:
    fabric = pytest.importorskip("lightning.fabric")
    sampler = ShuffleSampler(DATASET, 4, seed=3, num_replicas=1, rank=0)
    loader: DataLoader[Any] = DataLoader(DATASET, sampler=sampler, batch_size=4)
    prepared = fabric.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    assert prepared.sampler is sampler
    assert isinstance(sampler, DistributedSampler)  # what Lightning asks before it replaces a sampler


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torchdata", "ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_torchdata_saves_their_state(name: str, num_workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make_loader() -> Any:
        sampler = MAKERS[name](2, 1)
        is_batches = isinstance(next(iter(sampler)), list)
        place = {"batch_sampler": sampler} if is_batches else {"sampler": sampler, "batch_size": 4}
        return torchdata.StatefulDataLoader(range(5 * NUM_SAMPLES), num_workers=num_workers, **place)

    whole = [batch.tolist() for batch in make_loader()]
    loader = make_loader()
    begun = iter(loader)
    for _ in range(3):
        next(begun)
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    del begun
    assert [batch.tolist() for batch in resumed] == whole[3:]
