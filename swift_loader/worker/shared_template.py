"""The template that the ranks of a node share. It builds the dataset once, and forks the workers of all ranks.

Its keeper (`swift_loader.worker.keeper`) passes on each rank that joins. To a rank, it is a template as any other:
it answers its requests, and kills its workers when the rank leaves or dies. The others' workers aren't touched.

It only serves if the dataset can be shared by all. It can't if building it fails, opens files, leaves threads, or reads
an environment variable that differs from rank to rank. Then the template says why and exits, and each rank starts a
template of its own, which shows the rank's own error.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from swift_loader.errors import ProtocolError
from swift_loader.failpoints import Failpoint, failpoint
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import duplicate
from swift_loader.transport.frames import Kind, Received, unpack_frame
from swift_loader.transport.payload import read_environment, read_payload
from swift_loader.transport.reports import BuildReport
from swift_loader.transport.root_messages import Refused
from swift_loader.transport.segments import Segment
from swift_loader.transport.sharing_messages import Join, Member
from swift_loader.transport.template_messages import Built
from swift_loader.worker.dataset_builder import DatasetBuilder
from swift_loader.worker.fingerprint import SampleCheck, check_samples
from swift_loader.worker.fork_safety import ForkHazards
from swift_loader.worker.fork_server import ForkServer
from swift_loader.worker.noted_environ import noting_reads
from swift_loader.worker.rank_environment import set_rank_variables
from swift_loader.worker.stack_dumps import StackDumper
from swift_loader.worker.torch_settings import set_num_threads

__all__ = ["be_shared_template"]

_PR_SET_PTRACER = 0x59616D61
"""From <linux/prctl.h>."""


def be_shared_template(keeper: Channel) -> int:
    """Serve ranks until the keeper ends the stream; return the exit code."""
    failpoint(Failpoint.TEMPLATE_BOOT)
    while (joined := _Joined.receive(keeper)) is not None:
        member = joined.read_member()
        if member is not None:
            return _build_and_serve(keeper, joined, *member)
        joined.close()  # it has died
    return 0


class _Joined:
    """A rank that has joined, as it came from the keeper."""

    def __init__(self, channel: Channel, traces: int, stdout: int, pidfd: int) -> None:
        self.channel = channel
        self.traces = traces
        self.stdout = stdout
        self.pidfd = pidfd

    @classmethod
    def receive(cls, keeper: Channel) -> _Joined | None:
        """Wait for the next rank. Return None at the end of the stream."""
        received = keeper.receive()
        if received is None:
            return None
        Join.unpack(unpack_frame(received.data))
        channel, traces, stdout, pidfd = received.descriptors
        return cls(Channel.from_descriptor(channel), traces, stdout, pidfd)

    def read_member(self) -> tuple[Member, int] | None:
        """Return its first message, which it sent before it joined, and the payload. None if there is none."""
        received = self.channel.receive()
        return None if received is None else (Member.unpack(unpack_frame(received.data)), received.descriptors[0])

    @property
    def descriptors(self) -> list[int]:
        """What it holds open here."""
        return [self.channel.fileno(), self.traces, self.stdout, self.pidfd]

    def close(self) -> None:
        """Close all descriptors."""
        self.channel.close()
        for descriptor in (self.traces, self.stdout, self.pidfd):
            os.close(descriptor)


def _build_and_serve(keeper: Channel, first: _Joined, member: Member, payload: int) -> int:
    """Build the dataset of the first rank, and serve all; return the exit code."""
    segment = Segment.attach(duplicate(payload), member.layout.total_nbytes, private=True)
    environment = read_environment(member.layout, segment)
    sys.argv[:] = environment.argv
    builder = DatasetBuilder(partial(read_payload, member.layout, segment), environment)
    dumper = StackDumper(first.traces)
    reason = _build(builder, dumper, [keeper.fileno(), payload, *first.descriptors])
    if reason:
        keeper.send(Refused(0, is_stale=False, reason=reason).pack())
        return 0
    builder.is_shared = True
    server = _Server(keeper, _Shared(builder, builder.report(_check_samples), payload), dumper)
    set_num_threads(1)
    gc.collect()
    gc.freeze()  # else a garbage collection in a worker would write to every object, and so copy all shared pages
    server.add(first, member)
    return server.serve()


def _build(builder: DatasetBuilder, dumper: StackDumper, own: list[int]) -> str:
    """Build the dataset. Return why the ranks can't share it; empty if they can."""
    streams = ForkHazards.of_streams()
    dumper.start()
    try:
        failpoint(Failpoint.TEMPLATE_SET_UP)
        with noting_reads(by_installed=False) as read:
            builder.read()
        imported = ForkHazards.settled([*own, *dumper.descriptors], dumper.thread_ids)
        reason = imported.beyond(streams, "importing its modules") or _because_of(read, "importing its modules")
        if reason:
            return reason
        with noting_reads(by_installed=True) as read:
            builder.build()
        built = ForkHazards.settled([*own, *dumper.descriptors], dumper.thread_ids)
        reason = built.beyond(imported, "building it") or _because_of(read, "building it")
    except Exception as error:
        return f"building it raised {type(error).__name__}"
    finally:
        dumper.stop()
    failpoint(Failpoint.TEMPLATE_BUILT)
    return reason


def _check_samples(dataset: Any, indices: Sequence[int], definitions: Definitions) -> SampleCheck:
    """Return the checksums of samples, unless these depend on the rank that this template happens to start with."""
    with noting_reads(by_installed=True) as read:
        found = check_samples(dataset, indices, definitions)
    return found._replace(checksums=()) if read else found


