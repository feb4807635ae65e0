"""Promises of the loader that no other test shows by itself; see the table in .github/CONTRIBUTING.md."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift_loader import DataLoader, SwiftLoaderWarning
from tests.support import datasets
from tests.support.helpers import ids_of, make_loader, wait_until

BATCH_SIZE = 4


class FirstComesLater(datasets.Counting):
    """The first sample waits until a later batch is ready (in order), or until the loop has got one (else)."""

    def __init__(self, folder: str, *, in_order: bool) -> None:
        super().__init__(num_samples=24)
        self.folder, self.in_order = Path(folder), in_order

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 0:
            wait_until(self._may_come, "a later batch")
        elif self.in_order:
            (self.folder / str(index)).touch()
        return super().__getitem__(index)

    def _may_come(self) -> bool:
        # In order, more samples than one batch has: the other worker has sent that one, and builds the next.
        return len(list(self.folder.iterdir())) > (BATCH_SIZE if self.in_order else 0)


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_come_in_order_or_as_they_get_ready(in_order: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shuffle": False, "validate": False, "in_order": in_order, "batch_size": BATCH_SIZE}
    with make_loader(FirstComesLater, kwargs={"folder": str(tmp_path), "in_order": in_order}, **options) as loader:
        iterator = iter(loader)
        got = ids_of([next(iterator)])
        if not in_order:
            (tmp_path / "got one").touch()
        got += ids_of(iterator)
    assert (got == list(range(24))) == in_order
    assert sorted(got) == list(range(24))


class Noting(datasets.Counting):
    """Leaves a file for each sample that was fetched."""

    def __init__(self, folder: str) -> None:
        super().__init__(num_samples=1000)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        (self.folder / str(index)).touch()
        return index


@pytest.mark.parametrize("door", ["SwiftLoader", "DataLoader"])
def test_no_more_batches_are_built_ahead_than_the_user_allows(door: str, tmp_path: Path) -> None:
    def num_built() -> int:
        return len(list(tmp_path.iterdir()))

    num_ahead = 6
    with ExitStack() as closing:
        if door == "SwiftLoader":
            options: dict[str, Any] = {
                "batch_size": 1,
                "shuffle": False,
                "validate": False,
                "data_queue_size": num_ahead,
            }
            source: Any = closing.enter_context(make_loader(Noting, kwargs={"folder": str(tmp_path)}, **options))
        else:
            dataset: Any = Noting(str(tmp_path))
            source = DataLoader(dataset, num_workers=2, prefetch_factor=num_ahead // 2)
        iterator = iter(source)
        for num_taken in range(1, 30):
            next(iterator)
            wait_until(lambda: num_built() >= num_taken + num_ahead, "batches that are built ahead")  # noqa: B023
            assert num_built() == num_taken + num_ahead


class DiesWhenSent:
    """Kills the process that sends it, the first time."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return str, ("sent",)


class WithDeath(datasets.Counting):
    """Sends arrays, and after one of them death."""

    def __init__(self, folder: str) -> None:
        super().__init__(num_samples=40)
        self.marker = Path(folder) / "died"

    def __getitem__(self, index: int) -> dict[str, Any]:
        death = DiesWhenSent(self.marker) if index == 13 else None
        return {"id": np.array([index]), "x": np.full(100_000, index), "last": death}


def test_a_worker_that_is_killed_while_it_writes_a_batch_leaves_no_trace_in_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shuffle": False, "batch_size": 1, "collate_fn": datasets.first_only}
    with make_loader(WithDeath, kwargs={"folder": str(tmp_path)}, **options) as loader:
        with pytest.warns(SwiftLoaderWarning, match="SIGKILL"):
            batches = list(loader)
        assert loader.report()["worker_restarts"] == 1
    assert ids_of(batches) == list(range(40))
    assert all((batch["x"] == batch["id"]).all() for batch in batches)
    assert batches[13]["last"] == "sent"
