"""Fits with a Lightning Trainer, with torch's DataLoader and with the drop-in class. Run alone or by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.integrations.lightning import LoaderStateCallback
from tests.system.integrations.dropin import NUM_EPOCHS, NUM_RANKS, Numbers, Program, Seen, loss_of, make_model
from tests.system.integrations.ranks import run_rank


class Recorder(LightningModule):
    """Keeps the numbers of what it is given."""

    def __init__(self, program: Program, *, has_one_cycle: bool) -> None:
        super().__init__()
        self.program = program
        self.has_one_cycle = has_one_cycle
        self.model = make_model()
        self.seen: Seen = []
        self.validated: Seen = []

    def train_dataloader(self) -> Any:
        return self.program.loader()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(batch["number"].tolist())
        return loss_of(self.model, batch)

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.validated.append(batch["number"].tolist())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.has_one_cycle:
            return optimizer
        num_steps = self.trainer.estimated_stepping_batches  # sets the loader up before its state is restored
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(num_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    program: Program, folder: Path, *, checkpoint: Path | None = None, has_callback: bool = False
) -> dict[str, Any]:
    """Return what was seen in a whole run that saves into the folder, or in one resumed from a checkpoint."""
    save = [
        ModelCheckpoint(folder, "step-{step}", save_top_k=-1, every_n_train_steps=1),
        ModelCheckpoint(folder, "end-{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True),
    ]
    recorder = Recorder(program, has_one_cycle="callback" in sys.argv)
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy="ddp" if NUM_RANKS > 1 else "auto",
        max_epochs=NUM_EPOCHS,
        callbacks=[*([] if checkpoint else save), *([LoaderStateCallback()] if has_callback else [])],
        logger=False,
        enable_checkpointing=checkpoint is None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )
    held_out = program.loader(Numbers(10), shuffle=False)
    trainer.fit(recorder, val_dataloaders=held_out, ckpt_path=checkpoint)
    return {
        "seen": recorder.seen,
        "validated": recorder.validated,
        "is_swift": [isinstance(one, DataLoader) for one in (trainer.train_dataloader, trainer.val_dataloaders)],
        "weights": [float(value) for value in recorder.model.weight.flatten()],
    }


def study(folder: Path) -> dict[str, Any]:
    """Return the run with each class, and what was seen in the runs that resumed from each checkpoint."""
    num_workers, has_callback = int(sys.argv[3]), "callback" in sys.argv
    baseline = fit(Program("torch", num_workers), folder / "torch")
    program = Program("swift", num_workers)
    whole = fit(program, folder / "swift", has_callback=has_callback)
    resumed = []
    for checkpoint in sorted((folder / "swift").glob("*=10.ckpt" if num_workers else "*.ckpt")):  # workers take long
        num_steps = torch.load(checkpoint, weights_only=True)["global_step"]
        run = fit(program, folder / "resumed", checkpoint=checkpoint, has_callback=has_callback)
        resumed.append({"place": checkpoint.stem, "num_steps": num_steps, **run})
    return {"torch": baseline, "swift": whole, "resumed": resumed}


if __name__ == "__main__":
    run_rank(study)
