"""All processes of a loader have the same dataset, whatever it depends on; where they can't, that is an error."""

from __future__ import annotations

import os
import random
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift_loader import DatasetMismatch, SwiftLoader
from tests.support import datasets
from tests.support.helpers import (
    HANG_S,
    ROOT,
    exhaustive,
    ids_of,
    is_gone,
    loader_children,
    loader_processes,
    make_loader,
    run_script,
    set_environ,
    template_and_workers,
    wait_until,
    without_root,
)

METHODS = ["template", exhaustive("spawn")]

pytestmark = pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")  # of the replacements


def kill_the_template(loader: SwiftLoader) -> None:
    """End the template of a loader, and its workers with it; return once they are gone."""
    assert loader.has_started
    killed = loader_processes()
    for child in loader_children():
        child.kill()
    wait_until(lambda: all(is_gone(child.pid) for child in killed), "template and workers are gone")


def iterate_until_it_raises(loader: SwiftLoader) -> None:
    """Go through the data until all workers have taken part."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        for _ in loader:
            pass


class Folder(datasets.Counting):
    """Lists a folder, and makes it grow, which is what happens to folders."""

    def __init__(self, folder: str, *, keeps_open: bool) -> None:
        super().__init__(len(list(Path(folder).iterdir())))
        (Path(folder) / str(random.Random().random())).touch()
        self.file = Path(__file__).open() if keeps_open else None


@pytest.mark.parametrize("validate", [True, exhaustive(False)])
@pytest.mark.parametrize("start_method", METHODS)
def test_a_folder_that_grows_between_two_builds_is_an_error_that_names_both_lengths(
    start_method: str, validate: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number}.sample").touch()
    kwargs = {"folder": str(folder), "keeps_open": start_method == "template"}
    with (
        pytest.raises(DatasetMismatch, match=r"of 10[12] samples, but the first one has 100\. All processes"),
        make_loader(Folder, kwargs=kwargs, start_method=start_method, validate=validate) as loader,
    ):
        iterate_until_it_raises(loader)


class Labels(datasets.Counting):
    """Numbers labels in the order of a set of strings."""

    def __init__(self, *, deed: str = "") -> None:
        super().__init__(24)
        names = [f"class {number}" for number in range(24)]
        self.numbers = {name: number for number, name in enumerate(set(names))}
        self.names = names
        if deed == "thread":
            import threading

            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if deed == "file":
            self.file = Path(__file__).open()

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "label": self.numbers[self.names[index]], "pid": os.getpid()}


@pytest.mark.parametrize("start_method", METHODS)
@pytest.mark.parametrize("deed", ["", exhaustive("thread"), exhaustive("file")])
def test_a_set_of_strings_is_in_one_order_in_all_processes(start_method: str, deed: str) -> None:
    labels: dict[int, int] = {}
    with make_loader(Labels, workers=3, batch_size=2, kwargs={"deed": deed}, start_method=start_method) as loader:
        for epoch in range(4):
            for batch in loader:
                labels |= (found := dict(zip(batch["id"].tolist(), batch["label"].tolist(), strict=True)))
                assert found.items() <= labels.items()
            if epoch == 1:
                kill_the_template(loader)
    assert sorted(labels.values()) == list(range(24))


@pytest.mark.parametrize("seed", [exhaustive(None), exhaustive(""), "random", exhaustive("0"), "77"])
@pytest.mark.parametrize("isolation", [(), exhaustive(("-E",)), exhaustive(("-I",))])
def test_the_hash_seed_is_the_trainers_if_it_has_one(
    seed: str | None, isolation: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from swift_loader import SwiftLoader
        class Hashes:
            def __len__(self): return 4
            def __getitem__(self, index): return hash("text")
        with SwiftLoader(Hashes, worker_per_consumer=2, start_method="spawn", seed=1) as loader:
            print(hash("text"), *sorted({{int(batch[0]) for batch in loader}}))
    """
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    printed = run_script(code, via="-c", folder=tmp_path, options=isolation, environment=environment)
    ours, *theirs = printed.split()
    assert len(theirs) == 1
    if seed in ("0", "77") and not isolation:
        assert theirs == [ours]


