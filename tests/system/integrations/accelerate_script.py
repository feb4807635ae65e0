"""Trains with Accelerate, saves, and resumes. Run by torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import SAVED_AFTER, loss_of, make_loader, make_model, train, weights_of

NUM_RANKS = int(os.environ["WORLD_SIZE"])


def run(folder: Path, *, resume_at: str | None = None) -> dict[str, Any]:
    """Return a whole run that saves, or one that is resumed at a place."""
    accelerator = Accelerator(cpu=True)
    model = make_model()

    def step(batch: dict[str, Any]) -> None:
        optimizer.zero_grad()
        accelerator.backward(loss_of(wrapped, batch))
        optimizer.step()

    with make_loader(NUM_RANKS) as loader:
        wrapped, optimizer, prepared = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), loader)
        assert prepared is loader, "Accelerate wraps loaders other than torch's, which docs/frameworks.md denies"
        accelerator.register_for_checkpointing(loader)
        if resume_at is not None:
            accelerator.load_state(str(folder / resume_at))
        loader.start(device=accelerator.device)
        save = None if resume_at else lambda place: accelerator.save_state(str(folder / place))
        return {"seen": train(loader, step, save), "weights": weights_of(model)}


def study(folder: Path) -> dict[str, Any]:
    """Return the uninterrupted run and the resumed ones, by place."""
    whole = run(folder)
    torch.distributed.barrier()
    return {"uninterrupted": whole, **{place: run(folder, resume_at=place) for place in SAVED_AFTER}}


if __name__ == "__main__":
    run_rank(study)
