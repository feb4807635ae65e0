"""The dataset of these tests. Imports NumPy only: the workers import this module, and start in a tenth of the time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


class Drawing:
    """Sample i is i and what the usual generators draw for it."""

    def __init__(self, num_samples: int, *, with_torch: bool = False) -> None:
        self.num_samples = num_samples
        if with_torch:
            import torch  # noqa: F401 - so that the template imports it, once

        self.with_torch = with_torch

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [random.random(), np.random.random(), 0.0]
        if self.with_torch:
            import torch

            drawn[2] = float(torch.rand(()))
        return {"id": index, "drawn": np.array(drawn)}
