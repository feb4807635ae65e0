"""The template of a pool, and the datasets that it shares with the workers, which are its forks.

Everything here runs on the pool's thread, unless a method says otherwise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from swift_loader.errors import WorkerDied
from swift_loader.executors.process.deaths import died
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.event_loop_thread import EventLoopThread
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.launch import Launch
from swift_loader.executors.process.template import TemplateProcess
from swift_loader.executors.process.template_starts import TemplateStarts
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.descriptors import explaining_limits
from swift_loader.transport.payload import Environment, PayloadLayout, modules_of, write_payload
from swift_loader.transport.pool_messages import Pool, Share, Unshare
from swift_loader.transport.template_messages import Built
from swift_loader.worker.spec import StartMethod, WorkerSpec

__all__ = ["PoolDataset", "PoolTemplate"]

MAX_STARTS = 4
"""How many templates may end in a row before one of them has forked a worker."""


@dataclass(eq=False)
class PoolDataset:
    """The dataset and the functions of a loader, as they were when its epoch began."""

    key: int
    """Unique in the pool."""
    layout: PayloadLayout
    descriptor: int
    """Of the payload; owned by this object; -1 once closed."""
    definitions: Definitions
    """The definitions that travel by value, under the numbers that the processes use."""
    modules: tuple[str, ...]
    """What reading it imports, as far as it is known."""
    reason: str = ""
    """Why each worker reads it for itself; empty if the template does, or if it isn't known yet."""

    @classmethod
    def write(cls, key: int, spec: WorkerSpec) -> PoolDataset:
        """Write a payload. Any thread.

        Raises:
            EncodeError: The dataset or a function can't be sent.
        """
        layout, descriptor, definitions = write_payload(spec, Environment.of_this_process(spec.modules))
        modules = tuple(dict.fromkeys((*spec.modules, *modules_of(layout, descriptor))))
        return cls(key, layout, descriptor, definitions, modules)

    def __post_init__(self) -> None:
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns; -1 once closed."""
        return [self.descriptor]

    def close(self) -> None:
        """Close the payload. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PoolTemplate:
    """Starts the template, has it build datasets, and replaces it when it dies."""

    def __init__(self, thread: EventLoopThread) -> None:
        self._thread = thread
        self._starts: TemplateStarts | None = None
        """None before the first template."""
        self._process: TemplateProcess | None = None
        self._to_share: dict[int, PoolDataset] = {}
        """By key: what each new template builds."""
        self._num_starts = 0
        """Since the last one that forked a worker."""
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of the process and the datasets."""
        return [] if self._starts is None else self._starts.descriptors()

    # Any thread -------------------------------------------------------------------------------------------------------

    def share(self, dataset: PoolDataset) -> None:
        """Have the template build a dataset, if it hasn't started yet."""
        if not self.has_started:
            self._to_share[dataset.key] = dataset
        else:
            dataset.reason = "the pool had started before"

    @property
    def has_started(self) -> bool:
        """Whether a dataset comes too late to be shared."""
        return self._starts is not None

    @property
    def datasets(self) -> list[PoolDataset]:
        """Those that the template builds."""
        return list(self._to_share.values())

    def stopping(self) -> TemplateProcess | None:
        """Tell the template to exit. Return it, if there is one."""
        process = self._process
        if process is not None:
            process.request_exit()
        return process

    def close(self) -> None:
        """Close all handles. The process must have ended. Idempotent."""
        process, self._process = self._process, None
        starts, self._starts = self._starts, None
        if process is not None:
            process.close()
        if starts is not None:
            starts.close()

    # The pool's thread ------------------------------------------------------------------------------------------------

    def unshare(self, key: int) -> None:
        """Have the template forget a dataset."""
        if self._to_share.pop(key, None) is not None and self._process is not None:
            self._process.send(Unshare(key).pack())

    def living(self) -> TemplateProcess:
        """Return the template. Start one if there is none, or if it is gone.

        Raises:
            WorkerDied: Several died in a row.
        """
        while (process := self._process) is None or process.is_gone:
            if process is not None:
                if self._num_starts >= MAX_STARTS:
                    raise self._death_of(process)
                self._remove(process)
            self._start()
        return process

    def note_fork(self) -> None:
        """Record that the template has forked a worker."""
        self._num_starts = 0

    def watch(self, diagnostics: Diagnostics) -> None:
        """Forward the stderr of a process."""
        descriptor = diagnostics.fileno()

        def forward() -> None:
            if not diagnostics.forward():
                self._thread.loop.unwatch(descriptor)

        self._thread.loop.watch(descriptor, forward)

    def _start(self) -> None:
        """Start a template with all datasets. If it can't have one of them, it is gone afterwards."""
        is_first = self._starts is None
        if self._starts is None:
            modules = dict.fromkeys(name for dataset in self.datasets for name in dataset.modules)
            self._starts = TemplateStarts(Launch.of_this_process(), tuple(modules), StartMethod.TEMPLATE)
            self._starts.ask_ahead()
        start, blank = self._starts.next(self._thread, is_first=is_first)
        try:
            with self._thread.lock:
                self._thread.check_open()
                with explaining_limits():
                    process = self._process = TemplateProcess(start)
        finally:
            if blank is not None:
                blank.close()  # it has started, or isn't wanted any more
        self._num_starts += 1
        self.watch(process.diagnostics)
        for descriptor in (process.fileno(), process.pidfd):
            self._thread.loop.watch(descriptor, lambda: self._listen_to(process))
        process.send(Pool(Environment.of_this_process()).pack())
        for dataset in self.datasets:
            if not self._build(process, dataset):
                return

    def _build(self, process: TemplateProcess, dataset: PoolDataset) -> bool:
        """Have a template build a dataset. Return False if it can't: then the template isn't used."""
        process.ask(Share(dataset.key, dataset.layout).pack(), dataset.descriptor)
        self._thread.run_until(lambda: process.answer is not None or process.is_gone)
        if isinstance(process.answer, Built) and process.answer.forkable:
            return True
        # The error that it raises, or what it does to the process, is shown by the workers, which try it again.
        dataset.reason = (
            process.answer.reason if isinstance(process.answer, Built) else "the template failed to read it"
        )
        self._to_share.pop(dataset.key, None)
        self._num_starts = 0
        process.end(f"it can't share a dataset: {dataset.reason}")
        self._thread.run_until(lambda: process.is_gone)
        return False

    def _listen_to(self, process: TemplateProcess) -> None:
        process.take_in()
        if process.is_gone:
            self._unwatch(process)

    def _unwatch(self, process: TemplateProcess) -> None:
        for descriptor in (process.fileno(), process.pidfd):
            self._thread.loop.unwatch(descriptor)

    def _remove(self, process: TemplateProcess) -> None:
        self._unwatch(process)
        self._thread.loop.unwatch(process.diagnostics.fileno())
        with self._thread.lock:  # `stopping` either has seen it, or doesn't see it any more
            self._thread.check_open()
            self._process = None
        process.close()

    def _death_of(self, process: TemplateProcess) -> WorkerDied:
        diagnostics = process.diagnostics
        return died(
            f"the template process of a pool (pid {process.pid})",
            process.wait_exit_code(),
            process.reason or "it starts the workers",
            traces=diagnostics.last_traces(),
            stderr=diagnostics.last_lines(),
        )

    def __repr__(self) -> str:
        return f"<PoolTemplate {self._process!r}, {len(self._to_share)} datasets>"
