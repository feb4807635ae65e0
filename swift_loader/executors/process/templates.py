"""The templates of one loader: they hold the dataset, and workers are made from them.

Usually there is one, and all workers are its forks. If the dataset's modules leave threads behind, or with
`start_method="spawn"`, each worker is an interpreter that was a template first. A template that died is replaced by
another one with the same payload. Everything here runs on the supervisor's thread, unless a method says otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future

from swift_loader.errors import DatasetMismatch, ForkHangs, LoaderClosed, WorkerDied
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.executors.process.deaths import ForkWatch, attached, died
from swift_loader.executors.process.diagnostics import Diagnostics
from swift_loader.executors.process.event_loop_thread import EventLoopThread, Stopped
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.launch import Launch
from swift_loader.executors.process.root import BlankTemplate, discard
from swift_loader.executors.process.roots import ROOTS
from swift_loader.executors.process.template import TemplateProcess, WorkerProcess
from swift_loader.executors.process.trainer_fork import Start, TrainerFork
from swift_loader.executors.wording import Wording
from swift_loader.threads import nothing
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.descriptors import explaining_limits
from swift_loader.transport.messages import Failure
from swift_loader.transport.payload import Environment, PayloadLayout, modules_of, same_payload, write_payload
from swift_loader.transport.template_messages import Built
from swift_loader.worker.spec import StartMethod, WorkerSpec

# How the templates of one loader start: as forks of the root, which are quick, because the root has imported what the
# dataset needs; without a root, as interpreters. All get the same environment, recorded when the loader starts.

_MAX_ROOTS = 2
"""How many are tried. The second one starts if the source of a module has changed since the first one imported it."""

_IMPORT_LIMIT_S = 60.0
"""How long a root may take for its imports. Then the loader starts its own interpreter, which may take any time."""


class TemplateStarts:
    """Starts interpreters and asks for forks of the root, in one recorded environment."""

    def __init__(self, launch: Launch, modules: tuple[str, ...], start_method: StartMethod) -> None:
        """`launch` is closed with this object. `modules`: what a template will import, as far as it is known yet.

        `start_method`: `SPAWN` never uses the root.
        """
        self._launch = launch
        self._modules = modules
        self._uses_root = start_method is StartMethod.TEMPLATE
        self._ahead: tuple[Future[BlankTemplate], frozenset[str]] | None = None
        """A fork that was asked for while the payload was written, and the modules that it has."""

    def ask_ahead(self) -> None:
        """Ask the root for the first template, if it is likely to have what is needed."""
        if self._uses_root:
            self._ahead = ROOTS.fork_ahead(self._launch, self._modules)

    def need(self, modules: tuple[str, ...]) -> None:
        """Note what templates will import besides. Called before `next`, if at all."""
        self._modules = tuple(dict.fromkeys((*self._modules, *modules)))

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns."""
        return [self._launch.directory]

    def is_current(self) -> bool:
        """Return whether this process still has the recorded environment."""
        return self._launch.is_current()

    def close(self) -> None:
        """Close the descriptor, and let a fork exit that wasn't used."""
        self._take_ahead(None)
        self._launch.close()

    def next(self, thread: EventLoopThread, *, is_first: bool) -> tuple[Start, BlankTemplate | None]:
        """Return what starts the next template, and the fork of the root that it is, if it is one. Supervisor's thread.

        `thread` goes on with its work meanwhile. `is_first`: it is the loader's first one. Later ones use the root only
        if that has their environment. Raises `Stopped` if the thread is being stopped.
        """
        blank = self._fork_root(thread, is_first=is_first) if self._uses_root else None
        return (self._launch.start, None) if blank is None else (blank.start, blank)

    def _fork_root(self, thread: EventLoopThread, *, is_first: bool) -> BlankTemplate | None:
        """Return a fork of the root. None if there is no root for this loader."""
        for _ in range(_MAX_ROOTS):
            request = self._take_ahead(frozenset(self._modules))
            request = request or ROOTS.fork(self._launch, self._modules, may_start=is_first)
            if request is None:
                return None
            request.add_done_callback(lambda _: thread.loop.wake())
            try:
                is_answered = thread.run_until(request.done, _IMPORT_LIMIT_S)
            except BaseException:
                request.add_done_callback(discard)
                raise
            if not is_answered:
                request.add_done_callback(discard)
                ROOTS.give_up(self._modules)
            elif request.exception() is None:
                return request.result()
        return None

    def _take_ahead(self, needed: frozenset[str] | None) -> Future[BlankTemplate] | None:
        """Return the fork that was asked for ahead, if it has these modules. Else, or for None, let it exit."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        request, modules = ahead
        if needed is not None and needed <= modules:
            return request
        request.add_done_callback(discard)
        return None


ANSWER_LIMIT_S = 30.0
"""How long a fork of the trainer that builds nothing may take to answer."""

_HANGS = (
    "{} is a fork of this program, and {}. A fork has none of the program's threads, and locks that they hold at that "
    "moment stay locked in it. Give {}, or start the loader while no other thread is at work{}"
)
_NO_SECOND_FORK = (
    "it was a fork of the training process, and starts the workers. It can't be made again, because the training "
    "process has changed since. "
)
_ADVICE = "Make a new loader, or have it replaced: give start_method='template', and a dataset that can be serialised"
_ADVICE_LIKE_TORCH = (
    "Go on with a new epoch, or from the loader's state_dict(). Or have it replaced: give "
    "multiprocessing_context='forkserver', and a dataset that can be serialised"
)


class Templates:
    """Starts templates, compares their datasets and replaces those that die."""

    def __init__(
        self,
        spec: WorkerSpec,
        thread: EventLoopThread,
        await_replacement: Callable[[WorkerDied], None],
        wording: Wording,
    ) -> None:
        """`thread`: the supervisor's.

        `await_replacement` is called with the error that says how a template died. It returns if it is to be replaced,
        else it raises the error.
        """
        self.spec = spec
        """Sent to the templates."""
        self._thread = thread
        self._await_replacement = await_replacement
        self._wording = wording
        self._payload: tuple[PayloadLayout, int] | None = None
        """The payload and its descriptor, kept so that each later template gets the same."""
        self._starts: TemplateStarts | None = None
        """Starts interpreters, or forks of the root."""
        self._fork: TrainerFork | None = None
        """Forks the trainer instead."""
        self.definitions = Definitions()
        """The definitions that travel by value, under the numbers that the processes use."""
        self.datasets = DatasetCheck()
        self._watch = ForkWatch()
        self.first: Built | None = None
        """The first template's report on the dataset."""
        self.all: tuple[TemplateProcess, ...] = ()
        """Those that hold a dataset. Replaced as a whole, under the thread's lock, so that any thread may read it."""
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of the templates."""
        payload = [] if self._payload is None else [self._payload[1]]
        return payload if self._starts is None else [*payload, *self._starts.descriptors()]

    # Any thread -------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Write what all templates get, or fork the trainer, on this thread.

        Raises `EncodeError` if the dataset or a function can't be sent, `LoaderClosed` if the thread is being stopped.
        """
        if self.forks_trainer:
            self._fork = TrainerFork(self.spec)
            self.definitions = self._fork.definitions
            try:
                self._begin(self._fork.start)
            except Stopped:
                raise LoaderClosed("the loader was closed; make a new one") from None
            return
        launch = Launch.of_this_process()
        starts = TemplateStarts(launch, self.spec.modules, self.spec.options.start_method)
        try:
            starts.ask_ahead()
            layout, descriptor, self.definitions = self._write_payload()
        except BaseException:
            starts.close()
            raise
        starts.need(modules_of(layout, descriptor))
        with self._thread.lock:
            is_open = self._thread.is_open
            if is_open:
                self._payload, self._starts = (layout, descriptor), starts
        if not is_open:
            os.close(descriptor)
            starts.close()
            raise LoaderClosed("the loader was closed; make a new one")

    @property
    def forks_trainer(self) -> bool:
        """Whether the template is a fork of the trainer."""
        return self.spec.options.start_method is StartMethod.FORK

    def _write_payload(self) -> tuple[PayloadLayout, int, Definitions]:
        return write_payload(self.spec, Environment.of_this_process(self.spec.modules))

    def is_current(self) -> bool:
        """Return whether new templates would build the same. The dataset or the environment may have changed.

        Always false for a fork of the trainer: nothing tells whether what can't be serialised has changed.
        """
        if self._starts is None or self._payload is None or not self._starts.is_current():
            return False
        layout, descriptor, _ = self._write_payload()
        try:
            return same_payload(self._payload, (layout, descriptor))
        finally:
            os.close(descriptor)

    def ask_for_stacks(self) -> str:
        """Return the Python stacks of the one that builds the dataset. Blocks for half a second at most."""
        return self.all[-1].ask_for_stacks() if self.all else ""

    def close(self) -> None:
        """Close all handles. The processes must have ended. Idempotent."""
        for template in self.all:
            template.close()
        self._await_replacement = nothing
        payload, self._payload = self._payload, None  # before it is closed, see `Holder`
        starts, self._starts = self._starts, None
        if payload is not None:
            os.close(payload[1])
        if starts is not None:
            starts.close()

    # Building ---------------------------------------------------------------------------------------------------------

    def build_first(self, num_workers: int) -> tuple[Built, float]:
        """Return the first template's report and the seconds that it needed."""
        began_s = time.monotonic()
        if self._fork is not None:
            self._listen(self.all[0])
            if (built := self.wait_built(self.all[0])) is None:
                raise self._death_of(self.all[0])
            self.datasets.compare(built.report, "the template process")
        else:
            if self.spec.options.start_method is StartMethod.SPAWN and self.spec.options.torch is not None:
                self.add_ahead(0, num_workers)
            answer = self.build_another().answer  # one at a time: it may prepare what later ones find, as a download
            assert isinstance(answer, Built)
            built = answer
        return built, time.monotonic() - began_s

    def add_ahead(self, worker_id: int, num_workers: int) -> None:
        """Start the interpreters of this worker and of later ones, which then import at the same time.

        All of them, or one per core if they only import: with more, the first batch would wait for all.
        """
        num_ahead = num_workers if self.spec.options.torch is None else len(os.sched_getaffinity(0))
        while len(self.all) < min(num_workers, worker_id + num_ahead):
            self.add()

    def add(self) -> TemplateProcess:
        """Start a template, and let it build the dataset."""
        assert self._starts is not None
        assert self._payload is not None
        start, blank = self._starts.next(self._thread, is_first=self.first is None)
        try:
            template = self._begin(start)
        finally:
            if blank is not None:
                blank.close()  # it has started, or isn't wanted any more
        self._listen(template)
        layout, descriptor = self._payload
        template.send(layout.pack(), descriptor)
        return template

    def _begin(self, start: Start) -> TemplateProcess:
        """Start a template. Any thread."""
        with self._thread.lock:
            self._thread.check_open()
            with explaining_limits():
                template = TemplateProcess(start)
            self.all = (*self.all, template)
        return template

    def _listen(self, template: TemplateProcess) -> None:
        self.watch(template.diagnostics)
        for descriptor in (template.fileno(), template.pidfd):
            self._thread.loop.watch(descriptor, lambda: self._listen_to(template))

    def watch(self, diagnostics: Diagnostics) -> None:
        """Forward the stderr of a process."""
        descriptor = diagnostics.fileno()

        def forward() -> None:
            if not diagnostics.forward():
                self._thread.loop.unwatch(descriptor)

        self._thread.loop.watch(descriptor, forward)

    def _listen_to(self, template: TemplateProcess) -> None:
        template.take_in()
        if template.is_gone:
            for descriptor in (template.fileno(), template.pidfd):
                self._thread.loop.unwatch(descriptor)

    def wait_built(self, template: TemplateProcess) -> Built | None:
        """Return a template's report on its dataset; None if it is gone. Raises what building the dataset raised."""
        began_s, look_s = time.monotonic(), ForkWatch.look_s if self.forks_trainer else None
        builds_nothing = self.spec.options.torch is not None  # else it may build the dataset, or try samples of it
        while not self._thread.run_until(lambda: template.answer is not None or template.is_gone, look_s):
            self.check_fork(template, "the template process")
            if builds_nothing and time.monotonic() - began_s > ANSWER_LIMIT_S:
                raise self._hang(template, "the template process", f"didn't answer within {ANSWER_LIMIT_S:g} s")
        if isinstance(template.answer, Failure):
            who = f"the template process (pid {template.pid})"
            raise self._wording.failure(template.answer, who, self.definitions, "")
        return template.answer

    def check_fork(self, process: TemplateProcess | WorkerProcess, who: str) -> None:
        """Check that a fork of the trainer doesn't wait for ever. Raises `ForkHangs` if it does."""
        if self._watch.finds(process.pid):
            raise self._hang(process, who, "waits for a lock that nobody frees")

    def _hang(self, process: TemplateProcess | WorkerProcess, who: str, how: str) -> ForkHangs:
        instead = "multiprocessing_context='forkserver'" if self.spec.options.torch else "start_method='template'"
        stacks = attached(traces=process.ask_for_stacks())
        process.kill()
        return ForkHangs(_HANGS.format(f"{who} (pid {process.pid})", how, instead, stacks))

    def _death_of(self, template: TemplateProcess) -> WorkerDied:
        diagnostics, terms = template.diagnostics, self._wording.terms
        reason = f"{terms.build} and starts the {terms.workers}"
        if self.forks_trainer:
            reason = _NO_SECOND_FORK + (_ADVICE if self.spec.options.torch is None else _ADVICE_LIKE_TORCH)
        return died(
            f"the template process (pid {template.pid})",
            template.wait_exit_code(),
            template.reason or reason,
            traces=diagnostics.last_traces(),
            stderr=diagnostics.last_lines(),
            terms=terms,
        )

    def compare(self, template: TemplateProcess, built: Built) -> None:
        """Check that a later template built the same dataset as the first one.

        Raises `DatasetMismatch` if it didn't.
        """
        who = f"another template process (pid {template.pid})"
        self.datasets.compare(built.report, who)
        if self.are_forkable and not built.forkable:
            raise DatasetMismatch(
                f"{who} can't be forked, unlike the first one: {built.reason}. Each build of the dataset must open "
                f"the same files and start the same threads. If that isn't possible, give start_method='spawn'"
            )

    @property
    def are_forkable(self) -> bool:
        """Whether workers are forks of one template."""
        forks = self.spec.options.start_method is not StartMethod.SPAWN
        return forks and self.first is not None and self.first.forkable

    # Replacing --------------------------------------------------------------------------------------------------------

    def living(self) -> TemplateProcess:
        """Return the template that workers are forked from. If it is gone, replace it first.

        Raises `WorkerDied` if it was a fork of the trainer, which can't be made again.
        """
        while self.all[0].is_gone:
            if self.forks_trainer:
                raise self._death_of(self.all[0])
            self._remove_dead(self.all[0])
            self._build_again()
        return self.all[0]

    def build_another(self) -> TemplateProcess:
        """Return a template that will become a worker: one that isn't a worker yet, or a new one."""
        while (template := self._build_again(next((one for one in self.all if not one.is_worker), None))).is_gone:
            self._remove_dead(template)
        return template

    def _build_again(self, template: TemplateProcess | None = None) -> TemplateProcess:
        """Return a template once it has built the dataset; None: a new one. It may be gone already."""
        template = template or self.add()
        if (built := self.wait_built(template)) is not None:
            self.compare(template, built)
        return template

    def _remove_dead(self, template: TemplateProcess) -> None:
        """Remove a template that is gone, once it is to be replaced."""
        self._thread.check_open()
        self._await_replacement(self._death_of(template))
        self.remove(template)

    def remove(self, template: TemplateProcess) -> None:
        """Remove and close a template that is gone."""
        for descriptor in (template.fileno(), template.pidfd, template.diagnostics.fileno()):
            self._thread.loop.unwatch(descriptor)
        with self._thread.lock:  # `stop` either has seen it, and closes it, or doesn't see it any more
            self._thread.check_open()
            self.all = tuple(other for other in self.all if other is not template)
        template.close()

    def __repr__(self) -> str:
        return f"<Templates {', '.join(map(repr, self.all)) or 'none'}>"
