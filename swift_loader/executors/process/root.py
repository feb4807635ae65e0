"""The trainer's handle on a root process, which has imported what datasets need and forks templates on request.

It belongs to the training process, not to a loader. So it has a thread of its own, which lives as long as the root: the
kernel kills the root when the thread that started it ends. `swift_loader.worker.root` is the other side.

    WANTED ──start──► RUNNING ──refusal, retire──► RETIRED ──last template──► ended        by `refusal` and the process
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from swift_loader.errors import ProtocolError, SwiftLoaderError
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.event_loop_thread import EventLoopThread, stop_processes
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.launch import Conditions, Launch
from swift_loader.interrupts import blocked
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import explaining_limits, open_pidfd
from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.template_messages import Blank, Exited, Fork, Forked, Refused, Warmed

# A template that was forked from the root, before it knows which loader it serves.


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


class RootRefused(Exception):
    """The root forks no more: it can't be forked, was retired, or is gone."""

    def __init__(self, reason: str, unfit: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.unfit = unfit
        """The modules whose import may be the reason. No other root should import them."""


class Root:
    """One root process. It starts with the first request. Any thread may call its methods, which return at once."""

    def __init__(self, launch: Launch, conditions: Conditions) -> None:
        """Start nothing. `launch` starts the interpreter, and is closed with this object."""
        self.conditions = conditions
        self.refusal: RootRefused | None = None
        """Why it forks no more. Written once, by its thread."""
        self.imported: frozenset[str] = frozenset()
        """The modules that it was asked to import, and has imported. Replaced by its thread."""
        self._launch = launch
        self._thread = EventLoopThread(lambda: None, self._end_with, "root")
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._channel, self._theirs = Channel.pair()
        try:
            self._diagnostics = Diagnostics()
        except BaseException:
            self._channel.close()
            self._theirs.close()
            raise
        self._num_requests = 0
        self._asked: dict[int, tuple[tuple[str, ...], BlankTemplate | None, Future[BlankTemplate] | None]] = {}
        """The requests that weren't answered, by number."""
        self._templates: dict[int, BlankTemplate] = {}
        """Those that haven't ended, by the number of the request."""
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of its diagnostics; -1 for those that are closed."""
        directory = -1 if self._thread.loop.is_closed else self._launch.directory
        return [self._pidfd, self._channel.fileno(), self._theirs.fileno(), directory]

    # Any thread -------------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, and its thread."""
        return not self._thread.is_open

    def warm(self, modules: tuple[str, ...]) -> None:
        """Have it import modules."""
        self._thread.submit(partial(self._ask, modules, None))

    def fork(self, modules: tuple[str, ...]) -> Future[BlankTemplate]:
        """Have it import modules, and fork. The future may hold `RootRefused`."""
        answer: Future[BlankTemplate] = Future()
        if not self._thread.submit(partial(self._ask, modules, answer)):
            answer.set_exception(RootRefused("it has ended"))
        return answer

    def retire(self) -> None:
        """Let it exit once its templates have ended. Idempotent."""
        self._thread.submit(self._retire)

    def kill(self) -> None:
        """End it, and with it all its templates. Idempotent."""
        self._thread.submit(self._kill)

    def stop(self) -> None:
        """End it, and its templates if they don't end first; close everything. Blocks for 2.2 s at most. Idempotent."""
        with self._thread.lock:
            self._thread.stop()
        try:
            self._channel.shutdown()
            if self._pidfd >= 0:
                stop_processes([self._pidfd])
        finally:
            self._thread.end()
        self._close()

    def _close(self) -> None:
        if self._thread.loop.is_closed:
            return
        self._thread.loop.close()
        if self._process is not None:
            self._process.wait()
        self._diagnostics.close()
        self._channel.close()
        self._theirs.close()
        self._launch.close()
        if self._pidfd >= 0:
            pidfd, self._pidfd = self._pidfd, -1  # before it is closed, see `Holder`
            os.close(pidfd)

    # Its thread -------------------------------------------------------------------------------------------------------

    def _ask(self, modules: tuple[str, ...], answer: Future[BlankTemplate] | None) -> None:
        if self.refusal is None and self._process is None:
            self._start()
        if self.refusal is not None:
            if answer is not None:
                answer.set_exception(self.refusal)
            return
        self._num_requests += 1
        number, blank, attached = self._num_requests, None, []
        try:
            if answer is not None:
                ours, theirs = Channel.pair()
                blank, attached = BlankTemplate(ours), [theirs]
            self._channel.send(Blank(number, modules).pack(), [channel.fileno() for channel in attached])
        except (BrokenPipeError, ConnectionResetError):
            pass  # its end is noted next
        except (OSError, ProtocolError) as error:  # no descriptors are left, or there are too many modules
            if blank is not None:
                blank.close()
            if answer is not None:
                answer.set_exception(RootRefused(str(error)))
            return
        finally:
            for channel in attached:
                channel.close()
        self._asked[number] = modules, blank, answer

    def _start(self) -> None:
        try:
            with blocked({signal.SIGINT}), FORKS.starting, explaining_limits():
                stderr, _ = self._diagnostics.their_ends
                self._process = self._launch.start_root(self._theirs.fileno(), stderr)
            self._pidfd = open_pidfd(self._process.pid)
        except (OSError, SwiftLoaderError) as error:
            self._refuse(RootRefused(f"it can't be started: {error}"))
            self._thread.end()
            return
        finally:
            self._theirs.close()
            self._diagnostics.close_their_ends()
        self._thread.loop.watch(self._diagnostics.fileno(), self._forward)
        self._thread.loop.watch(self._channel.fileno(), self._take_in)
        self._thread.loop.watch(self._pidfd, self._note_end)

    def _forward(self) -> None:
        if not self._diagnostics.forward():
            self._thread.loop.unwatch(self._diagnostics.fileno())

    def _take_in(self) -> None:
        """Read all its messages."""
        try:
            while (received := self._channel.receive(wait=False)) is not None:
                self._note(bytes(received.data))
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._refuse(RootRefused(str(error)))
            self._kill()
        self._thread.loop.unwatch(self._channel.fileno())

    def _note(self, data: bytes) -> None:
        frame = unpack_frame(memoryview(data))
        if frame.kind is Kind.FORKED:
            forked = Forked.unpack(frame)
            modules, blank, answer = self._asked.pop(forked.worker)
            self.imported |= set(modules)
            assert blank is not None
            assert answer is not None
            blank.pid = forked.pid
            self._templates[forked.worker] = blank
            answer.set_result(blank)
        elif frame.kind is Kind.EXITED:
            exited = Exited.unpack(frame)
            self._templates.pop(exited.worker).exited.set_result(exited.exit_code)
        elif frame.kind is Kind.WARMED:
            modules, *_ = self._asked.pop(Warmed.unpack(frame).serial)
            self.imported |= set(modules)
        elif frame.kind is Kind.REFUSED:
            refused = Refused.unpack(frame)
            modules, *_ = self._asked[refused.serial]
            self._refuse(RootRefused(refused.reason, () if refused.is_stale else modules))
            self._channel.end_sending()
        else:
            raise ProtocolError(f"a root sent an unexpected message: {frame.kind.name}")

    def _note_end(self) -> None:
        """Its process has ended, and its templates with it."""
        assert self._process is not None
        self._take_in()
        self._process.wait()
        importing = [modules for modules, *_ in self._asked.values()]
        self._end_with(RootRefused("it has ended", tuple(name for modules in importing[:1] for name in modules)))

    def _retire(self) -> None:
        self.refusal = self.refusal or RootRefused("it was retired")
        self._channel.end_sending()  # it answers what was asked before
        if self._process is None:
            self._thread.end()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _refuse(self, refusal: RootRefused) -> None:
        self.refusal = self.refusal or refusal
        asked, self._asked = self._asked, {}
        for _, blank, answer in asked.values():
            if blank is not None and answer is not None:
                blank.close()
                answer.set_exception(self.refusal)

    def _end_with(self, error: BaseException) -> None:
        self._refuse(error if isinstance(error, RootRefused) else RootRefused(f"{type(error).__name__}: {error}"))
        self._templates.clear()
        for descriptor in (self._pidfd, self._channel.fileno(), self._diagnostics.fileno()):
            self._thread.loop.unwatch(descriptor)
        self._thread.end()

    def __repr__(self) -> str:
        return f"<Root {self._thread!r}, {len(self._templates)} templates{'' if self.refusal is None else ', refused'}>"
