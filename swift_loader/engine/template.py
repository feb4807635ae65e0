"""The trainer's handle on a template process: start it, ask it for workers, learn how they ended.

Belongs to the pool's thread, which also starts it: the kernel kills a template when the thread that started it ends.
`take_in` doesn't wait: it reads what the template has said, and the state tells what that was. See
`swift_loader.worker.template` for the other side.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess

from swift_loader.engine.forks import FORKS
from swift_loader.engine.launch import Launch
from swift_loader.engine.witness import Witness
from swift_loader.errors import ProtocolError
from swift_loader.transport.channel import Channel, Received
from swift_loader.transport.descriptors import duplicate, new_eventfd, open_pidfd
from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.messages import Built, Exited, Failure, Fork, Forked, Verdicts, Verify
from swift_loader.transport.payload import PayloadLayout
from swift_loader.transport.reports import Verdict
from swift_loader.worker.termination import end_group

__all__ = ["TemplateProcess", "WorkerProcess"]

_EXIT_WAIT_S = 0.5
"""How long the exit status may lag behind the end of the stream."""


class WorkerProcess:
    """A process that serves as a worker: a fork of a template, or one that was a template itself."""

    def __init__(self, serial: int, pid: int, pidfd: int, template: TemplateProcess, witness: Witness) -> None:
        self.serial = serial
        self.pid = pid
        self.pidfd = pidfd
        """Owned by this object; readable once the process has ended."""
        self.template = template
        """Which reports how it ends."""
        self.witness = witness
        self.exit_code: int | None = None
        """How it ended, once the template has said so."""

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.pidfd < 0 or _is_readable(self.pidfd)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Give up the descriptors; what it wrote to stderr is passed on first. Idempotent."""
        self.witness.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class TemplateProcess:
    """A fresh interpreter that holds the dataset."""

    def __init__(self, launch: Launch) -> None:
        self.witness = Witness()
        try:
            self._channel, theirs = Channel.pair()
        except BaseException:
            self.witness.close()
            raise
        self.answer: Built | Failure | None = None
        """What became of the dataset."""
        self.verdicts: dict[int, Verdict] | None = None
        """What it found out about samples that differ, by dataset index, once it has answered `ask_to_verify`."""
        self.reason = ""
        """Why it was killed, if it was by us."""
        self.is_gone = False
        """Whether it can't be told anything any more: it has ended, or become a worker."""
        self._workers: dict[int, WorkerProcess] = {}
        """Those that have handles of their own, by serial number."""
        self._unclaimed: dict[int, WorkerProcess] = {}
        self._requested: dict[int, Witness] = {}
        stderr, traces = self.witness.their_ends
        # A Ctrl-C before the template ignores SIGINT would print a traceback: it starts with the signal blocked.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with FORKS.starting:
                self._process = launch.start(theirs.fileno(), traces, stderr)
            try:
                self.pidfd = open_pidfd(self._process.pid)
            except ProcessLookupError:  # it has ended, and nothing is left of it: the trainer ignores SIGCHLD
                self.pidfd = new_eventfd(1)  # readable, as the pidfd of a process that has ended
                self.is_gone = True
        except BaseException:
            self._channel.close()
            self.witness.close()
            raise
        finally:
            theirs.close()
            self.witness.close_their_ends()
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    @property
    def pid(self) -> int:
        """Of the template."""
        return self._process.pid

    def fileno(self) -> int:
        """Return what is readable when the template has said something."""
        return self._channel.fileno()

    def send_setup(self, layout: PayloadLayout, descriptor: int) -> None:
        """Tell the template what to build; it gets its own copy of the descriptor."""
        self._send(layout.pack(), descriptor)

    def ask_to_verify(self) -> None:
        """Have it find out why its samples may differ from those of an earlier template."""
        self._send(Verify().pack())

    def request_fork(self, serial: int, theirs: Channel, witness: Witness) -> None:
        """Have a worker forked that serves the given end of a channel; it can be claimed once it exists."""
        self._requested[serial] = witness
        self._send(Fork(serial, in_place=False).pack(), theirs.fileno(), *witness.their_ends)

    def become_worker(self, serial: int, theirs: Channel) -> WorkerProcess:
        """Turn the template itself into a worker, and return that."""
        self._send(Fork(serial, in_place=True).pack(), theirs.fileno())
        process = WorkerProcess(serial, self.pid, duplicate(self.pidfd), self, self.witness)
        self._workers[serial] = process
        return process

    def has_forked(self, serial: int) -> bool:
        """Return whether a worker that was asked for exists by now."""
        return serial in self._unclaimed

    def claim(self, serial: int) -> WorkerProcess | None:
        """Return a worker that was asked for, which belongs to the caller now; None if it doesn't exist."""
        process = self._unclaimed.pop(serial, None)
        if process is not None:
            self._workers[serial] = process
        return process

    def take_in(self) -> None:
        """Read all that the template has said; it may turn out to be gone.

        Raises:
            ProtocolError: It makes no sense.
        """
        try:
            while (received := self._channel.receive(wait=False)) is not None:
                self._note(received)
        except BlockingIOError:
            if not _is_readable(self.pidfd):
                return
        self._note_end()

    def wait_exit_code(self) -> int | None:
        """Return how it ended; None if that can't be found out in time, or because the trainer ignores SIGCHLD.

        What the dataset started in it ends, too.
        """
        if self._process.returncode is None and _is_readable(self.pidfd):
            end_group(self.pid)
        try:
            exit_code = self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            return None
        return None if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN else exit_code

    def end(self, reason: str) -> None:
        """Kill it, for a reason that whoever asks for its death is told."""
        self.reason = reason
        self._process.kill()

    def hang_up(self) -> None:
        """Tell the template to end. Idempotent, from any thread."""
        self._channel.shutdown()

    def forget(self, serial: int) -> None:
        """Forget a worker that is gone."""
        self._workers.pop(serial, None)

    def close(self) -> None:
        """Give everything back but the workers, which have handles of their own; the process must have ended."""
        self._channel.close()
        self.wait_exit_code()
        self.witness.close()
        for process in self._unclaimed.values():
            process.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _send(self, message: bytes, *descriptors: int) -> None:
        try:
            self._channel.send(message, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self._note_end()

    def _note_end(self) -> None:
        self.is_gone = True

    def _note(self, received: Received) -> None:
        frame, descriptors = unpack_frame(received.data), received.descriptors
        if frame.kind is Kind.FORKED and len(descriptors) == 1:
            forked = Forked.unpack(frame)
            witness = self._requested.pop(forked.worker)
            self._unclaimed[forked.worker] = WorkerProcess(forked.worker, forked.pid, descriptors[0], self, witness)
        elif frame.kind is Kind.EXITED:
            exited = Exited.unpack(frame)
            process = self._workers.get(exited.worker) or self._unclaimed.get(exited.worker)
            if process is not None:  # else it was replaced without waiting for this
                process.exit_code = exited.exit_code
        elif frame.kind is Kind.BUILT:
            self.answer = Built.unpack(frame)
        elif frame.kind is Kind.FAILURE:
            self.answer = Failure.unpack(frame)
        elif frame.kind is Kind.VERIFIED:
            self.verdicts = Verdicts.unpack(frame).by_index
        else:
            raise ProtocolError(f"a template sent {frame.kind.name} with {len(descriptors)} descriptors")

    def __repr__(self) -> str:
        return f"<TemplateProcess pid {self.pid}{', gone' if self.is_gone else ''}, {len(self._workers)} workers>"


def _is_readable(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
