"""The trainer's handles on processes that serve over a channel: workers, templates and roots.

`swift_loader.worker.template` and `worker.root` are the other side.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from swift_loader.errors import NoDescriptorsLeft, ProtocolError
from swift_loader.executors.fleet import EXIT_LIMIT_S
from swift_loader.executors.handle import COUNTERS
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.loop_thread import LoopThread
from swift_loader.runtime import blocked, explaining_starts, handled_signals
from swift_loader.transport.channel import Channel, new_eventfd, open_pidfd, out_of_descriptors_error
from swift_loader.transport.messages import Exited, Fork, Forked, unpack
from swift_loader.transport.segments import Segment, read_word
from swift_loader.worker.process import end_group


class Launcher(Protocol):
    """Starts a process as a child of this one."""

    def start(self, channel: int, traces: int, stderr: int) -> Any:
        """Start it. It gets copies of the descriptors. Returns what has a `subprocess.Popen`'s `pid`, `returncode` and
        `wait`, which is called once it has ended.
        """


class Process:
    """A process with a channel, a pidfd, and pipes for its stderr and stacks. Any thread may use it.

    This process starts it, or a server forks it on request: then the server tells that it exists, and how it ended.

        NEW ──start, or Server.fork──► RUNNING ──► ended ──close──► CLOSED
    """

    def __init__(self, waiter: LoopThread, serial: int = -1) -> None:
        """Start nothing. `waiter`: the thread that waits for it; it is woken whenever something here has changed."""
        self.serial = serial
        """The number that it has as a worker; -1: it is none yet."""
        self.pid = 0
        """0 until it runs."""
        self.pidfd = -1
        """Owned by this object; -1 before it runs and once closed. Readable once the process has ended."""
        self.exit_code: int | None = None
        """Known once it was reaped, here or by the server that forked it, or the loader has ended it."""
        self.is_refused = False
        """Whether the server that was asked for it doesn't fork it."""
        self.template: Server | None = None
        """The template whose fork it is; None: it is none."""
        self._waiter: LoopThread | None = waiter
        self._child: Any = None
        self._is_closed = False
        self._lock = threading.RLock()
        """Held while its ends go to the process, so that nobody closes them meanwhile."""
        self.diagnostics = Diagnostics()
        try:
            self.channel, theirs = Channel.pair()
        except BaseException:
            self.diagnostics.close()
            raise
        self._theirs = theirs.detach()
        """The process's end of the channel; -1 once closed here."""
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of its diagnostics; -1 for those that are closed."""
        return [self.pidfd, self.channel.fileno(), self._theirs]

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self, launcher: Launcher) -> None:
        """Start it as a child of this process, on the thread that is to live as long: the kernel kills it then."""
        # Until the process has its own handlers, what the program handles, as Ctrl-C, is blocked.
        with blocked({signal.SIGINT, *handled_signals()}), FORKS.starting, explaining_starts("a process"):
            self.hand_over(partial(self._start, launcher))
        self._note_pid(self._child.pid)

    def _start(self, launcher: Launcher, *ends: int) -> None:
        self._child = launcher.start(*ends)

    def hand_over(self, give: Callable[..., object]) -> bool:
        """Give its ends of the channel and the pipes to the process, and close them here. Return False once closed."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                stderr, traces = self.diagnostics.their_ends
                give(self._theirs, traces, stderr)
            finally:
                self._close_their_ends()
        return True

    def _close_their_ends(self) -> None:
        theirs, self._theirs = self._theirs, -1  # before it is closed, see `Holder`
        if theirs >= 0:
            os.close(theirs)
        self.diagnostics.close_their_ends()

    def note_forked(self, pid: int, descriptors: list[int]) -> None:
        """Note that its server has forked it. The pidfd may have come with that."""
        try:
            self._note_pid(pid, *descriptors)
        except NoDescriptorsLeft:  # it ends, because nobody has the other end of its channel
            self.refuse()
        self._wake()

    def _note_pid(self, pid: int, pidfd: int = -1) -> None:
        with self._lock:
            if self._is_closed:  # meanwhile; it ends, see above
                if pidfd >= 0:
                    os.close(pidfd)
                return
            try:
                self.pidfd = pidfd if pidfd >= 0 else open_pidfd(pid)
            except ProcessLookupError:  # it has ended and was reaped; or at once, if the trainer ignores SIGCHLD
                self.pidfd = new_eventfd(1)  # readable, like the pidfd of a process that has ended
            self.pid = pid  # last: who waits for it looks at this

    def refuse(self) -> None:
        """Note that no server forks it."""
        self.is_refused = True
        self._wake()

    def _wake(self) -> None:
        if (waiter := self._waiter) is not None:
            with suppress(OSError):  # the thread is being closed
                waiter.wake()

    # Running ----------------------------------------------------------------------------------------------------------

    def attach(self, slot: int | None, nbytes: int, descriptors: list[int]) -> Segment:
        """Map memory that it announced: of a slot, or `COUNTERS`. The descriptors came with the message."""
        what = "a page of counters" if slot is COUNTERS else "a segment"
        return Segment.attach(_only(descriptors, what), nbytes)

    def num_fetched(self, length_address: int) -> int | None:
        """Return the number of samples fetched for its batch, from its memory; None if the kernel doesn't allow."""
        return read_word(self.pid, length_address)

    def ask_for_stacks(self, *, by_force: bool = False) -> str:
        """Return the Python stacks of all its threads, or why there are none. See `Diagnostics.ask_for_stacks`."""
        return self.diagnostics.ask_for_stacks(self.pid, self.pidfd, by_force=by_force)

    # Its end ----------------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or doesn't run yet."""
        return self.pidfd < 0 or is_readable(self.pidfd)

    def wait_end(self, limit_s: float | None) -> bool:
        """Wait until the process has ended. Return False if that takes longer."""
        with suppress(ProcessLookupError):  # it has ended since
            if not self.has_ended:
                try:
                    pidfd = open_pidfd(self.pid)  # `self.pidfd` may be closed meanwhile
                except NoDescriptorsLeft:
                    return is_readable(self.pidfd, limit_s)
                try:
                    return is_readable(pidfd, limit_s)
                finally:
                    os.close(pidfd)
        return True

    def terminate(self) -> None:
        """Send SIGTERM. Does nothing if the process has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if the process has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        with suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)  # it can't hit another process with the same number

    def request_exit(self) -> None:
        """Tell it to exit once its children have. Idempotent and thread-safe."""
        self.channel.shutdown()

    def note_exit(self, exit_code: int) -> None:
        """Note how it ended, which its server tells."""
        if not self._is_closed:
            self.exit_code = exit_code
        self._wake()

    def reap(self) -> bool:
        """Note how it ended, and end what it has started. Return False if it is no child of this process, or runs.

        The exit code stays None if the trainer ignores SIGCHLD.
        """
        if self._child is None or not self.wait_end(EXIT_LIMIT_S):
            return False
        if self._child.returncode is None:
            end_group(self.pid)
        try:
            exit_code = self._child.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return False
        if self.exit_code is None and signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
            self.exit_code = exit_code
        return True

    def close(self) -> None:
        """Forward the rest of its stderr, and close everything. The process must have ended. Idempotent."""
        self.channel.close()
        if self.pidfd >= 0 and not self.reap() and self.exit_code is None and self.template is None:
            end_group(self.pid)  # the root that has forked it couldn't
        self.exit_code = self.exit_code or 0
        self._waiter = self.template = None  # which refer to this object: cycles would wait for the collector
        with self._lock:
            self._is_closed = True
            pidfd, self.pidfd = self.pidfd, -1  # before it is closed, see `Holder`
            if pidfd >= 0:
                os.close(pidfd)
            self._close_their_ends()
            self.diagnostics.close()


def is_readable(pidfd: int, limit_s: float | None = 0) -> bool:
    """Return whether a process has ended. Wait for that at most `limit_s`; None: without a limit."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else max(0.0, limit_s) * 1000))


