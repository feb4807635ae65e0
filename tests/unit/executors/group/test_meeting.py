"""How the rank that loads accepts the others. This process is both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from swift_loader.executors.group import meeting
from swift_loader.executors.group.meeting import Listener
from swift_loader.ranks.group import Group, Member, Offer
from swift_loader.transport.local_sockets import new_local_socket
from tests.support.helpers import allowed_s


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener.open()
    assert made is not None
    yield made
    made.close()


@pytest.fixture
def other(listener: Listener) -> Iterator[socket.socket]:
    connection = new_local_socket()
    connection.settimeout(allowed_s(10))
    connection.connect(bytes.fromhex(listener.offer.address))
    yield connection
    connection.close()


def group_with(listener: Listener, pid: int) -> Group:
    """Return rank 0, which listens, and rank 1 with this process id."""
    return Group((Member(0, listener.offer), Member(1, Offer(listener.offer.node, pid, ""))), 0)


def test_a_rank_of_the_group_is_accepted(listener: Listener, other: socket.socket) -> None:
    met = listener.meet(group_with(listener, os.getpid()))
    met.channels[1].send(b"hello")
    assert other.recv(16) == b"hello"
    met.close()


def test_a_process_that_is_no_rank_of_the_group_is_turned_away(listener: Listener, other: socket.socket) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as rank:  # which ends, so that nobody waits for it
        met = listener.meet(group_with(listener, rank.pid))
    assert not met.channels
    assert other.recv(16) == b""


def test_a_connection_that_cannot_be_used_is_closed(
    listener: Listener, other: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(connection: socket.socket) -> Any:
        kept.append(connection)
        raise OSError("the kernel doesn't tell")

    kept: list[socket.socket] = []
    monkeypatch.setattr(meeting, "peer_of", fail)
    with pytest.raises(OSError, match="doesn't tell"):
        listener.meet(group_with(listener, os.getpid()))
    assert kept[0].fileno() < 0
    assert other.recv(16) == b""
