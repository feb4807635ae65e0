"""Trains with Accelerate, with torch's DataLoader and with the drop-in class. Run alone or by torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from swift_loader.dataloader.dataloader import DataLoader
from tests.system.integrations.dropin import NUM_EPOCHS, Numbers, Program, Seen, Stream, loss_of
from tests.system.integrations.ranks import run_rank
from tests.system.integrations.training import make_model

SAVED_AFTER = (1, 7, 10, 14)
"""How many steps. 10 are two epochs."""

CASES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "sampler": ({}, Numbers),
    "seedable sampler": ({"use_seedable_sampler": True}, Numbers),
    "split batches": ({"split_batches": True}, Numbers),
    "stream": ({}, Stream),
    "stream, each rank its own": ({"dispatch_batches": False}, Stream),
}


def train(program: Program, case: str, folder: Path, *, resume_after: int | None = None) -> dict[str, Any]:
    """Return what was seen in a whole run that saves into the folder, or in one resumed from it."""
    settings, dataset = CASES[case]
    torch.manual_seed(3)
    stateful = program.name == "swift"
    configuration = DataLoaderConfiguration(use_stateful_dataloader=stateful, **settings)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    bare_model = make_model()
    options = {} if dataset is Numbers else {"shuffle": None}
    loader = program.loader(dataset(), **options)
    length = len(loader)
    model, optimizer, prepared = accelerator.prepare(
        bare_model, torch.optim.SGD(bare_model.parameters(), lr=0.1), loader
    )
    first_epoch = 0
    if resume_after is not None:
        accelerator.load_state(str(folder / str(resume_after)))
        first_epoch = resume_after // len(prepared)
    seen: Seen = []
    for epoch in range(first_epoch, NUM_EPOCHS):
        prepared.set_epoch(epoch)
        for batch in prepared:
            seen.append(batch["number"].tolist())
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            if stateful and resume_after is None and len(seen) in SAVED_AFTER:
                accelerator.save_state(str(folder / str(len(seen))))
    return {
        "seen": seen,
        "lengths": [length, len(prepared)],
        "is_swift": isinstance(prepared.base_dataloader, DataLoader),
        "weights": [float(value) for value in bare_model.weight.flatten()],
    }


def study(folder: Path) -> dict[str, Any]:
    """Return the run with each class, and what was seen in the runs that resumed."""
    num_workers, case = int(sys.argv[3]), sys.argv[4]
    baseline = train(Program("torch", num_workers), case, folder)
    program = Program("swift", num_workers)
    whole = train(program, case, folder)
    resumed = [
        {"num_steps": after, **train(program, case, folder, resume_after=after)}
        for after in SAVED_AFTER
        if (folder / str(after)).exists()
    ]
    return {"torch": baseline, "swift": whole, "resumed": resumed}


if __name__ == "__main__":
    run_rank(study)
