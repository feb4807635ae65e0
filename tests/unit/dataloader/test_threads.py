from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset, TensorDataset

from swift_loader.dataloader.threads import copied, needs_copies


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.rows = np.zeros(3)

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Stateful(list[int]):
    def state_dict(self) -> dict[str, Any]:
        return {}


def test_threads_share_datasets_that_iterating_does_not_change() -> None:
    assert not needs_copies([1, 2])
    assert not needs_copies(TensorDataset())
    assert needs_copies(Stream())
    assert needs_copies(Stateful())


def test_a_copy_is_deep() -> None:
    stream = Stream()
    copied(stream).rows[:] = 1
    assert not stream.rows.any()


def test_what_can_not_be_copied_is_named() -> None:
    with pytest.raises(TypeError, match=r"the dataset, a generator, can't be copied \(cannot pickle 'generator' obj"):
        copied(number for number in range(3))
