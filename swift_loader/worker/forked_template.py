"""A template that is a fork of the trainer: it has the dataset already, whatever that holds.

It differs from a fresh interpreter in what it inherits. It keeps the user's descriptors, because the dataset may read
from them. It gives up everything that would act on the trainer: the trainer's own pipes, its signal handlers, its
standard input, and whatever Python does when a process ends.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, NoReturn

from swift_loader.transport.channel import Channel
from swift_loader.transport.failpoints import Failpoint, failpoint
from swift_loader.worker.dataset_builder import DatasetBuilder
from swift_loader.worker.process_exit import die_with_parent, lead_group, reset_multiprocessing, run_and_exit
from swift_loader.worker.stack_dumps import StackDumper
from swift_loader.worker.template import build_and_serve, reset_signals


class Trainer(NamedTuple):
    """The process that forked."""

    pid: int
    pidfd: int
    """Readable once it has ended. -1: the kernel kills the fork then."""


def be_forked_template(
    trainer: Trainer, pipes: tuple[int, int, int], foreign: Iterable[int], dataset_builder: DatasetBuilder
) -> NoReturn:
    """Be a template from now on. Runs in the fork, on its only thread, with all signals blocked.

    `pipes`: the descriptors of the channel, for traces, and for stderr.
    `foreign`: the descriptors of the trainer's loaders, which may contain `pipes`. `dataset_builder` returns the
    trainer's own dataset and functions.
    """
    if trainer.pidfd < 0:
        die_with_parent(trainer.pid)
    gc.freeze()  # no object of the trainer is ever finalised here: that might act on what it shares with the trainer
    lead_group()
    channel, traces, stderr = (fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3) for descriptor in pipes)
    _replace_descriptors(stderr, {*foreign, *pipes})
    _reset_python()
    _forget_signal_handlers()
    run_and_exit(partial(_serve, Channel.from_descriptor(channel), StackDumper(traces), dataset_builder, trainer.pidfd))


def _serve(channel: Channel, stack_dumper: StackDumper, dataset_builder: DatasetBuilder, trainer: int) -> int:
    failpoint(Failpoint.TEMPLATE_BOOT)
    try:
        return build_and_serve(channel, dataset_builder, stack_dumper, trainer)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the trainer is gone


def _replace_descriptors(stderr: int, foreign: set[int]) -> None:
    """Put /dev/null in place of standard input and of the trainer's own descriptors, and set stderr.

    They aren't closed: an object of the trainer may still close its number, which must not be a new file by then.
    """
    null = fcntl.fcntl(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), fcntl.F_DUPFD_CLOEXEC, 3)
    for descriptor in foreign:
        os.dup2(null, descriptor, inheritable=False)
    if sys.__stdin__ is not None:  # else the trainer has no standard input, and 0 may be a file of the user's
        os.dup2(null, 0)
    if sys.__stderr__ is not None:
        os.dup2(stderr, 2)
    os.close(stderr)
    os.close(null)


def _reset_python() -> None:
    """Undo what the trainer has set for itself in this interpreter."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    sys.excepthook = sys.__excepthook__
    reset_multiprocessing()


def _forget_signal_handlers() -> None:
    """Give each signal for which the trainer has a Python function its default action, then unblock all."""
    signal.set_wakeup_fd(-1)  # else each signal here would wake the trainer's asyncio loop
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    reset_signals()
