"""Unix sockets at which unrelated processes of one machine find each other. Linux only.

Abstract sockets have no owner and no permissions: any process in the same network namespace may connect, or take a
name. So both sides ask the kernel who is at the other end, and before they read anything.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

from swift_loader.transport.descriptors import avoid_std_streams, explaining_limits

__all__ = ["Peer", "new_local_socket", "peer_of"]

_CREDENTIALS = struct.Struct("3i")
"""struct ucred from <sys/socket.h>: pid, uid, gid."""


class Peer(NamedTuple):
    """The process at the other end of a connection, as of when it connected, or began to listen."""

    pid: int
    uid: int
    """The effective user."""

    @property
    def is_same_user(self) -> bool:
        """Whether it has the user of this process."""
        return self.uid == os.geteuid()


def new_local_socket() -> socket.socket:
    """Return a new socket that keeps message boundaries.

    Raises:
        NoDescriptorsLeft: This process has no file descriptors left.
    """
    with explaining_limits():
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, avoid_std_streams(made.detach()))


def peer_of(connection: socket.socket) -> Peer:
    """Return who is at the other end of a connected socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return Peer(pid, uid)
