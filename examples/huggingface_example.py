"""Train on handwritten digits with the Hugging Face Trainer, and resume a stopped run.

    python examples/huggingface_example.py
    torchrun --nproc-per-node 2 examples/huggingface_example.py --save /tmp/digits-huggingface --stop-after 25
    torchrun --nproc-per-node 2 examples/huggingface_example.py --resume /tmp/digits-huggingface/checkpoint-20

Uses one GPU per rank where there are GPUs, else the CPU.
"""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory
from typing import Any

import torch
from digits import Digits, count_right, make_model, make_parser, result
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

from swift_loader import SwiftLoader
from swift_loader.integrations.huggingface import LoaderStateCallback


class Classifier(torch.nn.Module):
    """Takes the fields of a batch by name and returns the loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch."""
        return {"loss": cross_entropy(self.model(images), labels)}


class SwiftTrainer(Trainer):
    """Trains and evaluates with SwiftLoaders instead of the Trainer's own DataLoaders.

    The Trainer's DataLoader drops the columns that the model's `forward` doesn't take (`remove_unused_columns`). A
    SwiftLoader delivers every field of a sample, so samples must have no other fields. `Digits` only has `images` and
    `labels`. For a `datasets.Dataset`, give the loader `dataset.select_columns([...])`.
    """

    def __init__(self, training: SwiftLoader, held_out: SwiftLoader, **options: Any) -> None:
        super().__init__(**options)
        self.training, self.held_out = training, held_out

    def get_train_dataloader(self) -> Any:
        """Return the loader as it is. It knows the rank and the device already."""
        return self.training

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:  # noqa: ARG002 - the Trainer's signature
        """Return the same loader each time, so that its workers survive from one evaluation to the next."""
        return self.held_out


class StopAfter(TrainerCallback):
    """Stops the training early. `max_steps` would too, but it changes the learning rate schedule."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the same
        """Stop after `num_steps` steps."""
        control.should_training_stop |= state.global_step >= self.num_steps


@torch.inference_mode()
def evaluate(trainer: Trainer, model: torch.nn.Module, loader: SwiftLoader) -> list[int]:
    """Return how many samples the model gets right and the number of samples, over all ranks."""
    counts = torch.zeros(2, dtype=torch.int64, device=trainer.args.device)
    for batch in loader:
        # The loader repeats some samples so that all ranks have the same number of batches. Don't count them twice, as
        # the Trainer's own evaluation does.
        counts += torch.tensor(count_right(model, batch, loader.num_padding), device=trainer.args.device)
    total: Any = trainer.accelerator.reduce(counts, reduction="sum")
    return list(total.tolist())


def train(arguments: Any, folder: str) -> None:
    """Train, and evaluate on the held-out digits."""
    has_gpu = torch.cuda.is_available()
    settings = TrainingArguments(
        output_dir=folder,
        num_train_epochs=arguments.epochs,
        save_strategy="steps" if arguments.save else "no",
        save_steps=arguments.save_every,
        eval_strategy="epoch",
        learning_rate=3e-3,
        ignore_data_skip=True,  # the loader resumes by itself
        use_cpu=not has_gpu,
        ddp_backend="gloo" if "RANK" in os.environ and not has_gpu else None,  # torchrun sets RANK
        report_to=[],
        disable_tqdm=True,
    )
    options = {"batch_size": arguments.batch_size, "worker_per_consumer": arguments.workers, "seed": 0}
    with (
        SwiftLoader(Digits, {"train": True}, **options) as training,
        SwiftLoader(Digits, {"train": False}, shuffle=False, **options) as held_out,
    ):
        training.start(device=settings.device)  # TrainingArguments set up torch.distributed, which knows the rank
        held_out.start(device=settings.device)
        callbacks = [LoaderStateCallback(), *([StopAfter(arguments.stop_after)] if arguments.stop_after else [])]
        classifier = Classifier()
        trainer = SwiftTrainer(
            training,
            held_out,
            model=classifier,
            args=settings,
            eval_dataset=held_out.dataset,  # the Trainer requires one
            callbacks=callbacks,
        )
        trainer.train(resume_from_checkpoint=str(arguments.resume) if arguments.resume else None)
        if not arguments.stop_after:
            counts = evaluate(trainer, classifier.model.eval(), held_out)
            if trainer.is_world_process_zero():
                print(result(classifier.model, *counts))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parsed = make_parser(__doc__).parse_args()
    with TemporaryDirectory() as unused:  # the Trainer needs a folder even if it saves nothing
        train(parsed, str(parsed.save or unused))
