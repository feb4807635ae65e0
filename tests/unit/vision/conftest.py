"""timm, and what it is compared on."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.device.prefetch import batch_key


@pytest.fixture(scope="session")
def timm_data() -> Any:
    """The module `timm.data`; what torchvision warns of when it is imported doesn't matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("timm.data")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The keys that batches are erased by, as they are used."""
    used: list[int] = []

    def note() -> int:
        used.append(batch_key())
        return used[-1]

    monkeypatch.setattr("swift_loader.vision.prefetch.batch_key", note)
    return used


def seed_everything(key: int) -> None:
    """Seed the generators that timm draws from."""
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key)


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert that two tensors have the same bits, dtype and layout."""
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    assert torch.equal(ours, theirs)


def assert_same_batches(ours: list[Any], theirs: list[Any]) -> None:
    """Assert the same of all tensors of some batches, which ours are tuples of."""
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is tuple
        for part, other_part in zip(mine, other, strict=True):
            assert_same(part, other_part)
