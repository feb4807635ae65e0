"""Trains with Fabric, saves, and resumes. Run by torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import SAVED_AFTER, loss_of, make_loader, make_model, train, weights_of

NUM_RANKS = int(os.environ["WORLD_SIZE"])


def run(fabric: Fabric, folder: Path, *, resume_at: str | None = None) -> dict[str, Any]:
    """Return a whole run that saves, or one that is resumed at a place."""
    model = make_model()
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))

    def step(batch: dict[str, Any]) -> None:
        optimizer.zero_grad()
        fabric.backward(loss_of(wrapped, batch))
        optimizer.step()

    with make_loader(NUM_RANKS) as loader:
        parts = {"model": wrapped, "optimizer": optimizer, "loader": loader}
        if resume_at is not None:
            fabric.load(folder / resume_at, parts)
        loader.start(fabric.global_rank, fabric.device)
        save = None if resume_at else lambda place: fabric.save(folder / place, parts)
        return {"seen": train(loader, step, save), "weights": weights_of(model)}


def study(folder: Path) -> dict[str, Any]:
    """Return the uninterrupted run and the resumed ones, by place."""
    fabric = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy="ddp")
    fabric.launch()
    whole = run(fabric, folder)
    fabric.barrier()
    return {"uninterrupted": whole, **{place: run(fabric, folder, resume_at=place) for place in SAVED_AFTER}}


if __name__ == "__main__":
    run_rank(study)
