"""Trains with Fabric, with torch's DataLoader and with the drop-in class. Run alone or by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from swift_loader.dataloader.dataloader import DataLoader
from tests.system.integrations.dropin import NUM_EPOCHS, NUM_RANKS, NUM_STEPS, Program, Seen, loss_of
from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import make_model

SAVED_AFTER = (1, 7, 10, 14)
"""How many steps. 10 are two epochs."""


def train(fabric: Fabric, program: Program, folder: Path, *, resume_after: int | None = None) -> dict[str, Any]:
    """Return what was seen in a whole run that saves into the folder, or in one resumed from it."""
    bare_model = make_model()
    model, optimizer = fabric.setup(bare_model, torch.optim.SGD(bare_model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(program.loader())
    has_state = program.name == "swift"
    parts = {"model": model, "optimizer": optimizer, **({"loader": loader} if has_state else {})}
    first_epoch = 0
    if resume_after is not None:
        fabric.load(folder / str(resume_after), parts)
        first_epoch = resume_after // NUM_STEPS
    seen: Seen = []
    for epoch in range(first_epoch, NUM_EPOCHS):
        for batch in loader:
            seen.append(batch["number"].tolist())
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch))
            optimizer.step()
            if has_state and resume_after is None and len(seen) in SAVED_AFTER and len(seen) % NUM_STEPS:
                fabric.save(folder / str(len(seen)), parts)
        if has_state and resume_after is None and (epoch + 1) * NUM_STEPS in SAVED_AFTER:
            fabric.save(folder / str(len(seen)), parts)
    return {
        "seen": seen,
        "is_swift": isinstance(loader._dataloader, DataLoader),
        "weights": [float(value) for value in bare_model.weight.flatten()],
    }


def study(folder: Path) -> dict[str, Any]:
    """Return the run with each class, and what was seen in the runs that resumed."""
    num_workers = int(sys.argv[3])
    fabric = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy="ddp" if NUM_RANKS > 1 else "auto")
    fabric.launch()
    baseline = train(fabric, Program("torch", num_workers), folder)
    program = Program("swift", num_workers)
    whole = train(fabric, program, folder)
    fabric.barrier()
    resumed = [
        {"num_steps": after, **train(fabric, program, folder, resume_after=after)}
        for after in (SAVED_AFTER[1:3] if num_workers else SAVED_AFTER)
    ]
    return {"torch": baseline, "swift": whole, "resumed": resumed}


if __name__ == "__main__":
    run_rank(study)
