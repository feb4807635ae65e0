"""Datasets of ranks that share a node."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.helpers import wait_until


class Numbers:
    """Says which rank's worker fetched a sample, and whose child that is."""

    def __init__(self, num_samples: int, path: str = "") -> None:
        self._num_samples = num_samples
        self._path = path
        self.set_up()

    def set_up(self) -> None:
        """What the constructor does besides."""

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index, "rank": int(os.environ.get("RANK", "-1")), "template": os.getppid()}


class WaitsForAFile(Numbers):
    """Says that it is being built by making a folder, and waits for a file in it."""

    def set_up(self) -> None:
        Path(self._path).mkdir(exist_ok=True)
        wait_until((Path(self._path) / "go").exists, "the file", 60)


class HoldsTheGil(Numbers):
    """Never gets built, and can't be interrupted: it says so by making a folder."""

    def set_up(self) -> None:
        import ctypes

        Path(self._path).mkdir(exist_ok=True)
        ctypes.PyDLL(None).sleep(600)


class Fails(Numbers):
    def set_up(self) -> None:
        raise OSError(f"nothing is at {self._path}")


class OpensAFile(Numbers):
    def set_up(self) -> None:
        self._file = open(os.devnull)  # a device without state is no hazard
        self._other = open(__file__)


class ReadsTheRank(Numbers):
    def set_up(self) -> None:
        self.rank = os.environ.get("LOCAL_RANK")


class Prints(Numbers):
    def set_up(self) -> None:
        sys.stdout.write("printed while it is built\n")


class Large(Numbers):
    """Has an array of 1 GiB, of which a sample reads a part."""

    def set_up(self) -> None:
        self._array: Any = np.ones((self._num_samples, (1 << 30) // self._num_samples), np.uint8)

    def __getitem__(self, index: int) -> dict[str, int]:
        assert self._array[index].sum() == self._array.shape[1]
        return super().__getitem__(index)


class Others(Numbers):
    """Another dataset."""
