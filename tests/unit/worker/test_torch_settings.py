from __future__ import annotations

import sys

import pytest
import torch

from swift_loader.worker.torch_settings import limited_threads, set_default_dtype, set_num_threads


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    other = before + 1
    with limited_threads(other):
        assert torch.get_num_threads() == other
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), limited_threads(other):
        raise KeyError
    assert torch.get_num_threads() == before


def test_without_torch_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delitem(sys.modules, "torch")
    set_num_threads(before + 1)
    set_default_dtype("")
    with limited_threads(before + 1):
        assert "torch" not in sys.modules
    monkeypatch.undo()
    assert torch.get_num_threads() == before


def test_the_default_dtype_is_set_by_name() -> None:
    try:
        set_default_dtype("float64")
        assert torch.get_default_dtype() is torch.float64
        set_default_dtype("")
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
