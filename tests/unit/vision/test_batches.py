from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.samplers.passes import Pass, PassState
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.vision.batches import ImageBatches
from swift_loader.vision.schedule import ConstantSchedule
from swift_loader.vision.shares import Share


def batches_of(
    num_samples: int, batch_size: int, *, repeats: float = 2.0, seed: int = 3, rank: int = 0
) -> ImageBatches:
    order = OrderSettings.of(seed=seed, shuffle=True, window=0, batch_size=batch_size)
    share = Share(order, num_samples, repeats, 2, rank)
    return ImageBatches(share, ConstantSchedule(share.num_items, batch_size, False, None))


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 5), st.data())
def test_the_rest_of_an_epoch_is_the_end_of_the_whole(
    num_samples: int, size: int, epoch: int, data: st.DataObject
) -> None:
    batches = batches_of(num_samples, size)
    batches.begin(Pass(epoch, 0, PassState.READY))
    whole = list(batches)
    assert len(whole) == len(batches)
    first = data.draw(st.integers(0, len(whole)))
    batches.begin(Pass(epoch, first, PassState.READY))
    assert list(batches) == whole[first:]


def test_no_two_places_of_a_run_have_the_same_key() -> None:
    keys = []
    for rank in range(2):
        batches = batches_of(100, 8, rank=rank)
        for epoch in range(3):
            batches.begin(Pass(epoch, 0, PassState.READY))
            keys += [place.key for batch in batches for place in batch]
    assert len(set(keys)) == len(keys) == 2 * 3 * 50


def test_an_iterator_keeps_to_its_pass() -> None:
    batches = batches_of(40, 4)
    batches.begin(Pass(0, 0, PassState.READY))
    iterator = iter(batches)
    batches.begin(Pass(1, 3, PassState.READY))
    batches.set_epoch(4)
    assert len(list(iterator)) == 5


def test_a_seed_that_is_set_changes_order_and_keys() -> None:
    batches, other = batches_of(40, 4), batches_of(40, 4, seed=9)
    assert list(batches.next_epoch()) != list(other.next_epoch())
    batches.seed = 9
    assert list(batches.next_epoch()) == list(other.next_epoch())


def test_batches_of_one_size_have_no_choices() -> None:
    with pytest.raises(AttributeError, match="without input_size_choices"):
        _ = batches_of(40, 4).batch_sizes
