"""A model and a logger for Lightning. It takes seconds to import, so only tests that run import this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers.logger import Logger


class Kept(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.seen: list[Any] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        pass


class Model(LightningModule):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.tolist())
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Failing(Callback):
    """Ends the step after so many, or the validation there."""

    def __init__(self, num_steps: int, *, in_validation: bool) -> None:
        self.num_steps = num_steps
        self.in_validation = in_validation

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step == self.num_steps and not self.in_validation:
            raise FloatingPointError

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == self.num_steps and self.in_validation:
            raise FloatingPointError


class AsksForSteps(Callback):
    """Asks how many steps there are, as schedules do."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.estimated_stepping_batches


def fit(loader: Any, callbacks: Any, folder: Path, checkpoint: Path | None = None, **options: Any) -> Kept:
    kept = Kept()
    given = callbacks if isinstance(callbacks, list) else [callbacks]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=kept,
        callbacks=given,
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_checkpointing=any(isinstance(one, Checkpoint) for one in given),
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(Model(kept.seen), loader, [torch.zeros(1, 4)], ckpt_path=checkpoint)
    return kept