def _because_of(read: set[str], doing: str) -> str:
    """Return why a dataset can't be shared whose build has read these variables; empty if it can."""
    return f"{doing} read {', '.join(sorted(read))}, which may differ from rank to rank" if read else ""


class _Shared(NamedTuple):
    """What all ranks get."""

    builder: DatasetBuilder
    reported: BuildReport
    payload: int
    """The first rank's. The others have equal ones, and take this one instead."""

    def tell(self, rank: Channel) -> None:
        """Tell a rank that the dataset is built."""
        rank.send(Built(self.reported, forkable=True, reason="").pack(), [self.payload])


class _MemberDataset:
    """What the workers of one rank get. See `Served`."""

    def __init__(self, shared: _Shared, joined: _Joined) -> None:
        self._shared = shared
        self._channel = joined.channel
        self.stdout = joined.stdout
        """The rank's; -1 once closed."""
        self.member: Member | None = None
        """Known before the first worker."""

    def answer(self, received: Received) -> bytes:
        """Return the answer to a message."""
        frame = unpack_frame(received.data)
        if frame.kind is Kind.MEMBER:
            self.member = Member.unpack(frame)
            for descriptor in received.descriptors:
                os.close(descriptor)
            self._shared.tell(self._channel)
            return b""
        if frame.kind is not Kind.RECHECK:
            raise ProtocolError(f"a shared template was sent {frame.kind.name} instead of FORK")
        return self._shared.builder.judge(self._shared.reported).pack()

    def run_worker(self, worker: int, channel: Channel) -> None:
        """Serve the channel as a worker of the rank."""
        member = self.member
        assert member is not None
        os.dup2(self.stdout, 1)
        os.close(self.stdout)
        set_rank_variables(os.environ, member.variables)
        with suppress(OSError):  # the rank has fewer cores by now
            os.sched_setaffinity(0, member.cores)
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, member.pid, 0, 0, 0)  # where only ancestors may read its memory
        self._shared.builder.use_plan(member.plan)
        self._shared.builder.run_worker(worker, channel)


class _Rank:
    """A rank that is served."""

    def __init__(self, server: ForkServer, dataset: _MemberDataset, pidfd: int) -> None:
        self.server = server
        self.dataset = dataset
        self.pidfd = pidfd
        """Readable once the rank has died; -1 once closed."""

    def close(self) -> None:
        """Close what belongs to it, apart from its server's descriptors."""
        for descriptor in (self.pidfd, self.dataset.stdout):
            os.close(descriptor)
        self.pidfd = self.dataset.stdout = -1


class _Server:
    """Serves all ranks, in turns."""

    def __init__(self, keeper: Channel, shared: _Shared, dumper: StackDumper) -> None:
        self._keeper = keeper
        self._shared = shared
        self._dumper = dumper
        self._ranks: list[_Rank] = []
        """Those that joined, and those that left workers behind that haven't ended yet."""
        self._poll = select.poll()
        self._poll.register(keeper.fileno(), select.POLLIN)

    def add(self, joined: _Joined, member: Member | None = None) -> None:
        """Serve one more rank. `member` is its first message, if that was read already."""
        dataset = _MemberDataset(self._shared, joined)
        server = ForkServer(joined.channel, dataset, self._dumper, self._poll, partial(self._drop_descriptors, dataset))
        rank = _Rank(server, dataset, joined.pidfd)
        self._ranks.append(rank)
        self._poll.register(joined.pidfd, select.POLLIN)
        if member is None:
            os.close(joined.traces)
            return
        dataset.member = member
        try:
            self._shared.tell(joined.channel)
        except (BrokenPipeError, ConnectionResetError):
            self._remove(rank)

    def serve(self) -> int:
        """Return the exit code once the keeper has ended the stream, or has died."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._keeper.fileno():
                    joined = _Joined.receive(self._keeper)
                    if joined is None:
                        return self._stop()
                    self.add(joined)
                elif not self._handle(descriptor):
                    break  # others may be ready no more

    def _handle(self, descriptor: int) -> bool:
        """Handle a descriptor of a rank. Return False if the rank is gone."""
        for rank in self._ranks:
            if descriptor == rank.pidfd:
                self._remove(rank)
                return False
            if rank.server.has(descriptor):
                return self._serve_rank(rank, descriptor)
        return True

    def _serve_rank(self, rank: _Rank, descriptor: int) -> bool:
        is_there = False
        with suppress(BrokenPipeError, ConnectionResetError, ProtocolError):
            is_there = rank.server.handle(descriptor)
        if not is_there:
            self._remove(rank)
        elif rank.server.is_over:
            self._ranks.remove(rank)
        return is_there

    def _remove(self, rank: _Rank) -> None:
        """A rank has left or died. Kill its workers, which are reaped as they end."""
        self._poll.unregister(rank.pidfd)
        rank.server.abandon()
        rank.close()
        if rank.server.is_over:
            self._ranks.remove(rank)

    def _stop(self) -> int:
        self._poll.unregister(self._keeper.fileno())
        for rank in [rank for rank in self._ranks if rank.pidfd >= 0]:
            self._remove(rank)
        while self._ranks:
            descriptor, _ = self._poll.poll()[0]
            self._handle(descriptor)
        failpoint(Failpoint.TEMPLATE_STOP)
        return 0

    def _drop_descriptors(self, served: _MemberDataset) -> None:
        """Close the descriptors of the template and of all ranks. Runs in a fork, which keeps its own rank's stdout."""
        self._keeper.close()
        os.close(self._shared.payload)
        for rank in self._ranks:
            rank.server.drop_descriptors()
            others = [rank.pidfd, *([] if rank.dataset is served else [rank.dataset.stdout])]
            for descriptor in others:
                if descriptor >= 0:
                    os.close(descriptor)
