"""Trains and evaluates with DistributedDataParallel on samples that ranks can't share evenly. Run by torchrun."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from swift_loader import SwiftLoader
from tests.system.integrations.drawing import Drawing
from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import loss_of, make_model, weights_of

NUM_RANKS = 3
BATCH_SIZE = 2
NUM_EPOCHS = 2
NUMS_OF_SAMPLES = (20, 23)
"""A step has six. The last one has two, so that with `"exact"` rank 2 has a batch less; or five: a sample less."""


def metric(ids: NDArray[np.int64]) -> torch.Tensor:
    """Return how many of the samples are "right", and a sum that one sample too many or too few would change."""
    return torch.tensor([np.count_nonzero(ids * 37 % 10 < 5), np.sum(ids**2 + 1)], dtype=torch.float64)


def make_loader(num_samples: int, uneven: Any) -> SwiftLoader:
    return SwiftLoader(Drawing, {"num_samples": num_samples}, batch_size=BATCH_SIZE, uneven=uneven, seed=7)


def train(num_samples: int, uneven: str) -> dict[str, Any]:
    """Return the batches of each epoch, and the weights in the end."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epochs = []
    with make_loader(num_samples, uneven) as loader:
        for _ in range(NUM_EPOCHS):
            batches = []
            # With "exact", a rank may be through one batch earlier; Join has it answer the others until they are.
            with Join([wrapped]) if uneven == "exact" else nullcontext():
                for batch in loader:
                    optimizer.zero_grad()
                    torch.autograd.backward(loss_of(wrapped, batch))
                    optimizer.step()
                    batches.append(batch["id"].tolist())
            epochs.append(batches)
    return {"epochs": epochs, "weights": weights_of(model)}


def evaluate(num_samples: int, uneven: str) -> list[float]:
    """Return the metric over all ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    with make_loader(num_samples, uneven) as loader:
        for batch in loader:
            ids = batch["id"]
            total += metric(ids[: len(ids) - loader.num_padding])
    distributed.all_reduce(total)
    return [float(value) for value in total]


def study(_folder: Path) -> dict[str, Any]:
    """Return what was trained on and measured, by `uneven` and the number of samples."""
    distributed.init_process_group("gloo")
    cases = [(uneven, num_samples) for uneven in ("pad", "drop", "exact") for num_samples in NUMS_OF_SAMPLES]
    return {
        f"{uneven} {num_samples}": {**train(num_samples, uneven), "metric": evaluate(num_samples, uneven)}
        for uneven, num_samples in cases
    }


if __name__ == "__main__":
    run_rank(study)
