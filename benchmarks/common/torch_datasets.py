"""A large dataset whose module imports torch. Users complain about the start of loaders with such datasets.

The import is intended: each process that unpickles or builds this dataset pays for it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_NUM_ARRAYS = 64
_ARRAY_SHAPE = (1024, 1024)
"""`float32`: 64 arrays are 256 MiB."""
_NUM_STRINGS = 200_000


class HeavyDataset(Dataset[dict[str, Any]]):
    """256 MiB of arrays and 200,000 strings. A sample contains the pid of the process that made it."""

    def __init__(self) -> None:
        self._arrays = [np.full(_ARRAY_SHAPE, number, np.float32) for number in range(_NUM_ARRAYS)]
        self._names = [f"folder-{number % 1000:04d}/sample-{number:08d}.jpg" for number in range(_NUM_STRINGS)]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        array = self._arrays[index % len(self._arrays)]
        return {
            "pid": os.getpid(),
            "name_length": len(self._names[index]),
            "row": torch.from_numpy(array[index % len(array), :16].copy()),
        }
