"""Every option together with every value of every other, pairwise; and the same through the other start method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dill
import pytest
from allpairspy import AllPairs

from tests.support import datasets
from tests.support.helpers import ids_of, make_loader

OPTIONS: dict[str, list[Any]] = {
    "workers": [1, 0, 3],
    "batch_size": [7, 1, 64],
    "num_samples": [50, 3, 0],
    "shuffle": [True, False],
    "nearby_shuffle": [None, 0, 10],
    "drop_last": [False, True],
    "uneven": ["pad", "drop", "exact"],
    "in_order": [True, False],
    "data_queue_size": [10, 1],
    "message_queue_size": [10, 1],
    "max_buffer_size": [None, 1],
    "codec": [None, "dill"],
    "collate_fn": [None, datasets.identity],
    "logger": [None, "prefix", "dict"],
    "on_error": ["raise", "skip", "replace"],
    "benchmark": [True, False],
    "benchmark_file": [False, True],
    "validate": [True, False],
    "multithread": [True, False],
    "device": [None, "cpu"],
    "max_nb_batch_on_device": [1, 3],
    "timeout": [None, 30],
    "start_method": ["template", "spawn"],
    "dataset_per_worker": [False, True],
    "as_instance": [False, True],
    "worker_type": ["process", "thread"],
}

CASES = [dict(zip(OPTIONS, values, strict=True)) for values in AllPairs(list(OPTIONS.values()))]


@pytest.mark.filterwarnings("ignore:data_queue_size=1 keeps:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("case", CASES, ids=[str(number) for number in range(len(CASES))])
def test_options_work_together(case: dict[str, Any], tmp_path: Path) -> None:
    options = dict(case)
    num_samples, device = options.pop("num_samples"), options.pop("device")
    if options.pop("codec"):
        options |= {"batch_encoder": dill.dumps, "batch_decoder": dill.loads}
    logger = options.pop("logger")
    options["logger"] = {"path": tmp_path / "log", "stdout": False} if logger == "dict" else logger and tmp_path / "log"
    options["benchmark_file"] = tmp_path / "figures" if options["benchmark_file"] else None
    if options.pop("as_instance"):
        loader = _instance_loader(num_samples, **options)
    else:
        loader = make_loader(datasets.Counting, kwargs={"num_samples": num_samples}, **options)
    batch_size = options["batch_size"]
    expected = num_samples - num_samples % batch_size if options["drop_last"] else num_samples
    with loader:
        loader.start(0, device)
        for _ in range(2):
            batches = list(loader)
            assert len(batches) == len(loader) == -(-expected // batch_size)
            if options["collate_fn"]:
                batches = [{"id": [sample["id"] for sample in batch]} for batch in batches]
            ids = ids_of(batches)
            assert len(set(ids)) == len(ids) == expected
            if not options["shuffle"] and options["in_order"]:
                assert ids == list(range(expected))


def _instance_loader(num_samples: int, *, workers: int, **options: Any) -> Any:
    from swift_loader import SwiftLoader

    return SwiftLoader(dataset=datasets.Counting(num_samples), worker_per_consumer=workers, seed=7, **options)
