"""Starts a template as a fork of the trainer, for datasets and functions that can't be serialised.

The supervisor's thread forks, because the kernel kills a process when the thread that forked it ends. Meanwhile the
thread that starts the loader waits, so it holds no lock that the fork might need. Locks of the user's other threads
stay locked in the fork, as with any fork.

A fork is made once per loader: a second one would be a copy of a trainer that has changed meanwhile. So workers that
die are replaced, by forks of the fork, and the template isn't.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType

from swift_loader.executors.process.child import ForkedChild
from swift_loader.executors.process.forks import FORKS
from swift_loader.transport.by_value import Definitions, travels_by_value
from swift_loader.transport.payload import Environment
from swift_loader.worker.dataset_builder import DatasetBuilder
from swift_loader.worker.forked_template import be_forked_template
from swift_loader.worker.process_exit import flush_streams
from swift_loader.worker.spec import WorkerSpec


class TrainerFork:
    """What a fork of this process needs to be a template."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Fork nothing yet. The fork will have the same objects as `spec`."""
        self._spec = spec
        self.definitions = Definitions(_definitions(spec))
        """Classes and functions that can't be imported. The fork has the same ones, under the same numbers."""

    def start(self, channel: int, traces: int, stderr: int) -> ForkedChild:
        """Fork this process. The fork gets copies of the descriptors. Runs on the supervisor's thread."""
        trainer_pid = os.getpid()
        # One thread: torch's pool of threads isn't in the fork, and waiting for it would never end.
        environment = replace(Environment.of_this_process(self._spec.modules), torch_threads=1)
        builder = DatasetBuilder(lambda: (self._spec, self.definitions), environment)
        flush_streams()  # else the fork would print the buffers' content once more
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the user asked for a fork
                pid = os.fork()
            if pid == 0:
                try:
                    be_forked_template(trainer_pid, (channel, traces, stderr), _descriptors(), builder)
                finally:
                    os._exit(1)  # whatever happens, the trainer's code isn't run twice
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        return ForkedChild(pid)


def _descriptors() -> Iterator[int]:
    """Yield the descriptors of all loaders of the trainer. Runs in the fork."""
    for holder in FORKS.holders:
        yield from (number for number in holder.descriptors() if number >= 0)


def _definitions(spec: WorkerSpec) -> Iterator[object]:
    """Yield the classes and functions of the user's script, and those of the options, if they can't be imported."""
    options = spec.options
    main = sys.modules.get("__main__")
    given = (options.dataset_class, type(options.dataset), options.collate_fn, options.batch_encoder)
    for thing in (*given, *(vars(main).values() if main is not None else ())):
        if isinstance(thing, (type, FunctionType)) and travels_by_value(thing):
            yield thing
