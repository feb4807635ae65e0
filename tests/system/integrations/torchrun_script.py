"""Trains with DistributedDataParallel in a plain loop, saves, and resumes. Run by torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import SAVED_AFTER, loss_of, make_loader, make_model, train, weights_of


def run(folder: Path, *, resume_at: str | None = None) -> dict[str, Any]:
    """Return a whole run that saves, or one that is resumed at a place."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(batch: dict[str, Any]) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(wrapped, batch))
        optimizer.step()

    with make_loader(distributed.get_world_size(), workers=2, with_torch=True) as loader:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}

        def save(place: str) -> None:
            if distributed.get_rank() == 0:
                torch.save({name: part.state_dict() for name, part in parts.items()}, folder / place)

        if resume_at is not None:
            saved = torch.load(folder / resume_at, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        for _ in range(2):
            iter(loader)  # thrown away, as some frameworks do
        return {"seen": train(loader, step, None if resume_at else save), "weights": weights_of(model)}


def study(folder: Path) -> dict[str, Any]:
    """Return the uninterrupted run and the resumed ones, by place."""
    distributed.init_process_group("gloo")
    whole = run(folder)
    distributed.barrier()
    return {"uninterrupted": whole, **{place: run(folder, resume_at=place) for place in SAVED_AFTER}}


if __name__ == "__main__":
    run_rank(study)
