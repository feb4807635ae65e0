r"""Train on handwritten digits with ranks that may die. torchrun starts them again, and no sample is lost or repeated.

On each node, with the address of the first node and a folder that all nodes see:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 \
        examples/elastic_example.py --save /shared/digits-elastic

The variable gives each start a new store. Else ranks read addresses there that ranks of an earlier start left. To try
it on one machine, run the command in two terminals with the endpoint localhost:29500, and kill a rank, or a terminal's
torchrun. Nodes may leave and join, also with another --nproc-per-node. Runs on the CPU.
"""

from __future__ import annotations

import os
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from digits import Digits, count_right, make_model, make_parser, result
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from swift_loader import SwiftLoader

PATIENCE = timedelta(seconds=60)
"""A rank that waits longer for another one ends with an error, and torchrun starts all again."""

Parts = dict[str, Any]
"""What a checkpoint holds, by name. Each has `state_dict` and `load_state_dict`."""


def save(folder: Path, parts: Parts) -> None:
    """Replace the checkpoint. Whoever dies meanwhile, the folder has a complete one: the new one or the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"checkpoint-{os.getpid()}.unfinished"
    with unfinished.open("wb") as file:
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.flush()
        os.fsync(file.fileno())  # else the new name may outlive a crash of the machine that the content doesn't
    unfinished.replace(folder / "checkpoint")


def load(folder: Path, parts: Parts) -> None:
    """Load the newest checkpoint, if there is one. Ends with the same state on all ranks.

    Rank 0 reads it and sends it to the others: another node may still see the file before.
    """
    path = folder / "checkpoint"
    is_first = distributed.get_rank() == 0
    found = [torch.load(path, weights_only=True) if is_first and path.exists() else None]
    distributed.broadcast_object_list(found)
    if found[0] is not None:
        for name, part in parts.items():
            part.load_state_dict(found[0][name])


def train(arguments: Namespace, parts: Parts) -> None:
    """Train from the loaded state until the last epoch."""
    model, loader, num_steps = DistributedDataParallel(parts["model"]), parts["loader"], 0
    for epoch in range(loader.state_dict()["epoch"], arguments.epochs):
        loader.set_epoch(epoch)  # keeps the position if this is the epoch of a loaded checkpoint
        for batch in loader:
            parts["optimizer"].zero_grad()
            cross_entropy(model(batch["images"]), batch["labels"]).backward()
            parts["optimizer"].step()
            num_steps += 1
            if num_steps % arguments.save_every == 0 and distributed.get_rank() == 0:
                save(arguments.save, parts)  # the loader's state is the same on all ranks


@torch.inference_mode()
def evaluate(model: torch.nn.Module, loader: SwiftLoader) -> list[int]:
    """Return how many samples the model gets right and the number of samples, over all ranks."""
    counts = torch.zeros(2, dtype=torch.int64)
    for batch in loader:
        counts += torch.tensor(count_right(model, batch, loader.num_padding))  # without the repeated samples
    distributed.all_reduce(counts)
    return counts.tolist()


def run(arguments: Namespace, loader_class: type[SwiftLoader] = SwiftLoader, **more_parts: Any) -> None:
    """Train and evaluate as one rank of as many as there are now.

    Args:
        arguments: The command line.
        loader_class: The class of the training's loader.
        more_parts: What checkpoints hold besides.
    """
    distributed.init_process_group("gloo", timeout=PATIENCE)  # rank and world size are those of this start
    model = make_model()
    options = {"batch_size": arguments.batch_size, "worker_per_consumer": arguments.workers, "seed": 0}
    with (
        loader_class(Digits, {"train": True}, **options) as training,
        SwiftLoader(Digits, {"train": False}, shuffle=False, **options) as held_out,
    ):
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        parts = {"model": model, "optimizer": optimizer, "loader": training, **more_parts}
        load(arguments.save, parts)
        training.start(device="cpu")
        train(arguments, parts)
        held_out.start(device="cpu")
        counts = evaluate(model, held_out)
        if distributed.get_rank() == 0:
            print(result(model, *counts))
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.set_defaults(save=Path("digits-elastic"))
    run(parser.parse_args())
