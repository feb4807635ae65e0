"""The template process: one fresh interpreter that imports and builds what workers need, and forks them on request.

Runs single-threaded and owns nothing exclusive, which is what makes forking it safe. After building the dataset it
looks at itself: if that opened descriptors or left threads behind (an HDF5 file, a database, a gRPC channel), the
dataset is dropped and each worker builds its own, because shared file offsets corrupt data silently. The kernel kills
it when the trainer ends, and the workers when it ends, whatever state they are in.

    trainer ──SETUP──► template ──BUILT──► trainer ──FORK + channel──► template ──FORKED + pidfd──► trainer
                                                                          └─ fork ─► worker ◄──channel──► trainer
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from swift_loader.errors import ProtocolError
from swift_loader.failpoints import Failpoint, failpoint, identify
from swift_loader.transport.channel import Channel
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.messages import Built, Exited, Fork, Forked, Stage
from swift_loader.transport.payload import PayloadLayout, read_environment, read_payload
from swift_loader.transport.segments import Segment
from swift_loader.worker.failure import describe_failure
from swift_loader.worker.loop import run_worker
from swift_loader.worker.nesting import importing
from swift_loader.worker.seeding import seed_for_worker
from swift_loader.worker.setup import WorkerSetup, length_of
from swift_loader.worker.traces import Traces

__all__ = ["main", "serve_template"]

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""

_MAX_SHOWN = 5


def main() -> NoReturn:
    """Run a template in a fresh interpreter: `argv` is (-c, package folder, channel, trainer's pid, traces)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's business
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the trainer until here
    channel, trainer_pid, traces = (int(argument) for argument in sys.argv[2:5])
    _die_with_parent(trainer_pid)
    for descriptor in (channel, traces):
        os.set_inheritable(descriptor, False)
    serve_template(Channel.from_descriptor(channel), Traces(traces))


def serve_template(channel: Channel, traces: Traces) -> NoReturn:
    """Be the template on this channel; never returns."""
    exit_code = 1
    try:
        failpoint(Failpoint.TEMPLATE_BOOT)
        _set_up(channel, traces)
        exit_code = 0
    except (BrokenPipeError, ConnectionResetError):
        exit_code = 0  # the trainer is gone
    except SystemExit as request:
        exit_code = request.code if isinstance(request.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _exit(exit_code)


def _set_up(channel: Channel, traces: Traces) -> None:
    received = channel.receive()
    if received is None:
        return
    frame = unpack_frame(received.data)
    if frame.kind is not Kind.SETUP or len(received.descriptors) != 1:
        raise ProtocolError(f"a template was sent {frame.kind.name} instead of SETUP")
    layout = PayloadLayout.unpack(frame)
    segment = Segment.attach(received.descriptors[0], layout.total_nbytes, private=True)
    environment = read_environment(layout, segment)
    sys.path[:], sys.argv[:] = environment.sys_path, environment.argv
    content = _Content(layout, segment)
    traces.start()
    before = _Holdings.now()
    failpoint(Failpoint.TEMPLATE_SET_UP)
    try:
        num_samples = content.build()
    except Exception as error:
        channel.send(describe_failure(error, Stage.BUILD, content.definitions).pack())
        return
    built = _examine(content, num_samples, before)
    traces.stop()  # no thread but this one may be there when workers are forked
    failpoint(Failpoint.TEMPLATE_BUILT)
    channel.send(built.pack())
    _hold_torch_to_one_thread()
    gc.collect()
    gc.freeze()  # a collection in a worker would write to every object, and so copy the pages it shares
    with suppress(BrokenPipeError, ConnectionResetError):  # the trainer hung up while something was reported to it
        _Template(channel, content, traces).serve()
    failpoint(Failpoint.TEMPLATE_STOP)


class _Content:
    """The dataset and what belongs to it, as read from the payload."""

    def __init__(self, layout: PayloadLayout, segment: Segment) -> None:
        self._layout = layout
        self._segment = segment
        """Mapped privately, and kept: the arrays that came through the payload are views of it."""
        self._setup: WorkerSetup | None = None
        self._dataset: Any = None
        self.definitions = Definitions()

    def build(self) -> int:
        """Make the dataset; return its length."""
        with importing():
            self._setup, self.definitions = read_payload(self._layout, self._segment)
        self._dataset = self._setup.source.make(self._setup.rng)
        return length_of(self._dataset)

    def drop(self) -> None:
        """Let go of the dataset, and of the instance it may have come from."""
        self._dataset = self._setup = None
        self.definitions = Definitions()
        gc.collect()

    def run_worker(self, worker: int, channel: Channel) -> None:
        """Serve the channel with this dataset; with one of its own, if it was dropped."""
        try:
            if self._setup is None:
                self.build()
            assert self._setup is not None
            plan = self._setup.plan
            seed_for_worker(plan.order.seed, plan.rank, worker, self._setup.rng)
        except Exception as error:
            channel.send(describe_failure(error, Stage.BUILD, self.definitions).pack())
            return
        run_worker(channel, self._dataset, self._setup, self.definitions)

    @property
    def per_worker(self) -> bool:
        """Whether the user asked for a dataset per worker."""
        return self._setup is not None and self._setup.dataset_per_worker


def _examine(content: _Content, num_samples: int, before: _Holdings) -> Built:
    """Decide whether workers can share the dataset; drop it if each must build its own."""
    gained = _Holdings.now().beyond(before)
    if not gained and not content.per_worker:
        return Built(num_samples, per_worker=False, forkable=True, reason="")
    content.drop()
    forkable = not _Holdings.now().threads - before.threads
    return Built(num_samples, per_worker=True, forkable=forkable, reason=gained or "dataset_per_worker=True")


@dataclass(frozen=True, slots=True)
class _Holdings:
    """What a process has that a fork of it can't safely share."""

    descriptors: frozenset[str]
    threads: frozenset[str]

    @classmethod
    def now(cls) -> _Holdings:
        descriptors = set()
        for number in os.listdir("/proc/self/fd"):
            try:
                descriptors.add(f"{number} ({os.readlink(f'/proc/self/fd/{number}')})")
            except FileNotFoundError:
                continue  # the one that listed the folder
        return cls(frozenset(descriptors), frozenset(os.listdir("/proc/self/task")))

    def beyond(self, before: _Holdings) -> str:
        """Return in words what is new; empty if nothing is."""
        opened = sorted(self.descriptors - before.descriptors)
        started = len(self.threads - before.threads)
        parts = []
        if opened:
            parts.append(f"building the dataset opened descriptors {', '.join(opened[:_MAX_SHOWN])}")
        if started:
            parts.append(f"building the dataset left {started} threads running")
        return "; ".join(parts)


class _Template:
    """Forks workers on request, reaps them, and reports how they ended."""

    def __init__(self, channel: Channel, content: _Content, traces: Traces) -> None:
        self._channel = channel
        self._traces = traces
        self._content = content
        self._children: dict[int, tuple[int, int]] = {}
        """pidfd -> (worker, pid)"""
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Block until there is something to do; return when the trainer hung up."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                elif not self._take_request():
                    return

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
        if request.in_place:  # for datasets whose modules leave threads behind, which no fork may inherit
            self._drop_own_descriptors()
            _run_and_exit(request.worker, channel, self._content, self._traces)
        stderr, traces = received.descriptors[1:]
        self._fork(request.worker, channel, stderr, traces)
        channel.close()  # only the worker may hold it: its death must be the end of the stream
        os.close(stderr)
        os.close(traces)
        return True

    def _fork(self, worker: int, channel: Channel, stderr: int, traces: int) -> None:
        template_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            _die_with_parent(template_pid)
            self._drop_own_descriptors()
            os.dup2(stderr, 2)
            os.close(stderr)
            _run_and_exit(worker, channel, self._content, Traces(traces))
        pidfd = os.pidfd_open(pid)
        failpoint(Failpoint.TEMPLATE_FORKED)
        self._children[pidfd] = (worker, pid)
        self._poll.register(pidfd, select.POLLIN)
        self._channel.send(Forked(worker, pid).pack(), [pidfd])

    def _drop_own_descriptors(self) -> None:
        """Close the template's own descriptors; those that modules opened stay, they may be in use."""
        self._channel.close()
        for descriptor in self._children:
            os.close(descriptor)

    def _reap(self, pidfd: int) -> None:
        worker, pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        failpoint(Failpoint.TEMPLATE_REAPED)
        self._channel.send(Exited(worker, os.waitstatus_to_exitcode(status)).pack())


def _run_and_exit(worker: int, channel: Channel, content: _Content, traces: Traces) -> NoReturn:
    exit_code = 1
    try:
        identify(worker)
        failpoint(Failpoint.WORKER_BOOT)
        traces.start()
        content.run_worker(worker, channel)
        exit_code = 0
    except SystemExit as request:
        exit_code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _exit(exit_code)


def _exit(exit_code: int) -> NoReturn:
    """End without the interpreter's tear-down: a fork's copies of the template's objects must not be finalised."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, broken or None
            continue
    os._exit(exit_code & 0xFF)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, whatever it is doing then; also if it is stopped.

    The signal is sent when the parent's *thread* ends: the template has only one, and in the trainer it is the pool's.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _hold_torch_to_one_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
