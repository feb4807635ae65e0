"""Starts the templates of one loader, which hold the dataset, and the workers that are made from them.

Usually all workers are forks of one template. One that died is replaced by another one with the same payload. If the
dataset can't be shared, or with `start_method="spawn"`, the template becomes the first worker, and each other worker
is started as it was.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

from swift_loader.errors import DatasetMismatch, EncodeError, ForkHangs, LoaderClosed, ProtocolError, WorkerDied
from swift_loader.executors.fleet import EXIT_LIMIT_S, Fleet
from swift_loader.executors.process.launch import ServerLaunch
from swift_loader.executors.process.loop_thread import LoopThread, Stopped
from swift_loader.executors.process.roots import ROOTS
from swift_loader.executors.process.server import Launcher, Process, Server, is_readable
from swift_loader.executors.process.trainer_fork import ForkWatch, TrainerFork
from swift_loader.executors.wording import attached
from swift_loader.metrics.machine import available_cores
from swift_loader.scheduler.messages import ExecutorFailed, TemplateEnded
from swift_loader.transport.channel import MAX_DESCRIPTORS, duplicate, explaining_limits
from swift_loader.transport.messages import Become, Built, Exited, Failure, Forked
from swift_loader.transport.payload import (
    Payload,
    PayloadLayout,
    depends_on_torch,
    modules_of,
    pack_payload,
    write_payload,
)
from swift_loader.worker.spec import StartMethod

# Templates, and workers that are no forks of one, start as forks of the root, which are quick, because the root has
# imported what the dataset needs; without a root, as interpreters. All get the same environment, recorded when the
# loader starts.

_MAX_ROOTS = 2
"""How many are tried. The second one starts if the source of a module has changed since the first one imported it."""

_IMPORT_LIMIT_S = 60.0
"""How long a root may take for its imports. Then the loader starts its own interpreter, which may take any time."""


ANSWER_LIMIT_S = 30.0
"""How long a fork of the trainer that builds nothing may take to answer."""

_HANGS = (
    "{} is a fork of this program, and {}. A fork has none of the program's threads, and locks that they hold at that "
    "moment stay locked in it. Give {}, or start the loader while no other thread is at work{}"
)
_NO_SECOND_FORK = (
    "it was a fork of the training process, and starts the workers. It can't be made again, because the training "
    "process has changed since. No fresh interpreter can take its place: {}. Go on from the loader's state_dict(), "
    "with a new loader"
)


FIRST_WORKERS = 4
"""Started before the loader starts. The others are started while these build batches. A fork takes some ms."""

FIRST_TORCH_WORKERS = 0
"""The same for torch's workers: their loader waits for none of them when it starts."""

FORK_LIMIT_S = 30.0
"""A template that doesn't fork within this time hangs and is replaced."""


AnyProcess = TypeVar("AnyProcess", bound=Process)


def num_cores() -> int:
    """Return how many processes may import at the same time."""
    return max(1, int(available_cores()))


