"""A dataset's long lists are in memory that all processes share: the batches stay, and the memory stays flat."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as TorchLoader

from swift_loader import DataLoader, SharedList, SwiftLoader
from swift_loader.pipeline import Pipeline
from swift_loader.shared.lists import LONG
from tests.support.datasets import identity
from tests.support.group import run_ranks
from tests.support.helpers import ROOT, loader_processes, run_script, slow

NUM_SAMPLES = LONG + 24
METHODS = ["template", "fork", slow("spawn")]


def path_of(index: int) -> str:
    return f"/data/{index:050}.jpg"


class Paths:
    """Sample i is what three lists have at i, and a slice of one; `kind` is the type of the lists."""

    def __init__(self, num_samples: int = NUM_SAMPLES, *, share: bool = False) -> None:
        form: Any = SharedList if share else list
        self.paths = form(map(path_of, range(num_samples)))
        self.labels = form(index % 1000 for index in range(num_samples))
        self.boxes = form({"box": (index, index / 2), "name": str(index) * (index % 3)} for index in range(num_samples))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.paths[index], self.labels[index], self.boxes[index], self.labels[index : index + 3]

    @property
    def lists(self) -> list[Any]:
        return [self.paths, self.labels, self.boxes]


def batches_of(loader: Any) -> list[Any]:
    return list(loader)


def mappings() -> int:
    """Return how many mappings of shared lists this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:swift_loader")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("given", ["instance", "class", "their own"])
def test_the_batches_are_those_of_plain_lists(method: Any, given: str) -> None:
    options: dict[str, Any] = {"batch_size": 500, "seed": 7, "collate_fn": identity}
    expected = batches_of(SwiftLoader(Paths, worker_per_consumer=0, **options))
    own: dict[str, Any] = {"dataset_class": Paths, "shared": True}
    if given != "class":
        own = {"dataset": Paths(share=given == "their own"), "shared": given == "instance"}
    before = mappings()

    with SwiftLoader(**own, **options, worker_per_consumer=2, start_method=method) as loader:
        assert batches_of(loader) == expected
        assert given == "class" or mappings() >= before
        assert all(type(one) is SharedList for one in loader.dataset.lists)
    assert batches_of(SwiftLoader(**own, **options, worker_per_consumer=2, worker_type="thread")) == expected
    del own, loader
    gc.collect()
    assert mappings() == 0


@pytest.mark.parametrize(("kind", "method"), [(DataLoader, "fork"), (TorchLoader, "fork"), slow(DataLoader, "spawn")])
def test_it_serves_the_workers_of_any_loader(kind: Any, method: str) -> None:
    whole: Any = Paths(share=True)
    options: dict[str, Any] = {
        "batch_size": 8,
        "num_workers": 2,
        "multiprocessing_context": method,
        "collate_fn": identity,
    }
    loader = kind(ConcatDataset([Subset(whole, SharedList(range(20, 60))), whole]), **options)
    batches = iter(loader)
    plain = Paths()

    assert [sample for _ in range(10) for sample in next(batches)] == [plain[i] for i in (*range(20, 60), *range(40))]


def test_a_stage_s_function_may_have_one() -> None:
    names = SharedList(map(path_of, range(100)))

    assert list(Pipeline(range(100)).map(names.__getitem__, concurrency=2, on="process")) == names


@pytest.mark.parametrize("method", ["template", slow("spawn")])
def test_it_has_what_the_script_defines(method: str, tmp_path: Path) -> None:
    code = f"""
    from dataclasses import dataclass
    from swift_loader import SharedList, SwiftLoader

    @dataclass
    class Record:
        number: int
        def doubled(self):
            return 2 * self.number

    class Records:
        def __init__(self, share):
            self.records = (SharedList if share else list)(Record(number) for number in range({LONG}))
        def __len__(self):
            return 12
        def __getitem__(self, index):
            assert type(self.records) is SharedList
            return self.records[index]

    for options in ({{"dataset": Records(True)}}, {{"dataset": Records(False), "shared": True}},
                    {{"dataset_class": Records, "dataset_kwargs": {{"share": False}}, "shared": True}}):
        with SwiftLoader(**options, batch_size=4, worker_per_consumer=1, start_method="{method}") as loader:
            print(sum(int(batch.doubled().sum()) for batch in loader))
    """
    assert run_script(code, folder=tmp_path, environment={"PYTHONPATH": str(ROOT)}) == "132\n" * 3


RANKS = """
    def make():
        return SharedList(map(str, range(20_000)))
    def inode(shared):
        return shared._state[0].address.inode
    equal, other = make(), SharedList([str(rank)] * 20_000)
    report([inode(equal), inode(other), equal == list(map(str, range(20_000))), other[7]])
    if rank == 0:
        SharedList(["only on this rank"])
    dist.barrier()
    del equal
    dist.barrier()
    again = make()
    report(inode(again))
    with SwiftLoader(dataset=again, batch_size=100, worker_per_consumer=2, seed=5, collate_fn=list) as loader:
        report(sorted(int(number) for batch in loader for number in batch))
    finish()
"""


@pytest.mark.slow
def test_ranks_of_a_machine_share_equal_lists(tmp_path: Path) -> None:
    first, second = run_ranks(RANKS, 2, tmp_path)

    assert first[0][0] == second[0][0]
    assert first[0][1] != second[0][1]
    assert (first[0][2:], second[0][2:]) == ([True, "0"], [True, "1"])
    assert first[1] == second[1]
    assert sorted(first[2] + second[2]) == list(range(20_000))


def private_bytes(processes: list[psutil.Process]) -> int:
    """Return the bytes of memory that only one process has, of all of these."""
    rollups = "".join(Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in processes)
    return 1024 * sum(map(int, re.findall(r"^Private_\w+: +(\d+) kB", rollups, re.MULTILINE)))


@pytest.mark.parametrize("given", ["instance", slow("class")])
def test_workers_take_no_memory_of_their_own_for_it(given: str) -> None:
    num_samples = 100_000
    own: dict[str, Any] = {"dataset_class": Paths, "dataset_kwargs": {"num_samples": num_samples}}
    own = {"dataset": Paths(num_samples)} if given == "instance" else own
    with SwiftLoader(**own, shared=True, batch_size=1000, worker_per_consumer=2, collate_fn=len) as loader:
        loader.start()
        workers = loader_processes()
        before = private_bytes(workers)
        for _ in range(2):
            assert sum(loader) == num_samples
        grown = private_bytes(workers) - before
    one_copy = sum(one.nbytes for one in Paths(num_samples, share=True).lists)
    assert grown < 2 * one_copy, (before, grown)  # with plain lists, 4 to 6 times
