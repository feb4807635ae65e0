"""The root: modules are imported once per training process, and a loader's template is its fork."""

from __future__ import annotations

import errno
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from swift_loader import NoDescriptorsLeft, SwiftLoader, SwiftLoaderWarning, WorkerDied
from swift_loader.executors.process import server, starter
from swift_loader.executors.process.launch import ServerLaunch
from swift_loader.executors.process.roots import ROOTS, SWITCH
from swift_loader.pipeline import Pipeline
from swift_loader.runtime import LoaderThread
from swift_loader.transport import channel
from tests.support import datasets
from tests.support.helpers import HANG_S, ROOT, ids_of, is_gone, is_tracker, make_loader, run_script, wait_until

pytestmark = pytest.mark.own_root

IMPORTED = """
import os, sys
from pathlib import Path
{body}
with open({log!r}, "a") as log:
    log.write(f"{{os.getpid()}}\\n")


class Data:
    VERSION = {version!r}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {{"id": index, "parent": os.getppid(), "version": self.VERSION}}
"""


@pytest.fixture(autouse=True)
def root_is_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch the root on, and begin without one."""
    ROOTS.stop()
    monkeypatch.setattr(ROOTS, "_unfit", set())
    monkeypatch.setenv(SWITCH, "1")
    yield
    ROOTS.stop()


class Module:
    """A module in a file, which notes each process that imports it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.log, self.file, self.name = folder / f"{name}.log", folder / f"{name}.py", name

    def write(self, body: str = "", version: int = 1) -> None:
        self.file.write_text(IMPORTED.format(body=body, log=str(self.log), version=version))

    def load(self) -> Any:
        sys.modules.pop(self.name, None)
        return __import__(self.name)

    def num_imports(self) -> int:
        """Return how many other processes have imported it."""
        pids = {int(line) for line in self.log.read_text().split()} if self.log.exists() else set()
        return len(pids - {os.getpid()})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Module]:
    name = "rooted_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Module(tmp_path, name)
    sys.modules.pop(name, None)


def once(data_class: Any, **options: Any) -> list[Any]:
    with make_loader(data_class, shuffle=False, validate=False, batch_size=4, **options) as loader:
        return list(loader)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=50, check=False)


def root_pid() -> int:
    root = ROOTS._current
    assert root is not None
    assert root._server is not None
    return root._server.pid


@pytest.mark.parametrize("is_of_script", [False, True])
def test_a_module_is_imported_once_for_all_loaders(is_of_script: bool, module: Module) -> None:
    module.write()
    data_class = module.load().Data
    if is_of_script:
        methods = f"__len__ = lambda self: 8; __getitem__ = lambda self, index: {module.name}.Data()[index]"
        exec(f"import {module.name}\nclass Data: {methods}", script := {"__name__": "__main__"})
        data_class = script["Data"]
    for _ in range(3):
        assert ids_of(once(data_class)) == list(range(8))
    assert module.num_imports() == 1


@pytest.mark.slow
def test_torch_is_imported_before_the_fork_if_the_dataset_s_library_may_need_it() -> None:
    library = pytest.importorskip("datasets")
    code = "def seen(_): import os; return 'libtorch' in open(f'/proc/{os.getppid()}/maps').read()"
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(code, script)
    for dataset, is_seen in ((range(8), False), (library.Dataset.from_dict({"x": range(8)}), True)):
        with SwiftLoader(dataset=dataset, worker_per_consumer=1, collate_fn=script["seen"]) as loader:
            assert set(loader) == {is_seen}


@pytest.mark.parametrize("thread", ["swift_loader-root", "swift_loader-starter"])
def test_a_thread_whose_start_is_interrupted_is_started_by_the_next_loader(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = LoaderThread.start

    def start_interrupted(self: LoaderThread) -> None:
        if self.name == thread:
            monkeypatch.setattr(LoaderThread, "start", start)
            raise KeyboardInterrupt
        start(self)

    monkeypatch.setattr(LoaderThread, "start", start_interrupted)
    with pytest.raises(KeyboardInterrupt):
        once(datasets.Counting)
    assert len(once(datasets.Counting)) == 25


def test_a_starter_whose_thread_has_failed_says_so_instead_of_letting_the_loop_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: starter.Starter) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(starter.Starter, "look_after", fail)
    with pytest.raises(ZeroDivisionError, match="planted"):
        once(datasets.Counting)


