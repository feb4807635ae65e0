"""Every test must leave the process as it found it. Fixtures that tests in several folders need."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support.helpers import allowed_s

PHOTOS_PER_CLASS = 7

SWITCH = "SWIFT_LOADER_ROOT"

_GRACE_S = 10.0
"""A process or a thread that was told to end may still be on its way."""


def pytest_configure() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt`, as in a terminal: a shell has its jobs in the background ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hypothesis measures time on the wall: a machine that stalls for a moment would fail a test.
    settings.register_profile("no limits", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no limits")


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue
    return found


def _shared_memory_names() -> set[str]:
    """Return the names of segments; those of semaphores and of other programs come and go."""
    folder = Path("/dev/shm")
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if name.startswith("psm_") or "swift" in name or f"_{os.getpid()}_" in name}


def _alive_threads(threads: Iterable[threading.Thread]) -> list[threading.Thread]:
    """Return those that don't end by themselves in a moment.

    If the garbage collector closes a loader on one of the loader's own threads, that thread can't wait for itself.
    """
    deadline_s = time.monotonic() + allowed_s(_GRACE_S)
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a descriptor, a shared-memory name or a temporary file behind."""
    gc.collect()
    gc.freeze()  # what is here stays: the collection after the test needn't look at it
    threads = set(threading.enumerate())
    descriptors = _descriptors()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    shared_memory = _shared_memory_names()
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    # Off, because a root for each test's TMPDIR takes time, and most tests look at a loader's own processes. Tests of
    # the root switch it on; SWIFT_LOADER_ROOT=1 does so for all.
    monkeypatch.setenv(SWITCH, os.environ.get(SWITCH, "0"))
    yield
    gc.collect()
    roots = sys.modules.get("swift_loader.executors.process.roots")  # only Linux has it
    if roots is not None:
        roots.ROOTS.stop()  # it belongs to the process, not to a loader
    new_children = [child for child in psutil.Process().children(recursive=True) if child.pid not in children]
    _, alive = psutil.wait_procs(new_children, timeout=allowed_s(_GRACE_S))
    assert not alive, f"processes left behind: {alive}"
    left_threads = _alive_threads(set(threading.enumerate()) - threads)
    assert not left_threads, f"threads left behind: {left_threads}"
    opened = {entry: target for entry, target in _descriptors().items() if descriptors.get(entry) != target}
    assert not opened, f"descriptors left open: {opened}"
    named = _shared_memory_names() - shared_memory
    assert not named, f"shared memory left behind: {named}"
    files = [entry.name for entry in folder.iterdir()]
    assert not files, f"temporary files left behind: {files}"


@pytest.fixture(scope="session", autouse=True)
def torch_is_warm() -> None:
    """Have torch open what it opens once (files, threads), before a test is held to leave nothing behind."""
    import torch

    (torch.ones(2) + torch.rand(2)).sum().item()


@pytest.fixture
def compilers_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's compiler, which timm imports, also in workers, make the folder for its cache where it may stay."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "torchinductor"))


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
