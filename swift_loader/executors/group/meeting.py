"""How ranks of one node meet: each listens, says where, and those that share batches connect to the one that loads.

A rank listens at an abstract Unix socket with a name that the kernel chooses. It listens before it says where, so a
connection succeeds at once, whenever the other rank accepts it. Only processes of the same user are accepted.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from swift_loader.errors import RankDied
from swift_loader.ranks.group import Group, Offer
from swift_loader.ranks.node import this_node
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import explaining_limits, open_pidfd
from swift_loader.transport.local_sockets import new_local_socket, peer_of

__all__ = ["Listener", "ConnectedGroup"]

_MEETING_LIMIT_S = 30.0
"""The ranks connect as soon as they have agreed. One that is stopped just then is waited for so long."""

_BACKLOG = 256


@dataclass(frozen=True, slots=True)
class ConnectedGroup:
    """The ranks of a group, once they are connected."""

    group: Group
    channels: Mapping[int, Channel]
    """By rank: of the rank that loads, to each other; of another rank, to the one that loads."""

    def close(self) -> None:
        """Close all channels. Idempotent."""
        for channel in self.channels.values():
            channel.close()


class Listener:
    """Where a rank can be found by those that need the same data."""

    def __init__(self, node: bytes) -> None:
        """Listen."""
        self._socket = new_local_socket()
        try:
            self._socket.bind("")  # the kernel chooses an abstract name
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self.offer = Offer(node.hex(), os.getpid(), self._socket.getsockname().hex())
        """What this rank says to the others."""

    @classmethod
    def open(cls) -> Listener | None:
        """Return a listener; None if this system has no such sockets."""
        node = this_node()
        return None if node is None else cls(node)

    def meet(self, group: Group) -> ConnectedGroup:
        """Connect with the others. The rank that loads waits for them; those that have ended are left out.

        Raises:
            RankDied: The rank that loads has ended.
        """
        channels = self._accept_all(group) if group.is_leader else {group.leader.process: _connect(group)}
        return ConnectedGroup(group, channels)

    def _accept_all(self, group: Group) -> dict[int, Channel]:
        missing = {member.offer.pid: member.process for member in group.followers}
        channels: dict[int, Channel] = {}
        pidfds = {}
        deadline_s = time.monotonic() + _MEETING_LIMIT_S
        poll = select.poll()
        try:
            for pid in missing:
                try:
                    pidfds[open_pidfd(pid)] = pid
                except ProcessLookupError:
                    continue
            for descriptor in (self._socket.fileno(), *pidfds):
                poll.register(descriptor, select.POLLIN)
            while missing and (ready := poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)):
                for descriptor, _ in ready:
                    if descriptor in pidfds:
                        poll.unregister(descriptor)
                        missing.pop(pidfds[descriptor], None)
                    else:
                        self._accept(missing, channels)
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        finally:
            for descriptor in pidfds:
                os.close(descriptor)
        return channels

    def _accept(self, missing: dict[int, int], channels: dict[int, Channel]) -> None:
        with explaining_limits():
            connection, _ = self._socket.accept()
        with connection:  # closes it, unless a channel owns it
            peer = peer_of(connection)
            if peer.is_same_user and peer.pid in missing:
                channels[missing.pop(peer.pid)] = _channel(connection)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()

    def __repr__(self) -> str:
        return f"<Listener at {self.offer.address}>"


def _connect(group: Group) -> Channel:
    """Return a channel to the rank of a group that loads."""
    leader = group.leader
    connection = new_local_socket()
    try:
        connection.connect(bytes.fromhex(leader.offer.address))
        peer = peer_of(connection)
    except OSError as error:
        connection.close()
        raise RankDied(
            f"rank {leader.process} (pid {leader.offer.pid}), which loads the batches of rank {group.process}, has "
            f"ended while the ranks started"
        ) from error
    if not peer.is_same_user or peer.pid != leader.offer.pid:
        connection.close()
        raise RankDied(
            f"process {peer.pid} of user {peer.uid} is where rank {leader.process} (pid {leader.offer.pid}) should be, "
            f"which loads the batches of rank {group.process}"
        )
    return _channel(connection)


def _channel(connection: socket.socket) -> Channel:
    connection.setblocking(False)
    return Channel.from_descriptor(connection.detach())