def test_a_root_that_is_stopped_while_it_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, real = threading.Event(), ServerLaunch.start

    def start(self: ServerLaunch, *descriptors: int) -> Any:
        begun.set()
        time.sleep(0.2)
        return real(self, *descriptors)

    monkeypatch.setattr(ServerLaunch, "start", start)
    before = set(os.listdir("/proc/self/fd"))
    ROOTS.warm(("operator",))
    assert begun.wait(HANG_S)
    ROOTS.stop()
    assert all(map(is_tracker, psutil.Process().children()))
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_processes_of_a_stage_have_torch_from_the_root() -> None:
    assert list(Pipeline(range(3)).map(operator.neg, on="process")) == [0, -1, -2]
    assert any("libtorch" in mapped.path for mapped in psutil.Process(root_pid()).memory_maps())


@pytest.mark.slow
def test_two_loaders_at_once_have_templates_of_their_own(module: Module) -> None:
    module.write()
    data_class = module.load().Data
    with make_loader(data_class, validate=False) as one, make_loader(data_class, validate=False) as other:
        parents = [set(next(iter(loader))["parent"].tolist()) for loader in (one, other)]
        assert {psutil.Process(pid).ppid() for pair in parents for pid in pair} == {root_pid()}
    assert parents[0].isdisjoint(parents[1])


@pytest.mark.slow
def test_a_script_s_own_classes_have_their_imports_in_the_root(module: Module) -> None:
    module.write()
    loaded = module.load()

    class Local(datasets.Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"id": index, "version": loaded.Data.VERSION}

    for _ in range(2):
        once(Local, kwargs={"num_samples": 8})
    assert module.num_imports() == 1


def test_a_module_that_was_edited_is_imported_anew(module: Module) -> None:
    module.write(version=1)
    assert once(module.load().Data)[0]["version"][0] == 1
    module.write(version=22)
    assert once(module.load().Data)[0]["version"][0] == 22
    assert module.num_imports() == 2


@pytest.mark.slow
def test_another_environment_has_another_root(module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module.write()
    data_class = module.load().Data
    once(data_class)
    before = root_pid()
    monkeypatch.setenv("MINE", "1")
    once(data_class)
    between = root_pid()
    monkeypatch.chdir(tmp_path)
    once(data_class)
    assert len({before, between, root_pid()}) == 3
    wait_until(lambda: not psutil.pid_exists(before), "the former root has ended")


@pytest.mark.slow
def test_a_former_root_stays_as_long_as_its_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_loader(datasets.Counting) as one:
        iterator = iter(one)
        batches = [next(iterator)]
        monkeypatch.setenv("MINE", "1")
        with make_loader(datasets.Counting) as other:
            next(iter(other))
        batches += list(iterator)
    monkeypatch.setenv(SWITCH, "0")
    with make_loader(datasets.Counting) as loader:
        assert ids_of(batches) == ids_of(loader)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        f"KEPT = open({__file__!r})",
    ],
    ids=["thread", "file"],
)
def test_a_module_that_a_root_can_not_have_is_left_to_the_loaders(body: str, module: Module) -> None:
    module.write(f"if os.getppid() == {os.getpid()} or os.getpid() != {os.getpid()}:\n    {body}")
    data_class = module.load().Data
    for number in (1, 2):
        with pytest.warns(SwiftLoaderWarning, match="importing its modules"):
            assert ids_of(once(data_class, workers=1)) == list(range(8))
        assert module.num_imports() == 1 + number  # one of the root that tried, one for each loader
    once(datasets.Counting)
    assert root_pid()


@pytest.mark.slow
@pytest.mark.parametrize("body", ["raise KeyError('planted')", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_an_import_that_fails_in_the_root_is_an_error_of_that_loader_alone(body: str, module: Module) -> None:
    module.write(f"if os.getpid() != {os.getpid()}:\n    {body}")
    data_class = module.load().Data
    with pytest.raises((WorkerDied, KeyError)):
        once(data_class)
    assert ids_of(once(datasets.Counting))


@pytest.mark.slow
def test_an_import_that_hangs_in_the_root_is_left_to_the_loader(
    module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(starter, "_IMPORT_LIMIT_S", 1.5)
    marker = tmp_path / "marker"
    hang = f"Path({str(marker)!r}).touch(); import signal; signal.pause()"
    module.write(f"if os.getpid() != {os.getpid()} and not Path({str(marker)!r}).exists():\n    {hang}")
    assert ids_of(once(module.load().Data)) == list(range(8))


@pytest.mark.slow
def test_a_root_that_is_killed_takes_its_templates_and_they_are_replaced() -> None:
    with make_loader(datasets.Counting, kwargs={"num_samples": 400}, data_queue_size=4) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        templates = [child.pid for child in psutil.Process(root_pid()).children()]
        os.kill(root_pid(), signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, templates)), "the templates have ended with their root")
        with pytest.warns(UserWarning, match="template"):
            batches += list(iterator)
    assert sorted(ids_of(batches)) == list(range(400))
    once(datasets.Counting)
    assert psutil.pid_exists(root_pid())


@pytest.mark.slow
def test_an_idle_root_that_is_killed_is_replaced_for_the_next_loader(module: Module) -> None:
    module.write()
    data_class = module.load().Data
    once(data_class)
    killed = root_pid()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: ROOTS._current is None or ROOTS._current.refusal is not None, "its end is noted")
    once(data_class)
    assert root_pid() != killed
    assert module.num_imports() == 2


