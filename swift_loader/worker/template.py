"""The template process: a new interpreter that imports the dataset's modules, builds it, and forks workers on request.

It is single-threaded and owns no exclusive resource; that makes forking it safe. It checks whether that holds:

* If importing the dataset's modules or building it left open descriptors (an HDF5 file, a database) or threads, nothing
  is forked. The template becomes the first worker, with the dataset that it has built. Each other worker is started in
  the same way, and told at once that it is one. In a fork of the trainer, the dataset is dropped, and each worker
  builds its own.
* Otherwise workers are forks that share the dataset.

The kernel kills the template when the trainer ends, and the workers when the template ends, whatever state they are in.

    trainer ──PAYLOAD──► template ──BUILT──► trainer ──FORK + channel──► template ──FORKED + pidfd──► trainer
                                                     │                   └─ fork ─► worker ◄──channel──► trainer
                                                     └──BECOME──► template, which is a worker from now on
"""

from __future__ import annotations

import gc
import os
import select
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from swift_loader.errors import ProtocolError
from swift_loader.runtime import explaining_starts
from swift_loader.transport.channel import Channel
from swift_loader.transport.failpoints import failpoint
from swift_loader.transport.messages import (
    Become,
    Built,
    Exited,
    FailureStage,
    Fork,
    Forked,
    Message,
    PayloadRead,
    unpack,
)
from swift_loader.transport.payload import Payload
from swift_loader.worker.failure import describe_failure
from swift_loader.worker.loop import DatasetBuilder
from swift_loader.worker.process import (
    ForkHazards,
    StackDumper,
    die_with_parent,
    end_group,
    finish_multiprocessing,
    flush_streams,
    lead_group,
    name_child,
    reset_multiprocessing,
    reset_signals,
    run_and_exit,
    share_with_forks,
    use_tracker,
)
from swift_loader.worker.spec import StartMethod
from swift_loader.worker.torch_worker import set_num_threads


class ForkServer:
    """Forks children on request, reaps them, and reports how they ended: what templates and the root have in common."""

    failpoints = ""
    """What their names begin with; empty: there are none."""
    sends_pidfds = False
    """Whether the trainer gets pidfds. If it has no free descriptor then, the loader that is starting fails."""

    def __init__(self, channel: Channel, trainer: int = -1) -> None:
        """Serve the trainer over a channel. `trainer`: its pidfd; its end is the end.

        -1: the kernel kills this process then.
        """
        self._channel = channel
        self._trainer = trainer
        self._children: dict[int, tuple[int | None, int]] = {}
        """pidfd -> (serial number, pid). The serial number is None for those that the trainer doesn't know."""
        self._poll = select.poll()
        for descriptor in (channel.fileno(), *([trainer] if trainer >= 0 else [])):
            self._poll.register(descriptor, select.POLLIN)

    def serve(self) -> None:
        """Handle requests and exits of children; return when the trainer has ended.

        If it has closed the channel, or a request was refused, return when the children have ended.
        """
        is_wanted, has_trainer = True, True
        while has_trainer and (is_wanted or self._children):
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                elif descriptor == self._trainer:
                    has_trainer = False
                elif is_wanted:
                    received = self._channel.receive()
                    if received is None or not self.take(unpack(received.data), received.descriptors):
                        is_wanted = False
                        self._poll.unregister(descriptor)
        for _, pid in self._children.values():
            end_group(pid)

    def take(self, request: Any, descriptors: list[int]) -> bool:
        """Do what the trainer asks for. Return False to refuse this and all that comes later."""
        if not isinstance(request, Fork):
            raise ProtocolError(f"a server was sent {type(request).__name__} instead of Fork")
        channel, traces, stderr = descriptors
        self._fail("fork-requested")
        parent = os.getpid()
        flush_streams()  # else each fork would print the buffers' content once more
        with explaining_starts("a worker"):
            pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
            lead_group()
            self._drop_descriptors()
            os.dup2(stderr, 2)
            os.close(stderr)
            run_and_exit(partial(self.be_child, request.serial, Channel.from_descriptor(channel), StackDumper(traces)))
        for descriptor in descriptors:
            os.close(descriptor)  # only the child may hold the channel, so that its death ends the stream
        pidfd = self._note(pid, request.serial)
        self._fail("forked")
        self.tell(Forked(request.serial, pid), *([pidfd] if self.sends_pidfds else []))
        return True

    def be_child(self, serial: int, channel: Channel, stack_dumper: StackDumper) -> int:
        """Be what it forks, until the trainer hangs up; return the exit code. Runs in the fork."""
        raise NotImplementedError

    def tell(self, message: Message, *descriptors: int) -> None:
        """Send the trainer a message, unless it has closed the channel."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(message.pack(), descriptors)

    def adopt(self, pid: int) -> None:
        """Reap a child that was forked elsewhere, and report nothing."""
        self._note(pid, None)

    def _note(self, pid: int, serial: int | None) -> int:
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = serial, pid
        self._poll.register(pidfd, select.POLLIN)
        return pidfd

    def _drop_descriptors(self) -> None:
        """Close the server's own descriptors. Those that modules opened stay open, because they may be in use."""
        self._channel.close()
        for descriptor in (*self._children, *([self._trainer] if self._trainer >= 0 else [])):
            os.close(descriptor)

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        serial, pid = self._children.pop(pidfd)
        end_group(pid)
        _, status = os.waitpid(pid, 0)
        if serial is not None:
            self._fail("reaped")
            self.tell(Exited(serial, os.waitstatus_to_exitcode(status)))

    def _fail(self, name: str) -> None:
        if self.failpoints:
            failpoint(f"{self.failpoints}.{name}")


