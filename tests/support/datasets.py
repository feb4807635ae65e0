"""Datasets and functions for the workers of tests. Imports NumPy only: importing it is part of every worker's start."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Counting:
    """Sample i is `{"id": i, "x": [i, i, i, i] float32}`."""

    def __init__(self, num_samples: int = 100) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return {"id": index, "x": np.full(4, index, np.float32)}


class Images:
    """Sample i is an `(3, side, side) uint8` image full of `i % 251`."""

    def __init__(self, num_samples: int = 64, side: int = 32) -> None:
        self.num_samples, self.side = num_samples, side

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return np.full((3, self.side, self.side), index % 251, np.uint8)


class Blocks:
    """Samples whose every byte is their index."""

    NUM_SAMPLES = 96
    NBYTES = 50_000

    def __len__(self) -> int:
        return self.NUM_SAMPLES

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return np.full(self.NBYTES, index, np.uint8)


class Batched(Counting):
    """Has `__getitems__`, and refuses `__getitem__`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("__getitem__ was called although there is __getitems__")

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [{"id": index, "batch": len(indices)} for index in indices]


class Columns(Counting):
    """Returns a batch as a dict, and refuses `__getitem__`."""

    def __init__(self) -> None:
        super().__init__(6)

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("__getitem__ was called although there is __getitems__")

    def __getitems__(self, indices: Sequence[int]) -> dict[str, NDArray[np.int64]]:
        return {"id": np.array(indices), "minus": -np.array(indices)}


class Values:
    """Each sample is one of the values, as it is."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


class Misbehaving(Counting):
    """Does something bad at one index."""

    def __init__(self, num_samples: int = 40, *, at: int = 13, deed: str = "raise", marker: str = "") -> None:
        super().__init__(num_samples)
        self.at, self.deed, self.marker = at, deed, marker

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at:
            return {"id": misbehave(self.deed, self.marker)}
        return {"id": index}


class Numbered(Counting):
    """Samples have text, and tell how many came before in this process. A file gets the index of each fetch."""

    num_calls = 0

    def __init__(self, num_samples: int = 100, *, path: str = "") -> None:
        super().__init__(num_samples)
        self.path = path

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Path(self.path).open("a") as file:
            file.write(f"{index}\n")
        Numbered.num_calls += 1
        return {"id": index, "text": str(index), "call": Numbered.num_calls}


class UnbuildableError(Exception):
    """Can be pickled, but not rebuilt."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class CustomError(ValueError):
    """An ordinary exception of one's own."""


def misbehave(deed: str, marker: str = "") -> Any:
    """Do one of the things that datasets do."""
    if deed == "raise":
        raise CustomError("no luck")
    if deed == "unbuildable":
        raise UnbuildableError(1, 2)
    if deed == "stop-iteration":
        raise StopIteration("stop")
    if deed.startswith("exit-"):
        os._exit(int(deed[len("exit-") :]))
    if deed == "system-exit":
        sys.exit(3)
    if deed.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, deed))
        time.sleep(60)
    if deed == "hang":
        if marker:
            Path(marker).write_text(str(os.getpid()))
        while True:
            signal.pause()
    if deed == "hold-the-interpreter":
        if marker:
            Path(marker).write_text(str(os.getpid()))
        return sum(range(10**12))  # hours in C: no other thread of this process runs, no Python handler of a signal
    if deed == "lock":
        import threading

        return threading.Lock()
    if deed == "generator":
        return (number for number in range(3))
    if deed == "file-limit":
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return np.zeros(1 << 20)
    raise AssertionError(deed)


class FailsToBuild:
    """Raises in its constructor, or does something else that is bad."""

    def __init__(self, deed: str = "raise", marker: str = "") -> None:
        misbehave(deed, marker)


class WaitsForAWriter(Counting):
    """Its constructor waits until someone writes to a named pipe."""

    def __init__(self, pipe: str) -> None:
        super().__init__()
        Path(pipe).read_text()


