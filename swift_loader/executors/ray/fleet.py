"""The actors of one loader, alone or beside processes of this machine.

An actor that was lost is replaced by another one with the same id: by this loader, never by Ray. Ray's threads post an
actor that may have answered where the inboxes listen; the thread that leads takes the answers, and decodes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from swift_loader.errors import LoaderClosed, WorkerDied, WorkerStalled, warn
from swift_loader.executors.called import ArrivedMemory, CalledFleet, CalledHandle, Failed, who_is
from swift_loader.executors.environment import environ_for_workers, import_path, working_directory
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.handle import Handle
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.ray.actor import Actor, ActorHandle, told_by_ray
from swift_loader.executors.ray.connection import Connection
from swift_loader.executors.wording import Explainer
from swift_loader.options import DeliveryOptions, RayExecutor
from swift_loader.scheduler.messages import Death, Ended, ExecutorFailed
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.messages import Identity
from swift_loader.transport.payload import Payload, pack_payload
from swift_loader.transport.segments import Segment
from swift_loader.worker.actor import ActorPayload, BatchActor
from swift_loader.worker.process import refuse_start
from swift_loader.worker.spec import WorkerSpec

FIRST_SERIAL = 1 << 20
"""Serial numbers of actors begin here, so that workers on this machine have others."""

MAX_INLINE_BYTES = 2 << 20
"""Ray sends batches of up to this size with the answer."""

END_LIMIT_S = 1.5
"""How long `close` waits until Ray says that the actors have ended."""

_DISCONNECTED = (
    "this process isn't connected to Ray any more, so its actors are gone; call ray.shutdown() after close()"
)


class ActorFleet(CalledFleet):
    """The actors of one loader."""

    has_segments = False

    def __init__(self, spec: WorkerSpec, options: DeliveryOptions, executor: RayExecutor, explainer: Explainer) -> None:
        """Connect and start nothing."""
        super().__init__(spec, options, explainer)
        self.num_started = FIRST_SERIAL
        self._wanted = executor
        self._connection = Connection(executor.address)
        self._connecting = threading.RLock()
        """Held while a thread connects, which may take long. `stop` doesn't wait for that."""
        self._content: Payload | None = None
        """What the actors build the dataset from, to compare it with what another start would send."""
        self._payload: Any = None
        """Ray's reference to the same in the object store. None: not connected, or told so."""
        self._actor_class: Any = None
        self._num_begun = 0
        """How often all actors were lost before one of them had built the dataset."""
        self._placement_due_s: float | None = None
        """When to look for actors that have no place; None: they have one, or that was told."""

    # Starting ---------------------------------------------------------------------------------------------------------

    def start_first(self) -> None:
        """Start all actors, unless that was done. Returns while Ray places them, and they build the dataset.

        Raises `ImportError` if Ray isn't installed, `ConnectionError` if there is no cluster, `EncodeError` if the
        dataset or a function can't be sent.
        """
        with self._connecting:
            self.check_open()
            if self._payload is not None:
                return
            refuse_start()
            packed, self.definitions = pack_payload(self.spec, self.spec.modules)
            self._connection.open()
            try:
                with self._connection.held() as is_open:
                    if not is_open:
                        raise LoaderClosed(_DISCONNECTED)
                    self._content = packed
                    directory = None if "working_dir" in (self._wanted.runtime_env or {}) else working_directory()
                    self._payload = self._connection.ray.put(ActorPayload(packed, import_path(), directory))
                    self._actor_class = self._make_class()
                self._began_s = time.monotonic()
                for worker_id in self.worker_ids:
                    self._start(worker_id)
            except BaseException:
                if not self.is_open:  # it was closed meanwhile, maybe before there was a connection
                    self._disconnect()
                raise

    @property
    def worker_ids(self) -> range:
        """Those of the actors come after those of processes."""
        return range(self.options.num_local, self.options.num_workers)

    def _make_class(self) -> Any:
        wanted = self._wanted
        given = dict(wanted.runtime_env or {})
        variables = {
            # Sets of strings must have one order in all actors.
            "PYTHONHASHSEED": environ_for_workers()["PYTHONHASHSEED"],
            # An object in the store takes two raylets several ms, whatever its size. Ray's own limit is 100 KiB.
            "RAY_max_direct_call_object_size": str(MAX_INLINE_BYTES),
        }
        resources = dict(wanted.resources or {})
        amounts = {"num_gpus": resources.pop("GPU", None), "resources": resources or None, "memory": wanted.memory}
        remote: Any = self._connection.ray.remote(concurrency_groups={"requests": 1, "end": 1})(BatchActor)
        return remote.options(
            num_cpus=wanted.num_cpus,
            scheduling_strategy=wanted.scheduling_strategy,
            runtime_env={**given, "env_vars": {**variables, **given.get("env_vars", {})}},
            max_restarts=0,  # the scheduler decides who is replaced
            max_task_retries=0,
            **{name: value for name, value in amounts.items() if value is not None},
        )

    def is_current(self) -> bool:
        """Return whether another start would build the same."""
        if self._content is None or not self._connection.is_open:
            return False
        return self._content.is_same(pack_payload(self.spec, self.spec.modules)[0])

    def _start(self, worker_id: int) -> None:
        """Have Ray start an actor with this id, which builds the dataset."""
        with self.lock, self._connection.held() as is_open:
            self.check_open()
            if not is_open:
                raise LoaderClosed(_DISCONNECTED)
            serial = self.next_serial()
            identity = None if self.spec.options.torch is None else Identity(worker_id, self.options.num_workers)
            actor = self._actor_class.remote()
            try:
                process = Actor(self._connection, actor, self, serial)
                process.begin(actor.start.remote(self._payload, serial, identity))
                handle = ActorHandle(worker_id, serial, process, process, ArrivedMemory())
                self.workers = {**self.workers, serial: handle}
            except BaseException:  # of a signal handler: nobody knows of the actor
                with suppress(Exception):  # the connection has ended meanwhile
                    self._connection.ray.kill(actor)
                raise
            if self.generation:
                process.use_generation(self.generation)
        self.note_news(serial)  # an answer may have come before the worker was known

    def start_worker(self, worker_id: int) -> None:
        """Start another actor. Returns while Ray places it."""
        with suppress(LoaderClosed):
            self._start(worker_id)
            self._expect_placement()

    # The first build --------------------------------------------------------------------------------------------------

    def wait_built(self, *, warns: bool = False) -> tuple[int, float]:
        """Start the actors, unless that was done. Wait until one of them has built the dataset; see `Fleet`.

        With `warns`, also warns if no actor has room. Raises `WorkerDied` if all actors were lost, `WorkerStalled` if
        none has found room within `placement_timeout`.
        """
        self.start_first()
        steps = [
            (self._wanted.placement_warning if warns else None, False, self._warn_of_placement),
            (self._wanted.placement_timeout, False, self._give_up),
            (self.options.stall_warning_s if warns else None, True, self.warn_of_build),
        ]
        return self.await_first([(after_s, self._if(is_placed, step)) for after_s, is_placed, step in steps if after_s])

    def _if(self, is_placed: bool, step: Callable[[], None]) -> Callable[[], None]:
        """Return what does a step if an actor has a place then, or none has."""

        def do() -> None:
            if is_placed == any(worker.process.is_placed for worker in self.workers.values()):
                step()

        return do

    def begin_again(self, lost: Sequence[tuple[CalledHandle, Failed]]) -> None:
        """Replace all actors, if their nodes have died before one of them has built the dataset.

        Raises `WorkerDied` if at least one has ended by itself, or this was tried too often.
        """
        self._num_begun += 1
        for worker, answer in lost:
            worker.process.note_loss(answer.error)
            if worker.process.has_crashed or self._num_begun > self.options.max_restarts:
                consequence = f"{self.explainer.build}{told_by_ray(answer.error)}"
                raise self.explainer.died(who_is(worker), None, consequence)
        for worker, _ in lost:
            self.release(worker)
            self.start_worker(worker.worker_id)

    # Actors without a place -------------------------------------------------------------------------------------------

    def _warn_of_placement(self) -> None:
        warn(self._unplaced_text())

    def _give_up(self) -> None:
        raise WorkerStalled(
            f"{self._unplaced_text()}, for longer than placement_timeout={self._wanted.placement_timeout:g} s. Ask for "
            f"less, add nodes, or end what uses the cluster: a loader keeps its actors until it is closed or deleted"
        )

    def _unplaced_text(self) -> str:
        """Return how many actors have no place, what they ask for, and what the cluster has."""
        return (
            f"{self._num_unplaced()} of {len(self.workers)} Ray actors wait for room. Each asks for "
            f"{self._wanted.describe_need()}. The cluster has "
            f"{self._connection.describe(self._wanted.resources or ())}"
        )

    def _num_unplaced(self, for_s: float = 0.0) -> int:
        """Return how many actors have had no place for so many seconds."""
        unplaced = (worker.process for worker in self.workers.values() if not worker.process.is_placed)
        return sum(time.monotonic() - process.began_s >= for_s for process in unplaced)

    def _expect_placement(self) -> None:
        """Warn if an actor that was started has no place after a while."""
        limit_s = self._wanted.placement_warning
        if limit_s is not None and self._placement_due_s is None:
            self._placement_due_s = time.monotonic() + limit_s

    def _look_at_placement(self) -> None:
        """Warn of actors that have had no place for long. On the thread that leads."""
        if self._placement_due_s is None or time.monotonic() < self._placement_due_s:
            return
        self._placement_due_s = None
        with suppress(Exception):  # the connection has ended meanwhile
            if num_late := self._num_unplaced(self._wanted.placement_warning or 0.0):
                rest = ". The others go on without them" if num_late < len(self.workers) else ""
                self.notices.append(f"{self._unplaced_text()}{rest}")
            elif self._num_unplaced():
                self._expect_placement()

    def explain(self, worker: Handle | None) -> str:
        """Return what Ray says of an actor's end; without an actor, how many have no place."""
        if worker is None:
            return f". {self._unplaced_text()}" if self._num_unplaced() else ""
        loss = worker.process.loss
        return "" if loss is None or worker.hang is not None else told_by_ray(loss)

    # Listening --------------------------------------------------------------------------------------------------------

    def make_inbox(self, reader: MessageReader, posted: Any) -> Any:
        """Return an inbox that looks at the connection, too."""
        inbox = super().make_inbox(reader, posted)
        inbox.remote = self
        return inbox

    def look_at_connection(self) -> ExecutorFailed | None:
        """Return an event if this process isn't connected any more. Then Ray tells of no actor's end."""
        self._look_at_placement()
        if self._connection.is_open or not self.is_open or self._payload is None:
            return None
        self._drop_payload()  # it is told once
        return ExecutorFailed(WorkerDied(_DISCONNECTED))

    def listen(self, reader: MessageReader) -> None:
        """Make the inboxes."""
        if not self.inboxes:  # of processes beside which there are actors
            super().listen(reader)

    def run(self) -> None:
        """Take what has come up to now, which `wait_built` has left: the first build first."""
        super().run()
        self._expect_placement()

    # Acting -----------------------------------------------------------------------------------------------------------

    def use_generation(self, generation: int) -> None:
        """Have the actors skip tasks of earlier generations."""
        super().use_generation(generation)
        for worker in self.workers.values():
            worker.process.use_generation(generation)

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002 - they follow from the options
        """Be ready for so many actors. Starts and ends none."""
        self.options = replace(self.options, num_workers=num_workers)

    def reap(self, worker: Handle) -> None:
        """Say how an actor ended, by an event. It is killed if it lives."""
        worker.process.close()
        self.post(Ended(worker.serial, Death(None, bool(worker.tasks) and worker.process.has_crashed)))

    def dismiss(self, worker: Handle) -> None:
        """End an actor that has nothing left to do."""
        worker.process.kill()

    def kill(self, worker: Handle) -> None:
        """End an actor that hangs."""
        worker.channel.drop_results()
        worker.process.kill()

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all actors. Idempotent."""
        with self.lock:
            self._is_stopped = True
            workers = list(self.workers.values())
        for worker in workers:
            worker.process.kill()
        self._news.put(None)

    def close_processes(self) -> list[Segment]:
        """Wait until the actors have ended, at most `END_LIMIT_S`, and drop all references. Idempotent."""
        deadline_s = time.monotonic() + END_LIMIT_S
        for worker in self.workers.values():
            if self._connection.is_open:
                worker.process.wait_end(max(0.0, deadline_s - time.monotonic()))
        super().close_processes()
        self._disconnect()
        return []

    def _drop_payload(self) -> None:
        with self._connection.held():
            self._payload = self._actor_class = self._content = None

    def _disconnect(self) -> None:
        self._drop_payload()
        self._connection.close()


class MixedFleet(Fleet):
    """Processes of this machine with ids from 0 on, then actors, in one loader.

    The processes start first, and the loop doesn't wait for the actors, which share the processes' inboxes.
    """

    def __init__(self, local: Fleet, remote: ActorFleet) -> None:
        """Own two fleets."""
        super().__init__(local.spec, remote.options, local.explainer)
        self.local = local
        self.remote: ActorFleet = remote
        local.remote = remote
        self.datasets = remote.datasets = local.datasets
        self.inboxes = remote.inboxes = local.inboxes
        self.posted = remote.posted = local.posted

    def of(self, serial: int) -> Fleet:
        """Return the fleet that a worker belongs to."""
        return self.remote if serial >= FIRST_SERIAL else self.local

    def get(self, serial: int) -> Any:
        """Return the handle of a worker; None if it is gone."""
        return self.of(serial).get(serial)

    @property
    def notice(self) -> str:
        """As of the processes."""
        return self.local.notice

    @property
    def is_open(self) -> bool:
        """Whether workers may start."""
        return self.local.is_open

    def start_first(self) -> None:
        """Start the process that builds the dataset first. The actors start with the loader."""
        self.local.start_first()

    def start_ahead(self) -> None:
        """Start the actors first, because that may fail at once."""
        self.remote.start_first()
        self.local.start_ahead()
        self.definitions = self.local.definitions
        if self.definitions.names() != self.remote.definitions.names():
            raise RuntimeError(
                "processes of this machine and Ray actors don't have the same classes and functions of the script; "
                "with executor=, don't give start_method='fork', or use actors only"
            )

    def wait_built(self, *, warns: bool = False) -> tuple[int, float]:
        """Wait until a process here has built the dataset."""
        return self.local.wait_built(warns=warns)

    def is_current(self) -> bool:
        """Return whether another start would build the same."""
        return self.local.is_current()

    def listen(self, reader: MessageReader) -> None:
        """Make the inboxes of the processes."""
        self.local.listen(reader)
        self.remote.listen(reader)

    def run(self) -> None:
        """Start the processes, then listen to the actors, too."""
        self.remote.notices = self.notices
        self.local.run()
        self.remote.run()

    def start_worker(self, worker_id: int) -> None:
        """Start a process or an actor."""
        (self.local if worker_id < self.options.num_local else self.remote).start_worker(worker_id)

    def processes(self) -> list[Handle]:
        """Return the processes here, then the actors."""
        return [*self.local.processes(), *self.remote.processes()]

    def use_generation(self, generation: int) -> None:
        """Have the actors skip tasks of earlier generations."""
        self.remote.use_generation(generation)

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers in all: the first ones are processes."""
        self.options = replace(self.options, num_workers=num_workers)
        self.local.resize(min(num_workers, self.options.num_local), limits)
        self.remote.resize(num_workers, limits)

    def renew(self) -> list[Segment]:
        """Kill all workers, and start others."""
        return [*self.remote.renew(), *self.local.renew()]

    def replace_template(self) -> None:
        """Replace the template of the processes."""
        self.local.replace_template()

    def stop(self) -> None:
        """Stop all workers."""
        try:
            self.local.stop()
        finally:
            self.remote.stop()

    def close_processes(self) -> list[Segment]:
        """Close all handles."""
        return [*self.remote.close_processes(), *self.local.close_processes()]
