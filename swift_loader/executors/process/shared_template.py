"""This rank's part in the template that the ranks of its node share.

It is a connection to the template's keeper (`swift_loader.worker.keeper`), which tells how the template ends. The end
of the connection is how the keeper learns that the rank has left. Until then, the template lives.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

from swift_loader.errors import ProtocolError
from swift_loader.executors.process.forks import FORKS
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import duplicate
from swift_loader.transport.frames import Kind, Received, unpack_frame
from swift_loader.transport.root_messages import Refused
from swift_loader.transport.sharing_messages import Join
from swift_loader.transport.template_messages import Exited, Forked

__all__ = ["SharedTemplate"]

_LEAVE_LIMIT_S = 2.2
"""How long the last rank waits for the template's end."""


class SharedTemplate:
    """A shared template, as a process that serves this rank. See `ChildProcess`."""

    def __init__(self, connection: Channel) -> None:
        """Own a connection to the keeper."""
        self.greeting: tuple[bytes, int] | None = None
        """The first message to the template, and the descriptor that goes with it."""
        self.pid = -1
        """Known once the keeper has answered."""
        self.pidfd = -1
        self.returncode: int | None = None
        """Its exit code, once the keeper has said so."""
        self.refusal = ""
        """Why each rank needs a template of its own; empty if it doesn't."""
        self.is_gone = False
        """Whether the keeper is gone."""
        self._connection = connection
        self._has_joined = False
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 once closed."""
        return [self.pidfd, self._connection.fileno()]

    def fileno(self) -> int:
        """Return the descriptor that is readable when the keeper has sent something."""
        return self._connection.fileno()

    @property
    def is_known(self) -> bool:
        """Whether the keeper has answered."""
        return self.pid > 0

    def take_in(self) -> None:
        """Read all messages of the keeper."""
        try:
            while (received := self._connection.receive(wait=False)) is not None:
                self._note(received)
        except BlockingIOError:
            return
        except (ProtocolError, OSError):  # an unknown keeper, such as one of another version
            pass
        self.is_gone = True

    def _note(self, received: Received) -> None:
        frame = unpack_frame(received.data)
        if frame.kind is Kind.FORKED:
            self.pid, (self.pidfd,) = Forked.unpack(frame).pid, received.descriptors
        elif frame.kind is Kind.REFUSED:
            self.refusal = Refused.unpack(frame).reason
        elif frame.kind is Kind.EXITED:
            self.returncode = Exited.unpack(frame).exit_code
        else:
            raise ProtocolError(f"a keeper sent an unexpected message: {frame.kind.name}")

    def start(self, channel: int, traces: int, stderr: int) -> SharedTemplate:
        """Join: have the template serve the channel. It gets copies of the descriptors."""
        stdout = 1 if sys.__stdout__ is not None else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is noted later
                self._connection.send(Join().pack(), (channel, traces, stderr, stdout))
        finally:
            if stdout != 1:
                os.close(stdout)
        self._has_joined = True
        return self

    def open_pidfd(self) -> int:
        """Return a new pidfd of the template, which the caller owns."""
        return duplicate(self.pidfd)

    def wait(self, timeout: float | None = None) -> int:
        """See `ChildProcess`."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        while self.returncode is None and not self.is_gone:
            poll.register(self._connection.fileno(), select.POLLIN)
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not poll.poll(None if left_s is None else left_s * 1000):
                break
            self.take_in()
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a shared template", timeout or 0.0)
        return self.returncode

    def begin_to_leave(self) -> None:
        """Tell the keeper that this rank leaves. Idempotent and thread-safe."""
        self._connection.end_sending()

    def wait_left(self) -> None:
        """Block until the keeper has let this rank go, and if it was the last one, until the template has ended."""
        poll, descriptor = select.poll(), self._connection.fileno()
        if descriptor >= 0:
            poll.register(descriptor, 0)  # POLLHUP
            poll.poll(_LEAVE_LIMIT_S * 1000)

    def close(self) -> None:
        """Leave, unless the template has been started: then `leave` does."""
        if not self._has_joined:
            self.leave()

    def leave(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()
        if self.pidfd >= 0:
            pidfd, self.pidfd = self.pidfd, -1  # first, see `Holder`
            os.close(pidfd)

    def __repr__(self) -> str:
        return f"<SharedTemplate pid {self.pid}{', gone' if self.is_gone else ''}>"
