"""DataPipes are seeded and resumed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from swift_loader.dataloader.dataloader import DataLoader


def _loader() -> DataLoader[Any]:
    return DataLoader(IterableWrapper(range(20)).shuffle(buffer_size=20), batch_size=3, collate_fn=list)


def test_a_shuffled_pipe_resumes_in_its_order() -> None:
    torch.manual_seed(3)
    loader = _loader()
    iterator = iter(loader)
    seen = [next(iterator) for _ in range(2)]
    state = loader.state_dict()
    rest = list(iterator)
    assert sorted(number for batch in seen + rest for number in batch) == list(range(20))
    torch.manual_seed(4)
    resumed = _loader()
    resumed.load_state_dict(state)
    assert list(resumed) == rest
