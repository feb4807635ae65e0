"""Trains with the Hugging Face Trainer, saves, and resumes in the midst of an epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from swift_loader import SwiftLoader
from swift_loader.integrations.huggingface import LoaderStateCallback
from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import NUM_EPOCHS, Seen, loss_of, make_loader, make_model, observe, weights_of


class Recorder(torch.nn.Module):
    def __init__(self, loader: SwiftLoader) -> None:
        super().__init__()
        self.model = make_model()
        self.loader = loader
        self.seen: list[Seen] = []

    def forward(self, id: torch.Tensor, drawn: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: A002 - a batch's key
        batch = {"id": id, "drawn": drawn}
        self.seen.append(observe(self.loader, batch))
        return {"loss": loss_of(self.model, batch)}


class SwiftTrainer(Trainer):
    """Trains with the model's loader."""

    def get_train_dataloader(self) -> Any:
        return self.model.loader


def run(folder: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return a whole run that saves into the folder, or one that is resumed from a checkpoint."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=NUM_EPOCHS,
        save_strategy="no" if checkpoint else "steps",
        save_steps=1,
        ignore_data_skip=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    with make_loader(1) as loader:
        recorder = Recorder(loader)
        loader.start(device=arguments.device)
        trainer = SwiftTrainer(model=recorder, args=arguments, callbacks=[LoaderStateCallback()])
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return {"seen": recorder.seen, "weights": weights_of(recorder.model)}


def refusals() -> dict[str, str]:
    """Return what the callback says where it can't restore."""
    callback, loader = LoaderStateCallback(), make_loader(1)
    resumed = SimpleNamespace(global_step=7, stateful_callbacks={})
    cases: dict[str, Any] = {
        "no SwiftLoader": (SimpleNamespace(ignore_data_skip=True), [1, 2, 3]),
        "ignore_data_skip=False": (SimpleNamespace(ignore_data_skip=False), loader),
        "saved without it": (SimpleNamespace(ignore_data_skip=True), loader),
    }
    messages = {}
    for name, (arguments, train_dataloader) in cases.items():
        try:
            callback.on_train_begin(arguments, resumed, None, train_dataloader=train_dataloader)
        except (TypeError, ValueError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def study(folder: Path) -> dict[str, Any]:
    """Return the uninterrupted run, the resumed one, and what is refused."""
    return {
        "uninterrupted": run(folder / "whole"),
        "mid-epoch": run(folder / "resumed", folder / "whole" / "checkpoint-7"),
        "refusals": refusals(),
    }


if __name__ == "__main__":
    run_rank(study)
