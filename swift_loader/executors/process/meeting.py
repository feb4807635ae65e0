"""Finds the template that the ranks of a node share, or starts it.

There is no leader. Whoever binds the name of the meeting starts a keeper, and passes it the listening socket. All ranks
connect to the name, that one included. When the keeper ends, the kernel frees the name, and the ranks try again.

    bind ──free──► start a keeper ──┐
      └───taken───► connect ◄───────┘ ──FORKED──► join        the connection ends: begin again
"""

from __future__ import annotations

import errno
import socket
import time

from swift_loader.executors.process.event_loop_thread import EventLoopThread
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.launch import Launch
from swift_loader.executors.process.shared_template import SharedTemplate
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import explaining_limits
from swift_loader.transport.local_sockets import new_local_socket, peer_of

__all__ = ["MeetingPoint", "NotShared"]

_ANSWER_LIMIT_S = 60.0
"""How long a keeper may take to answer. It answers as soon as its interpreter runs."""

_MAX_TRIES = 8
"""How many keepers may end before one answers."""

_PAUSE_S = 0.002
"""Far longer than the time between bind(2) and listen(2)."""

_BACKLOG = 4096
"""How many ranks may wait for the keeper's interpreter. The kernel may allow fewer."""


class NotShared(Exception):
    """The ranks can't share a template, for this reason."""


class MeetingPoint:
    """The place where the ranks with one dataset meet. Supervisor's thread."""

    def __init__(self, launch: Launch, name: bytes) -> None:
        """Connect to nobody yet.

        Args:
            launch: Starts a keeper. Belongs to the caller.
            name: The address of an abstract socket.
        """
        self._launch = launch
        self._name = name

    def join(self, thread: EventLoopThread) -> SharedTemplate:
        """Return the template. It answers, and knows nothing of this rank yet.

        Raises:
            NotShared: The ranks can't share one, or nobody answers.
            Stopped: The thread is being stopped.
        """
        for _ in range(_MAX_TRIES):
            shared = SharedTemplate(Channel(self._connect(thread)))
            try:
                self._await_answer(shared, thread)
            except BaseException:
                shared.leave()
                raise
            if shared.is_known:
                return shared
            shared.leave()
        raise NotShared(f"{_MAX_TRIES} processes that were to keep it have ended")

    def _connect(self, thread: EventLoopThread) -> socket.socket:
        """Return a connection to the keeper. Start one if there is none."""
        deadline_s = time.monotonic() + _ANSWER_LIMIT_S
        while time.monotonic() < deadline_s:
            self._start_keeper()
            connection = self._try_to_connect()
            if connection is not None:
                return connection
            thread.run_until(lambda: False, _PAUSE_S)  # nothing tells when the one that has bound the name listens
        raise NotShared(f"the process that has taken the name hasn't listened within {_ANSWER_LIMIT_S:g} s")

    def _start_keeper(self) -> None:
        """Start a keeper, if the name is free."""
        with FORKS.starting, explaining_limits():  # a fork would keep the name taken
            listener = new_local_socket()
            try:
                listener.bind(self._name)
                listener.listen(_BACKLOG)
                self._launch.start_keeper(listener.fileno())
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            finally:
                listener.close()

    def _try_to_connect(self) -> socket.socket | None:
        """Return a connection to the keeper. None if nobody listens."""
        connection = new_local_socket()
        connection.setblocking(False)
        try:
            connection.connect(self._name)
            peer = peer_of(connection)
            if not peer.is_same_user:
                raise NotShared(f"a process of another user (uid {peer.uid}) has taken the name where the ranks meet")
        except ConnectionRefusedError:
            connection.close()
            return None
        except OSError as error:
            connection.close()
            raise NotShared(f"connecting to the other ranks failed: {error}") from error
        except BaseException:
            connection.close()
            raise
        connection.setblocking(True)
        return connection

    def _await_answer(self, shared: SharedTemplate, thread: EventLoopThread) -> None:
        thread.loop.watch(shared.fileno(), shared.take_in)
        try:
            done = thread.run_until(lambda: shared.is_known or shared.is_gone or bool(shared.refusal), _ANSWER_LIMIT_S)
        finally:
            thread.loop.unwatch(shared.fileno())
        if shared.refusal:
            raise NotShared(shared.refusal)
        if not done:
            raise NotShared(f"the process that keeps the template hasn't answered within {_ANSWER_LIMIT_S:g} s")

    def __repr__(self) -> str:
        return f"<MeetingPoint {self._name[1:].decode()}>"
