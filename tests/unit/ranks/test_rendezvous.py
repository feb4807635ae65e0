"""Ranks wait for each other in a store: two clients of one TCPStore stand for two ranks."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch import distributed

from swift_loader.ranks.rendezvous import Rendezvous

pytestmark = pytest.mark.processes


class OldStore:
    """A store of torch before 2.8, which has no clone()."""

    def __init__(self, store: Any) -> None:
        for name in ("add", "check", "get", "set", "wait"):
            setattr(self, name, getattr(store, name))
        self.timeout = store.timeout


def connect(limit_s: float) -> tuple[Any, Any]:
    """Return the stores of two ranks."""
    store_class: Any = distributed.TCPStore  # type: ignore[attr-defined]
    limit = timedelta(seconds=limit_s)
    master = store_class("127.0.0.1", 0, None, True, limit, False)
    return master, store_class("127.0.0.1", master.port, None, False, limit, False)


@pytest.fixture(scope="module", autouse=True)
def stores_are_warm() -> None:
    """Have torch open what it opens once."""
    connect(30)


def join(store: Any, process: int) -> Rendezvous:
    return Rendezvous(store, process, range(2), {"process": process})


@pytest.mark.parametrize("kind", [lambda store: store, OldStore], ids=["with clone", "without"])
def test_ranks_get_the_facts_of_all_however_late_one_comes(kind: Any) -> None:
    stores = connect(30)
    expected = [{"process": 0}, {"process": 1}]
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            early = pool.submit(join(kind(stores[0]), 0).gather)
            assert join(kind(stores[1]), 1).gather() == expected
            assert early.result(10) == expected


def test_a_rank_that_is_late_is_named_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    here, _ = connect(1.0)
    with (
        pytest.warns(UserWarning, match=r"rank 1 hasn't: all ranks must .* It keeps waiting, up to 1 s in all"),
        pytest.raises(RuntimeError, match=r"but rank 1 hasn't within 1 s: all ranks must .* nb_consumer=1"),
    ):
        join(here, 0).gather()
    printed = capfd.readouterr()
    lines = [line for line in printed.err.splitlines() if "poolFD failed" not in line]  # torch 2.3 prints that
    assert (printed.out, lines) == ("", [])  # torch logs a wait that times out


def test_ranks_of_an_earlier_start_in_the_store_end_in_an_error_that_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores = connect(1.0)
    join(stores[0], 0)  # and dies, before the other one comes
    restarted = [join(stores[0], 0), join(stores[1], 1)]
    with (
        pytest.warns(UserWarning, match="rank 1 hasn't"),
        pytest.raises(RuntimeError, match=r"rank 1 hasn't within 1 s: .* TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    ):
        restarted[0].gather()


def gather_and_press_ctrl_c(rendezvous: Rendezvous) -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    rendezvous.gather()


@pytest.mark.parametrize("kind", [lambda store: store, OldStore], ids=["with clone", "without"])
def test_ctrl_c_ends_the_wait_at_once_and_that_of_the_other_ranks(kind: Any) -> None:
    stores = connect(300)
    rendezvous = join(kind(stores[0]), 0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if the tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            gather_and_press_ctrl_c(rendezvous)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(RuntimeError, match="rank 0 stopped waiting before all ranks had started their loaders"):
        join(kind(stores[1]), 1).gather()


class LostStore(OldStore):
    """A store that fails whoever waits."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.wait = self.fail
        self.check = store.check

    def fail(self, *_: object) -> None:
        self.check = self.fail
        raise RuntimeError("the connection is lost")


def test_a_rank_whose_wait_fails_ends_that_of_the_others() -> None:
    stores = connect(30)
    with pytest.raises(RuntimeError, match="the connection is lost"):
        join(LostStore(stores[1]), 1).gather()
    with pytest.raises(RuntimeError, match="rank 1 stopped waiting before all ranks had started their loaders"):
        join(stores[0], 0).gather()


class TellingStore(OldStore):
    """A store that tells when it waits."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.waits = threading.Event()
        self.wait = self.tell_and_wait
        self.own_wait = store.wait

    def tell_and_wait(self, *arguments: Any) -> None:
        self.waits.set()
        self.own_wait(*arguments)


def test_a_store_that_is_gone_ends_the_wait_with_its_error() -> None:
    master, here = connect(30)
    store = TellingStore(here)
    rendezvous = join(store, 1)
    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        waiting = pool.submit(rendezvous.gather)
        assert store.waits.wait(50)
        del master
        with pytest.raises(RuntimeError):
            waiting.result(50)
