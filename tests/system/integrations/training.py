"""A training run that is saved at three places: what the scripts of this folder train, each in its framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from swift_loader import SwiftLoader
from tests.system.integrations.drawing import Drawing

BATCH_SIZE = 4
NUM_EPOCHS = 3
NUM_STEPS = 5
"""Of an epoch; the last one is partial."""

NUM_SAMPLES = {1: 18, 2: 37}
"""For so many ranks. With two, the last step has five samples left, so one of the two ranks is padded."""

SAVED_AFTER = {"mid-epoch": 7, "last batch": 10, "end of the epoch": 10}
"""How many steps of the run are done at these places."""

Seen = list[Any]
"""Of each batch: its dataset indices, and what was drawn for its samples."""


def make_loader(num_ranks: int, *, workers: int = 1, with_torch: bool = False) -> SwiftLoader:
    """Return the train loader of one rank; it finds out by itself which one that is."""
    kwargs = {"num_samples": NUM_SAMPLES[num_ranks], "with_torch": with_torch}
    return SwiftLoader(Drawing, kwargs, batch_size=BATCH_SIZE, worker_per_consumer=workers, seed=7)


def make_model() -> torch.nn.Linear:
    """Return the same model each time it is called."""
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def loss_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return a loss whose gradient depends on each value that was drawn."""
    predicted: torch.Tensor = model(torch.as_tensor(batch["drawn"], dtype=torch.float32))
    return (predicted**2).mean()


def observe(loader: SwiftLoader, batch: dict[str, Any]) -> Seen:
    """Return what is to be the same after resuming."""
    indices = loader.batch_indices.tolist()
    assert indices == batch["id"].tolist(), "batch_indices are of another batch"
    return [indices, batch["drawn"].tolist()]


def weights_of(model: torch.nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def train(
    loader: SwiftLoader, step: Callable[[dict[str, Any]], None], save: Callable[[str], None] | None = None
) -> list[Seen]:
    """Train from where the loader is to the end of the last epoch; save at the places of `SAVED_AFTER`."""
    seen: list[Seen] = []

    def reached(place: str) -> None:
        if save is not None and len(seen) == SAVED_AFTER[place]:
            save(place)

    for epoch in range(loader.state_dict()["epoch"], NUM_EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            step(batch)
            seen.append(observe(loader, batch))
            reached("mid-epoch")
            reached("last batch")
        reached("end of the epoch")
    return seen


# What must hold of a run that was resumed -----------------------------------------------------------------------------


def assert_complete(runs: list[Any], *, draws: bool = True) -> None:
    """Fail unless the ranks had all samples in each epoch, the same number of batches, and drew anew each time.

    Args:
        runs: By rank, what was seen, batch by batch.
        draws: Whether the samples draw.
    """
    num_samples = NUM_SAMPLES[len(runs)]
    assert [len(run) for run in runs] == [NUM_EPOCHS * NUM_STEPS] * len(runs)
    for epoch in range(NUM_EPOCHS):
        steps = slice(epoch * NUM_STEPS, (epoch + 1) * NUM_STEPS)
        assert {index for run in runs for indices, _ in run[steps] for index in indices} == set(range(num_samples))
    drawn = {value for run in runs for _, samples in run for value, *_ in samples}
    assert not draws or len(drawn) == NUM_EPOCHS * num_samples, (
        "padding repeats a sample; nothing else may be drawn twice"
    )


def assert_resumed_exactly(ranks: list[Any]) -> None:
    """Fail unless each rank saw the same samples and ended with the same weights wherever it was resumed.

    Args:
        ranks: By rank, the runs by name, each with `seen` and `weights`.
    """
    assert_complete([rank["uninterrupted"]["seen"] for rank in ranks])
    for rank in ranks:
        whole = rank["uninterrupted"]
        for place, num_steps in SAVED_AFTER.items():
            assert rank[place]["seen"] == whole["seen"][num_steps:], place
            assert rank[place]["weights"] == whole["weights"], place
