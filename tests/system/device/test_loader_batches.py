"""What a loader moves to the CPU: keys, dtypes, autograd, page-locked memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import DataLoader, DevicePrefetcher, SwiftLoader, SwiftLoaderWarning, batch_key
from tests.support.datasets import Blocks, Counting
from tests.support.device_loaders import wait_for_ready
from tests.support.helpers import make_loader


class Tensors:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


@pytest.mark.parametrize(("workers", "device"), [(2, None), (0, None), (2, "cpu")])
def test_a_batch_that_arrives_in_inference_mode_is_one_that_autograd_takes(workers: int, device: str | None) -> None:
    weight = torch.ones(1, requires_grad=True)
    with make_loader(Tensors, workers=workers) as loader:
        loader.start(0, device)
        batches = iter(loader)
        with torch.inference_mode():
            early = [next(batches) for _ in range(3)]
        for batch in [*early, *batches]:
            assert not batch.is_inference()
            (batch * weight).sum().backward()


def test_a_batch_that_is_moved_ahead_in_inference_mode_is_one_that_autograd_takes() -> None:
    weight = torch.ones(1, requires_grad=True)
    with make_loader(Counting, workers=1, max_nb_batch_on_device=3) as loader:
        loader.start(0, "cpu")
        batches = iter(loader)
        with torch.inference_mode():
            next(batches)
            wait_for_ready(loader, 3)
            next(batches)
        for batch in itertools.islice(batches, 4):
            (batch["x"] * weight).sum().backward()
    assert weight.grad is not None


def keys_of(loader: SwiftLoader, device: str = "cpu") -> list[list[int]]:
    """Return the keys of the batches, for two epochs."""
    keys: list[int] = []

    def move(batch: Any, device: torch.device) -> int:
        keys.append(batch_key())
        assert batch_key() == keys[-1]
        return keys[-1]

    loader.start(0, device, move)
    with loader:
        return [list(loader), list(loader)]


def test_keys_on_the_device_depend_on_the_batch_alone() -> None:
    once = keys_of(make_loader(Blocks, workers=0))
    assert len({key for epoch in once for key in epoch}) == 24
    assert keys_of(make_loader(Blocks, workers=2, max_nb_batch_on_device=5)) == once
    assert keys_of(make_loader(Blocks, workers=0, seed=8)) != once
    first = make_loader(Blocks, workers=0)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state = first.state_dict()
    first.close()
    second = make_loader(Blocks, workers=0)
    second.load_state_dict(state)
    assert keys_of(second) == [once[0][5:], once[1]]


def test_ranks_have_keys_of_their_own() -> None:
    found = []
    for rank in (0, 1):
        loader = make_loader(Blocks, workers=0, nb_consumer=2)
        keys: list[int] = []
        loader.start(rank, "cpu", lambda batch, device, keys=keys: keys.append(batch_key()))
        with loader:
            list(loader)
        found.append(keys)
    assert len({*found[0], *found[1]}) == 12


def test_floating_point_tensors_are_converted_and_others_are_not() -> None:
    class Mixed(Blocks):
        def __getitem__(self, index: int) -> Any:
            return {"image": np.full(4, index, np.float32), "label": index}

    with make_loader(Mixed, workers=0) as loader:
        loader.start(0, "cpu", dtype=torch.bfloat16)
        batch = next(iter(loader))
    assert (batch["image"].dtype, batch["label"].dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dtype": torch.float16}, "dtype was given without a device"),
        ({"to_device": print}, "to_device was given without a device"),
        ({"device": "cpu", "to_device": 3}, "to_device is a int, which can't be called"),
        ({"device": "cpu", "dtype": torch.int8}, "isn't a floating-point dtype"),
        ({"device": "cpu", "dtype": "half"}, "isn't a floating-point dtype"),
        ({"device": "cpu", "dtype": torch.half, "to_device": print}, "both given"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_starts(arguments: dict[str, Any], text: str) -> None:
    with make_loader(Blocks, workers=1) as loader, pytest.raises(TypeError, match=text):
        loader.start(0, **arguments)


def test_nothing_is_asked_about_accelerators_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> bool:
        raise AssertionError("this opens the driver, which forks of the program can't use then")

    for name in ("torch.cuda.is_available", "torch.cuda.device_count"):
        monkeypatch.setattr(name, ask)
    if hasattr(torch, "accelerator"):
        monkeypatch.setattr("torch.accelerator.is_available", ask)
        monkeypatch.setattr("torch.accelerator.current_accelerator", ask)
    with make_loader(Blocks, workers=0) as loader:
        loader.start(device="cpu")
        assert len(list(loader)) == 12
    assert len(list(DevicePrefetcher([1, 2], "cpu"))) == 2
    assert len(list(DataLoader([1, 2]))) == 2  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
@pytest.mark.parametrize("workers", [0, 1])
def test_pin_memory_without_a_gpu_is_a_warning_and_tensors_all_the_same(workers: int) -> None:
    with make_loader(Blocks, workers=workers) as loader:
        plain = list(loader)
    assert isinstance(plain[0], np.ndarray)
    with make_loader(Blocks, workers=workers, pin_memory=True) as loader:
        with pytest.warns(SwiftLoaderWarning, match="pin_memory=True has no effect except that arrays become tensors"):
            loader.start()
        batches = list(loader)
    assert all(isinstance(batch, torch.Tensor) for batch in batches)
    assert all(np.array_equal(batch, array) for batch, array in zip(batches, plain, strict=True))
