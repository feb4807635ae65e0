"""Any dataset has a fingerprint."""

from __future__ import annotations

import pytest
import torch

from swift_loader.dataloader.changes import fingerprint


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_have_a_fingerprint() -> None:
    tensor = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert fingerprint([tensor]) == fingerprint([tensor])


def test_sparse_tensors_have_a_fingerprint() -> None:
    tensor = torch.eye(3).to_sparse()
    assert fingerprint([tensor]) == fingerprint([tensor])
