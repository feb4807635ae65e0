"""Train on handwritten digits with the Lightning Trainer, and resume a stopped run.

    python examples/lightning_example.py
    torchrun --nproc-per-node 2 examples/lightning_example.py --save /tmp/digits-lightning --stop-after 25
    torchrun --nproc-per-node 2 examples/lightning_example.py --resume /tmp/digits-lightning/epoch=0-step=20.ckpt

Uses one GPU per rank where there are GPUs, else the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from digits import Digits, count_right, make_model, make_parser, result
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.functional import cross_entropy

from swift_loader import SwiftLoader
from swift_loader.integrations.lightning import LoaderStateCallback


class Classifier(LightningModule):
    """Starts the loaders in `setup`, where the Trainer knows the rank and the device."""

    def __init__(self, training: SwiftLoader, held_out: SwiftLoader) -> None:
        super().__init__()
        self.model = make_model()
        self.training_loader, self.held_out = training, held_out

    def setup(self, stage: str) -> None:
        """Start the loader of this stage, so that it delivers tensors on the device."""
        loader = self.training_loader if stage == "fit" else self.held_out
        loader.start(device=self.trainer.strategy.root_device)

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss."""
        return cross_entropy(self.model(batch["images"]), batch["labels"])

    def test_step(self, batch: dict[str, Any]) -> None:
        """Count the right answers over all ranks, without the samples that are repeated to fill the last batch."""
        num_right, num_samples = count_right(self.model, batch, self.held_out.num_padding)
        counts = {"right": float(num_right), "samples": float(num_samples)}
        self.log_dict(counts, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser."""
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)


def main() -> None:
    """Train, and evaluate on the held-out digits."""
    arguments = make_parser(__doc__).parse_args()
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    options = {"batch_size": arguments.batch_size, "worker_per_consumer": arguments.workers, "seed": 0}
    with (
        SwiftLoader(Digits, {"train": True}, **options) as training,
        SwiftLoader(Digits, {"train": False}, shuffle=False, **options) as held_out,
    ):
        callbacks: list[Callback] = [LoaderStateCallback(training)]
        if arguments.save:
            callbacks.append(ModelCheckpoint(arguments.save, save_top_k=-1, every_n_train_steps=arguments.save_every))
        trainer = Trainer(
            devices=num_ranks,
            strategy="ddp" if num_ranks > 1 else "auto",
            max_epochs=arguments.epochs,
            max_steps=arguments.stop_after or -1,
            callbacks=callbacks,
            enable_checkpointing=bool(arguments.save),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        classifier = Classifier(training, held_out)
        trainer.fit(classifier, training, ckpt_path=arguments.resume)
        if not arguments.stop_after:
            counts = trainer.test(classifier, held_out, verbose=False)[0]
            if trainer.is_global_zero:
                print(result(classifier.model, counts["right"], counts["samples"]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
