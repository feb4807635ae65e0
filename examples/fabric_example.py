"""Train on handwritten digits with Lightning Fabric, and resume a stopped run.

    python examples/fabric_example.py
    torchrun --nproc-per-node 2 examples/fabric_example.py --save /tmp/digits-fabric --stop-after 25
    torchrun --nproc-per-node 2 examples/fabric_example.py --resume /tmp/digits-fabric/epoch-0-sample-1280

Uses one GPU per rank where there are GPUs, else the CPU. `--mnist FOLDER` trains on MNIST, in torchvision's files.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from digits import Digits, Mnist, checkpoint_path, count_right, make_model, make_parser, result
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy

from swift_loader import SwiftLoader


def train(arguments: Namespace, fabric: Fabric, parts: dict[str, Any]) -> bool:
    """Train until the last epoch. Return False if `--stop-after` ended the training early."""
    model, optimizer, loader, num_steps = parts["model"], parts["optimizer"], parts["loader"], 0
    for epoch in range(loader.state_dict()["epoch"], arguments.epochs):
        loader.set_epoch(epoch)  # keeps the position if this is the epoch of a loaded checkpoint
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(batch["images"]), batch["labels"]))
            optimizer.step()
            num_steps += 1
            path = checkpoint_path(arguments, num_steps, loader.state_dict())
            if path:
                fabric.save(path, parts)  # calls state_dict() of each part that has one
            if num_steps == arguments.stop_after:
                return False
    return True


@torch.inference_mode()
def evaluate(fabric: Fabric, model: torch.nn.Module, loader: SwiftLoader) -> list[int]:
    """Return how many samples the model gets right and the number of samples, over all ranks."""
    counts = torch.zeros(2, dtype=torch.int64, device=fabric.device)
    for batch in loader:
        # The loader repeats some samples so that all ranks have the same number of batches. Don't count them twice.
        counts += torch.tensor(count_right(model, batch, loader.num_padding), device=fabric.device)
    total: Any = fabric.all_reduce(counts, reduce_op="sum")
    return list(total.tolist())


def main() -> None:
    """Train, and evaluate on the held-out digits."""
    parser = make_parser(__doc__)
    parser.add_argument("--mnist", type=Path, metavar="FOLDER", help="train on MNIST, from torchvision's files")
    arguments = parser.parse_args()
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    fabric = Fabric(devices=num_ranks, strategy="ddp" if num_ranks > 1 else "auto")
    fabric.launch()
    image_size, dataset, kwargs = (28, Mnist, {"folder": arguments.mnist}) if arguments.mnist else (8, Digits, {})
    options = {"batch_size": arguments.batch_size, "worker_per_consumer": arguments.workers, "seed": 0}
    with (
        SwiftLoader(dataset, {"train": True, **kwargs}, **options) as training,
        SwiftLoader(dataset, {"train": False, **kwargs}, shuffle=False, **options) as held_out,
    ):
        bare_model = make_model(image_size)
        model, optimizer = fabric.setup(bare_model, torch.optim.Adam(bare_model.parameters(), lr=3e-3))
        parts = {"model": model, "optimizer": optimizer, "loader": training}
        if arguments.resume:
            fabric.load(arguments.resume, parts)
        # This replaces setup_dataloaders(), which only takes torch's DataLoader.
        training.start(fabric.global_rank, fabric.device)
        held_out.start(fabric.global_rank, fabric.device)
        if train(arguments, fabric, parts):
            counts = evaluate(fabric, model, held_out)
            if fabric.is_global_zero:
                print(result(bare_model, *counts))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
