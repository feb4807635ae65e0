"""Train on handwritten digits with Accelerate, and resume a stopped run.

    python examples/accelerate_example.py
    torchrun --nproc-per-node 2 examples/accelerate_example.py --save /tmp/digits-accelerate --stop-after 25
    torchrun --nproc-per-node 2 examples/accelerate_example.py --resume /tmp/digits-accelerate/epoch-0-sample-1280

Uses one GPU per rank where there are GPUs, else the CPU.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from accelerate import Accelerator
from digits import Digits, checkpoint_path, count_right, make_model, make_parser, result
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from swift_loader import SwiftLoader


def train(
    arguments: Namespace, accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: SwiftLoader
) -> bool:
    """Train until the last epoch. Return False if `--stop-after` ended the training early."""
    num_steps = 0
    for epoch in range(loader.state_dict()["epoch"], arguments.epochs):
        loader.set_epoch(epoch)  # keeps the position if this is the epoch of a loaded checkpoint
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(batch["images"]), batch["labels"]))
            optimizer.step()
            scheduler.step()
            num_steps += 1
            path = checkpoint_path(arguments, num_steps, loader.state_dict())
            if path:
                accelerator.save_state(str(path))
            if num_steps == arguments.stop_after:
                return False
    return True


@torch.inference_mode()
def evaluate(accelerator: Accelerator, model: Any, loader: SwiftLoader) -> list[int]:
    """Return how many samples the model gets right and the number of samples, over all ranks."""
    counts = torch.zeros(2, dtype=torch.int64, device=accelerator.device)
    for batch in loader:
        # The loader repeats some samples so that all ranks have the same number of batches. Don't count them twice.
        # gather_for_metrics() can't do that here: it only knows about repeats in torch's DataLoader.
        counts += torch.tensor(count_right(model, batch, loader.num_padding), device=accelerator.device)
    total: Any = accelerator.reduce(counts, reduction="sum")
    return list(total.tolist())


def main() -> None:
    """Train, and evaluate on the held-out digits."""
    parser = make_parser(__doc__)
    parser.add_argument("--decay", action="store_true", help="reduce the learning rate linearly to a tenth")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    options = {"batch_size": arguments.batch_size, "worker_per_consumer": arguments.workers, "seed": 0}
    with (
        SwiftLoader(Digits, {"train": True}, **options) as training,
        SwiftLoader(Digits, {"train": False}, shuffle=False, **options) as held_out,
    ):
        bare_model = make_model()
        model, optimizer = accelerator.prepare(bare_model, torch.optim.Adam(bare_model.parameters(), lr=3e-3))
        # A prepared scheduler takes num_processes steps for each step of the loop. len(training) counts the batches of
        # this rank only, unlike a DataLoader before prepare(). So the last factor is needed.
        num_training_steps = len(training) * arguments.epochs * accelerator.num_processes
        last_factor = 0.1 if arguments.decay else 1.0
        scheduler = accelerator.prepare(LinearLR(optimizer, 1.0, last_factor, total_iters=num_training_steps))
        accelerator.register_for_checkpointing(training)  # save_state and load_state include it from now on
        if arguments.resume:
            accelerator.load_state(str(arguments.resume))
        training.start(device=accelerator.device)  # finds the rank itself
        held_out.start(device=accelerator.device)
        if train(arguments, accelerator, model, optimizer, scheduler, training):
            counts = evaluate(accelerator, model, held_out)
            accelerator.print(result(bare_model, *counts))
    accelerator.end_training()


if __name__ == "__main__":
    main()
