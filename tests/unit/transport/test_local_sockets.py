"""Sockets at which unrelated processes find each other."""

from __future__ import annotations

import os

import pytest

from swift_loader.transport.local_sockets import Peer, new_local_socket, peer_of


def test_both_sides_know_who_is_at_the_other_end() -> None:
    with new_local_socket() as listener, new_local_socket() as ours:
        listener.bind("")
        listener.listen(1)
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
        with theirs:
            for end in (ours, theirs):
                assert peer_of(end) == Peer(os.getpid(), os.geteuid())
                assert peer_of(end).is_same_user


@pytest.mark.parametrize("difference", [1, -1])
def test_another_user_is_told_apart(difference: int) -> None:
    assert not Peer(os.getpid(), os.geteuid() + difference).is_same_user
