"""Starts a template as a fork of the trainer, for datasets and functions that can't be serialised.

The thread that starts the loader forks, so the dataset finds what belongs to that thread: `threading.local`, torch's
grad mode, an SQLite connection. Locks of the user's other threads stay locked in the fork, as with any fork.

A fork is made once per loader: a second one would be a copy of a trainer that has changed meanwhile. So workers that
die are replaced, by forks of the fork, and the template isn't.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType

from swift_loader.executors.process.child import ForkedChild
from swift_loader.executors.process.forks import FORKS
from swift_loader.transport.by_value import Definitions, travels_by_value
from swift_loader.transport.payload import Environment
from swift_loader.worker.dataset_builder import DatasetBuilder
from swift_loader.worker.forked_template import Trainer, be_forked_template
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
        """Fork this process. The fork gets copies of the descriptors. Runs on the thread that starts the loader."""
        # The kernel kills a process when the thread that forked it ends, so another thread's fork watches the process.
        is_main = threading.current_thread() is threading.main_thread()
        trainer = Trainer(os.getpid(), -1 if is_main else os.pidfd_open(os.getpid()))
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
                    be_forked_template(trainer, (channel, traces, stderr), _descriptors(), builder)
                finally:
                    os._exit(1)  # whatever happens, the trainer's code isn't run twice
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            if trainer.pidfd >= 0:
                os.close(trainer.pidfd)
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
