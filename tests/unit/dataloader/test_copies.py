"""A loader that was iterated over can be copied and pickled, as torch's can."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader.dataloader.dataloader import DataLoader


def _pickled(loader: Any) -> Any:
    return pickle.loads(pickle.dumps(loader))


@pytest.mark.parametrize("take_copy", [copy.copy, copy.deepcopy, _pickled])
def test_a_copy_begins_afresh(take_copy: Callable[[Any], Any]) -> None:
    loader: DataLoader[Any] = DataLoader([1, 2, 3], collate_fn=list, batch_size=2)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    copied = take_copy(loader)
    assert list(copied) == [[1, 2], [3]]
    assert list(iterator) == [[3]]
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        copied.batch_size = 3
