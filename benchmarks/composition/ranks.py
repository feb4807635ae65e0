"""Batches of several ranks: how much the largest of each step computes, since all ranks wait for it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from composition.packers import NUM_WORKERS, SEED, Lengths, Samples, Shape, pad

_LIMIT = timedelta(minutes=5)


def largest_of_neighbours(shapes: Sequence[Shape], num_ranks: int) -> int:
    """Return the sum over the steps, if the ranks take neighbours, as they do of a sampler of swift_loader."""
    computed = np.zeros(-(-len(shapes) // num_ranks) * num_ranks, np.int64)
    computed[: len(shapes)] = [shape.rows * shape.columns for shape in shapes]
    return int(computed.reshape(-1, num_ranks).max(axis=1).sum())


def largest_of_odb(lengths: Lengths, max_tokens: int, buffer_size: int, num_ranks: int) -> int:
    """Return the sum over the steps of online-dynamic-batching in so many processes, which it lets agree by gloo.

    Each rank groups `buffer_size` samples of its own at a time. Step i is the i-th batch of each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_odb, (folder, lengths, max_tokens, buffer_size, num_ranks), num_ranks)
        ranks = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(num_ranks)]
    computed = np.zeros((num_ranks, max(map(len, ranks))), np.int64)
    for row, batches in zip(computed, ranks, strict=True):
        row[: len(batches)] = batches
    return int(computed.max(axis=0).sum())


def _run_odb(rank: int, folder: str, lengths: Lengths, max_tokens: int, buffer_size: int, num_ranks: int) -> None:
    from odb import ODBDataLoader

    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    os.environ["ODB_ITERATOR_STARTUP_JITTER_SEC"] = "0"
    dist.init_process_group("gloo", f"file://{folder}/store", _LIMIT, world_size=num_ranks, rank=rank)
    samples = Samples(lengths)
    loader = ODBDataLoader(
        samples,
        token_budget=max_tokens,
        sampler=torch.utils.data.DistributedSampler(samples, num_ranks, rank, seed=SEED),
        num_workers=NUM_WORKERS,
        prefetch_factor=-(-buffer_size // NUM_WORKERS),
        collate_fn=pad,
    )
    batches = iter(loader)
    (Path(folder) / str(rank)).write_text(json.dumps([batch["input_ids"].numel() for batch in batches]))
    dist.barrier()
    os._exit(0)  # its shutdown takes 30 s, and may raise
