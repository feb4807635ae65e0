"""Trains in a loop of one's own, plain or with Fabric or Accelerate, saves, and resumes. Run by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from swift_loader import SwiftLoader
from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import SAVED_AFTER, loss_of, make_loader, make_model, train, weights_of

NUM_RANKS = 2


class Plain:
    loader_options: dict[str, Any] = {"workers": 2, "with_torch": True}

    def __init__(self) -> None:
        distributed.init_process_group("gloo")

    def prepare(self, model: Any, optimizer: Any, loader: SwiftLoader) -> tuple[Any, Any]:
        """Return what is trained."""
        self.parts = {"model": model, "optimizer": optimizer, "loader": loader}
        self.backward = torch.autograd.backward
        return DistributedDataParallel(model), optimizer

    def save(self, path: Path) -> None:
        if distributed.get_rank() == 0:
            torch.save({name: part.state_dict() for name, part in self.parts.items()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])

    def begin(self, loader: SwiftLoader) -> None:
        for _ in range(2):
            iter(loader)  # thrown away, as some frameworks do


class WithFabric:
    loader_options: dict[str, Any] = {}

    def __init__(self) -> None:
        from lightning.fabric import Fabric

        self.fabric = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy="ddp")
        self.fabric.launch()

    def prepare(self, model: Any, optimizer: Any, loader: SwiftLoader) -> tuple[Any, Any]:
        wrapped, optimizer = self.fabric.setup(model, optimizer)
        self.parts = {"model": wrapped, "optimizer": optimizer, "loader": loader}
        self.backward = self.fabric.backward
        return wrapped, optimizer

    def save(self, path: Path) -> None:
        self.fabric.save(path, self.parts)

    def load(self, path: Path) -> None:
        self.fabric.load(path, self.parts)

    def begin(self, loader: SwiftLoader) -> None:
        loader.start(self.fabric.global_rank, self.fabric.device)


class WithAccelerate:
    loader_options: dict[str, Any] = {}

    def prepare(self, model: Any, optimizer: Any, loader: SwiftLoader) -> tuple[Any, Any]:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        wrapped, optimizer, prepared = self.accelerator.prepare(model, optimizer, loader)
        assert prepared is loader, "Accelerate wraps loaders other than torch's, which docs/frameworks.md denies"
        self.accelerator.register_for_checkpointing(loader)
        self.backward = self.accelerator.backward
        return wrapped, optimizer

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    def begin(self, loader: SwiftLoader) -> None:
        loader.start(device=self.accelerator.device)


def run(loop: Any, folder: Path, *, resume_at: str | None = None) -> dict[str, Any]:
    """Return a whole run that saves, or one that is resumed at a place."""
    model = make_model()

    def step(batch: dict[str, Any]) -> None:
        optimizer.zero_grad()
        loop.backward(loss_of(wrapped, batch))
        optimizer.step()

    with make_loader(NUM_RANKS, **loop.loader_options) as loader:
        wrapped, optimizer = loop.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), loader)
        if resume_at is not None:
            loop.load(folder / resume_at)
        loop.begin(loader)
        save = None if resume_at else lambda place: loop.save(folder / place)
        return {"seen": train(loader, step, save), "weights": weights_of(model)}


def study(folder: Path) -> dict[str, Any]:
    """Return the uninterrupted run and the resumed ones, by place."""
    loop = {"plain": Plain, "fabric": WithFabric, "accelerate": WithAccelerate}[sys.argv[3]]()
    whole = run(loop, folder)
    distributed.barrier()
    return {"uninterrupted": whole, **{place: run(loop, folder, resume_at=place) for place in SAVED_AFTER}}


if __name__ == "__main__":
    run_rank(study)