@pytest.mark.slow
def test_a_fork_of_the_trainer_has_a_root_of_its_own(tmp_path: Path) -> None:
    script = """
import os
from swift_loader.executors.process.roots import ROOTS
from tests.support import datasets
from tests.support.helpers import ids_of, make_loader

def take():
    with make_loader(datasets.Counting) as loader:
        ids = ids_of(loader)
    return len(ids), ROOTS._current._server.pid

first = take()
pid = os.fork()
if pid == 0:
    second = take()
    os._exit(int(second[0] != 100 or second[1] == first[1]))
assert os.waitpid(pid, 0)[1] == 0
assert take() == first
print("done")
"""
    assert run_script(script, via="-c", folder=tmp_path) == "done\n"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)"])
def test_a_root_ends_with_the_trainer(end: str) -> None:
    script = f"""
import os
from swift_loader.executors.process.roots import ROOTS
from tests.support import datasets
from tests.support.helpers import make_loader
with make_loader(datasets.Counting) as loader:
    next(iter(loader))
print(ROOTS._current._server.pid, flush=True)
{end}
"""
    done = run("-W", "error", "-c", script)
    assert done.stderr == ""
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)), "the root has ended")


@pytest.mark.slow
def test_templates_of_a_root_draw_different_unseeded_numbers() -> None:
    class Drawing(datasets.Counting):
        def __init__(self) -> None:
            super().__init__(8)
            self.drawn = np.random.rand()

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"id": index, "drawn": self.drawn}

    drawn = [once(Drawing, rng=None)[0]["drawn"][0] for _ in range(2)]
    assert drawn[0] != drawn[1]


@pytest.mark.slow
def test_an_exit_code_comes_through_the_root() -> None:
    class Exiting(datasets.Counting):
        def __init__(self) -> None:
            os._exit(7)

    with pytest.raises(WorkerDied, match="exited with code 7"):
        once(Exiting)


def test_a_loader_that_is_closed_while_the_root_is_asked_leaves_no_request() -> None:
    once(datasets.Counting)
    root = ROOTS._current
    assert root is not None
    os.kill(root_pid(), signal.SIGSTOP)
    try:
        with make_loader(datasets.Counting) as loader:
            loader.prepare()
            wait_until(lambda: bool(root._asked), "the root is asked")
    finally:
        os.kill(root_pid(), signal.SIGCONT)
    wait_until(lambda: not root._asked, "the root has answered")
    once(datasets.Counting)
    assert ROOTS._current is root


def test_a_lack_of_descriptors_in_the_trainer_ends_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = channel.open_pidfd, list[int]()

    def fail(pid: int) -> int:
        if failed:
            return real(pid)
        failed.append(pid)
        raise NoDescriptorsLeft(errno.EMFILE, "planted")

    once(datasets.Counting)
    before = root_pid()
    monkeypatch.setattr(server, "open_pidfd", fail)
    assert len(once(datasets.Counting)) == 25
    assert failed
    assert root_pid() == before


class StartsAProcess(datasets.Counting):
    def __init__(self, log: str) -> None:
        super().__init__()
        with open(log, "a") as pids:
            pids.write(f"{subprocess.Popen(['sleep', '100']).pid}\n")


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_what_a_dataset_has_started_ends_with_the_loader_also_after_the_root_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "pids"
    with make_loader(StartsAProcess, kwargs={"log": str(log)}, validate=False) as loader:
        next(iterator := iter(loader))
        os.kill(root_pid(), signal.SIGKILL)
        list(iterator)
    wait_until(lambda: all(is_gone(int(pid)) for pid in log.read_text().split()), "the dataset's processes have ended")


class Named(datasets.OpensAFile):
    """Holds a file, so that it can't be shared, and what its constructor sees."""

    def __init__(self) -> None:
        super().__init__(40)
        self.name = multiprocessing.current_process().name

    def __getitem__(self, index: int) -> Any:
        return {"id": index, "name": self.name}


@pytest.mark.parametrize("method", ["template", "spawn"])
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_constructors_see_the_same_process_in_all_workers(method: str) -> None:
    names = {name for batch in once(Named, workers=3, start_method=method) for name in batch["name"]}
    assert names == {"MainProcess"}
