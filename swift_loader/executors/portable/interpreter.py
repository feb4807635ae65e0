"""The trainer's handle on one worker's interpreter: the process, its pipes, and three threads that look after it.

One thread sends the payload, then waits for the process's end. Another one forwards its stderr. The third one sends
tasks, as the pipe may be full. All block, and end with the process. `swift_loader.worker.portable` is the other side.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from swift_loader.executors.environment import Launch, working_directory
from swift_loader.executors.failures import StderrTail
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.process.forks import FORKS
from swift_loader.runtime import Answer, LoaderThread, blocked, explaining_starts
from swift_loader.transport.messages import Identity
from swift_loader.transport.payload import Payload
from swift_loader.transport.portable import AnyConnection, PipeChannel, SegmentNames, attach, inheriting, new_pipe
from swift_loader.transport.segments import Segment
from swift_loader.worker.portable import PAGE_NBYTES, Request
from swift_loader.worker.process import end_group

_PROGRAM = "import sys; sys.path[:] = sys.argv[5:]; from swift_loader.worker.portable import main; main()"
"""Run with `-c`, so that no script is imported again. Sets the import path first, as the trainer has it."""


@dataclass(frozen=True, slots=True)
class InterpreterLaunch(Launch):
    """Starts workers."""

    directory: str | None = field(default_factory=working_directory)
    """The working directory. None: it was deleted."""

    def start(self, tasks: AnyConnection, requests: AnyConnection, names: str, serial: int) -> subprocess.Popen[bytes]:
        """Start an interpreter as a worker. It gets copies of its ends of the pipes, `tasks` and `requests`.

        `names`: what the names of its segments begin with.
        """
        flags: dict[str, Any] = {}
        if sys.platform == "win32":
            # Not the launcher of a virtual environment: it would be the process that is waited for and killed.
            flags = {"env": {**self.environ, "__PYVENV_LAUNCHER__": sys.executable}}
            flags |= {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP, "executable": sys._base_executable}  # noqa: SLF001
        # Without Ctrl-C, which would print a traceback before the process ignores it.
        with FORKS.starting, nullcontext() if sys.platform == "win32" else blocked({signal.SIGINT}):
            return self.open(
                _PROGRAM,
                *(tasks.fileno(), requests.fileno(), names, serial),
                stderr=subprocess.PIPE,
                cwd=self.directory,
                **inheriting(tasks, requests),
                **flags,
            )

    def is_current(self) -> bool:
        """Return whether this process still has the recorded environment, apart from variables that libraries set."""
        return self.directory == working_directory() and Launch.is_current(self)


_ANSWER_S = 0.5
"""A worker that doesn't hold the GIL answers a request within this time."""

_JOIN_LIMIT_S = 0.5
"""How long a thread may take to end after its process."""

_READ_NBYTES = 1 << 16


