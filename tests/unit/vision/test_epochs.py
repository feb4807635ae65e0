from __future__ import annotations

from typing import Any

import pytest

from swift_loader import StateMismatch
from swift_loader.vision import create_loader
from swift_loader.vision.epochs import EpochLoader
from tests.support.numbered import Numbered, NumberedStream

pytestmark = pytest.mark.usefixtures("timm_data")


def make(dataset: Any = None, **options: Any) -> EpochLoader:
    dataset = Numbered() if dataset is None else dataset
    loader = create_loader(dataset, (3, 16, 16), 4, num_workers=0, use_prefetcher=False, seed=1, **options)
    assert isinstance(loader, EpochLoader)
    return loader


def sampled(**options: Any) -> EpochLoader:
    return make(is_training=True, num_aug_repeats=2, **options)


def test_a_pass_that_is_left_begins_again() -> None:
    loader = sampled()
    iterator = iter(loader)
    first = next(iterator)[1]
    assert loader.state_dict()["position"] == 1
    assert next(iter(loader))[1].tolist() == first.tolist()
    with pytest.raises(RuntimeError, match="it raised an error, or was superseded by a newer one"):
        next(iterator)


def test_the_state_after_the_last_batch_begins_the_next_epoch() -> None:
    loader = sampled()
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["finished"]) == (0, 1)
    expected = [targets.tolist() for _, targets in loader]
    resumed = sampled()
    resumed.load_state_dict(state)
    assert [targets.tolist() for _, targets in resumed] == expected


def test_an_error_ends_the_pass_and_the_next_one_begins_afresh() -> None:
    def collate(samples: Any) -> int:
        calls.append(samples)
        if len(calls) == 2:
            raise OSError("a broken disk")
        return len(samples)

    calls: list[Any] = []
    loader = sampled(collate_fn=collate)
    iterator = iter(loader)
    assert next(iterator) == 4
    with pytest.raises(OSError, match="a broken disk"):
        next(iterator)
    with pytest.raises(RuntimeError, match="it raised an error"):
        next(iterator)
    assert list(loader) == [4] * 7


def test_a_streams_sampler_has_no_indices() -> None:
    sampler = make(NumberedStream()).sampler
    sampler.set_epoch(1)
    with pytest.raises(TypeError, match="the samples of a NumberedStream, a stream, have no indices"):
        len(sampler)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": "distributed"}, "the state's sampler is 'distributed', but it was loaded into a create_loader"),
        ({"position": -1}, "the state's position=-1"),
        ({"num_samples": 31}, "num_samples=31"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    loader = sampled()
    with pytest.raises(StateMismatch, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    loader.load_state_dict({})
