"""The trainer's handle on a root process, which has imported what datasets need and forks templates on request.

It belongs to the training process, not to a loader. So it has a thread of its own, which lives as long as the root: the
kernel kills the root when the thread that started it ends. `swift_loader.worker.root` is the other side.

    WANTED ──start──► RUNNING ──refusal, retire──► RETIRED ──last template──► ended        by `refusal` and the process
"""

from __future__ import annotations

import contextlib
import subprocess
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from swift_loader.errors import ProtocolError, SwiftLoaderError
from swift_loader.executors.fleet import stop_processes
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.launch import Conditions, Launch
from swift_loader.executors.process.loop_thread import LoopThread
from swift_loader.executors.process.template import ServerProcess
from swift_loader.transport.channel import Channel, explaining_limits
from swift_loader.transport.messages import Frame, Kind
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


class _RootProcess(ServerProcess):
    """The process of a root, which gets its messages."""

    def __init__(self, launch: Launch, root: Root) -> None:
        """Start it."""
        self._root = root
        super().__init__(launch.start_root)

    def _note(self, frame: Frame, _: list[int]) -> None:
        self._root.note(frame)

    def end_requests(self) -> None:
        """Have it exit once it has answered all requests, and its templates have ended."""
        self._channel.end_sending()


class Root(LoopThread):
    """One root process. It starts with the first request. Any thread may call its methods, which return at once."""

    def __init__(self, launch: Launch, conditions: Conditions) -> None:
        """Start nothing. `launch` starts the interpreter, and is closed with this object."""
        super().__init__("root")
        self.conditions = conditions
        self.refusal: RootRefused | None = None
        """Why it forks no more. Written once, by its thread."""
        self.imported: frozenset[str] = frozenset()
        """The modules that it was asked to import, and has imported. Replaced by its thread."""
        self._launch = launch
        self._process: _RootProcess | None = None
        self._num_requests = 0
        self._asked: dict[int, tuple[tuple[str, ...], BlankTemplate | None, Future[BlankTemplate] | None]] = {}
        """The requests that weren't answered, by number."""
        self._templates: dict[int, BlankTemplate] = {}
        """Those that haven't ended, by the number of the request."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of its process; -1 for those that are closed."""
        return [*super().descriptors(), -1 if self.is_closed else self._launch.directory]

    # Any thread -------------------------------------------------------------------------------------------------------

    def warm(self, modules: tuple[str, ...]) -> None:
        """Have it import modules."""
        self.submit(partial(self._ask, modules, None))

    def fork(self, modules: tuple[str, ...]) -> Future[BlankTemplate]:
        """Have it import modules, and fork. The future may hold `RootRefused`."""
        answer: Future[BlankTemplate] = Future()
        if not self.submit(partial(self._ask, modules, answer)):
            answer.set_exception(RootRefused("it has ended"))
        return answer

    def retire(self) -> None:
        """Let it exit once its templates have ended. Idempotent."""
        self.submit(self._retire)

    def kill(self) -> None:
        """End it, and with it all its templates. Idempotent."""
        self.submit(self._kill)

    def close(self) -> None:
        """End it, and its templates if they don't end first; close everything. Blocks for 2.2 s at most. Idempotent."""
        with self.lock:
            self.stop()
        process = self._process
        try:
            if process is not None:
                process.request_exit()
                stop_processes([process])
        finally:
            self.end()
        if not self.is_closed:
            self.close_loop()
            self._launch.close()
            if process is not None:
                process.close()

    # Its thread -------------------------------------------------------------------------------------------------------

    def _ask(self, modules: tuple[str, ...], answer: Future[BlankTemplate] | None) -> None:
        if self.refusal is None and self._process is None:
            self._start()
        if self.refusal is not None:
            if answer is not None:
                answer.set_exception(self.refusal)
            return
        assert self._process is not None
        self._num_requests += 1
        number, blank, attached = self._num_requests, None, []
        try:
            if answer is not None:
                ours, theirs = Channel.pair()
                blank, attached = BlankTemplate(ours), [theirs]
            self._process.send(Blank(number, modules).pack(), *(channel.fileno() for channel in attached))
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
            with explaining_limits():
                self._process = process = _RootProcess(self._launch, self)
        except (OSError, SwiftLoaderError) as error:
            self._refuse(RootRefused(f"it can't be started: {error}"))
            self.end()
            return
        self.forward(process.diagnostics)
        self.watch(process.fileno(), self._take_in)
        self.watch(process.pidfd, self._note_end)

    def _take_in(self) -> None:
        """Read all its messages."""
        process = self._process
        assert process is not None
        try:
            process.take_in()
        except ProtocolError as error:
            self._refuse(RootRefused(str(error)))
            self._kill()
        else:
            if not process.is_gone:
                return
        self.unwatch(process.fileno())

    def note(self, frame: Frame) -> None:
        """Take in one of its messages."""
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
            if self._process is not None:
                self._process.end_requests()
        else:
            raise ProtocolError(f"a root sent an unexpected message: {frame.kind.name}")

    def _note_end(self) -> None:
        """Its process has ended, and its templates with it."""
        self._take_in()
        if self._process is not None:
            self._process.wait_exit_code()
        importing = [modules for modules, *_ in self._asked.values()]
        self.note_failure(RootRefused("it has ended", tuple(name for modules in importing[:1] for name in modules)))

    def _retire(self) -> None:
        self.refusal = self.refusal or RootRefused("it was retired")
        if self._process is None:
            self.end()
        else:
            self._process.end_requests()  # it answers what was asked before

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

    def note_failure(self, error: BaseException) -> None:
        """End the thread: nothing comes from the root any more."""
        self._refuse(error if isinstance(error, RootRefused) else RootRefused(f"{type(error).__name__}: {error}"))
        self._templates.clear()
        if (process := self._process) is not None:
            self.unwatch(process.pidfd, process.fileno(), process.diagnostics.fileno())
        self.end()

    def __repr__(self) -> str:
        return (
            f"<Root {self._state.value}, {len(self._templates)} templates{'' if self.refusal is None else ', refused'}>"
        )