class Starter(LoopThread):
    """The thread that starts the processes of one loader and looks after them.

    It waits for calls, for messages of the templates, and for stderr output of the processes, which it forwards. All
    methods run on it, unless the section says otherwise.
    """

    def __init__(self, fleet: Fleet) -> None:
        """Start nothing. The workers are for this fleet, which closes this object."""
        super().__init__("starter")
        self._fleet = fleet
        self._payload: tuple[PayloadLayout, list[int]] | None = None
        """The payload and its descriptors, kept so that each later template gets the same."""
        self._launch: ServerLaunch | None = None
        """Starts interpreters in the recorded environment, which forks of the root have, too."""
        self._modules = fleet.spec.modules
        """What a template will import, as far as it is known yet."""
        self._fork: TrainerFork | None = None
        """Forks the trainer instead."""
        self._watch_of_forks = ForkWatch()
        self._next_look_s = 0.0
        """When forks of the trainer are looked at again."""
        self.first: Built | None = None
        """The first template's report on the dataset."""
        self.template: Server | None = None
        """The one that holds the dataset; None before it starts, and if it is a worker by now. For any thread."""
        self._replaceable: SimpleQueue[None] = SimpleQueue()
        """Has an entry for each template that died and is to be replaced."""
        self._early: list[WorkerDied] = []
        """How templates died that were replaced before the workers ran."""
        self._ahead: dict[int, Process] = {}
        """The processes of workers to come, by id. They import, and have no tasks."""
        self._to_start: deque[int] = deque()
        """The ids of the workers that are to be started. Any thread may add one."""
        options = fleet.spec.options
        self._start_method = options.start_method
        self._is_torch = options.torch is not None

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns, apart from those of the templates; some may be -1."""
        payload = [] if self._payload is None else self._payload[1]
        directory = [] if self._launch is None else [self._launch.directory]
        return [*super().descriptors(), *payload, *directory]

    # Any thread -------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Write what all templates get, or fork the trainer, on this thread.

        Raises `EncodeError` if the dataset or a function can't be sent, `LoaderClosed` if the thread is being stopped.
        """
        fleet = self._fleet
        spec = fleet.spec
        if self.forks_trainer:
            self._fork = TrainerFork(spec)
            fleet.definitions = self._fork.definitions
            try:
                self._start_child(self._new_template(), self._fork)
            except BaseException as error:
                self._fork.end()
                if isinstance(error, Stopped):
                    raise LoaderClosed("the loader was closed; make a new one") from None
                raise
            return
        launch, descriptors = ServerLaunch(), list[int]()
        try:
            layout, descriptors, definitions = write_payload(
                spec, spec.modules, len(fleet.definitions), shares_tensors=self._is_torch
            )
            fleet.definitions.extend(definitions)
            names = dict.fromkeys((*self._modules, *modules_of(layout, descriptors[0])))
            packages = {name.partition(".")[0] for name in names} - {"swift_loader"}
            if "torch" in sys.modules and any(map(depends_on_torch, packages)):
                names["torch"] = None  # else each worker may import it for its first sample, as one of Hugging Face's
            self._modules = tuple(names)
            with self.lock:
                if not self.is_open:
                    raise LoaderClosed("the loader was closed; make a new one")
                self._payload, self._launch = (layout, descriptors), launch
        except BaseException:
            if self._launch is launch:  # interrupted behind it: `close` closes them
                raise
            for descriptor in descriptors:
                os.close(descriptor)
            launch.close()
            raise

    @property
    def forks_trainer(self) -> bool:
        """Whether the template is a fork of the trainer."""
        return self._start_method is StartMethod.FORK

    @property
    def are_forkable(self) -> bool:
        """Whether workers are forks of one template."""
        is_shared = self._start_method is StartMethod.TEMPLATE and self.first is not None and not self.first.reason
        return self.forks_trainer or is_shared

    def is_current(self) -> bool:
        """Return whether new templates would build the same. The dataset or the environment may have changed.

        Always false for a fork of the trainer: nothing tells whether what can't be serialised has changed.
        """
        if self._launch is None or self._payload is None or not self._launch.is_current():
            return False
        spec, (layout, descriptors) = self._fleet.spec, self._payload
        now, _ = pack_payload(spec, spec.modules, hands_over=True)
        return now.is_same(Payload.in_file(layout, duplicate(descriptors[0])))

    def replace_template(self) -> None:
        """Replace the template whose end was posted last. Returns at once."""
        self._replaceable.put(None)
        self.wake()

    @property
    def without_tasks(self) -> list[Process]:
        """The processes that aren't workers of the fleet's: the template, and those of workers to come. Any thread."""
        template = self.template
        return [*([] if template is None else [template]), *self._ahead.values()]

    def close(self) -> None:
        """Close all handles. The processes and the thread must have ended. Idempotent."""
        if self.is_closed:
            return
        self.close_loop()
        for process in self.without_tasks:
            process.close()
        payload, self._payload = self._payload, None  # before it is closed, see `Holder`
        launch, self._launch = self._launch, None
        for descriptor in payload[1] if payload is not None else ():
            os.close(descriptor)
        if launch is not None:
            launch.close()
        del self._fleet  # the fleet refers to this object: a cycle would keep the dataset until the collector runs

    # Templates --------------------------------------------------------------------------------------------------------

    def build_first(self) -> float:
        """Start the first template, and wait until it has built the dataset. Return the seconds that it needed."""
        began_s, built = time.monotonic(), None
        if self._fork is not None:
            template = self.template
            assert template is not None
            self.check_open()
            template.listen()
            built = self._wait_built(template, "the template process")
            if built is None:
                self._leave_fork(template)
                self._remove_dead(template)
        if built is None:
            if self._start_method is StartMethod.SPAWN and self._is_torch:
                self._start_ahead(num_cores())
            built = self._build_again()
        self.first = built
        return time.monotonic() - began_s

    def _new_template(self) -> Server:
        """Return a template that isn't started yet, of which `stop` knows. Any thread."""
        template = Server(self)
        with self.lock, self._or_ended(template):
            self.check_open()
            self.template = template
        return template

    def _start_process(self, new: Callable[[], AnyProcess], worker: int | None = None) -> AnyProcess:
        """Return a process that has been sent the payload: a template, or the worker with this serial number."""
        payload, launch = self._payload, self._launch
        if payload is None or launch is None:  # they were closed
            raise Stopped
        process = self._fork_of_root(new, launch) if self._start_method is StartMethod.TEMPLATE else None
        process = process or self._start_child(new(), launch)
        layout, descriptors = payload
        message = replace(layout, worker=worker).pack()
        with self._or_ended(process), suppress(BrokenPipeError, ConnectionResetError):  # its end is noticed elsewhere
            for begin in range(0, len(descriptors), MAX_DESCRIPTORS):
                process.channel.send(message, descriptors[begin : begin + MAX_DESCRIPTORS])
        return process

    def _start_child(self, process: AnyProcess, launcher: Launcher) -> AnyProcess:
        """Start a process as a child of this one, and return it. Any thread."""
        with self.lock, explaining_limits(), self._or_ended(process):
            self.check_open()
            process.start(launcher)
        return process

    def _fork_of_root(self, new: Callable[[], AnyProcess], launch: ServerLaunch) -> AnyProcess | None:
        """Return a fork of the root. None if there is no root for this loader.

        Only the loader's first template may start one: the root must have the environment of the later ones.
        """
        for _ in range(_MAX_ROOTS):
            process = new()
            with self._or_ended(process):
                if ROOTS.fork(process, launch, self._modules, may_start=self.first is None):
                    any(process.pid or process.is_refused for _ in self.rounds(_IMPORT_LIMIT_S))
                    if process.pid:
                        return process
                    if not process.is_refused:
                        ROOTS.give_up(self._modules)
            process.close()
            if not process.is_refused:
                break
        return None

    @contextmanager
    def _or_ended(self, process: Process) -> Iterator[None]:
        """End a process that nobody else knows of, if an error is raised."""
        try:
            yield
        except BaseException:
            process.kill()
            process.close()
            raise

    def take_in(self, source: Any) -> None:
        """Take in what a template has sent, or that it has ended; or that a worker to come has sent something."""
        if not isinstance(source, Server):
            return
        for message in source.messages():
            if isinstance(message, (Built, Failure)):
                source.answer = message
            elif not isinstance(message, (Forked, Exited)):
                raise ProtocolError(f"a template sent an unexpected message: {type(message).__name__}")
        if source.is_gone:
            self.unwatch(source.channel.fileno(), source.pidfd)

    def _wait_built(self, template: Server, who: str) -> Built | None:
        """Return a template's report on its dataset; None if it is gone.

        Raises what building the dataset raised, `DatasetMismatch` if it hasn't built the same as others.
        """
        began_s, look_s = time.monotonic(), ForkWatch.new_s if self.forks_trainer else None
        # Torch's builds nothing before its workers do; the others may build the dataset, or try samples of it.
        while not any(template.answer is not None or template.is_gone for _ in self.rounds(look_s)):
            self._check_fork(template, who)
            if self._is_torch and time.monotonic() - began_s > ANSWER_LIMIT_S:
                raise self._hang(template, who, f"didn't answer within {ANSWER_LIMIT_S:g} s")
        answer = template.answer
        if isinstance(answer, Failure):
            who = f"the template process (pid {template.pid})"
            raise self._fleet.explainer.rebuilt(answer, who, self._fleet.definitions)
        if answer is None:
            return None
        assert isinstance(answer, Built)
        self._fleet.datasets.compare(answer.report, who)
        return answer

    def _check_fork(self, process: Process, who: str) -> None:
        """Check that a fork of the trainer doesn't wait for ever. Raises `ForkHangs` if it does."""
        if self._watch_of_forks.finds(process.pid):
            raise self._hang(process, who, "waits for a lock that nobody frees")

    def _hang(self, process: Process, who: str, how: str) -> ForkHangs:
        instead = "multiprocessing_context='forkserver'" if self._is_torch else "start_method='template'"
        stacks = attached(traces=process.ask_for_stacks())
        process.kill()
        return ForkHangs(_HANGS.format(f"{who} (pid {process.pid})", how, instead, stacks))

    def _death_of(self, template: Server, why_left: EncodeError | None = None) -> WorkerDied:
        diagnostics, explainer = template.diagnostics, self._fleet.explainer
        reason = f"{explainer.build} and starts the workers"
        if why_left is not None:
            reason = _NO_SECOND_FORK.format(why_left.fact)
        return explainer.died(
            f"the template process (pid {template.pid})",
            self._exit_code_of(template),
            template.reason or reason,
            traces=diagnostics.last_traces(),
            stderr=diagnostics.last_lines(),
        )

    # Replacing templates ----------------------------------------------------------------------------------------------

    def _living(self) -> Server:
        """Return the template that workers are forked from. If it is gone, replace it first.

        Raises `WorkerDied` if it was a fork of the trainer, and no other process can take its place.
        """
        while self.template is None or self.template.is_gone:
            if self.template is not None:
                if self.forks_trainer:
                    self._leave_fork(self.template)
                self._remove_dead(self.template)
            self._build_again()
        return self.template

    def _leave_fork(self, template: Server) -> None:
        """Have fresh interpreters take the place of a fork of the trainer, which is gone.

        Raises how it died if no signal ended it, or if the dataset can't be sent to them.
        """
        exit_code = self._exit_code_of(template)
        if exit_code is not None and exit_code >= 0:
            raise self._death_of(template)
        fleet = self._fleet
        before, mode = fleet.spec, fleet.spec.options.torch
        mode = mode and replace(mode, pool=None, kept={})  # only forks have the mappings
        fleet.spec = replace(before, options=replace(before.options, start_method=StartMethod.TEMPLATE, torch=mode))
        fleet.datasets.compares_seeds = before.options.dataset is None
        try:
            self._start_method = StartMethod.TEMPLATE
            self.prepare()
        except LoaderClosed:
            raise Stopped from None
        except EncodeError as error:
            self._start_method = StartMethod.FORK
            raise self._death_of(template, error) from error

    def _build_again(self) -> Built:
        """Start a template. Return its report once one has built the dataset; it may be gone already.

        Raises `DatasetMismatch` if it hasn't built the same as the first one.
        """
        while True:
            template = self._start_process(self._new_template)
            self.check_open()
            template.listen()
            who = f"another template process (pid {template.pid})"
            if (built := self._wait_built(template, who)) is None:
                self._remove_dead(template)
            elif self.are_forkable and built.reason:
                raise DatasetMismatch(
                    f"{who} can't be forked, unlike the first one: {built.reason}. Each build of the dataset must open "
                    f"the same files and start the same threads. If that isn't possible, give start_method='spawn'"
                )
            else:
                return built

    def _remove_dead(self, template: Server) -> None:
        """Remove a template that is gone, once the scheduler wants it replaced. Other work of this thread waits, too.

        Raises how it died if it is one too many at the start.
        """
        self.check_open()
        error, fleet = self._death_of(template), self._fleet
        if fleet.is_running:
            fleet.post(TemplateEnded(error))
            any(not self._replaceable.empty() for _ in self.rounds())
            self._replaceable.get()
        elif (num := len(self._early)) >= fleet.options.max_restarts:
            raise type(error)(f"{error}\nAs many others ended before it: {num}") if num else error
        else:
            self._early.append(error)
        template.unlisten()
        with self.lock:  # `stop` either has seen it, and closes it, or doesn't see it any more
            self.check_open()
            self.template = None
        template.close()

    # Workers ----------------------------------------------------------------------------------------------------------

    def start_first(self) -> None:
        """Start the first workers, and have the inboxes listen. The others are started after that."""
        fleet, num_first = self._fleet, FIRST_TORCH_WORKERS if self._is_torch else FIRST_WORKERS
        for worker_id in range(min(num_first, fleet.options.num_workers)):
            self._start(worker_id)
        fleet.listen_to_all()
        for error in self._early:
            fleet.post(TemplateEnded(error, is_replaced=True))
        self._to_start.extend(range(num_first, fleet.options.num_workers))
        self.submit(self._start_next)

    def start_worker(self, worker_id: int) -> None:
        """Have a worker started with this id. Returns at once. Any thread."""
        self._to_start.append(worker_id)
        self.submit(self._start_next)

    def _start_next(self) -> None:
        """Start the next worker, unless nothing is started any more."""
        if self._to_start and self.is_open:
            self._start(self._to_start.popleft())
            self.submit(self._start_next)  # after deaths that came meanwhile

    def leave_workers(self) -> None:
        """Look after no worker any more, and start none of those that were to be started."""
        self._to_start.clear()
        for worker in self._fleet.workers.values():
            self.unwatch(worker.process.diagnostics.fileno())

    def _start(self, worker_id: int) -> None:
        process: Process | None = None
        while process is None:
            if self.are_forkable:
                template = self._living()  # it may have taken the place of another, and not be forkable
                process = self._fork_from(template) if self.are_forkable else None
            elif self.template is not None:
                process, serial = self.template, self._fleet.next_serial()
                self.template.unlisten()
                self.template.send(Become(serial).pack())
                process.serial = serial
            else:
                process = self._fresh_worker(worker_id)
        self._add_worker(worker_id, process)

    def _fork_from(self, template: Server) -> Process | None:
        """Return a worker that the template has forked; None if the template is gone, or hung and was killed."""
        process = Process(self, self._fleet.next_serial())
        process.template = template
        with self._or_ended(process):
            template.fork(process, process.serial)
            if not any(process.pid or template.is_gone for _ in self.rounds(FORK_LIMIT_S)):
                template.reason = f"it didn't start a worker within {FORK_LIMIT_S:g} s, and was killed"
                template.kill()
                any(template.is_gone for _ in self.rounds())
        if process.pid:
            return process
        process.close()
        return None

    def _fresh_worker(self, worker_id: int) -> Process:
        """Return a process that is this worker, once it has read the payload, or has ended. Others start meanwhile."""
        # With more imports of torch than cores, the first batch would wait for all.
        self._start_ahead(worker_id + (num_cores() if self._is_torch else self._fleet.options.num_workers))
        if worker_id not in self._ahead:
            self._start_alone(worker_id)
        process = self._ahead[worker_id]
        self.watch(process.channel.fileno(), process)  # only to wait: what it sends is for an inbox
        any(is_readable(process.channel.fileno()) or process.has_ended for _ in self.rounds())
        self.unwatch(process.channel.fileno())
        return process

    def _start_ahead(self, stop: int) -> None:
        """Start the processes of the workers up to this id that have none. The template is worker 0 first."""
        found = {*self._ahead, *(worker.worker_id for worker in self._fleet.workers.values())}
        for worker_id in range(1, min(stop, self._fleet.options.num_workers)):
            if worker_id not in found:
                self._start_alone(worker_id)

    def _start_alone(self, worker_id: int) -> None:
        """Start a process that is told with the payload that it is this worker."""
        serial = self._fleet.next_serial()

        def new() -> Process:
            process = Process(self, serial)
            with self.lock, self._or_ended(process):  # so that `stop` knows of it
                self.check_open()
                self._ahead[worker_id] = process
            return process

        self._start_process(new, serial)

    def _add_worker(self, worker_id: int, process: Process) -> None:
        """Give a process that is a worker by now to the fleet."""
        fleet = self._fleet
        with self.lock, self._or_ended(process):
            self.check_open()
            worker = fleet.make_handle(worker_id, process.serial, process.channel, process)
            if (mode := fleet.spec.options.torch) is not None:
                worker.tell_identity(fleet.options.num_workers, mode.kept.pop(worker_id, []))
            self.watch(process.diagnostics.fileno(), process.diagnostics)
            fleet.add(worker)
            if process is self.template:
                self.template = None
            self._ahead.pop(worker_id, None)

    def _exit_code_of(self, process: Process) -> int | None:
        """Return the exit code of a process that has ended; None if it isn't known in time."""
        template = process.template
        if not process.reap():
            for _ in self.rounds(EXIT_LIMIT_S):
                if process.exit_code is not None or (template is not None and template.is_gone):
                    break
        return process.exit_code

    def learn_end(self, process: Process) -> bool:
        """Wait until it is known how a worker ended. Return whether it has ended with its template, as far as known."""
        exit_code, template = self._exit_code_of(process), process.template
        self.unwatch(process.diagnostics.fileno())
        return exit_code is None and template is not None and template.is_gone

    # The thread -------------------------------------------------------------------------------------------------------

    def look_after(self) -> float | None:
        """Replace the template that workers are forked from, if it is gone. Its workers are replaced one by one.

        Raises `ForkHangs` if a worker hangs.
        """
        if not self.are_forkable or not self._fleet.is_running:
            return None
        self._living()
        if not self.forks_trainer:
            return None
        if time.monotonic() >= self._next_look_s:
            workers = self._fleet.workers.values()
            is_new = not workers or any(worker.owes_first_answer for worker in workers)
            self._next_look_s = time.monotonic() + (ForkWatch.new_s if is_new else ForkWatch.look_s)
            for worker in workers:
                self._check_fork(worker.process, f"worker {worker.worker_id}")
        return max(0.0, self._next_look_s - time.monotonic())

    def note_failure(self, error: BaseException) -> None:
        """Tell the scheduler, once errors aren't raised by `wait_built` or `run` any more."""
        if not self.is_closed and self._fleet.is_running:
            self._fleet.post(ExecutorFailed(error))