class Growing(Counting):
    """Sample 20 and later are 20 times as large as the others."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "x": np.full(1000 * (20 if index >= 20 else 1), index, np.int64)}


class Augmenting(Counting):
    """Draws from Python's and NumPy's global generators."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "py": random.random(), "np": np.random.rand(3)}


class AugmentingWithAll(Counting):
    """Draws from all three global generators; how often depends on the sample, and some samples draw nothing."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        times = index % 3
        return {
            "id": index,
            "py": sum(random.gauss(0, 1) for _ in range(times)),
            "np": np.random.standard_normal() if times else 0.0,
            "torch": torch.randn(2).numpy() if times else np.zeros(2, np.float32),
        }


class FailsOnce(Augmenting):
    """Draws random numbers, and does something bad at one index, the first time that anyone gets there."""

    def __init__(self, num_samples: int = 80, *, folder: str, deed: str, at: int = 21) -> None:
        super().__init__(num_samples)
        self.marker, self.deed, self.at = Path(folder) / "done", deed, at

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at and _is_first(self.marker):
            misbehave(self.deed)
        return super().__getitem__(index)


def _is_first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class OpensAFile(Counting):
    """Keeps a file open, as an HDF5 dataset does, and reads from it by seeking."""

    def __init__(self, num_samples: int = 200) -> None:
        super().__init__(num_samples)
        self.file = Path(__file__).open("rb")
        self.content = Path(__file__).read_bytes()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.file.seek(index * 10)
        time.sleep(0.0005)
        data = self.file.read(10)
        assert data == self.content[index * 10 : index * 10 + 10], "the offset of a shared file was moved"
        return {"id": index, "pid": os.getpid()}


class LeavesAThread(Counting):
    """Starts a thread that outlives it."""

    def __init__(self, num_samples: int = 20) -> None:
        import threading

        super().__init__(num_samples)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class Reports(Counting):
    """Tells about the process it runs in."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        names = sorted(name for name in ("cloudpickle", "dill", "loguru", "torch") if name in sys.modules)
        return {
            "id": index,
            "modules": ",".join(names),
            "pid": os.getpid(),
            "thread_env": os.environ["OMP_NUM_THREADS"],
        }


class Slow(Counting):
    """Takes its time."""

    def __init__(self, num_samples: int = 100, seconds: float = 0.2) -> None:
        super().__init__(num_samples)
        self.seconds = seconds

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {"id": index}


class SlowAt(Counting):
    """Takes its time at one index."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 0:
            time.sleep(1.5)
        return {"id": index}


class FillsThePipe(Counting):
    """Its batches fill the worker's pipe, which it makes as narrow as can be; all but the first wait for a file."""

    def __init__(self, num_samples: int = 100, *, marker: str) -> None:
        super().__init__(num_samples)
        self.marker = Path(marker)

    def __getitem__(self, index: int) -> dict[str, Any]:
        for entry in Path("/proc/self/fd").iterdir():
            if entry.is_socket():
                with socket.socket(fileno=os.dup(int(entry.name))) as pipe:
                    pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # the kernel doubles it
        while index and not self.marker.exists():
            time.sleep(0.01)
        return {"id": index, "text": "x" * 15_000}


class SlowAtFirst(Counting):
    """The first sample that is fetched in any process takes a second. The file names the processes that fetch one."""

    def __init__(self, num_samples: int = 100, *, marker: str) -> None:
        super().__init__(num_samples)
        self.marker = Path(marker)

    def __getitem__(self, index: int) -> dict[str, Any]:
        is_first = not self.marker.exists()
        with self.marker.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if is_first:
            time.sleep(1)
        return super().__getitem__(index)


def identity(samples: list[Any]) -> list[Any]:
    """Collate nothing."""
    return samples


def first_only(samples: list[Any]) -> Any:
    """Return the first sample as the batch."""
    return samples[0]


class DecodesBadly:
    """Can be pickled, but raises when it is rebuilt in the process that it names."""

    def __init__(self, refuses_in: int) -> None:
        self.refuses_in = refuses_in

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() == state["refuses_in"]:
            raise CustomError("can't be rebuilt here")
        self.__dict__.update(state)
