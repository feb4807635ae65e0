from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from swift_loader.worker.fork_safety import ForkHazards

pytestmark = pytest.mark.processes


def now(*own: int) -> ForkHazards:
    return ForkHazards.now(own, [])


def test_what_was_opened_is_named(tmp_path: Path) -> None:
    before = now()
    with (tmp_path / "data").open("w") as file:
        text = now().beyond(before, "building it")
        assert text == f"building it opened descriptors {file.fileno()} ({tmp_path / 'data'})"
        assert now(file.fileno()).beyond(before, "building it") == ""
    assert now().beyond(before, "building it") == ""


def test_of_many_descriptors_some_are_named() -> None:
    before = now()
    opened = [os.memfd_create(f"number_{number}") for number in range(7)]
    text = now().beyond(before, "importing its modules")
    for descriptor in opened:
        os.close(descriptor)
    assert text.count("number_") == 5
    assert text.endswith(" and 2 more")


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero", "/dev/urandom"])
def test_devices_without_state_do_not_count(device: str) -> None:
    before = now()
    with open(device, "rb"):
        assert now().beyond(before, "building it") == ""


def test_a_thread_that_runs_counts_unless_it_is_the_loaders() -> None:
    before, go = now(), threading.Event()
    thread = threading.Thread(target=go.wait, args=(60,))
    thread.start()
    try:
        assert now().beyond(before, "building it") == "building it left 1 threads running"
        assert thread.native_id is not None
        assert ForkHazards.now([], [thread.native_id]).beyond(before, "building it") == ""
    finally:
        go.set()
        thread.join()
    assert ForkHazards.settled([], []).beyond(before, "building it") == ""


def test_the_thread_of_a_memory_allocator_does_not_count() -> None:
    before, go, ready = now(), threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("jemalloc_bg_thd")
        ready.set()
        go.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(60)
        assert now().beyond(before, "building it") == ""
    finally:
        go.set()
        thread.join()
