from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from swift_loader.executors.thread import draws
from swift_loader.executors.thread.draws import DrawWatch
from swift_loader.executors.thread.inbox import Mailbox, ThreadInbox
from swift_loader.scheduler.events import Event
from swift_loader.worker.generators import preserved_generators
from tests.support.helpers import wait_until


def draw_all() -> None:
    random.random()
    np.random.rand()
    torch.rand(1)


@contextmanager
def blocked(inbox: ThreadInbox[Event]) -> Iterator[None]:
    """Let the loop's thread block in the inbox."""
    loop = threading.Thread(target=inbox.wait)
    loop.start()
    wait_until(lambda: inbox.num_moves % 2 == 1, "the loop blocks")
    try:
        yield
    finally:
        inbox.wake()
        loop.join()
        inbox.sleep()


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (random.random, "random"),
        (np.random.rand, "numpy.random"),
        (lambda: torch.rand(1), "torch's default generator"),
        (draw_all, "random and numpy.random and torch's default generator"),
    ],
)
def test_a_draw_is_told_once_with_the_generators(draw: Callable[[], object], named: str) -> None:
    inbox, notes = Mailbox[Event]().of_loop, list[str]()
    watch = DrawWatch(inbox, notes.append)
    with preserved_generators(), blocked(inbox):
        for _ in range(2):
            with watch.watching():
                draw()
    (note,) = notes
    assert f"draws from {named}. " in note
    assert "sample_rng()" in note
    assert "worker_type='process'" in note


def test_what_draws_nothing_is_not_told() -> None:
    inbox, notes = Mailbox[Event]().of_loop, list[str]()
    watch = DrawWatch(inbox, notes.append)
    with blocked(inbox), watch.watching():
        np.random.default_rng().random()
    assert notes == []


def test_a_draw_while_the_loop_runs_may_be_its_own_and_is_not_told() -> None:
    inbox, notes = Mailbox[Event]().of_loop, list[str]()
    watch = DrawWatch(inbox, notes.append)
    with preserved_generators(), watch.watching():
        random.random()
    with preserved_generators(), blocked(inbox), watch.watching():
        random.random()
        inbox.wake()
        wait_until(lambda: inbox.num_moves % 2 == 0, "the loop runs again")
    assert notes == []


def test_the_first_batch_waits_for_the_loop_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        with watch.watching():
            random.random()

    inbox, notes = Mailbox[Event]().of_loop, list[str]()
    watch = DrawWatch(inbox, notes.append)
    monkeypatch.setattr(draws, "FIRST_WAIT_S", 60)
    worker = threading.Thread(target=build)
    worker.start()
    with preserved_generators(), blocked(inbox):
        worker.join()
    assert len(notes) == 1
    watch = DrawWatch(Mailbox[Event]().of_loop, notes.append)
    monkeypatch.setattr(draws, "FIRST_WAIT_S", 0)
    with preserved_generators():
        build()
    assert len(notes) == 1


def test_watching_changes_no_generator() -> None:
    before = random.getstate(), torch.get_rng_state()
    inbox = Mailbox[Event]().of_loop
    watch = DrawWatch(inbox, lambda _: None)
    with blocked(inbox), watch.watching():
        pass
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