class Template(ForkServer):
    """A process that builds the dataset, and forks workers."""

    failpoints = "template"
    sends_pidfds = True

    def __init__(self, channel: Channel, builder: DatasetBuilder, stack_dumper: StackDumper, trainer: int = -1) -> None:
        """Build nothing yet. `trainer`: see `ForkServer`."""
        super().__init__(channel, trainer)
        self._builder = builder
        self._stack_dumper = stack_dumper

    # Building the dataset ---------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Build the dataset and serve the trainer until it hangs up; return the exit code."""
        streams = ForkHazards.of_streams()
        self._stack_dumper.start()
        failpoint("template.set-up")
        if not self._tries(self._builder.read):
            return 0
        options = self._builder.spec.options
        if options.start_method is not StartMethod.FORK or options.dataset is None:
            return self._build(streams)
        if not self._tries(self._builder.build):  # with the trainer's own dataset, shared whatever it holds
            return 0
        return self._report("")

    def _tries(self, step: Any) -> bool:
        """Take a step. Return False if the user's code raised, which the trainer is told."""
        try:
            step()
        except Exception as error:
            self._channel.send(describe_failure(error, FailureStage.BUILD, self._builder.definitions).pack())
            return False
        return True

    def _build(self, streams: ForkHazards) -> int:
        """Build the dataset, report whether it can be shared, and serve."""
        builder, dumper, options = self._builder, self._stack_dumper, self._builder.spec.options
        own = [self._channel.fileno(), *dumper.descriptors]
        imported = ForkHazards.settled(own, dumper.thread_ids)
        if not self._tries(builder.build):
            return 0
        built = ForkHazards.settled(own, dumper.thread_ids)
        if options.start_method is StartMethod.FORK:
            built = replace(built, threads=imported.threads)  # as with any fork of the trainer, threads stay behind
        imports = _why_unforkable(options.start_method, imported, streams)
        reason = imports or built.beyond(imported, "building it")
        reason = reason or ("dataset_per_worker=True" if options.dataset_per_worker else "")
        return self._report(reason, is_odd=bool(imports or built.threads - imported.threads))

    def _report(self, reason: str, *, is_odd: bool = False) -> int:
        """Report the dataset, and serve. See `Built`."""
        builder = self._builder
        self._stack_dumper.stop()
        failpoint("template.built")
        builder.is_shared = not reason
        report = builder.report_length() if reason else builder.report()
        if reason and builder.spec.options.start_method is StartMethod.FORK:
            builder.drop()  # only this process can be forked, so its workers build their own after it has built one
        self._channel.send(Built(report, reason, is_odd).pack())
        return self._serve()

    def _serve(self) -> int:
        """Start workers on request until the trainer closes the channel."""
        set_num_threads(1)
        if (options := self._builder.spec.options).torch is None or options.start_method is not StartMethod.SPAWN:
            gc.collect()  # 0.1 s with torch. A worker of torch's that is never forked has only imported, and unpickled
        gc.freeze()  # else a garbage collection in a worker would write to every object, and so copy all shared pages
        with suppress(BrokenPipeError, ConnectionResetError):  # the trainer closed the channel during a report
            if self._builder.slow_fork:
                self.adopt(self._builder.slow_fork)
            self.serve()
        failpoint("template.stop")
        return 0

    # Serving ----------------------------------------------------------------------------------------------------------

    def take(self, request: Any, descriptors: list[int]) -> bool:
        """Fork a worker, or be one from now on."""
        if isinstance(request, Become):
            run_and_exit(partial(self.be_child, request.serial, self._channel, self._stack_dumper))
        return super().take(request, descriptors)

    def be_child(self, serial: int, channel: Channel, stack_dumper: StackDumper) -> int:
        """Be a worker, see `ForkServer`. It may have read nothing yet."""
        builder = self._builder
        reset_multiprocessing()
        failpoint("worker.boot", serial)
        stack_dumper.start()
        if not builder.is_read:
            if not self._tries(builder.read):
                return 0
            self.tell(PayloadRead())
            # As in a template, the constructor finds the main process's name.
            if builder.spec.options.torch is None and not self._tries(builder.build):
                return 0
        options = builder.spec.options
        if options.torch is None:  # else it takes torch's name for it
            name_child(f"SwiftLoader worker {serial}")
        builder.run_worker(serial, channel)
        if options.start_method is StartMethod.FORK:
            finish_multiprocessing()  # the trainer may read from a queue of the dataset's
        return 0


