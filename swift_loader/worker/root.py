"""The root process: it has imported what datasets need, and forks a template for each loader of the trainer.

Workers that can't be forks of a template are forks of the root, too.

So a module is imported once per training process, not once per loader. Like a template, the root is single-threaded and
owns nothing: importing must leave no threads and no open descriptors. If it did, or failed, or the source of a module
has changed since, the root refuses. Then the trainer starts another root or an interpreter for that loader alone.

    trainer ──FORK + channel──► root ──FORKED──► trainer
                                └─ fork ─► template ◄──channel──► trainer

The kernel kills the root when the trainer ends, and what the root has forked when the root ends.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from swift_loader.transport.channel import Channel
from swift_loader.transport.messages import Fork, Refused, Warmed
from swift_loader.worker.process import ForkHazards, StackDumper, importing, reset_signals, run_and_exit
from swift_loader.worker.template import ForkServer, be_template, set_up
from swift_loader.worker.torch_worker import set_num_threads

# Tells whether the source of an imported module has changed, as in a notebook that reloads modules as they are edited.
#
# Only modules of the user's are looked at: not those of the interpreter's own folders, which nobody edits.

_Stamp = tuple[int, int]
"""Time of the last change in ns, size in bytes."""


class SourceStamps:
    """The files of the modules that this process has imported, as they were then."""

    def __init__(self) -> None:
        self._stamps: dict[str, _Stamp | None] = {}

    def take(self) -> None:
        """Note the files of the modules that were imported since the last call."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file not in self._stamps and not file.startswith(_INSTALLED):
                self._stamps[file] = _stamp_of(file)

    def are_stale(self) -> bool:
        """Return whether one of these files isn't what it was."""
        return any(_stamp_of(file) != stamp for file, stamp in self._stamps.items())


def _stamp_of(file: str) -> _Stamp | None:
    try:
        status = os.stat(file)  # noqa: PTH116 - a Path takes longer
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


_INSTALLED = tuple({os.path.dirname(os.__file__), *(os.path.join(sys.prefix, name) for name in ("lib", "lib64"))})  # noqa: PTH118, PTH120
"""Where installed modules are."""


_SURVIVED = {getattr(signal, f"SIG{name}") for name in ("ALRM", "HUP", "QUIT", "TERM", "USR1", "USR2", "XCPU")}
"""What a program may handle by then. If it doesn't, it ends, and this process with it."""


def main() -> NoReturn:
    """Run a root in a new interpreter."""
    channel, _ = set_up()
    reset_signals(_SURVIVED)
    run_and_exit(partial(_be_root, Channel.from_descriptor(channel)))


def _be_root(channel: Channel) -> int:
    with suppress(BrokenPipeError, ConnectionResetError):  # the trainer hung up
        RootServer(channel).serve()
    return 0


class RootServer(ForkServer):
    """Imports modules, and forks templates, and workers that are no forks of one."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._stamps = SourceStamps()

    def take(self, request: Fork, descriptors: list[int]) -> bool:
        """Import modules and fork a template, see `ForkServer`. Without descriptors, only the imports are wanted."""
        is_stale = self._stamps.are_stale()
        reason = "the source of a module has changed" if is_stale else self._import(request.modules, descriptors)
        if reason:
            self.tell(Refused(request.serial, is_stale, reason))
            return False
        if descriptors:
            return super().take(request, descriptors)
        self.tell(Warmed(request.serial))
        return True

    def be_child(self, serial: int, channel: Channel, stack_dumper: StackDumper) -> int:  # noqa: ARG002
        """Be a template or a worker, see `ForkServer`."""
        _seed_like_new()
        importlib.invalidate_caches()
        try:
            return be_template(channel, stack_dumper)
        finally:
            channel.close()

    def _import(self, modules: Iterable[str], descriptors: Iterable[int]) -> str:
        """Import the modules that are missing. Return why this process can't be forked any more; empty if it can."""
        missing = [name for name in modules if name not in sys.modules]
        if not missing:
            return ""
        importlib.invalidate_caches()
        with importing():
            for name in missing:
                try:
                    importlib.import_module(name)
                except BaseException as error:  # a module may also call sys.exit
                    return f"importing {name} raised {type(error).__name__}: {error}"[:1000]
        set_num_threads(1)
        own = [self._channel.fileno(), *descriptors, *self._children]
        reason = ForkHazards.settled(own, ()).beyond(ForkHazards.of_streams(), "importing its modules")
        self._stamps.take()
        gc.collect()
        gc.freeze()  # the pages of what was imported stay shared
        return reason


def _seed_like_new() -> None:
    """Seed the generators that a new interpreter seeds from the system. `random` seeds itself after a fork."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed()
