"""A program whose dataset holds what multiprocessing hands over. Prints, as JSON, which of it doesn't work.

Arguments: the class of the loader, the start method.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import socket
import sys
import warnings
from collections.abc import Callable
from multiprocessing import shared_memory
from typing import Any

import torch

Case = tuple[Any, Callable[[Any], object], Callable[[Any], object]]
"""What the dataset holds, what a worker does with it, and what the trainer sees then: true if it works."""


def set_all(tensors: Any) -> None:
    for tensor in tensors:
        tensor.data.fill_(7)


def is_set(tensors: Any) -> bool:
    return all(bool((tensor == 7).all()) for tensor in tensors)


def halves_of(tensor: Any) -> Any:
    return tensor[:2], tensor[2:]


def filled(name: str) -> None:
    block = shared_memory.SharedMemory(name)
    memory: Any = block.buf
    memory[0] = 7
    del memory
    block.close()


def has_name(name: str) -> bool:
    block = shared_memory.SharedMemory(name)
    memory: Any = block.buf
    value = memory[0]
    del memory
    block.close()
    return value == 7


def cases(context: Any, manager: Any) -> dict[str, Case]:
    block = shared_memory.SharedMemory(create=True, size=8)
    values: dict[str, Case] = {
        "shared tensor": ([torch.zeros(2).share_memory_()], set_all, is_set),
        "views of one tensor": (halves_of(torch.zeros(4).share_memory_()), set_all, is_set),
        "parameters": (list(torch.nn.Linear(2, 2).share_memory().parameters()), set_all, is_set),
        "300 shared tensors": ([torch.zeros(1).share_memory_() for _ in range(300)], set_all, is_set),
        "shared memory by name": (block.name, filled, has_name),
        "shared memory": (block, lambda one: one.buf.__setitem__(1, 7), lambda one: one.buf[1] == 7),
        "Value": (context.Value("i", 0), lambda one: setattr(one, "value", 7), lambda one: one.value == 7),
        "Array": (context.Array("i", 2), lambda one: one.__setitem__(1, 7), lambda one: list(one) == [0, 7]),
        "RawArray": (context.RawArray("i", 2), lambda one: one.__setitem__(1, 7), lambda one: list(one) == [0, 7]),
        "RawValue": (context.RawValue("i", 0), lambda one: setattr(one, "value", 7), lambda one: one.value == 7),
        "a ctypes value of its own": (ctypes.c_int(7), lambda one: 1 // (one.value == 7), lambda one: True),
        "Event": (context.Event(), lambda one: one.set(), lambda one: one.is_set()),
        "Barrier": (context.Barrier(1), lambda one: one.wait(30), lambda one: not one.broken),
        "Queue": (context.Queue(), lambda one: one.put(7), lambda one: one.get(timeout=30) == 7),
        "SimpleQueue": (context.SimpleQueue(), lambda one: one.put(7), lambda one: one.get() == 7),
        "Pipe": (context.Pipe(), lambda ends: ends[1].send(7), lambda ends: ends[0].recv() == 7),
        "socket": (socket.socketpair(), lambda ends: ends[1].send(b"7"), lambda ends: ends[0].recv(1) == b"7"),
        "a manager's dict": (manager.dict(), lambda one: one.update(a=7), lambda one: one["a"] == 7),
    }
    for name in ("Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition"):
        values[name] = getattr(context, name)(), lambda one: (one.acquire(), one.release()), lambda one: one.acquire()
    multiprocessing.get_logger().setLevel(logging.ERROR)
    key = bytes(multiprocessing.current_process().authkey)
    seen: dict[str, tuple[object, Callable[[], object]]] = {
        "authkey": (key, lambda: bytes(multiprocessing.current_process().authkey)),
        "log level": (logging.ERROR, lambda: multiprocessing.get_logger().level),
        "a parent": (True, lambda: multiprocessing.parent_process() is not None),
        "sys.argv": (sys.argv, lambda: sys.argv),
        "environment": ("here", lambda: os.environ["HANDED_OVER"]),
        "working directory": (os.getcwd(), os.getcwd),
    }
    for name, (expected, look) in seen.items():
        values[name] = expected, lambda one, look=look: 1 // (one == look()), lambda one: True  # type: ignore[misc]
    return values


class Holding(torch.utils.data.Dataset[str]):
    """The first samples act, each once or more; their values say how it went."""

    def __init__(self, held: dict[str, Case]) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> str:
        thing, act, _ = list(self.held.values())[index]
        try:
            act(thing)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def main(front: str, method: Any) -> None:
    from swift_loader import DataLoader, SwiftLoader

    os.environ["HANDED_OVER"] = "here"
    context = multiprocessing.get_context("fork" if method == "fork" else "spawn")
    manager = multiprocessing.get_context("fork").Manager()  # quickly, as its process needn't import torch
    held = cases(context, manager)
    errors: list[str] = []
    for _ in range(2):  # the end of a loader's processes takes nothing with it
        if front == "DataLoader":
            loader: Any = DataLoader(Holding(held), num_workers=2, multiprocessing_context=method)
            errors = [text for batch in loader for text in batch]
        else:
            given: Any = {"dataset_class": Holding, "dataset_kwargs": {"held": held}}
            if front == "SwiftLoader":
                given = {"dataset": Holding(held)}
            with SwiftLoader(**given, shuffle=False, worker_per_consumer=2, start_method=method) as loader:
                errors = [text for batch in loader for text in batch]
    for number, (thing, _, look) in enumerate(held.values()):
        errors[number] = errors[number] or ("" if look(thing) else "the trainer sees nothing of it")
    held["shared memory"][0].unlink()
    sys.stdout.write(json.dumps(dict(zip(held, errors, strict=True))))
    manager.shutdown()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