def main() -> NoReturn:
    """Run a template in a new interpreter."""
    channel, traces = set_up()
    run_and_exit(partial(be_template, Channel.from_descriptor(channel), StackDumper(traces)))


def set_up() -> tuple[int, int]:
    """Get a new interpreter ready; `sys.argv` is (-c, channel, trainer's pid, traces, directory, tracker, *path).

    Returns the descriptors of the channel and for traces.
    """
    reset_signals()
    channel, trainer_pid, traces, _, tracker = (int(argument) for argument in sys.argv[1:6])
    die_with_parent(trainer_pid)
    lead_group()
    open_standard_streams()
    for descriptor in (channel, traces, tracker):
        os.set_inheritable(descriptor, False)
    use_tracker(tracker)
    return channel, traces


def open_standard_streams() -> None:
    """Open /dev/null for each closed descriptor from 0 to 2. Else another file would get it, and the output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


def be_template(
    channel: Channel, stack_dumper: StackDumper, builder: DatasetBuilder | None = None, trainer: int = -1
) -> int:
    """Serve the trainer until it hangs up; return the exit code. `builder` None: the payload comes first.

    `trainer`: see `ForkServer`.
    """
    try:
        failpoint("template.boot")
        if builder is None:
            return _receive_payload(channel, stack_dumper)
        return Template(channel, builder, stack_dumper, trainer).run()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the trainer is gone


def _receive_payload(channel: Channel, stack_dumper: StackDumper) -> int:
    """Receive the payload, build the dataset, and serve; return the exit code."""
    received = channel.receive()
    if received is None:
        return 0
    layout, descriptors = unpack(received.data), received.descriptors
    while len(descriptors) < layout.num_descriptors:
        if (received := channel.receive()) is None:
            return 0
        descriptors += received.descriptors
    share_with_forks(*descriptors[1:])
    payload = Payload.in_file(layout, *descriptors)
    reset_signals(payload.environment().handled)
    template = Template(channel, DatasetBuilder.of(payload), stack_dumper)
    return template.run() if layout.worker is None else template.be_child(layout.worker, channel, stack_dumper)


def _why_unforkable(start_method: StartMethod, imported: ForkHazards, streams: ForkHazards) -> str:
    """Return why no workers can be forked from this process; empty if they can."""
    if start_method is StartMethod.TEMPLATE:
        return imported.beyond(streams, "importing its modules")
    return "start_method='spawn'" if start_method is StartMethod.SPAWN else ""
