"""Fits with a Lightning Trainer, saves after each step and epoch, and resumes. Run alone or by torchrun.

Arguments: a case, and after how many steps to resume, or "all"; without them, all cases whose `is_quick` isn't set.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader as TorchDataLoader

from swift_loader import DataLoader, SwiftLoader, sample_rng
from swift_loader.integrations.lightning import LoaderStateCallback
from swift_loader.pipeline import Pipeline, StageLoader
from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import (
    BATCH_SIZE,
    NUM_EPOCHS,
    NUM_SAMPLES,
    loss_of,
    make_loader,
    make_model,
    observe,
    weights_of,
)

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
NUM_HELD_OUT = 10
NUM_ARGUMENTS = 3
"""What `run_ranks` gives to all scripts."""


class Numbers(torch.utils.data.Dataset[Any]):
    """Draws nothing, so that torch's class and ours give the same."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return {"id": index, "drawn": np.full(3, index / 10)}


def draw(number: int) -> tuple[int, Any]:
    return number, sample_rng().random(3)


def collate(samples: list[tuple[int, Any]]) -> Any:
    ids, drawn = zip(*samples, strict=True)
    return {"id": torch.tensor(ids), "drawn": torch.tensor(np.stack(drawn))}


def data_loader(loader_class: Any, num_samples: int, num_workers: int = 0) -> Any:
    options = {"shuffle": num_samples != NUM_HELD_OUT, "generator": torch.Generator().manual_seed(7)}
    return loader_class(Numbers(num_samples), BATCH_SIZE, num_workers=num_workers, **options)


def stage_loader(num_items: int) -> StageLoader:
    source: Any = range(num_items) if NUM_RANKS == 1 else Pipeline(range(num_items), seed=5).shard()
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "aggregator": collate, "num_threads": 2, "seed": 5}
    return StageLoader(source, preprocessor=draw, output_order="input", **options)


def pipeline(num_items: int) -> Pipeline:
    source = Pipeline(range(num_items), seed=5).shuffle(7).shard()
    return source.map(draw, concurrency=2).batch(BATCH_SIZE).map(collate).prefetch(2)


@dataclass(frozen=True, slots=True)
class Case:
    """How the loader's state gets into the checkpoint and back."""

    make: Callable[[int], Any] | None = None
    """Makes the loaders of so many samples; a SwiftLoader if there is none."""
    reference: Callable[[int], Any] | None = None
    """Makes loaders with which the fit must be the same."""
    has_callback: bool = False
    has_one_cycle: bool = False
    """A OneCycleLR asks how many steps there are, and then the Trainer doesn't load the state."""
    is_started_early: bool = False
    """In `setup`, as one does to give it a device, instead of by the first batch."""
    is_quick: bool = False


TORCH, SWIFT = partial(data_loader, TorchDataLoader), partial(data_loader, DataLoader)
CASES = {
    "SwiftLoader": Case(),
    "SwiftLoader, OneCycleLR": Case(has_callback=True, has_one_cycle=True, is_started_early=True),
    "SwiftLoader, callback": Case(has_callback=True),
    "DataLoader": Case(SWIFT, TORCH),
    "DataLoader, OneCycleLR": Case(SWIFT, TORCH, has_callback=True, has_one_cycle=True),
    "DataLoader, workers": Case(partial(SWIFT, num_workers=2), partial(TORCH, num_workers=2), is_quick=True),
    "StageLoader": Case(stage_loader),
    "Pipeline": Case(pipeline),
    "Pipeline, OneCycleLR": Case(pipeline, has_callback=True, has_one_cycle=True),
}


class Recorder(LightningModule):
    def __init__(self, loader: Any, case: Case) -> None:
        super().__init__()
        self.model = make_model()
        self.loader = loader
        self.case = case
        self.seen: list[Any] = []
        self.validated: list[Any] = []

    def setup(self, stage: str) -> None:
        if self.case.is_started_early:
            self.loader.start(device=self.trainer.strategy.root_device)

    def training_step(self, batch: dict[str, Any], batch_index: int) -> torch.Tensor:
        is_swift = isinstance(self.loader, SwiftLoader)
        self.seen.append(observe(self.loader, batch) if is_swift else plain(batch))
        return loss_of(self.model, batch)

    def validation_step(self, batch: dict[str, Any]) -> None:
        self.validated.append(batch["id"].tolist())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.case.has_one_cycle:
            return optimizer
        num_steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(num_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def plain(batch: dict[str, Any]) -> Any:
    return [batch["id"].tolist(), batch["drawn"].tolist()]


def fit(case: Case, folder: Path, make: Any = None, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return what was seen in a whole run that saves into the folder, or in one resumed from a checkpoint."""
    loader = make_loader(NUM_RANKS) if make is None else make(NUM_SAMPLES[NUM_RANKS])
    callbacks: list[Any] = []
    if checkpoint is None:
        callbacks.append(ModelCheckpoint(folder, "step-{step}", save_top_k=-1, every_n_train_steps=1))
        callbacks.append(
            ModelCheckpoint(folder, "end-{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
        )
    if case.has_callback and make is case.make:
        callbacks.append(LoaderStateCallback() if isinstance(loader, DataLoader) else LoaderStateCallback(loader))
    recorder = Recorder(loader, case)
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy="ddp" if NUM_RANKS > 1 else "auto",
        max_epochs=NUM_EPOCHS,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=checkpoint is None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )
    trainer.fit(recorder, loader, None if make is None else make(NUM_HELD_OUT), ckpt_path=checkpoint)
    loaders = [trainer.train_dataloader, trainer.val_dataloaders]
    if isinstance(loader, SwiftLoader):
        loader.close()
    return {
        "seen": recorder.seen,
        "validated": recorder.validated,
        "weights": weights_of(recorder.model),
        "is_ours": make is None or [isinstance(one, type(loader)) for one in loaders] == [True, True],
    }


def study(folder: Path) -> dict[str, Any]:
    """Return of each case the uninterrupted run, the one of the reference, and the resumed ones."""
    if len(sys.argv) > NUM_ARGUMENTS:
        name, num_steps = sys.argv[NUM_ARGUMENTS:]
        return {name: study_case(CASES[name], folder, None if num_steps == "all" else int(num_steps))}
    return {
        name: study_case(case, folder / name.replace(" ", "-")) for name, case in CASES.items() if not case.is_quick
    }


def study_case(case: Case, folder: Path, only: int | None = None) -> dict[str, Any]:
    """Return the runs of one case. `only`: it resumes after so many steps."""
    whole, resumed = fit(case, folder / "whole", case.make), []
    for checkpoint in sorted((folder / "whole").glob("*.ckpt")):
        num_steps = torch.load(checkpoint, weights_only=True)["global_step"]
        if only in (None, num_steps):
            run = fit(case, folder / "resumed", case.make, checkpoint=checkpoint)
            resumed.append({"place": checkpoint.stem, "num_steps": num_steps, **run})
    reference = whole
    if case.reference is not None:
        reference = fit(case, folder / "reference", case.reference)
    elif case.make is not None:
        loader = case.make(NUM_SAMPLES[NUM_RANKS])
        seen = [plain(batch) for _ in range(NUM_EPOCHS) for batch in loader]
        reference = {**whole, "seen": seen}
    names = {thread.name for thread in threading.enumerate()}
    threads = [name for name in names - {"swift_loader-root"} if name.startswith("swift_loader")]
    return {"uninterrupted": whole, "reference": reference, "resumed": resumed, "threads": threads}


if __name__ == "__main__":
    run_rank(study)
