"""Datasets for the doctor: two of real kinds, which read the folder of `FOLDER`, and some with a planted fault each."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from swift_loader import sample_rng

FOLDER = "SWIFT_LOADER_DOCTOR_FOLDER"
"""Environment variable: the folder of the files."""

NUM_SAMPLES = 300
FAILING = 77
SLOW_EVERY = 50
SLOW_S = 0.02
NUM_REAL = 290
"""Samples that `TooLong` really has."""
RAGGED_EVERY = 7


class Sound:
    """Nothing is wrong with it. Draws from keyed generators only."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        image = np.full((8, 8), index % 256, np.float32)
        return {"image": image + np.float32(random.random() + sample_rng().random()), "label": index}


class Bulk:
    """Has only `__getitems__`, and draws."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitems__(self, indices: list[int]) -> Any:
        return [Sound()[index] for index in indices]


class Unkeyed(Sound):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return {"noise": self.rng.normal(size=3).astype(np.float32), "label": index}


class UnkeyedByTheSystem(Sound):
    def __getitem__(self, index: int) -> Any:
        return {"noise": np.random.default_rng().normal(size=3).astype(np.float32), "label": index}


class RandomConstructor(Sound):
    def __init__(self) -> None:
        self.order = np.random.default_rng().permutation(NUM_SAMPLES)

    def __getitem__(self, index: int) -> Any:
        return {"label": self.order[index]}


class Counting(Sound):
    """A sample depends on how many were fetched before."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return {"count": self.count, "label": index}


class ManyStrings(Sound):
    def __init__(self) -> None:
        self.paths = [f"/data/images/{number:09d}.jpg" for number in range(1_000_000)]


class Ragged(Sound):
    def __getitem__(self, index: int) -> Any:
        return {"tokens": np.zeros(5 if index % RAGGED_EVERY else 6, np.int64), "label": index}


class SlowLine(Sound):
    def __getitem__(self, index: int) -> Any:
        if index % SLOW_EVERY == 1:
            threading.Event().wait(SLOW_S)  # the slow line
        return super().__getitem__(index)


class Failing(Sound):
    def __getitem__(self, index: int) -> Any:
        if index == FAILING:
            raise ValueError(f"record {index} is broken")
        return super().__getitem__(index)


class TooLong(Sound):
    def __getitem__(self, index: int) -> Any:
        if index >= NUM_REAL:
            raise IndexError(index)
        return super().__getitem__(index)


class Crashing(Sound):
    def __getitem__(self, index: int) -> Any:
        if index == FAILING:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


class Exiting(Sound):
    def __getitem__(self, index: int) -> Any:
        if index == FAILING:
            os._exit(3)
        return super().__getitem__(index)


class Hanging(Sound):
    def __getitem__(self, index: int) -> Any:
        if index == FAILING:
            threading.Event().wait()
        return super().__getitem__(index)


class Growing(Sound):
    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.cache.setdefault(index, super().__getitem__(index))


class Reseeding(Sound):
    def __getitem__(self, index: int) -> Any:
        random.seed(index)
        return {"noise": random.random()}


class Empty(Sound):
    def __len__(self) -> int:
        return 0


class Three(Sound):
    def __len__(self) -> int:
        return 3


class Unbuildable(Sound):
    def __init__(self) -> None:
        raise FileNotFoundError("no index file")


class ExitingConstructor(Sound):
    """Leaves a process behind that holds all that it inherited."""

    def __init__(self) -> None:
        if not os.fork():
            threading.Event().wait()
        os._exit(0)


class SeveralFaults(Sound):
    """Samples that draw unkeyed, one that fails and some that are ragged."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        if index == FAILING:
            raise ValueError("broken")
        return {"noise": self.rng.normal(size=2 + index % 2)}


def slow_collate(samples: list[Any]) -> Any:
    time.sleep(SLOW_S)
    return samples


def loader_with_a_slow_collate_function() -> Any:
    from torch.utils.data import DataLoader

    dataset: Any = Sound()
    return DataLoader(dataset, batch_size=3, collate_fn=slow_collate)


# Real kinds ----------------------------------------------------------------------------------------------------------


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def images() -> Any:
    """timm's ImageDataset with its augmentations, over the JPEGs of the folder."""
    from timm.data import ImageDataset, create_transform

    transform = create_transform((3, 32, 32), is_training=True, auto_augment="rand-m9-mstd0.5")
    return ImageDataset(str(_folder()), transform=transform)
