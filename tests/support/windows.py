"""A program that imports the package where POSIX is missing, builds batches without worker processes, and packs a
payload.

It removes what Windows lacks, once it has imported the libraries, which ask for the platform when they are imported.
"""

# ruff: noqa: E402
from __future__ import annotations

import ctypes
import mmap
import multiprocessing.connection
import multiprocessing.shared_memory
import multiprocessing.spawn
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

import cloudpickle
import dill
import loguru
import numpy as np
import torch.utils.data

LIBRARIES = [cloudpickle, dill, loguru, torch]

ABSENT: dict[Any, str] = {
    os: """fork forkpty register_at_fork sched_getaffinity memfd_create pidfd_open eventfd setpgid killpg O_CLOEXEC
           posix_fallocate waitid""",
    select: "poll epoll",
    socket: "CMSG_SPACE AF_UNIX MSG_CMSG_CLOEXEC send_fds socketpair",
    signal: "SIGKILL SIGCHLD SIGURG SIGSTOP SIGTTOU pthread_sigmask pause SIG_SETMASK SIG_BLOCK",
    mmap: "MAP_SHARED MAP_PRIVATE MAP_ANON MAP_ANONYMOUS MAP_POPULATE PROT_READ PROT_WRITE",
}
for owner, names in ABSENT.items():
    for name in names.split():
        delattr(owner, name)
sys.modules.update(dict.fromkeys(["fcntl", "resource", "_posixshmem"]))  # type: ignore[arg-type]

load_library: Any = ctypes.CDLL


def load_by_name(name: str | None, *args: Any, **kwargs: Any) -> Any:
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    return load_library(name, *args, **kwargs)


ctypes.CDLL = load_by_name  # type: ignore[assignment,misc]
multiprocessing.connection.PipeConnection = multiprocessing.connection.Connection  # type: ignore[attr-defined]
subprocess.STARTUPINFO = subprocess.CREATE_NEW_PROCESS_GROUP = None  # type: ignore[attr-defined]
sys.platform = "win32"

import swift_loader
from swift_loader.executors import torch_fleet
from swift_loader.executors.environment import Launch
from swift_loader.transport.payload import Environment, pack_payload
from swift_loader.worker import torch_dataset

assert [torch_fleet, torch_dataset]


class Dataset:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return np.full(3, index)


for name in swift_loader.__all__:
    getattr(swift_loader, name)
for workers, worker_type in ((0, "process"), (2, "thread")):
    options: dict[str, Any] = {"worker_per_consumer": workers, "worker_type": worker_type}
    with swift_loader.SwiftLoader(Dataset, batch_size=4, shuffle=False, **options) as loader:
        assert [int(batch[0, 0]) for batch in loader] == [0, 4, 8, 12, 16]
environment = Environment.of_this_process()
payload, _ = pack_payload({"dataset": Dataset(), "function": lambda x: np.ones(x) + 1}, ())
assert payload.environment() == environment
content, _ = payload.read()
assert (content["function"](2) == 2).all()
assert Launch().is_current()
sys.stdout.write("fine\n")
