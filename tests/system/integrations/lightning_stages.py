"""Fits and validates on stages with a Lightning Trainer, and resumes from each checkpoint.

Run as `python lightning_stages.py FOLDER SECONDS`, or by torchrun for DDP.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from swift_loader import sample_rng
from swift_loader.integrations.lightning import LoaderStateCallback
from swift_loader.pipeline import Pipeline, StageLoader
from tests.system.integrations.ranks import run_rank

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
NUM_EPOCHS = 3
NUM_ITEMS = 18
BATCH_SIZE = 4
NUM_HELD_OUT = 6


def draw(number: int) -> tuple[int, float]:
    return number, float(sample_rng().random())


def collate(samples: list[tuple[int, float]]) -> torch.Tensor:
    """Return numbers and draws, `(B, 2) float64`."""
    return torch.tensor(samples, dtype=torch.float64)


def stage_loader(num_items: int) -> StageLoader:
    return StageLoader(
        range(num_items) if NUM_RANKS == 1 else Pipeline(range(num_items), seed=5).shard(),
        preprocessor=draw,
        batch_size=BATCH_SIZE,
        aggregator=collate,
        num_threads=2,
        output_order="input",
        seed=5,
    )


def pipeline(num_items: int) -> Pipeline:
    source = Pipeline(range(num_items), seed=5).shuffle(7).shard()
    return source.map(draw, concurrency=2).batch(BATCH_SIZE).map(collate).prefetch(2)


CASES: dict[str, tuple[Callable[[int], Any], bool]] = {
    "StageLoader": (stage_loader, False),
    "Pipeline": (pipeline, False),
    "Pipeline with OneCycleLR": (pipeline, True),
}
"""By name: what makes a loader, and whether a OneCycleLR asks how many steps there are.

Then the Trainer doesn't load the loader's state, and the callback does.
"""


class Recorder(LightningModule):
    """Keeps what it is given."""

    def __init__(self, *, has_one_cycle: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.has_one_cycle = has_one_cycle
        self.seen: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(batch.tolist())
        loss: torch.Tensor = (self.model(batch) ** 2).mean()
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.validated.append(batch[:, 0].tolist())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        if not self.has_one_cycle:
            return optimizer
        num_steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=int(num_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(name: str, folder: Path, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return what was seen in a whole run that saves into the folder, or in one resumed from a checkpoint."""
    make, has_one_cycle = CASES[name]
    loader = make(NUM_ITEMS)
    recorder = Recorder(has_one_cycle=has_one_cycle)
    save = [
        ModelCheckpoint(folder, "step-{step}", save_top_k=-1, every_n_train_steps=1),
        ModelCheckpoint(folder, "end-{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True),
    ]
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy="ddp" if NUM_RANKS > 1 else "auto",
        max_epochs=NUM_EPOCHS,
        callbacks=[*([] if checkpoint else save), *([LoaderStateCallback(loader)] if has_one_cycle else [])],
        logger=False,
        enable_checkpointing=checkpoint is None,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(recorder, loader, make(NUM_HELD_OUT), ckpt_path=checkpoint)
    weights = [float(value) for value in recorder.model.weight.flatten()]
    return {"seen": recorder.seen, "validated": recorder.validated, "weights": weights}


def study(folder: Path) -> dict[str, Any]:
    """Return of each case what a plain loop sees, what the Trainer does, and which threads are left."""
    return {name: study_case(name, folder / name.replace(" ", "-")) for name in CASES}


def study_case(name: str, folder: Path) -> dict[str, Any]:
    """Return the runs of one case."""
    loader = CASES[name][0](NUM_ITEMS)
    plain = [[batch.tolist() for batch in loader] for _ in range(NUM_EPOCHS)]
    whole = fit(name, folder)
    resumed = []
    for checkpoint in sorted(folder.glob("*.ckpt")):
        num_steps = torch.load(checkpoint, weights_only=True)["global_step"]
        resumed.append({"place": checkpoint.stem, "num_steps": num_steps, **fit(name, folder, checkpoint=checkpoint)})
    threads = [thread.name for thread in threading.enumerate() if "swift_loader" in thread.name]
    return {"plain": plain, "uninterrupted": whole, "resumed": resumed, "threads": threads}


if __name__ == "__main__":
    run_rank(study)