CACHED_OPEN = """
import functools, os, time, threading
import numpy as np

NUM = 4000

@functools.lru_cache
def opened(path):
    return open(path, "rb")

class Cached:
    def __init__(self, path):
        self.path = path
        opened(path)
    def __len__(self):
        return NUM
    def __getitem__(self, index):
        file = opened(self.path)
        file.seek(index * 8)
        return index, np.frombuffer(file.read(8), np.int64).copy()
"""

AT_IMPORT = CACHED_OPEN.replace("class Cached", 'opened(os.environ["STORM_FILE"])\n\nclass Cached')


@pytest.mark.parametrize("code", [CACHED_OPEN, AT_IMPORT], ids=["cached", "at-import"])
def test_workers_never_share_a_file_that_outlives_the_dataset(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"module_{'import' in code and len(code)}"
    (tmp_path / f"{name}.py").write_text(code)
    path = tmp_path / "numbers"
    path.write_bytes(np.arange(4000).tobytes())
    set_environ(monkeypatch, "STORM_FILE", str(path))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(name)
    try:
        with make_loader(module.Cached, workers=3, batch_size=50, kwargs={"path": str(path)}) as loader:
            for _ in range(2):
                for indices, values in loader:
                    assert indices.tolist() == values[:, 0].tolist()
    finally:
        module.opened(str(path)).close()


def test_a_template_that_is_replaced_has_the_circumstances_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Relative(datasets.Counting):
        def __init__(self) -> None:
            super().__init__(40)
            self.text = Path("data.txt").read_text() + os.environ["WHICH_DATA"]

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"id": index, "text": self.text}

    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.txt").write_text(name)
    set_environ(monkeypatch, "WHICH_DATA", "first")
    monkeypatch.chdir(tmp_path / "first")
    with make_loader(Relative, batch_size=4) as loader:
        texts = set()
        for epoch in range(3):
            for batch in loader:
                texts |= set(batch["text"])
            if epoch == 0:
                monkeypatch.chdir(tmp_path / "second")
                monkeypatch.setenv("WHICH_DATA", "second")
                (tmp_path / "first").rename(tmp_path / "moved")
                kill_the_template(loader)
    assert texts == {"firstfirst"}


class Rewritten(datasets.Counting):
    """Its samples are what a file held when it was built."""

    def __init__(self, path: str) -> None:
        super().__init__(40)
        self.text = Path(path).read_text()

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "text": self.text}


def test_a_file_that_changed_before_a_template_was_replaced_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("first")
    with make_loader(Rewritten, kwargs={"path": str(path)}, batch_size=4) as loader:
        assert len(list(loader)) == 10
        path.write_text("second")
        kill_the_template(loader)
        with pytest.raises(DatasetMismatch, match=r"(?s)sample at dataset index \d+ differs.*a file .* has changed"):
            iterate_until_it_raises(loader)


class Unkeyed(datasets.Counting):
    """Its constructor draws from a generator that nobody seeds."""

    def __init__(self, *, when: str = "built") -> None:
        super().__init__(40)
        self.generator = np.random.default_rng()
        self.noise = self.generator.normal(size=40)
        self.when = when

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = self.noise[index] if self.when == "built" else self.generator.normal()
        return {"id": index, "noise": noise}


@pytest.mark.parametrize("options", [exhaustive({"start_method": "spawn"}), {"dataset_per_worker": True}])
def test_an_unkeyed_generator_in_the_constructor_is_named(options: dict[str, Any]) -> None:
    with (
        pytest.raises(
            DatasetMismatch,
            match=r"(?s)at dataset index \d+ differs.*constructor uses a random.*default_rng",
        ),
        make_loader(Unkeyed, **options) as loader,
    ):
        iterate_until_it_raises(loader)


