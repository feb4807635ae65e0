from __future__ import annotations

from typing import Any

import pytest
import torch

from swift_loader.vision.sources import is_native, is_page_locked
from tests.support.numbered import Numbered, NumberedStream

NATIVE: dict[str, Any] = {
    "dataset": Numbered(),
    "is_training": True,
    "num_aug_repeats": 0,
    "input_size_choices": None,
    "num_batches": None,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"num_aug_repeats": 1.0}, True),
        ({"num_aug_repeats": 3.0}, False),
        ({"num_aug_repeats": 3.0, "is_training": False}, True),
        ({"input_size_choices": [24]}, False),
        ({"num_batches": 4}, False),
        ({"dataset": NumberedStream()}, False),
    ],
    ids=str,
)
def test_a_swift_loader_loads_what_comes_once_in_one_size(change: dict[str, Any], expected: bool) -> None:
    assert is_native({**NATIVE, **change}) is expected


@pytest.mark.parametrize(
    ("has_gpu", "device", "use_prefetcher", "pin_memory", "expected"),
    [
        (True, None, True, False, True),
        (True, "cuda", True, False, True),
        (True, "cpu", True, True, False),
        (False, None, True, True, False),
        (False, None, False, True, True),
        (True, "cuda", False, False, False),
    ],
)
def test_batches_are_page_locked_on_their_way_to_a_gpu_or_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    device: str | None,
    use_prefetcher: bool,
    pin_memory: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    given = {"device": device, "use_prefetcher": use_prefetcher, "pin_memory": pin_memory}
    assert is_page_locked(given) is expected
