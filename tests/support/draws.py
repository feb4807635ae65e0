"""What unmodified code does with the global generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

DRAWS: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.getrandbits of 1": lambda: random.getrandbits(1),
    "random.shuffle": lambda: random.sample(range(10), 10),
    "numpy.random.rand": lambda: float(np.random.rand()),
    "numpy.random.standard_normal": lambda: float(np.random.standard_normal()),
    "numpy.random.rand(312), a whole turn of the generator": lambda: float(np.random.rand(312)[0]),
    "numpy.random.randint": lambda: int(np.random.randint(2)),
    "torch.rand": lambda: float(torch.rand(())),
    "torch.randperm": lambda: torch.randperm(5).tolist(),
}
