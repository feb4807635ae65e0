"""The keeper: it owns the template that the ranks of a node share, and knows which ranks still need it.

A template can't watch its ranks by itself, because it runs the user's code. The keeper runs none. It listens on the
socket where the ranks meet, and ends the template when the last rank has left or died, whatever the template is doing.

    rank ──connect──► keeper ──FORKED + pidfd──► rank ──JOIN + channel──► keeper ──JOIN + channel──► template
                      └─ fork ─► template ◄──channel──► each rank

The kernel kills the template when the keeper ends, and the workers when the template ends. Then the name of the socket
is free, and the ranks that are left start another keeper. No rank is its parent, and it is in a session of its own.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NoReturn

from swift_loader.errors import ProtocolError
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import avoid_std_streams
from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.local_sockets import peer_of
from swift_loader.transport.root_messages import Refused
from swift_loader.transport.sharing_messages import Join
from swift_loader.transport.template_messages import Exited, Forked
from swift_loader.worker.output_relay import OutputRelay
from swift_loader.worker.process_exit import die_with_parent, end_group, lead_group, run_and_exit
from swift_loader.worker.shared_template import be_shared_template
from swift_loader.worker.template import open_standard_streams, reset_signals

__all__ = ["main"]

_FIRST_MEMBER_LIMIT_S = 30.0
"""How long a keeper waits for the rank that started it, which connects at once unless it has died."""

_TEMPLATE_LIMIT_S = 0.7
"""How long a template may take to exit, before it is killed. It doesn't hear while it runs the user's code."""

_MAX_REST = 4
"""How many pieces of output are forwarded after the template's end: more than a pipe holds."""

_NUM_JOINED = 4
"""How many descriptors a rank sends when it joins."""


def main() -> NoReturn:
    """Run a keeper in a new interpreter; `sys.argv` is (-c, listening socket, unused, unused, *import path)."""
    reset_signals()
    open_standard_streams()
    listener = socket.socket(fileno=avoid_std_streams(int(sys.argv[1])))
    listener.set_inheritable(False)
    run_and_exit(partial(_keep, listener))


def _keep(listener: socket.socket) -> int:
    outputs = OutputRelay(1), OutputRelay(2)
    ours, theirs = Channel.pair()
    keeper_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(keeper_pid)
        lead_group()
        listener.close()
        ours.close()
        for output in outputs:
            output.be_written_to()
        run_and_exit(partial(be_shared_template, theirs))
    theirs.close()
    for output in outputs:
        output.close_writing()
        os.dup2(0, output.stream)  # whoever reads the stream of the rank that started it must see its end
    _Keeper(listener, ours, pid, outputs).serve()
    return 0


