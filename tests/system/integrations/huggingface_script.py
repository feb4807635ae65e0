"""Trains with the Hugging Face Trainer, saves, and resumes. Run by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from swift_loader import SwiftLoader
from swift_loader.integrations.huggingface import LoaderStateCallback
from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import NUM_EPOCHS, Seen, loss_of, make_loader, make_model, observe, weights_of

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
NUM_ARGUMENTS = 3
"""What `run_ranks` gives to all scripts."""

PLACES = {
    "mid-epoch": ("steps", "checkpoint-7"),
    "last batch": ("steps", "checkpoint-10"),
    "end of the epoch": ("epoch", "checkpoint-10"),
}
"""When the Trainer saves, and the checkpoint."""


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


def run(folder: Path, *, save_strategy: str, checkpoint: Path | None = None) -> dict[str, Any]:
    """Return a whole run that saves into the folder, or one that is resumed from a checkpoint."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=NUM_EPOCHS,
        save_strategy="no" if checkpoint else save_strategy,
        save_steps=1,
        ignore_data_skip=True,
        # Makes a new callback of each that has a state; the loader's has to stand that.
        restore_callback_states_from_checkpoint=save_strategy == "epoch",
        use_cpu=True,
        ddp_backend="gloo" if NUM_RANKS > 1 else None,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    with make_loader(NUM_RANKS) as loader:
        recorder = Recorder(loader)
        loader.start(device=arguments.device)
        trainer = SwiftTrainer(model=recorder, args=arguments, callbacks=[LoaderStateCallback()])
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return {"seen": recorder.seen, "weights": weights_of(recorder.model)}


def refusals() -> dict[str, str]:
    """Return what the callback says where it can't restore."""
    callback, loader = LoaderStateCallback(), make_loader(NUM_RANKS)
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
    """Return the uninterrupted run, the resumed ones by place, and what is refused.

    Places as further arguments: only these.
    """
    places = sys.argv[NUM_ARGUMENTS:] or list(PLACES)
    whole, *others = (
        run(folder / name, save_strategy=name) for name in dict.fromkeys(PLACES[one][0] for one in places)
    )
    assert all(one == whole for one in others)
    if NUM_RANKS > 1:
        torch.distributed.barrier()
    found: dict[str, Any] = {"uninterrupted": whole, "refusals": refusals()}
    for place in places:
        strategy, checkpoint = PLACES[place]
        found[place] = run(folder / "resumed", save_strategy=strategy, checkpoint=folder / strategy / checkpoint)
    return found


if __name__ == "__main__":
    run_rank(study)
