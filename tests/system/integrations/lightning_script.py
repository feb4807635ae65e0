"""Fits, saves after every step and epoch, and resumes from each checkpoint, with a Lightning Trainer.

Run as `python lightning_script.py FOLDER`, or by torchrun for DDP.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from swift_loader import SwiftLoader
from swift_loader.integrations.lightning import LoaderStateCallback
from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import (
    NUM_EPOCHS,
    NUM_STEPS,
    Seen,
    loss_of,
    make_loader,
    make_model,
    observe,
    weights_of,
)

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
NUM_ARGUMENTS = 3
"""What `run_ranks` gives to all scripts."""


@dataclass(frozen=True, slots=True)
class Case:
    """How the loader's state gets into the checkpoint and back."""

    has_callback: bool
    has_one_cycle: bool
    """A OneCycleLR asks how many steps there are, and then the Trainer doesn't load the state."""
    is_started_early: bool
    """In `setup`, as one does to give it a device, instead of by the first batch."""
    resumed_after: range
    """How many steps."""


SECOND_EPOCH = range(NUM_STEPS + 1, 2 * NUM_STEPS + 1)

CASES = {
    "trainer alone": Case(
        has_callback=False,
        has_one_cycle=False,
        is_started_early=False,
        resumed_after=range(NUM_EPOCHS * NUM_STEPS + 1),
    ),
    "callback with OneCycleLR": Case(
        has_callback=True, has_one_cycle=True, is_started_early=True, resumed_after=SECOND_EPOCH
    ),
    "callback and trainer": Case(
        has_callback=True, has_one_cycle=False, is_started_early=False, resumed_after=SECOND_EPOCH
    ),
}


class Recorder(LightningModule):
    """Keeps what it is given."""

    def __init__(self, loader: SwiftLoader, case: Case) -> None:
        super().__init__()
        self.model = make_model()
        self.loader = loader
        self.case = case
        self.seen: list[Seen] = []

    def setup(self, stage: str) -> None:
        if self.case.is_started_early:
            self.loader.start(device=self.trainer.strategy.root_device)

    def training_step(self, batch: dict[str, Any], batch_index: int) -> torch.Tensor:
        self.seen.append(observe(self.loader, batch))
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.case.has_one_cycle:
            return optimizer
        num_steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(num_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(case: Case, folder: Path, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return what was seen in a whole run that saves into the folder, or in one resumed from a checkpoint."""
    save = [
        ModelCheckpoint(folder, "step-{step}", save_top_k=-1, every_n_train_steps=1),
        ModelCheckpoint(folder, "end-{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True),
    ]
    with make_loader(NUM_RANKS) as loader:
        recorder = Recorder(loader, case)
        trainer = Trainer(
            accelerator="cpu",
            devices=NUM_RANKS,
            strategy="ddp" if NUM_RANKS > 1 else "auto",
            max_epochs=NUM_EPOCHS,
            callbacks=[*([] if checkpoint else save), *([LoaderStateCallback(loader)] if case.has_callback else [])],
            logger=False,
            enable_checkpointing=checkpoint is None,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(recorder, loader, ckpt_path=checkpoint)
    return {"seen": recorder.seen, "weights": weights_of(recorder.model)}


def study(folder: Path) -> dict[str, Any]:
    """Return of each case the uninterrupted run, and the resumed ones: what they saw, after how many steps.

    A name and a number as further arguments: only this case, resumed after so many steps.
    """
    if len(sys.argv) > NUM_ARGUMENTS:
        name, num_steps = sys.argv[NUM_ARGUMENTS:]
        return {name: study_case(replace(CASES[name], resumed_after=range(int(num_steps), int(num_steps) + 1)), folder)}
    return {name: study_case(case, folder / name.replace(" ", "-")) for name, case in CASES.items()}


def study_case(case: Case, folder: Path) -> dict[str, Any]:
    """Return the runs of one case."""
    whole = fit(case, folder)
    resumed = []
    for checkpoint in sorted(folder.glob("*.ckpt")):
        num_steps = torch.load(checkpoint, weights_only=True)["global_step"]
        if num_steps in case.resumed_after:
            run = fit(case, folder, checkpoint=checkpoint)
            resumed.append({"place": checkpoint.stem, "num_steps": num_steps, **run})
    return {"uninterrupted": whole, "resumed": resumed}


if __name__ == "__main__":
    run_rank(study)
