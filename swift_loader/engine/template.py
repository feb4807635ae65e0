"""The trainer's handle on a template process: start it, ask it for workers, learn how they ended.

It is made, and `fork` is called, by the thread that starts the loader; afterwards a thread of its own reads
what the template reports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.spawn import get_executable
from pathlib import Path

import swift_loader
from swift_loader.engine.failures import died, rebuild
from swift_loader.errors import ProtocolError
from swift_loader.transport.channel import Channel
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.frames import Frame, Kind, unpack_frame
from swift_loader.transport.messages import Built, Exited, Failure, Fork, Forked
from swift_loader.transport.payload import PayloadLayout

__all__ = ["ForkedWorker", "TemplateProcess"]

_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from swift_loader.worker.template import main; main()"

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Many workers with many threads each only fight for the cores; and a process with threads can't be forked safely."""

_EXIT_WAIT_S = 0.5
"""How long the exit status may lag behind the end of the stream."""


class ForkedWorker:
    """A process that a template forked."""

    def __init__(self, worker: int, pid: int, pidfd: int) -> None:
        self.worker = worker
        self.pid = pid
        self.pidfd = pidfd
        """Owned by this object; readable once the process has ended."""
        self._exited = threading.Event()
        self._exit_code: int | None = None

    def note_exit(self, exit_code: int | None) -> None:
        """Take the status that the template reported, or None if nobody can tell any more; the first one counts."""
        if not self._exited.is_set():
            self._exit_code = exit_code
            self._exited.set()

    def wait_exit_code(self) -> int | None:
        """Return how the process ended; None if that can't be found out in time."""
        self._exited.wait(_EXIT_WAIT_S)
        return self._exit_code

    def close(self) -> None:
        """Give up the descriptor. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class TemplateProcess:
    """A fresh interpreter that holds the dataset; see `swift_loader.worker.template` for its side."""

    def __init__(self) -> None:
        self._channel, theirs = Channel.pair()
        self._workers: dict[int, ForkedWorker] = {}
        self._thread: threading.Thread | None = None
        folder = str(Path(swift_loader.__file__).parent.parent)
        # Private, but what multiprocessing uses for the same purpose: -W, -X, -O and the like.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
        arguments = [get_executable(), *flags, "-c", _PROGRAM, folder, str(theirs.fileno()), str(os.getpid())]
        # A Ctrl-C before the template ignores SIGINT would print a traceback: it starts with the signal blocked.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [os.fsdecode(argument or sys.executable) for argument in arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**_ONE_THREAD, **os.environ},
            )
            self.pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    @property
    def pid(self) -> int:
        """Of the template."""
        return self._process.pid

    def send_setup(self, layout: PayloadLayout, descriptor: int) -> None:
        """Tell the template what to build; it gets its own copy of the descriptor."""
        try:
            self._channel.send(layout.pack(), [descriptor])
        except (BrokenPipeError, ConnectionResetError):
            return  # `wait_built` says what happened

    def wait_built(self, definitions: Definitions) -> Built:
        """Return what the template found out about the dataset; blocks as long as building it takes.

        Raises:
            WorkerDied: The template ended.
            Exception: What building the dataset raised.
        """
        frame, _ = self._receive()
        if frame.kind is Kind.FAILURE:
            raise rebuild(Failure.unpack(frame), f"the template process (pid {self.pid})", definitions)
        if frame.kind is not Kind.BUILT:
            raise ProtocolError(f"a template answered SETUP with {frame.kind.name}")
        return Built.unpack(frame)

    def fork(self, worker: int, theirs: Channel) -> ForkedWorker:
        """Return a new worker, which serves the given end of a channel.

        Raises:
            WorkerDied: The template ended.
        """
        try:
            self._channel.send(Fork(worker, in_place=False).pack(), [theirs.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None
        while worker not in self._workers:
            frame, descriptors = self._receive()
            self._take_in(frame, descriptors)
        return self._workers[worker]

    def become_worker(self, worker: int, theirs: Channel) -> ForkedWorker:
        """Turn the template itself into a worker, and return that."""
        try:
            self._channel.send(Fork(worker, in_place=True).pack(), [theirs.fileno()])
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None
        process = ForkedWorker(worker, self.pid, os.dup(self.pidfd))
        self._workers[worker] = process
        threading.Thread(
            target=lambda: process.note_exit(self._process.wait()), name="swift_loader-reaper", daemon=True
        ).start()
        return process

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        """From now on, have a thread read what the template reports; `on_death` runs on it when the template ends."""
        self._thread = threading.Thread(
            target=self._listen, args=(on_death,), name="swift_loader-template", daemon=True
        )
        self._thread.start()

    def hang_up(self) -> None:
        """Tell the template to end. Idempotent."""
        self._channel.shutdown()

    def close(self) -> None:
        """Give everything back; the process must have ended."""
        self._channel.shutdown()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._process.wait()
        self._channel.close()
        for process in self._workers.values():
            process.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _listen(self, on_death: Callable[[BaseException], None]) -> None:
        try:
            while True:
                self._take_in(*self._receive())
        except Exception as error:
            for process in self._workers.values():
                process.note_exit(None)
            on_death(error)

    def _receive(self) -> tuple[Frame, list[int]]:
        received = self._channel.receive()
        if received is None:
            raise self._death()
        return unpack_frame(received.data), received.descriptors

    def _take_in(self, frame: Frame, descriptors: list[int]) -> None:
        if frame.kind is Kind.FORKED and len(descriptors) == 1:
            forked = Forked.unpack(frame)
            self._workers[forked.worker] = ForkedWorker(forked.worker, forked.pid, descriptors[0])
        elif frame.kind is Kind.EXITED:
            exited = Exited.unpack(frame)
            self._workers[exited.worker].note_exit(exited.exit_code)
        else:
            raise ProtocolError(f"a template sent {frame.kind.name} with {len(descriptors)} descriptors")

    def _death(self) -> Exception:
        try:
            exit_code: int | None = self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            exit_code = None
        return died(f"the template process (pid {self.pid})", exit_code, "it builds the dataset and starts the workers")

    def __repr__(self) -> str:
        return f"<TemplateProcess pid {self.pid}, {len(self._workers)} workers forked>"