class _Member:
    """A rank that has connected."""

    def __init__(self, connection: Channel, pidfd: int) -> None:
        self.connection = connection
        self.pidfd = pidfd
        self.streams: tuple[int, int] | None = None
        """Its stdout, and the pipe to its stderr. Known once it has joined."""

    def tell(self, message: bytes, *descriptors: int) -> None:
        """Send it a message. If it is gone, that is noticed later."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message, descriptors)

    def close(self) -> None:
        """Close all that belongs to it. The rank sees the end of its connection."""
        self.connection.close()
        os.close(self.pidfd)
        for descriptor in self.streams or ():
            os.close(descriptor)


class _Keeper:
    """Accepts ranks, passes them on to the template, and ends the template after the last one."""

    def __init__(
        self, listener: socket.socket, template: Channel, pid: int, outputs: tuple[OutputRelay, OutputRelay]
    ) -> None:
        self._listener = listener
        self._template = template
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._outputs = outputs
        self._members: list[_Member] = []
        self._leaving: list[_Member] = []
        """The last ones. They are let go once the template has ended."""
        self._refusal: bytes | None = None
        self._is_over = False
        self._poll = select.poll()
        self._sources: dict[int, Callable[[], None]] = {}
        self._watch(listener.fileno(), self._accept)
        self._watch(template.fileno(), self._take_refusal)
        self._watch(self._pidfd, self._note_end)
        for index, output in enumerate(outputs):
            self._watch(output.fileno(), partial(self._forward, index))

    def serve(self) -> None:
        """Return when no rank is left, or the template has ended."""
        turns = count()
        limit_ms: float | None = _FIRST_MEMBER_LIMIT_S * 1000
        while not self._is_over:
            ready = self._poll.poll(limit_ms)
            if not ready:
                break
            # One at a time, because it may close others that are ready; in turns, because some may always be ready.
            descriptor, _ = ready[next(turns) % len(ready)]
            self._sources[descriptor]()
            limit_ms = None if self._members else limit_ms
        self._listener.close()  # first: another keeper may begin
        self._end_template()
        for member in (*self._members, *self._leaving):
            member.close()

    def _watch(self, descriptor: int, source: Callable[[], None]) -> None:
        self._sources[descriptor] = source
        self._poll.register(descriptor, select.POLLIN)

    def _unwatch(self, descriptor: int) -> None:
        del self._sources[descriptor]
        self._poll.unregister(descriptor)

    def _accept(self) -> None:
        if self._has_ended(0):  # the rank shall wait for the next keeper
            self._is_over = True
            return
        connection, _ = self._listener.accept()
        peer = peer_of(connection)
        try:
            if not peer.is_same_user:
                raise ProcessLookupError
            pidfd = os.pidfd_open(peer.pid)
        except ProcessLookupError:  # another user's, or gone already
            connection.close()
            return
        member = _Member(Channel(connection), pidfd)
        self._members.append(member)
        self._watch(member.connection.fileno(), partial(self._listen_to, member))
        self._watch(pidfd, partial(self._remove, member))
        if self._refusal is None:
            member.tell(Forked(0, self._pid).pack(), self._pidfd)
        else:
            member.tell(self._refusal)

    def _listen_to(self, member: _Member) -> None:
        descriptors: list[int] = []
        try:
            received = member.connection.receive(wait=False)
            if received is not None and unpack_frame(received.data).kind is Kind.JOIN:
                descriptors = received.descriptors
        except BlockingIOError:
            return
        except ProtocolError:
            pass
        if len(descriptors) != _NUM_JOINED or member.streams is not None:  # it has left, or is no rank of ours
            self._remove(member)
            return
        channel, traces, stderr, stdout = descriptors
        member.streams = stdout, stderr
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is noted next
            self._template.send(Join().pack(), (channel, traces, stdout, member.pidfd))
        os.close(channel)
        os.close(traces)

    def _remove(self, member: _Member) -> None:
        """A rank has left, or died. The template sees that by itself."""
        self._unwatch(member.connection.fileno())
        self._unwatch(member.pidfd)
        self._members.remove(member)
        if self._members:
            member.close()
        else:
            self._leaving.append(member)
            self._is_over = True

    def _forward(self, index: int) -> None:
        """Forward output of the template to the first rank that takes it."""
        output = self._outputs[index]
        ranks = (*self._members, *self._leaving)
        targets = [member.streams[index] for member in ranks if member.streams is not None]
        if output.fileno() in self._sources and not output.forward(targets):
            self._unwatch(output.fileno())

    def _take_refusal(self) -> None:
        try:
            received = self._template.receive(wait=False)
        except BlockingIOError:  # a process that the dataset has started may hold the other end
            return
        if received is None:
            self._unwatch(self._template.fileno())
            return
        self._refusal = Refused.unpack(unpack_frame(received.data)).pack()
        for member in self._members:
            member.tell(self._refusal)

    def _note_end(self) -> None:
        self._is_over = True

    def _has_ended(self, limit_ms: float | None) -> bool:
        """Return whether the template has ended. Wait for that at most `limit_ms`; None: without a limit."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(limit_ms))

    def _end_template(self) -> None:
        """Have the template exit, reap it, and tell the ranks that are left."""
        self._template.end_sending()
        if not self._has_ended(_TEMPLATE_LIMIT_S * 1000 if self._members or self._leaving else 0):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._has_ended(None)
        if self._template.fileno() in self._sources:
            self._take_refusal()
        for index in range(len(self._outputs)):
            for _ in range(_MAX_REST):
                self._forward(index)
        end_group(self._pid)
        _, status = os.waitpid(self._pid, 0)
        for member in self._members:
            member.tell(Exited(0, os.waitstatus_to_exitcode(status)).pack())