class Interpreter:
    """A process that is, or will be, a worker. Any thread may use it."""

    def __init__(
        self, launch: InterpreterLaunch, serial: int, payload: Payload, fleet: Fleet, identity: Identity | None = None
    ) -> None:
        """Start it. A thread of this object sends `payload`, and `identity` behind it.

        `fleet` is told once the process has ended, on a thread of this object.
        """
        self.serial = serial
        self.names = SegmentNames()
        self.exit_code: int | None = None
        """Known once the process has ended; None also if the trainer ignores SIGCHLD."""
        self._ended: Answer[None] = Answer()
        self._num_slots = 0
        """Segments that were attached. Slots are numbered in the order of their making."""
        self._stderr = StderrTail()
        self._asking = threading.Lock()
        """Held while a request and its answer are on the way."""
        tasks, their_tasks = new_pipe()
        requests, their_requests = new_pipe()
        self.channel, self._requests = PipeChannel(tasks), PipeChannel(requests)
        for end in (self.channel, self._requests):
            FORKS.keep_from_children(end)
        try:
            with explaining_starts("an interpreter"):
                self._process = launch.start(their_tasks, their_requests, self.names.prefix, serial)
        except BaseException:
            self.channel.close()
            self._requests.close()
            raise
        finally:
            their_tasks.close()
            their_requests.close()
        self._threads = [
            LoaderThread(self._look_after, "waiter", payload, identity, fleet),
            LoaderThread(self._forward_stderr, "stderr"),
            LoaderThread(self.channel.send_posted, "sender"),
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no thread is left, or a signal handler raised
            self._process.kill()
            self._process.wait()
            self.close()
            raise

    # Its threads ------------------------------------------------------------------------------------------------------

    def _look_after(self, payload: Payload, identity: Identity | None, fleet: Fleet) -> None:
        with suppress(OSError):  # it has ended, which the next line finds out
            self.channel.send(payload.layout.pack())
            self.channel.send_long(payload.memory)  # blocks until the worker has read most of it
            if identity is not None:
                self.channel.send(identity.pack())
        exit_code = self._process.wait()
        if sys.platform != "win32":
            end_group(self._process.pid)  # what the dataset started in it
        if sys.platform == "win32" or signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
            self.exit_code = exit_code
        self._ended.give(None)
        fleet.note_news(self.serial)

    def _forward_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            while data := os.read(stderr.fileno(), _READ_NBYTES):
                self._stderr.add(data)

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._ended.is_given

    def wait_end(self, limit_s: float | None) -> bool:
        """Wait until the process has ended. Return False if that takes longer."""
        return self._ended.wait(limit_s)

    def last_lines(self) -> str:
        """Return the last lines that the process wrote to stderr, as printable text."""
        if self.has_ended:
            self._threads[1].join(_JOIN_LIMIT_S)
        return self._stderr.last_lines()

    # What it does -----------------------------------------------------------------------------------------------------

    def attach(self, slot: int | None, nbytes: int, _descriptors: list[int]) -> Segment:
        """Map memory that it announced: of a slot, or `COUNTERS`.

        Raises `FileNotFoundError` if the memory is gone, because the process has ended.
        """
        segment = attach(self.names.of(slot), PAGE_NBYTES if slot is None else nbytes)
        if slot is not None:
            self._num_slots = slot + 1
        return segment

    def ask_for_stacks(self, *, by_force: bool = False) -> str:  # noqa: ARG002 - there is no force
        """Return the Python stacks of its threads, or why there are none. Blocks for half a second at most."""
        stacks = self._ask(Request.STACKS)
        if stacks:
            return stacks
        return "(none: the process is gone)" if self.has_ended else "(none: C code holds the GIL, or it is stopped)"

    def num_fetched(self, _length_address: int) -> int | None:
        """Return the number of samples fetched for its batch; None if it doesn't answer within half a second."""
        answer = self._ask(Request.NUM_FETCHED)
        return int(answer) if answer else None

    def _ask(self, request: Request) -> str:
        """Return the worker's answer; empty if it doesn't answer in time. Blocks for half a second at most."""
        deadline_s = time.monotonic() + _ANSWER_S
        with self._asking, suppress(OSError, EOFError):
            while self._requests.end.poll(0):  # the answer to an earlier request came too late
                self._requests.end.recv_bytes()
            self._requests.send(request.value)
            if self._requests.end.poll(max(0.0, deadline_s - time.monotonic())):
                return self._requests.end.recv_bytes().decode("utf-8", "backslashreplace")
        return ""

    # Its end ----------------------------------------------------------------------------------------------------------

    def request_exit(self) -> None:
        """Have it exit when it is idle, or in a second."""
        self._requests.close()

    def terminate(self) -> None:
        """Have the system end it."""
        with suppress(OSError):
            self._process.terminate()

    def kill(self) -> None:
        """Have the system end it, whatever it does."""
        with suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        """Close its pipes, and remove the names that it left. It must have ended. Idempotent."""
        self._requests.close()
        self.channel.close()
        deadline_s = time.monotonic() + _JOIN_LIMIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self.names.unlink_from(self._num_slots)
