"""Samples that three ranks can't share evenly, and what is measured on them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

NUM_RANKS = 3
BATCH_SIZE = 2
NUM_EPOCHS = 2
NUMS_OF_SAMPLES = (20, 23)
"""A step has six. The last one has two, so that with `"exact"` rank 2 has a batch less; or five: a sample less."""


def metric(ids: NDArray[np.int64]) -> torch.Tensor:
    """Return how many of the samples are "right", and a sum that one sample too many or too few would change."""
    return torch.tensor([np.count_nonzero(ids * 37 % 10 < 5), np.sum(ids**2 + 1)], dtype=torch.float64)
