"""Train on handwritten digits with DistributedDataParallel in a plain loop, and resume a stopped run.

    python examples/torchrun_example.py
    torchrun --nproc-per-node 2 examples/torchrun_example.py --save /tmp/digits-torchrun --stop-after 25
    torchrun --nproc-per-node 2 examples/torchrun_example.py --resume /tmp/digits-torchrun/epoch-0-sample-1280

Uses one GPU per rank where there are GPUs, else the CPU.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import torch
from digits import Digits, checkpoint_path, count_right, make_model, make_parser, result
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from swift_loader import SwiftLoader


def train(arguments: Namespace, model: nn.Module, parts: dict[str, Any]) -> bool:
    """Train until the last epoch. Return False if `--stop-after` ended the training early."""
    loader, optimizer, num_steps = parts["loader"], parts["optimizer"], 0
    for epoch in range(loader.state_dict()["epoch"], arguments.epochs):
        loader.set_epoch(epoch)  # keeps the position if this is the epoch of a loaded checkpoint
        for batch in loader:
            optimizer.zero_grad()
            cross_entropy(model(batch["images"]), batch["labels"]).backward()
            optimizer.step()
            num_steps += 1
            path = checkpoint_path(arguments, num_steps, loader.state_dict())
            if path and int(os.environ.get("RANK", "0")) == 0:  # the loader's state is the same on all ranks
                torch.save({name: part.state_dict() for name, part in parts.items()}, path)
            if num_steps == arguments.stop_after:
                return False
    return True


@torch.inference_mode()
def evaluate(model: nn.Module, loader: SwiftLoader, device: torch.device) -> list[int]:
    """Return how many samples the model gets right and the number of samples, over all ranks."""
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    for batch in loader:
        # The loader repeats some samples so that all ranks have the same number of batches. Don't count them twice.
        counts += torch.tensor(count_right(model, batch, loader.num_padding), device=device)
    if distributed.is_initialized():
        distributed.all_reduce(counts)
    return counts.tolist()


def main() -> None:
    """Train, and evaluate on the held-out digits."""
    arguments = make_parser(__doc__).parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if "RANK" in os.environ:  # torchrun sets it
        distributed.init_process_group("nccl" if has_gpu else "gloo")
    model = make_model().to(device)
    wrapped = DistributedDataParallel(model) if distributed.is_initialized() else model
    options = {"batch_size": arguments.batch_size, "worker_per_consumer": arguments.workers, "seed": 0}
    with (
        SwiftLoader(Digits, {"train": True}, **options) as training,
        SwiftLoader(Digits, {"train": False}, shuffle=False, **options) as held_out,
    ):
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        parts = {"model": model, "optimizer": optimizer, "loader": training}
        if arguments.resume:
            saved = torch.load(arguments.resume, map_location=device, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        training.start(device=device)  # finds the rank itself
        held_out.start(device=device)
        if train(arguments, wrapped, parts):
            counts = evaluate(model, held_out, device)
            if int(os.environ.get("RANK", "0")) == 0:
                print(result(model, *counts))
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
