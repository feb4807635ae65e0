"""The datasets of a pool's template. Workers are its forks, so they share the memory of these datasets.

A dataset that can't be shared, because reading it opens files or starts threads, is refused. The trainer ends such a
template then, and makes another one without that dataset: each worker reads it for itself.
"""

from __future__ import annotations

import gc
import mmap
import sys
from functools import partial

from swift_loader.errors import ProtocolError
from swift_loader.failpoints import Failpoint, failpoint
from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import Frame, Kind, Received, unpack_frame
from swift_loader.transport.messages import FailureStage
from swift_loader.transport.payload import Environment, read_environment, read_payload
from swift_loader.transport.pool_messages import Page, Share, Unshare
from swift_loader.transport.segments import Segment
from swift_loader.transport.template_messages import Built
from swift_loader.worker.dataset_builder import DatasetBuilder
from swift_loader.worker.failure import describe_failure
from swift_loader.worker.fork_safety import ForkHazards
from swift_loader.worker.import_guard import importing
from swift_loader.worker.pool_worker import PoolWorker
from swift_loader.worker.stack_dumps import StackDumper
from swift_loader.worker.torch_settings import set_default_dtype
from swift_loader.worker.torch_worker import import_torch

__all__ = ["PoolDatasets"]


class PoolDatasets:
    """The datasets of the loaders that were known when the template started. See `worker.fork_server.Served`."""

    def __init__(self, environment: Environment, channel: Channel, stack_dumper: StackDumper) -> None:
        """Set this process up, and have no dataset yet."""
        sys.argv[:] = environment.argv
        sys.setrecursionlimit(max(sys.getrecursionlimit(), environment.recursion_limit))
        with importing():
            import_torch()
        self._shared: dict[int, DatasetBuilder] = {}
        """By key."""
        self._channel = channel
        self._stack_dumper = stack_dumper
        self._before = self._hazards()

    def _hazards(self) -> ForkHazards:
        own = [self._channel.fileno(), *self._stack_dumper.descriptors]
        return ForkHazards.settled(own, self._stack_dumper.thread_ids)

    def answer(self, received: Received) -> bytes:
        """Return the answer to SHARE; UNSHARE has none."""
        frame = unpack_frame(received.data)
        if frame.kind is Kind.UNSHARE:
            self._shared.pop(Unshare.unpack(frame).key, None)
            return b""
        if frame.kind is not Kind.SHARE or len(received.descriptors) != 1:
            raise ProtocolError(f"a template of a pool was sent {frame.kind.name} instead of FORK")
        return self._share(frame, received.descriptors[0])

    def _share(self, frame: Frame, descriptor: int) -> bytes:
        """Read and build a dataset."""
        request = Share.unpack(frame)
        segment = Segment.attach(descriptor, request.layout.total_nbytes, private=True)
        environment = read_environment(request.layout, segment)
        builder = DatasetBuilder(partial(read_payload, request.layout, segment), environment)
        failpoint(Failpoint.TEMPLATE_SET_UP)
        self._stack_dumper.start()
        try:
            builder.read()
            builder.build()
        except Exception as error:
            return describe_failure(error, FailureStage.BUILD, builder.definitions).pack()
        finally:
            self._stack_dumper.stop()  # the process must have a single thread when it is forked
            set_default_dtype("float32")  # torch's own, for the other datasets
        reason = self._hazards().beyond(self._before, "reading it")
        failpoint(Failpoint.TEMPLATE_BUILT)
        builder.is_shared = True
        self._shared[request.key] = builder
        gc.collect()
        gc.freeze()  # as in any template: its pages stay shared
        return Built(builder.report_length(), forkable=not reason, reason=reason).pack()

    def run_worker(self, worker: int, channel: Channel) -> None:
        """Serve the loaders that the trainer names on the channel."""
        received = channel.receive()
        if received is None:
            return
        Page.unpack(unpack_frame(received.data))
        page = Segment.attach(received.descriptors[0], mmap.PAGESIZE)
        PoolWorker(worker, channel, page, self._take).serve()
        failpoint(Failpoint.WORKER_STOP)

    def _take(self, key: int) -> DatasetBuilder | None:
        """Return a dataset to a worker, which may change it. Each can be taken once."""
        return self._shared.pop(key, None)

    def __repr__(self) -> str:
        return f"<PoolDatasets {sorted(self._shared)}>"
