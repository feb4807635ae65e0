"""Trains with the Hugging Face Trainer, as it is and with the drop-in class. Run alone or by torchrun."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, IterableDataset
from transformers import TrainingArguments

from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.integrations.huggingface import LoaderStateCallback, Trainer
from tests.system.integrations.dropin import BATCH_SIZE, NUM_EPOCHS, NUM_RANKS, NUM_SAMPLES, NUM_STEPS, Seen
from tests.system.integrations.ranks import run_rank

TRAINERS = {"torch": transformers.Trainer, "swift": Trainer}


def rows() -> Iterator[dict[str, Any]]:
    """Yield texts of different lengths, as tokens, and a column that the model doesn't take."""
    for index in range(NUM_SAMPLES):
        yield {"number": index, "tokens": [index] * (1 + index % 5), "unused": "text"}


def shard_rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        yield from [row for row in rows() if row["number"] % 4 == shard]


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(one["tokens"]) for one in samples], batch_first=True)
    return {"number": torch.tensor([one["number"] for one in samples]), "tokens": tokens}


class Recorder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.seen: Seen = []
        self.evaluated: Seen = []

    def forward(self, number: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        (self.seen if self.training else self.evaluated).append([*number.tolist(), tokens.shape[1]])
        means = tokens.float().mean(1, keepdim=True) / 100
        return {"loss": (self.layer(means) ** 2).mean()}


def dataset_of(case: str) -> Any:
    if case == "map":
        return Dataset.from_list(list(rows()))
    streamed = IterableDataset.from_generator(shard_rows, gen_kwargs={"shards": [0, 1, 2, 3]})
    return streamed.shuffle(seed=3, buffer_size=5)


def run(
    name: str, case: str, folder: Path, num_workers: int, *, checkpoint: Path | None = None, has_state: bool = False
) -> dict[str, Any]:
    """Return what was seen in a whole run that saves into the folder, or in one resumed from a checkpoint."""
    length = {} if case == "map" else {"max_steps": NUM_EPOCHS * NUM_STEPS}
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=NUM_EPOCHS,
        **length,
        per_device_train_batch_size=BATCH_SIZE,
        save_strategy="no" if checkpoint else "steps",
        save_steps=1,
        ignore_data_skip=has_state,
        remove_unused_columns=True,
        dataloader_num_workers=num_workers,
        accelerator_config={"dispatch_batches": None if "dispatch" in case or case == "map" else False},
        use_cpu=True,
        ddp_backend="gloo" if NUM_RANKS > 1 else None,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        eval_strategy="no" if num_workers else "epoch",  # the Trainer makes a new loader for each evaluation
    )
    recorder = Recorder()
    trainer = TRAINERS[name](
        model=recorder,
        args=arguments,
        data_collator=pad,
        train_dataset=dataset_of(case),
        eval_dataset=Dataset.from_list(list(rows())[:10]),
        callbacks=[LoaderStateCallback()] if has_state else [],
    )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    loaders = [trainer.callback_handler.train_dataloader, trainer.get_eval_dataloader()]
    return {
        "seen": recorder.seen,
        "evaluated": recorder.evaluated,
        "is_swift": [isinstance(one.base_dataloader, DataLoader) for one in loaders],
        "weights": [float(value.detach()) for value in recorder.layer.parameters()],
    }


def study(folder: Path) -> dict[str, Any]:
    """Return the run with each class, and what was seen in the runs that resumed from each checkpoint."""
    num_workers, case, places = int(sys.argv[3]), sys.argv[4], sys.argv[5:]
    baseline = run("torch", case, folder / "torch", num_workers)
    whole = run("swift", case, folder / "swift", num_workers, has_state=True)
    resumed = []
    for place in places:
        checkpoint = folder / "swift" / f"checkpoint-{place}"
        found = run("swift", case, folder / "resumed", num_workers, checkpoint=checkpoint, has_state=True)
        resumed.append({"num_steps": int(place), **found})
    return {"torch": baseline, "swift": whole, "resumed": resumed}


if __name__ == "__main__":
    run_rank(study)
