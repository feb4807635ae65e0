"""Any dataset has a fingerprint."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader.dataloader.changes import fingerprint, look_at


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_have_a_fingerprint() -> None:
    tensor = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert fingerprint([tensor]) == fingerprint([tensor])


def test_sparse_tensors_have_a_fingerprint() -> None:
    tensor = torch.eye(3).to_sparse()
    assert fingerprint([tensor]) == fingerprint([tensor])


@pytest.mark.parametrize(
    "generator", [random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()]
)
def test_generators_are_found_at_any_depth(generator: Any) -> None:
    assert look_at({"transforms": [SimpleNamespace(generator=generator)]}).has_generator
    assert not look_at({"transforms": [SimpleNamespace(generator=random)]}).has_generator
