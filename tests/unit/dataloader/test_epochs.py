from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.dataloader.epochs import at_epochs, epoch_of, epochs_of, with_inner

NUM_SAMPLES = 8


def make_sampler() -> DistributedSampler[int]:
    return DistributedSampler(range(NUM_SAMPLES), num_replicas=1, rank=0, shuffle=True)  # type: ignore[arg-type]


def order_at(epoch: int) -> list[int]:
    sampler = make_sampler()
    sampler.set_epoch(epoch)
    return list(sampler)


def test_samplers_are_found_inside_others() -> None:
    inner = make_sampler()
    batches = BatchSampler(inner, 2, drop_last=False)
    outer = BatchSampler(batches, 2, drop_last=False)  # type: ignore[arg-type]

    assert list(with_inner(None, outer, inner)) == [outer, batches, inner]


def test_only_what_set_epoch_sets_is_an_epoch() -> None:
    sampler = make_sampler()
    sampler.set_epoch(3)
    assert epoch_of(sampler) == 3
    assert epoch_of(SequentialSampler(range(2))) is None
    assert epochs_of([SequentialSampler(range(2)), sampler]) == [3]


@pytest.mark.parametrize(("epochs", "inside"), [([5], 5), (None, 3), ([5, 6], 3)])
def test_epochs_are_set_for_a_while(epochs: list[int] | None, inside: int) -> None:
    sampler = make_sampler()
    sampler.set_epoch(3)
    with at_epochs([sampler], epochs):
        assert sampler.epoch == inside
    assert sampler.epoch == 3


def test_set_epoch_after_iter_counts() -> None:
    sampler = make_sampler()
    loader = DataLoader(range(NUM_SAMPLES), None, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    iterator = iter(loader)
    sampler.set_epoch(2)
    in_batches = DataLoader(range(NUM_SAMPLES), 1, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    sampler.set_epoch(1)
    batches = iter(in_batches)
    sampler.set_epoch(2)

    assert [int(batch) for batch in batches] == order_at(2)
    assert len(list(iterator)) == NUM_SAMPLES


def test_a_position_is_resumed_in_its_own_epoch_whatever_the_sampler_has_been_set_to() -> None:
    sampler = make_sampler()
    loader = DataLoader(range(NUM_SAMPLES), 2, sampler=sampler)  # type: ignore[arg-type, var-annotated]
    sampler.set_epoch(4)
    iterator = iter(loader)
    seen = next(iterator).tolist()
    state = loader.state_dict()

    resumed_sampler = make_sampler()
    resumed = DataLoader(range(NUM_SAMPLES), 2, sampler=resumed_sampler)  # type: ignore[arg-type, var-annotated]
    resumed.load_state_dict(state)
    for batch in resumed:
        seen += batch.tolist()

    assert seen == order_at(4)
    assert resumed_sampler.epoch == 0, "it isn't this loader's to change"
