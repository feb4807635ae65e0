"""timm, and what it is compared on."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.device.keys import batch_key

PHOTOS_PER_CLASS = 7


@pytest.fixture(scope="session")
def timm_data() -> Any:
    """The module `timm.data`; what torchvision warns of when it is imported doesn't matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("timm.data")


@pytest.fixture(autouse=True)
def compilers_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's compiler, which timm imports, also in workers, make the folder for its cache where it may stay."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "torchinductor"))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 14 JPEG files, of several sizes, in two classes."""
    image_module = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for index in range(2 * PHOTOS_PER_CLASS):
        path = folder / f"class{index % 2}" / f"{index}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse = image_module.fromarray(generator.integers(0, 256, (6, 8, 3), np.uint8))
        coarse.resize((60 + 5 * index, 90 - 3 * index)).save(path, quality=90)
    return folder


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The keys that batches are erased by, as they are used."""
    used: list[int] = []

    def note() -> int:
        used.append(batch_key())
        return used[-1]

    monkeypatch.setattr("swift_loader.vision.erasing.batch_key", note)
    return used


def seed_everything(key: int) -> None:
    """Seed the generators that timm draws from when it erases."""
    random.seed(key)
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
