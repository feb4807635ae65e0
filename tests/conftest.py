"""Every test must leave the process as it found it. Fixtures that tests in several folders need."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.util import get_temp_dir
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support.helpers import HANG_S, START_METHOD, STARTED_BY_TORCH, wait_until

PHOTOS_PER_CLASS = 7

SYSTEM = Path(__file__).parent / "system"


def pytest_configure() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt`, as in a terminal: a shell has its jobs in the background ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Each run has the same examples, and no limit on the wall: a machine may stall for a moment.
    settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the whole system: their loaders have processes, threads and shared memory."""
    for item in items:
        if item.path.is_relative_to(SYSTEM):
            item.add_marker("processes")


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a folder for temporary files that only this process and its children use.

    It is the same for all tests: TMPDIR is part of the environment, and another environment needs another root process.
    """
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        # Of torch's compiler, which timm imports, also in workers. It stays.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "torchinductor"))
        if STARTED_BY_TORCH:
            get_temp_dir()  # multiprocessing has one folder in a program, until its end
        yield folder


@pytest.fixture(scope="session", autouse=True)
def torch_is_warm() -> None:
    """Have torch open what it opens once (files, threads), before a test is held to leave nothing behind."""
    import torch

    (torch.ones(2) + torch.rand(2)).sum().item()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, temporary_folder: Path) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a descriptor, a shared-memory name or a temporary file behind.

    Only tests marked `processes` are looked at. The root process stays from test to test, as it does in a program.
    """
    if request.node.get_closest_marker("processes") is None:
        yield
        return
    gc.collect()
    gc.freeze()  # what is here stays: the collection after the test needn't look at it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a test may have killed it
        resource_tracker.ensure_running()
    root = _current_root() if request.node.get_closest_marker("own_root") else _started_root()
    before = _belongings(temporary_folder)
    yield
    gc.collect()
    if root is not _current_root():  # another environment had another one; the next test has that of before again
        _stop_roots()
    left: set[tuple[str, str]] = set()

    def is_all_gone() -> bool:
        """Some things end a moment later: a process that was told to, a thread that closed its own loader."""
        left.clear()
        left.update(_belongings(temporary_folder) - before)
        return not left

    try:
        wait_until(is_all_gone, "the end of all that the test has started", HANG_S)
    except AssertionError:
        pytest.fail(f"left behind: {sorted(left)}")
    finally:
        for kind, name in left:  # the next test isn't to blame for it
            if kind == "temporary file":
                path = temporary_folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _belongings(folder: Path) -> set[tuple[str, str]]:
    """Return what this process has, each with its kind. Other programs have shared memory, too: it isn't looked at."""
    children = psutil.Process().children(recursive=True)
    found = {("process", f"{child.pid}, started {child.create_time()}") for child in children}
    found |= {("thread", f"{thread.name} {thread.ident}") for thread in threading.enumerate()}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of listdir itself
            found.add(("descriptor", f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}"))
    shared_memory = Path("/dev/shm")
    names = [entry.name for entry in shared_memory.iterdir()] if shared_memory.is_dir() else []
    found |= {("shared memory", name) for name in names if f"_{os.getpid()}_" in name}
    return found | {("temporary file", entry.name) for entry in folder.iterdir()}


def _started_root() -> object:
    """Return the root of this process. Start it if there is none, and wait until its descriptors are open."""
    if START_METHOD == "template" and not STARTED_BY_TORCH and _current_root() is None:
        from swift_loader.executors.process.roots import ROOTS

        ROOTS.warm(("torch",))
        if (root := ROOTS._current) is not None:
            with suppress(Exception):  # it may have refused
                root.call(lambda: None).result()  # after what was asked
            wait_until(lambda: not root._asked or root.refusal is not None, "the root has imported torch")
    return _current_root()


def _current_root() -> object:
    roots = sys.modules.get("swift_loader.executors.process.roots")
    return None if roots is None else roots.ROOTS._current


def _stop_roots() -> None:
    from swift_loader.executors.process.roots import ROOTS

    ROOTS.stop()


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs in threads until the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 14 JPEG files, of several sizes, in two classes."""
    image_module = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for index in range(2 * PHOTOS_PER_CLASS):
        path = folder / f"class{index % 2}" / f"{index}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse = image_module.fromarray(generator.integers(0, 256, (6, 8, 3), np.uint8))
        coarse.resize((60 + 5 * index, 90 - 3 * index)).save(path, quality=90)
    return folder
