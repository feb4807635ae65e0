"""Whole programs: no `__main__` guard, no file, no clean-up."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.helpers import HANG_S, ROOT, exhaustive, run_script

DATASET = """
    from dataclasses import dataclass
    import numpy as np
    from swift_loader import SwiftLoader

    SCALE = 10

    @dataclass
    class Point:
        x: np.ndarray
        label: list

    def scaled(index):
        return index * SCALE

    class Dataset:
        def __len__(self):
            return 20
        def __getitem__(self, index):
            return Point(np.full(3, scaled(index)), f"sample {index}")
"""


def unguarded(body: str) -> str:
    return textwrap.dedent(DATASET) + textwrap.dedent(body)


@pytest.mark.parametrize("start_method", ["template", exhaustive("spawn")])
@pytest.mark.parametrize("via", ["file", exhaustive("-c"), exhaustive("stdin")])
def test_no_main_guard_is_needed_and_classes_of_the_script_arrive_as_themselves(
    via: str, start_method: str, tmp_path: Path
) -> None:
    body = f"""
    factor = 2
    loader = SwiftLoader(Dataset, {{}}, batch_size=4, worker_per_consumer=2, shuffle=False,
                         start_method={start_method!r},
                         collate_fn=lambda samples: [Point(s.x * factor, s.label) for s in samples])
    for epoch in range(2):
        for batch in loader:
            assert all(type(point) is Point for point in batch), batch
            print(*[point.x[0] for point in batch])
    """
    printed = run_script(unguarded(body), via=via, folder=tmp_path).split()
    assert [int(number) for number in printed] == [number * 20 for number in range(20)] * 2


def test_a_dataset_inside_a_function_and_an_instance_work(tmp_path: Path) -> None:
    body = """
    def main():
        class Local(Dataset):
            def __init__(self, offset): self.offset = offset
            def __getitem__(self, index): return super().__getitem__(index).x + self.offset
        for source in (dict(dataset=Local(1)), dict(dataset_class=lambda: Local(1))):
            with SwiftLoader(**source, batch_size=5, worker_per_consumer=2, shuffle=False) as loader:
                print([int(b[0, 0]) for b in loader], type(loader.dataset).__name__)
    main()
    """
    assert run_script(unguarded(body), folder=tmp_path) == "[1, 51, 101, 151] Local\n" * 2


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        exhaustive("raise SystemExit(0)"),
        exhaustive("del loader, iterator"),
        exhaustive("import sys; sys.exit()"),
        exhaustive("loader.close()"),
    ],
)
def test_a_script_that_just_ends_exits_cleanly(ending: str, tmp_path: Path) -> None:
    body = f"""
    loader = SwiftLoader(Dataset, {{}}, batch_size=4, worker_per_consumer=2)
    iterator = iter(loader)
    next(iterator)
    {ending}
    """
    assert run_script(unguarded(body), folder=tmp_path) == ""


def test_an_exception_in_the_loop_is_all_that_is_printed(tmp_path: Path) -> None:
    body = """
    loader = SwiftLoader(Dataset, {}, batch_size=4, worker_per_consumer=2)
    for batch in loader:
        raise ValueError("in the loop")
    """
    script = tmp_path / "script.py"
    script.write_text(unguarded(body))
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert ended.stderr.endswith("ValueError: in the loop\n")


@pytest.mark.slow
def test_ranks_started_by_torch_multiprocessing_share_a_loader(tmp_path: Path) -> None:
    body = """
    import torch.multiprocessing as mp

    def train(rank, loader, folder):
        loader.start(rank)
        ids = [int(x) // SCALE for point in loader for x in point.x[:, 0]]
        loader.close()
        open(f"{folder}/{rank}", "w").write(" ".join(map(str, ids)))

    if __name__ == "__main__":
        import sys
        mp.spawn(train, (SwiftLoader(Dataset, {}, batch_size=4, nb_consumer=2, worker_per_consumer=2), sys.argv[1]), 2)
    """
    run_script(unguarded(body), str(tmp_path), folder=tmp_path)
    parts = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == 10
    assert {int(number) for part in parts for number in part} == set(range(20))


@pytest.mark.slow
def test_a_fork_of_a_trainer_that_has_counted_makes_workers_of_its_own(tmp_path: Path) -> None:
    code = """
        import os
        from swift_loader import SwiftLoader
        loader = SwiftLoader(lambda: list(range(20)), batch_size=4, worker_per_consumer=2, seed=1)
        print(len(loader), flush=True)
        child = os.fork()
        if child == 0:
            print(sum(len(batch) for batch in loader), flush=True)
            loader.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(sum(len(batch) for batch in loader), flush=True)
        loader.close()
    """
    assert run_script(code, folder=tmp_path).split() == ["5", "20", "20"]


@pytest.mark.slow
def test_a_module_that_starts_a_loader_of_its_own_dataset_when_it_is_imported_is_an_error(tmp_path: Path) -> None:
    module = unguarded("loader = SwiftLoader(Dataset, {}, batch_size=4)\nloader.start()\n")
    (tmp_path / "its_own_module.py").write_text(module)
    body = """
        import sys
        sys.path.insert(0, sys.argv[1])
        try:
            import its_own_module
        except RuntimeError as error:
            print(error)
    """
    printed = run_script(body, str(tmp_path), folder=tmp_path)
    assert "would start processes without end. Start the loader in that module under" in printed
    main = module.replace("import numpy as np", "import numpy as np\n")
    assert run_script(main + "print(len(list(loader)))", folder=tmp_path) == "5\n"
