"""The part of a template that forks workers on request, and reports how they ended."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from swift_loader.errors import ProtocolError
from swift_loader.threads import explaining_starts
from swift_loader.transport.channel import Channel
from swift_loader.transport.failpoints import Failpoint, failpoint, identify
from swift_loader.transport.messages import Kind, unpack_frame
from swift_loader.transport.template_messages import Exited, Fork, Forked
from swift_loader.worker.process import (
    StackDumper,
    die_with_parent,
    end_group,
    flush_streams,
    lead_group,
    reset_multiprocessing,
    run_and_exit,
)

RunWorker = Callable[[int, Channel], None]


class ForkServer:
    """Forks workers on request, reaps them, and reports how they ended."""

    def __init__(self, channel: Channel, run_worker: RunWorker, stack_dumper: StackDumper, trainer: int = -1) -> None:
        """`run_worker` serves a channel as the worker with this serial number, in a fork.

        `trainer`: a pidfd; its end is the end. -1: the kernel kills this process then.
        """
        self._channel = channel
        self._stack_dumper = stack_dumper
        self._run_worker = run_worker
        self._children: dict[int, tuple[int, int]] = {}
        """pidfd -> (worker, pid)"""
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._trainer = trainer
        if trainer >= 0:
            self._poll.register(trainer, select.POLLIN)

    def serve(self) -> None:
        """Handle requests and exits of workers; return when the trainer has ended.

        If it has closed the channel, it has told the workers to end, too: return when they have.
        """
        is_wanted, has_trainer = True, True
        while has_trainer and (is_wanted or self._children):
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                elif descriptor == self._trainer:
                    has_trainer = False
                elif not self._take_request():
                    is_wanted = False
                    self._poll.unregister(descriptor)
        for _, pid in self._children.values():
            end_group(pid)

    def _take_request(self) -> bool:
        received = self._channel.receive()
        if received is None:
            return False
        frame = unpack_frame(received.data)
        if frame.kind is not Kind.FORK or not received.descriptors:
            raise ProtocolError(f"a template was sent {frame.kind.name} instead of FORK")
        request = Fork.unpack(frame)
        channel = Channel.from_descriptor(received.descriptors[0])
        failpoint(Failpoint.TEMPLATE_FORK_REQUESTED)
        if request.in_place:  # for datasets whose modules leave threads running, so that a fork isn't safe
            self._drop_descriptors()
            run_and_exit(partial(_be_worker, request.worker, channel, self._run_worker, self._stack_dumper))
        stderr, traces = received.descriptors[1:]
        try:
            self._fork(request.worker, channel, stderr, traces)
        finally:
            channel.close()  # only the worker may hold it, so that its death ends the stream
            os.close(stderr)
            os.close(traces)
        return True

    def _fork(self, worker: int, channel: Channel, stderr: int, traces: int) -> None:
        template_pid = os.getpid()
        flush_streams()  # else each fork would print the buffers' content once more
        with explaining_starts("a worker"):
            pid = os.fork()
        if pid == 0:
            die_with_parent(template_pid)
            lead_group()
            self._drop_descriptors()
            os.dup2(stderr, 2)
            os.close(stderr)
            run_and_exit(partial(_be_worker, worker, channel, self._run_worker, StackDumper(traces)))
        pidfd = os.pidfd_open(pid)
        failpoint(Failpoint.TEMPLATE_FORKED)
        self._children[pidfd] = (worker, pid)
        self._poll.register(pidfd, select.POLLIN)
        with suppress(BrokenPipeError):  # the trainer has closed the channel
            self._channel.send(Forked(worker, pid).pack(), [pidfd])

    def _drop_descriptors(self) -> None:
        """Close the template's own descriptors. Those that modules opened stay open, because they may be in use."""
        self._channel.close()
        for descriptor in (*self._children, *([self._trainer] if self._trainer >= 0 else [])):
            os.close(descriptor)

    def _reap(self, pidfd: int) -> None:
        worker, pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        end_group(pid)
        _, status = os.waitpid(pid, 0)
        failpoint(Failpoint.TEMPLATE_REAPED)
        with suppress(BrokenPipeError):  # the trainer has closed the channel
            self._channel.send(Exited(worker, os.waitstatus_to_exitcode(status)).pack())


def _be_worker(worker: int, channel: Channel, run_worker: RunWorker, stack_dumper: StackDumper) -> int:
    """Be a worker until it is told to stop; return the exit code."""
    identify(worker)
    reset_multiprocessing()
    failpoint(Failpoint.WORKER_BOOT)
    stack_dumper.start()
    run_worker(worker, channel)
    return 0