def _only(descriptors: list[int], what: str) -> int:
    """Return the one descriptor that came with a message.

    Raises `NoDescriptorsLeft` if none came, because the kernel drops descriptors if the receiver has no room for them,
    and `ProtocolError` if more than one came.
    """
    if not descriptors:
        raise out_of_descriptors_error()
    if len(descriptors) != 1:
        raise ProtocolError(f"{what} was announced with {len(descriptors)} descriptors")
    return descriptors[0]


class Server(Process):
    """A process that forks others on request: a template, or a root. The thread that waits for it talks with it."""

    def __init__(self, waiter: LoopThread) -> None:
        super().__init__(waiter)
        self.is_gone = False
        """Whether it takes no more messages, because it has ended."""
        self.answer: Any = None
        """A template's report on the dataset, or why it couldn't build it. None: there is none yet."""
        self.reason = ""
        """Why we killed it, for the error that reports its death; empty if we didn't."""
        self._children: dict[int, Process] = {}
        """By the serial number of the request. Those that were asked for and haven't ended."""

    def fork(self, child: Process, serial: int, modules: tuple[str, ...] = ()) -> bool:
        """Ask for a process. It runs once it has a pid. Return False if it was closed meanwhile.

        Raises `NoDescriptorsLeft`, `ProtocolError`.
        """
        self._children[serial] = child
        is_asked = False
        try:
            is_asked = child.hand_over(partial(self.send, Fork(serial, modules).pack()))
        finally:
            if not is_asked:
                del self._children[serial]
        return is_asked

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send it a message, with copies of the descriptors. Does nothing if it is gone."""
        try:
            self.channel.send(message, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self.is_gone = True

    def messages(self) -> Iterator[Any]:
        """Yield all messages that it has sent, and note what it says of its forks, and if it is gone. Doesn't block.

        Raises `ProtocolError` if one is invalid.
        """
        try:
            while (received := self.channel.receive(wait=False)) is not None:
                message = unpack(received.data)
                if isinstance(message, Forked):
                    self._children[message.serial].note_forked(message.pid, received.descriptors)
                elif isinstance(message, Exited):
                    self._children.pop(message.serial).note_exit(message.exit_code)
                yield message
        except BlockingIOError:
            if not self.has_ended:
                return
        self.is_gone = True

    def listen(self) -> None:
        """Have the thread that waits for it take in what it sends, and forward its stderr. On that thread."""
        if (waiter := self._waiter) is not None:
            waiter.watch(self.diagnostics.fileno(), self.diagnostics)
            for descriptor in (self.channel.fileno(), self.pidfd):
                waiter.watch(descriptor, self)

    def unlisten(self) -> None:
        """End `listen`. Idempotent."""
        if (waiter := self._waiter) is not None:
            waiter.unwatch(self.channel.fileno(), self.pidfd, self.diagnostics.fileno())

    def close(self) -> None:
        """Close everything, see `Process`, and forget its forks."""
        super().close()
        self.is_gone = True
        self._children.clear()

    def end_requests(self) -> None:
        """Have it exit once it has answered all requests, and its children have ended."""
        self.channel.shutdown(receives=True)
