"""A rank whose loader differs at the first start, or doesn't start at the second one. At the third, all agree.

Argument: a folder, in which each rank writes its error, or the samples that it got.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from torch import distributed

from swift_loader import SwiftLoader

PATIENCE = timedelta(seconds=20)
DIFFERS, MISSES = 3, 2


class Numbers:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def start_number(folder: Path) -> int:
    """Return how many starts there were before, the same on all ranks."""
    found = [len(list(folder.glob("attempt-*-0.txt")))]
    distributed.broadcast_object_list(found)
    return found[0]


def load(number: int, rank: int) -> str:
    """Return the numbers that this rank gets, or what is wrong."""
    if (number, rank) == (1, MISSES):
        return ""
    seed = 8 if (number, rank) == (0, DIFFERS) else 7
    try:
        with SwiftLoader(Numbers, batch_size=4, worker_per_consumer=0, seed=seed) as loader:
            return " ".join(str(int(index)) for batch in loader for index in batch)
    except (ValueError, RuntimeError) as error:
        return str(error)


if __name__ == "__main__":
    distributed.init_process_group("gloo", timeout=PATIENCE)
    rank, path = distributed.get_rank(), Path(sys.argv[1])
    number = start_number(path)
    (path / f"attempt-{number}-{rank}.txt").write_text(load(number, rank))
    distributed.monitored_barrier(timeout=2 * PATIENCE)  # all have written
    if number < 2:
        sys.exit(1)  # torchrun starts all ranks again
    distributed.destroy_process_group()