@pytest.mark.parametrize(
    "options", [{"kwargs": {"when": "fetched"}}, {"validate": False}], ids=["drawn when fetched", "validate=False"]
)
@pytest.mark.parametrize("start_method", METHODS)
def test_samples_that_differ_from_fetch_to_fetch_are_no_error(options: dict[str, Any], start_method: str) -> None:
    with make_loader(Unkeyed, dataset_per_worker=True, start_method=start_method, **options) as loader:
        assert sorted(ids_of(loader)) == list(range(40))


class Tells(datasets.Counting):
    """Samples tell the process and the time."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "pid": os.getpid(), "time": time.monotonic_ns() if index % 2 else 0}


@pytest.mark.parametrize(
    "options", [exhaustive({"start_method": "spawn"}), {"dataset_per_worker": True}, exhaustive({})]
)
def test_samples_that_hold_a_process_id_are_no_error(options: dict[str, Any]) -> None:
    with make_loader(Tells, workers=2, **options) as loader:
        for epoch in range(2):
            assert sorted(ids_of(loader)) == list(range(100))
            if epoch == 0:
                kill_the_template(loader)
        assert sorted(ids_of(loader)) == list(range(100))


class OnlyOnce:
    """A constructor that must run once in a process, changes the directory, and keeps a file open."""

    built_in: int | None = None

    def __init__(self, *, keeps_open: bool) -> None:
        if type(self).built_in is not None:
            raise RuntimeError("built twice")
        type(self).built_in = os.getpid()
        os.chdir("data")
        self.file = open("numbers", "rb")
        if not keeps_open:
            self.file.close()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if self.file.closed:
            return index
        self.file.seek(index)
        return self.file.read(1)[0]


@pytest.mark.parametrize("keeps_open", [exhaustive(False), True])
@pytest.mark.parametrize(
    "options", [exhaustive({}), exhaustive({"start_method": "spawn"}), {"dataset_per_worker": True}]
)
def test_a_constructor_runs_once_in_each_process(
    options: dict[str, Any], keeps_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numbers").write_bytes(bytes(range(40)))
    without_root(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with make_loader(OnlyOnce, kwargs={"keeps_open": keeps_open}, batch_size=4, **options) as loader:
        for epoch in range(2):
            assert sorted(int(number) for batch in loader for number in batch) == list(range(40))
            if epoch == 0:
                kill_the_template(loader)
        assert len(list(loader)) == 10


@pytest.mark.parametrize(
    ("options", "num_builds", "num_imports"), [exhaustive("", 1, 1), exhaustive("spawn", 3, 3), ("own", 3, 1)]
)
def test_what_modules_and_constructors_print_comes_once_per_import_and_build(
    options: str, num_builds: int, num_imports: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = """
        import ctypes
        print("imported")
        class Talkative:
            def __init__(self):
                print("built")
                ctypes.CDLL(None).printf(b"in C\\n")
            def __len__(self): return 12
            def __getitem__(self, index): return index
    """
    chosen = {"": "", "spawn": "start_method='spawn'", "own": "dataset_per_worker=True"}[options]
    code = f"""
        from swift_loader import SwiftLoader
        from talkative import Talkative
        with SwiftLoader(Talkative, worker_per_consumer=3, {chosen}) as loader:
            list(loader)
    """
    (tmp_path / "talkative.py").write_text(textwrap.dedent(module))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    lines = run_script(code, folder=tmp_path, environment={"PYTHONPATH": str(ROOT)}).split()
    assert lines.count("imported") == num_imports + 1, "and once in the trainer"
    assert lines.count("built") == lines.count("C") == num_builds


def test_a_trainer_that_ignores_sigchld_loses_no_more_than_others(tmp_path: Path) -> None:
    code = """
        import os, signal, warnings
        import psutil
        from swift_loader import SwiftLoader
        os.environ["SWIFT_LOADER_ROOT"] = "0"  # the template is this process's child
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with SwiftLoader(lambda: list(range(400)), batch_size=4, worker_per_consumer=2, shuffle=False) as loader:
            got = []
            for number, batch in enumerate(loader):
                got += batch.tolist()
                if number == 20:
                    template = psutil.Process().children()[-1]  # behind multiprocessing's resource tracker
                    template.children()[0].kill()
            assert got == list(range(400)), got
            print(template.is_running(), signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN)
    """
    assert run_script(code, folder=tmp_path) == "True True\n"


def test_a_module_beside_the_trainer_that_is_not_on_its_path_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('the wrong random')")
    (tmp_path / "numpy.py").write_text("raise RuntimeError('the wrong numpy')")
    code = """
        import os, sys
        from swift_loader import SwiftLoader
        os.chdir(sys.argv[1])
        with SwiftLoader(lambda: list(range(8)), worker_per_consumer=2) as loader:
            print(len(list(loader)))
    """
    (tmp_path / "scripts").mkdir()
    assert run_script(code, str(tmp_path), folder=tmp_path / "scripts") == "8\n"


@pytest.mark.parametrize("start_method", METHODS)
def test_a_directory_that_was_deleted_is_no_hindrance(start_method: str, tmp_path: Path) -> None:
    code = f"""
        import os, sys
        os.chdir(sys.argv[1])
        os.rmdir(sys.argv[1])
        from swift_loader import SwiftLoader
        with SwiftLoader(lambda: list(range(8)), worker_per_consumer=2, start_method={start_method!r}) as loader:
            print(len(list(loader)))
    """
    (tmp_path / "gone").mkdir()
    assert run_script(code, str(tmp_path / "gone"), via="-c", folder=tmp_path) == "8\n"


class HasAPool(datasets.Counting):
    """Starts processes of its own, in the constructor or when it is asked for the first sample."""

    def __init__(self, *, marker: str, when: str) -> None:
        super().__init__(20)
        self.marker, self.when = marker, when
        self.pool: Any = None
        if when == "built":
            self.start()

    def start(self) -> None:
        from multiprocessing import get_context

        self.pool = get_context("fork").Pool(2)
        with Path(self.marker).open("a") as file:
            file.writelines(f"{process.pid}\n" for process in self.pool._pool)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.pool is None:
            self.start()
        return {"id": self.pool.apply(abs, (-index,))}


@pytest.mark.parametrize("when", [exhaustive("built"), "fetched"])
@pytest.mark.parametrize("start_method", METHODS)
def test_the_processes_that_a_dataset_started_end_with_the_loader(start_method: str, when: str, tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    kwargs = {"marker": str(marker), "when": when}
    with make_loader(HasAPool, kwargs=kwargs, batch_size=4, start_method=start_method, timeout=HANG_S) as loader:
        assert sorted(ids_of(loader)) == list(range(20))
    pids = [int(pid) for pid in marker.read_text().split()]
    assert len(pids) >= 4
    wait_until(lambda: all(map(is_gone, pids)), "the pools' processes end")


@pytest.mark.parametrize("workers", [exhaustive(0), exhaustive(1), 2])
def test_sums_and_convolutions_are_the_same_with_any_number_of_workers(workers: int) -> None:
    import torch

    class Sums(datasets.Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            values = torch.from_numpy(np.random.default_rng(index).normal(size=(1, 8, 96, 96)).astype(np.float32))
            weights = values[0, :, :3, :3].expand(8, 8, 3, 3)
            return {"id": index, "sum": values.sum(), "mean": values.mean(), "conv": torch.conv2d(values, weights)}

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with make_loader(Sums, workers=workers, kwargs={"num_samples": 8}, shuffle=False) as loader:
            (batch,) = loader
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        expected = [Sums(8)[index] for index in range(8)]
    finally:
        torch.set_num_threads(before)
    for name in ("sum", "mean", "conv"):
        assert all(torch.equal(got, wanted[name]) for got, wanted in zip(batch[name], expected, strict=True))


def test_signals_that_the_trainer_blocks_still_end_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    without_root(monkeypatch)  # it has started before
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        with make_loader(datasets.Counting) as loader:
            ids_of(loader)
            template, _ = template_and_workers()
            blocked = next(
                line.split()[1]
                for line in Path(f"/proc/{template.pid}/status").read_text().splitlines()
                if line.startswith("SigBlk")
            )
            assert int(blocked, 16) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class UsedThreads(datasets.Counting):
    """Its constructor uses threads, which are on their way out when it returns."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        super().__init__()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(abs, range(1000)))


