"""More workers than cores: all of them at work, started while the first ones build."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from swift_loader.executors.inbox import MAX_RECEIVERS
from swift_loader.executors.process.starter import FIRST_WORKERS
from tests.support import datasets
from tests.support.helpers import (
    ids_of,
    make_loader,
    set_faults,
    template_and_workers,
)

NUM_WORKERS = 12
"""More than ten, which was once the limit of batches in flight; more than `FIRST_WORKERS`."""


class Gathering:
    """Samples that wait until so many of them are being fetched at the same time, once."""

    def __init__(self, folder: str, num_awaited: int, num_samples: int) -> None:
        self.folder, self.num_awaited, self.num_samples = Path(folder), num_awaited, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        own, met = self.folder / "present" / str(os.getpid()), self.folder / "met"
        own.touch()
        while not met.exists():
            if len(list(own.parent.iterdir())) >= self.num_awaited:
                met.touch()
            time.sleep(0.002)
        own.unlink()
        return {"id": index}


@pytest.mark.parametrize("in_order", [True, False])
def test_all_workers_are_at_work_at_the_same_time(in_order: bool, tmp_path: Path) -> None:
    (tmp_path / "present").mkdir()
    kwargs = {"folder": str(tmp_path), "num_awaited": NUM_WORKERS, "num_samples": 8 * NUM_WORKERS}
    options: dict[str, Any] = {"batch_size": 1, "shuffle": False, "validate": False, "in_order": in_order}
    with make_loader(Gathering, workers=NUM_WORKERS, kwargs=kwargs, **options) as loader:
        ids = ids_of(loader)
    assert (ids if in_order else sorted(ids)) == list(range(8 * NUM_WORKERS))
    assert (tmp_path / "met").exists()


def test_batches_come_while_workers_are_still_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, f"template.fork-requested=hang,hit={FIRST_WORKERS + 2}")
    with make_loader(datasets.Counting, workers=NUM_WORKERS) as loader:
        loader.start(0)
        assert sorted(ids_of(loader)) == list(range(100))


@pytest.mark.filterwarnings("ignore:the template:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("point", ["template.fork-requested", "template.forked"])
def test_a_template_that_dies_while_workers_are_being_started_is_replaced(
    point: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_faults(monkeypatch, f"{point}=SIGKILL,hit={FIRST_WORKERS + 2},once={tmp_path / 'killed'}")
    with make_loader(datasets.Counting, workers=NUM_WORKERS, shuffle=False) as loader:
        for _ in range(3):
            assert ids_of(loader) == list(range(100))
        template_and_workers(num_workers=NUM_WORKERS)
        assert ids_of(loader) == list(range(100))
    assert (tmp_path / "killed").exists()


def test_a_worker_that_dies_while_others_are_being_started_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, f"worker.boot=SIGKILL,serial=1;worker.boot=SIGKILL,serial={FIRST_WORKERS + 1}")
    with make_loader(datasets.Counting, workers=NUM_WORKERS, shuffle=False) as loader:
        loader.start(0)
        template_and_workers(num_workers=NUM_WORKERS)
        with pytest.warns(match="is replaced"):
            assert [ids_of(loader) for _ in range(2)] == 2 * [list(range(100))]


@pytest.mark.parametrize(("multithread", "num_threads"), [(True, MAX_RECEIVERS), (False, 1)])
def test_workers_share_the_threads_that_listen_to_them(multithread: bool, num_threads: int) -> None:
    with make_loader(
        datasets.Counting, workers=MAX_RECEIVERS + 4, batch_size=1, shuffle=False, multithread=multithread
    ) as loader:
        for index, batch in enumerate(loader):
            assert batch["id"].tolist() == [index]
            if index % 10 == 0:
                time.sleep(0.02)  # so that the threads listen now and then
        names = [thread.name for thread in threading.enumerate()]
    assert names.count("swift_loader-receiver") == num_threads
