"""A loop that is left leaves its workers to the next epoch."""

from __future__ import annotations

from typing import Any

import torch

from swift_loader.dataloader.dataloader import DataLoader
from tests.support.datasets import Counting
from tests.support.helpers import loader_processes


def test_break_starts_no_new_workers() -> None:
    loader: DataLoader[Any] = DataLoader(Counting(40), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    seen = []
    for _ in range(3):
        for batch in loader:
            assert batch["id"].tolist() == [0]
            break
        seen.append({process.pid for process in loader_processes()})
    assert seen[0] == seen[1] == seen[2]


def test_workers_that_persist_keep_their_seed_after_break() -> None:
    generator = torch.Generator().manual_seed(3)
    loader: DataLoader[Any] = DataLoader(
        Counting(40),  # type: ignore[arg-type]
        num_workers=1,
        persistent_workers=True,
        generator=generator,
        multiprocessing_context="fork",
    )
    for _ in loader:
        break
    state = generator.get_state()
    first = iter(loader)
    assert torch.equal(generator.get_state(), state)
    second = iter(loader)
    assert torch.equal(generator.get_state(), state)
    assert len(list(second)) == 40
    assert list(first) == []
