"""A template that was forked from the root, before it knows which loader it serves."""

from __future__ import annotations

import contextlib
import subprocess
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from swift_loader.executors.process.forks import FORKS
from swift_loader.transport.channel import Channel
from swift_loader.transport.template_messages import Fork


class BlankTemplate:
    """A fork of the root. It waits for its descriptors; see `ChildProcess` for the process that it is then."""

    def __init__(self, channel: Channel) -> None:
        self.pid = -1
        """Known once the root has forked."""
        self.exited: Future[int] = Future()
        """The exit code. It stays pending if the root ends first."""
        self._channel = channel
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns; -1 once closed."""
        return [self._channel.fileno()]

    def start(self, channel: int, traces: int, stderr: int) -> BlankTemplate:
        """Make it a template, which gets copies of the descriptors. If it is gone, the trainer notices that later."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(Fork(0, in_place=True).pack(), (channel, traces, stderr))
        self.close()
        return self

    def close(self) -> None:
        """Let it exit, unless it was started. Idempotent."""
        self._channel.close()

    @property
    def returncode(self) -> int | None:
        """The exit code, if it has ended and the root has said so."""
        return self.exited.result() if self.exited.done() else None

    def wait(self, timeout: float | None = None) -> int:
        """See `ChildProcess`."""
        try:
            return self.exited.result(timeout)
        except FutureTimeoutError:
            raise subprocess.TimeoutExpired("a fork of the root", timeout or 0.0) from None

    def __repr__(self) -> str:
        return f"<BlankTemplate pid {self.pid}>"


def discard(answer: Future[BlankTemplate]) -> None:
    """Let a fork exit that nobody waits for any more."""
    if answer.exception() is None:
        answer.result().close()