@pytest.mark.parametrize("start_method", METHODS)
def test_threads_that_a_constructor_has_ended_do_not_count(start_method: str) -> None:
    for _ in range(4):
        with make_loader(UsedThreads, workers=2, start_method=start_method) as loader:
            assert sorted(ids_of(loader)) == list(range(100))
            num_expected = 1 if start_method == "template" else 2  # workers are forks
            wait_until(lambda: len(loader_children()) == num_expected, f"{num_expected} children")  # noqa: B023


def test_a_closure_of_a_module_sees_what_the_dataset_has_set_there(tmp_path: Path) -> None:
    module = """
        WORDS = {}
        class Texts:
            def __init__(self):
                for number, word in enumerate("abcdef", 1):
                    WORDS[word] = number
            def __len__(self): return 6
            def __getitem__(self, index): return "abcdef"[index]
        def make_collate():
            return lambda samples: [WORDS.get(word, 0) for word in samples]
    """
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from swift_loader import SwiftLoader
        import its_words
        for workers in (0, 2):
            with SwiftLoader(its_words.Texts, worker_per_consumer=workers, batch_size=3, shuffle=False,
                             collate_fn=its_words.make_collate()) as loader:
                print(list(loader))
    """
    (tmp_path / "its_words.py").write_text(textwrap.dedent(module))
    assert run_script(code, str(tmp_path), folder=tmp_path) == "[[1, 2, 3], [4, 5, 6]]\n" * 2


class TakesOverStdin(datasets.Counting):
    """Does what daemons do: closes stdin, so that the next file gets its number."""

    def __init__(self, path: str) -> None:
        super().__init__(200)
        os.close(0)
        self.file = open(path, "rb", buffering=0)
        assert self.file.fileno() == 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.file.seek(8 * index)
        time.sleep(0.0005)
        return {"id": index, "x": np.frombuffer(self.file.read(8), np.int64).copy()}


def test_a_file_in_the_place_of_stdin_is_not_shared(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(np.arange(200).tobytes())
    with make_loader(TakesOverStdin, workers=3, kwargs={"path": str(path)}) as loader:
        for _ in range(3):
            for batch in loader:
                assert batch["id"].tolist() == batch["x"][:, 0].tolist()


def test_the_umask_and_the_recursion_limit_hold_for_workers_too(tmp_path: Path) -> None:
    code = """
        import os, psutil, sys, warnings
        from swift_loader import SwiftLoader
        os.environ["SWIFT_LOADER_ROOT"] = "0"  # the template is this process's child
        warnings.simplefilter("ignore")
        os.umask(0o027)
        sys.setrecursionlimit(20000)
        def deep(number): return 0 if number == 0 else 1 + deep(number - 1)
        class Deep:
            def __len__(self): return 40
            def __getitem__(self, index):
                mask = os.umask(0)
                os.umask(mask)
                return deep(5000), mask
        with SwiftLoader(Deep, worker_per_consumer=2, batch_size=4) as loader:
            found = set()
            for epoch in range(2):
                found |= {(int(depth), int(mask)) for batch in loader for depth, mask in zip(*batch)}
                os.umask(0o077)
                psutil.Process().children()[0].kill()
            print(found)
    """
    assert run_script(code, folder=tmp_path) == "{(5000, 23)}\n"


class OpensInLen(datasets.Counting):
    """Opens a file when it is asked for its length, as datasets of HDF5 files do."""

    def __len__(self) -> int:
        self.file = Path(__file__).open()
        self.opened_by = os.getpid()
        return super().__len__()

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "is_own": self.opened_by == os.getpid()}

    def __getstate__(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples}


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_an_instance_that_opens_a_file_for_its_length_is_not_shared() -> None:
    options: dict[str, Any] = {"batch_size": 4, "worker_per_consumer": 2, "shuffle": False, "validate": False}
    with SwiftLoader(dataset=OpensInLen(24), **options) as loader:
        batches = list(loader)
    assert ids_of(batches) == list(range(24))
    assert all(batch["is_own"].all() for batch in batches)
