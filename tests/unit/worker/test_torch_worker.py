"""What a worker of torch's looks like to the dataset, in a fork: it changes settings of the process."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from swift_loader.worker.seeding import Rng
from swift_loader.worker.stream_shard import StreamShard
from swift_loader.worker.torch_worker import TorchWorker
from tests.support.forked import run_in_fork
from tests.support.torch_mode import worker_spec


def worker_of(
    init: Callable[[int], object] | None = None, rng: Rng = Rng.NONE, worker_id: int = 3, **mode_options: Any
) -> TorchWorker:
    mode = worker_spec([1], worker_init_fn=init, num_workers=5, **mode_options).options.torch
    assert mode is not None
    return TorchWorker(mode, rng, worker_id, "the dataset")


def draw() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_loops_process_is_no_worker() -> None:
    assert torch.utils.data.get_worker_info() is None


def test_get_worker_info_answers_with_the_seed_of_the_generation() -> None:
    def examine() -> None:
        worker = worker_of()
        worker.begin(2**63 - 1)
        for base_seed in (2**63 - 1, 11):
            worker.use_seed(base_seed)
            info: Any = torch.utils.data.get_worker_info()
            assert (info.id, info.num_workers, info.seed, info.dataset) == (3, 5, base_seed + 3, "the dataset")

    assert run_in_fork(examine) == 0


@pytest.mark.parametrize(
    ("init", "rng", "keeps"), [(None, Rng.NONE, False), (random.seed, Rng.NONE, True), (random.seed, Rng.SAMPLE, False)]
)
def test_each_generation_is_seeded_unless_the_user_seeds(init: Any, rng: Rng, keeps: bool) -> None:
    def examine() -> None:
        worker = worker_of(init, rng)
        worker.begin(7)
        before = random.getstate(), draw()[1:]
        worker.begin(7)
        worker.use_seed(7)  # the first generation: what `worker_init_fn` did counts
        assert (random.getstate(), draw()[1:]) == before
        drawn = []
        for base_seed in (8, 9, 8):
            worker.use_seed(base_seed)
            drawn.append(draw())
        assert (drawn[0] != drawn[2]) is keeps
        assert drawn[0] != drawn[1]

    assert run_in_fork(examine) == 0


def test_multiprocessing_takes_a_worker_for_a_child() -> None:
    def examine() -> None:
        torch_worker = worker_of()
        torch_worker.begin(1)
        assert multiprocessing.current_process().name == "DataLoader worker 3"
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.is_alive()
        assert (parent.name, parent.pid) == ("MainProcess", os.getppid())
        assert threading.current_thread().name == "MainThread"

    run_in_fork(examine)
    assert multiprocessing.parent_process() is None


def test_of_a_shared_stream_all_workers_draw_the_same_and_none_is_seen() -> None:
    def examine() -> None:
        drawn = []
        for worker_id in (0, 1):
            worker = worker_of(worker_id=worker_id, shard=StreamShard())
            worker.begin(5)
            info: Any = torch.utils.data.get_worker_info()
            assert info.id == worker_id
            drawn.append(draw())
            with worker.hidden():
                assert torch.utils.data.get_worker_info() is None
            assert torch.utils.data.get_worker_info() is info
        assert drawn[0] == drawn[1]

    assert run_in_fork(examine) == 0
