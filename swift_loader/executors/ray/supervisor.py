"""Starts the actors of one loader, and stops them.

    OPEN ──stop──► CLOSED

A worker has an id, 0 to n-1, and a serial number. An actor that was lost is replaced by another one with the same id:
by this loader, never by Ray. All methods may be called by any thread, and none of them runs code of the user.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from swift_loader.errors import LoaderClosed, WorkerDied, WorkerStalled
from swift_loader.executors.crew import Mailbox
from swift_loader.executors.environment import environ_for_workers, import_path, working_directory
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.handle import Handle
from swift_loader.executors.inbox import WorkerInbox
from swift_loader.executors.process.deaths import died
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.ray.calls import ActorCalls, Lost, told_by_ray
from swift_loader.executors.ray.connection import Connection
from swift_loader.executors.ray.inbox import ActorInbox, Posted, RayWorker
from swift_loader.executors.ray.memory import MAX_INLINE_BYTES, STORE_SHARE, ActorMemory, ArrivalStore
from swift_loader.executors.ray.process import ActorProcess
from swift_loader.executors.wording import LOADER_WORDING, Wording
from swift_loader.options import DeliveryOptions
from swift_loader.ray_executor import RayExecutor
from swift_loader.scheduler.messages import Death, Ended, Event, ExecutorFailed
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import Failure, FailureStage, Identity, Kind, Ready, unpack_frame
from swift_loader.transport.payload import Environment, PayloadLayout, pack_payload
from swift_loader.transport.segments import Segment
from swift_loader.worker.actor import Answer, BatchActor, Payload, Surroundings
from swift_loader.worker.process import refuse_start
from swift_loader.worker.spec import WorkerSpec

# Has Ray start actors: what they are made of, and what each of them asks for.


class ActorLaunch:
    """Makes the actors of one loader: NEW ─prepare─► READY ─drop─► NEW. The caller holds its lock."""

    def __init__(self, spec: WorkerSpec, wanted: RayExecutor, connection: Connection) -> None:
        """Prepare nothing: `prepare` opens the connection. `wanted`: what the user wants of the actors."""
        self.definitions = Definitions()
        """The definitions that travel by value, under the numbers that the actors use. Known once it is prepared."""
        self._spec = spec
        self._wanted = wanted
        self._connection = connection
        self._content: tuple[PayloadLayout, Any] | None = None
        """The payload, to compare it with what another start would send."""
        self._payload: Any = None
        """Ray's reference to the payload in the object store. None: not prepared."""
        self._actor_class: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether it is prepared."""
        return self._payload is not None

    def prepare(self) -> None:
        """Connect to the cluster, and put there what the actors build the dataset from.

        Raises `ImportError` if Ray isn't installed, `ConnectionError` if there is no cluster, `EncodeError` if the
        dataset or a function can't be sent.
        """
        layout, memory, self.definitions = pack_payload(self._spec, Environment.of_this_process(self._spec.modules))
        self._connection.open()
        with self._connection.held():
            self._content = layout, memory
            self._payload = self._connection.ray.put(Payload(layout.pack(), memory))
            self._actor_class = self._make_class()

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
        layout, memory, _ = pack_payload(self._spec, Environment.of_this_process(self._spec.modules))
        return layout == self._content[0] and bool((memory == self._content[1]).all())

    def start(
        self, serial: int, identity: Identity | None, announce: Callable[[], None]
    ) -> tuple[ActorCalls, ActorProcess]:
        """Have Ray start an actor, which builds the dataset. Returns at once. The caller holds the connection.

        `identity`: see `BatchActor.start`. `announce` is called when the actor may have answered, on any thread.
        """
        has_own_folder = "working_dir" in (self._wanted.runtime_env or {})
        around = Surroundings(import_path(), None if has_own_folder else working_directory())
        actor = self._actor_class.remote()
        calls = ActorCalls(actor, self._is_of_call, announce, self._connection.held)
        process = ActorProcess(self._connection, actor, calls, announce)
        calls.begin(actor.start.remote(self._payload, serial, identity, around))
        return calls, process

    def _is_of_call(self, error: BaseException) -> bool:
        return isinstance(error, self._connection.ray.exceptions.RayTaskError)

    def drop(self) -> None:
        """Drop all references to what is in the cluster. Idempotent."""
        with self._connection.held():
            self._payload = self._actor_class = self._content = None

    def __repr__(self) -> str:
        return f"<ActorLaunch {'ready' if self.is_ready else 'new'}>"


# The wait for the first actor that has built the dataset.


@dataclass(frozen=True, slots=True)
class FirstBuild:
    """The first actor that has built the dataset, or whose set-up as a worker failed then."""

    worker: RayWorker
    num_samples: int
    build_s: float
    """How long that took, with the actor's start."""


def first_build_of(
    worker: RayWorker, answer: Answer, build_s: float, wording: Wording, definitions: Definitions
) -> FirstBuild:
    """Return what an actor's first answer says. It has come after `build_s`.

    Raises what building the dataset raised.
    """
    frame = unpack_frame(memoryview(answer.messages[-1]))
    if frame.kind is not Kind.FAILURE:
        return FirstBuild(worker, Ready.unpack(frame).report.num_samples, build_s)
    failure = Failure.unpack(frame)
    if failure.stage is FailureStage.BUILD:
        raise wording.failure(failure, who(worker), definitions, "")
    return FirstBuild(worker, 0, build_s)  # only in torch mode, where the length has no meaning


def who(worker: RayWorker) -> str:
    """Return which actor it is, for messages before the loader has started."""
    return f"the first worker ({worker.process.describe()})"


class Step(NamedTuple):
    """What is done if the first build takes long."""

    after_s: float | None
    """None: never."""
    is_of_building: bool
    """Whether it is about actors that build the dataset, or about actors that have no place."""
    act: Callable[[], None]


class Patience:
    """Takes the steps that are due, each once."""

    def __init__(self, began_s: float, is_building: Callable[[], bool], steps: Sequence[Step]) -> None:
        """Wait since `began_s`, by `time.monotonic`. `is_building` returns whether an actor has a place."""
        self._is_building = is_building
        due = [(began_s + step.after_s, step) for step in steps if step.after_s is not None]
        self._due = sorted(due, key=lambda one: one[0])

    def left_s(self, clock: Callable[[], float] = time.monotonic) -> float | None:
        """Take the steps that are due. Return the seconds until the next one; None if there is none."""
        while self._due:
            at_s, step = self._due[0]
            left_s = at_s - clock()
            if left_s > 0:
                return left_s
            self._due.pop(0)
            if step.is_of_building == self._is_building():
                step.act()
        return None


FIRST_SERIAL = 1 << 20
"""Serial numbers of actors begin here, so that workers on this machine have others."""

END_LIMIT_S = 1.5
"""How long `close` waits until Ray says that the actors have ended."""


_DISCONNECTED = (
    "this process isn't connected to Ray any more, so its actors are gone; call ray.shutdown() after close()"
)


class RaySupervisor(Fleet):
    """Starts the actors, replaces those that the scheduler wants replaced, and ends them."""

    def __init__(
        self, spec: WorkerSpec, options: DeliveryOptions, executor: RayExecutor, wording: Wording = LOADER_WORDING
    ) -> None:
        """Connect and start nothing."""
        super().__init__(spec, options, wording)
        self.num_started = FIRST_SERIAL
        self.mailbox: Mailbox[Posted] = Mailbox()
        """Gets each worker that may have an answer."""
        self.tell: Callable[[Sequence[Posted]], None] = self.mailbox.post
        """Posts there, or where another executor listens."""
        self.wanted = executor
        self._connection = Connection(executor.address)
        self.launch = ActorLaunch(spec, executor, self._connection)
        self._store: ArrivalStore | None = None
        self._num_begun = 0
        """How often all actors were lost before one of them had built the dataset."""
        self._generation = 0
        """The current one, for actors that start later."""
        self._first_build: FirstBuild | None = None
        self._began_s = 0.0

    # Starting ---------------------------------------------------------------------------------------------------------

    def start_first(self) -> None:
        """Start all actors, unless that was done. Returns while Ray places them, and they build the dataset.

        Raises as `ActorLaunch.prepare` does.
        """
        with self.lock:
            self.check_open()
            if self.launch.is_ready:
                return
            refuse_start()
            self.launch.prepare()
            self.definitions = self.launch.definitions
            self._began_s = time.monotonic()
            for worker_id in range(self.options.num_local, self.options.num_workers):
                self._start(worker_id)

    def make_store(self, on_segment: Callable[[Segment], None] | None) -> None:
        """Make the memory in which batches arrive. `on_segment`: see `ArrivalStore`."""
        limit = self._connection.store_nbytes() // STORE_SHARE
        self._store = ArrivalStore(limit, self.options.limits.max_in_flight + 1, on_segment)
        for worker in self.workers.values():
            worker.memory = ActorMemory(self._store)

    def is_current(self) -> bool:
        """Return whether another start would build the same."""
        return self.launch.is_current()

    def wait_built(
        self, on_wait: Callable[[], None] | None = None, patience_s: float | None = None
    ) -> tuple[int, float]:
        """Return the dataset's length, and the seconds that building it took. See `wait_first_build`."""
        built = self.wait_first_build(on_wait or (lambda: None), patience_s, lambda _: None)
        return built.num_samples, built.build_s

    def wait_first_build(
        self, on_wait: Callable[[], None], patience_s: float | None, note: Callable[[str], None]
    ) -> FirstBuild:
        """Start the actors, unless that was done. Wait until one of them has built the dataset.

        Calls `on_wait` once if building takes longer than `patience_s`; None: never. `note` gets a warning if no actor
        has room. Raises `WorkerDied` if all actors were lost, `WorkerStalled` if none has found room within
        `placement_timeout`, or what `start_first` or building the dataset raised.
        """
        self.start_first()
        wanted = self.wanted
        waiting = Patience(
            self._began_s,
            lambda: any(worker.process.is_placed for worker in self.workers.values()),
            [
                Step(wanted.placement_warning, False, lambda: note(self.unplaced_text())),
                Step(wanted.placement_timeout, False, self._give_up),
                Step(patience_s, True, on_wait),
            ],
        )
        while (built := self._first_build or self._look()) is None:
            self.mailbox.of_loop.wait(waiting.left_s())
            self.check_open()
        self._first_build = built
        return built

    def _look(self) -> FirstBuild | None:
        """Return what the first actor that has answered says; None if none has. Its answer stays."""
        lost: list[tuple[RayWorker, Lost]] = []
        for worker in self.workers.values():
            answer = worker.channel.peek()
            if isinstance(answer, Lost):
                lost.append((worker, answer))
            elif isinstance(answer, Answer):
                build_s = time.monotonic() - self._began_s
                return first_build_of(worker, answer, build_s, self.wording, self.launch.definitions)
            elif answer is not None:
                raise answer.error
        if len(lost) == len(self.workers):
            self._begin_again(lost)
        return None

    def _begin_again(self, lost: Sequence[tuple[RayWorker, Lost]]) -> None:
        """Replace all actors, if their nodes have died before one of them has built the dataset.

        Raises `WorkerDied` if at least one has ended by itself, or this was tried too often.
        """
        self._num_begun += 1
        for worker, answer in lost:
            worker.process.note_loss(answer.reason)
            if worker.process.has_crashed or self._num_begun > self.options.max_restarts:
                terms = self.wording.terms
                raise died(who(worker), None, f"{terms.build}{told_by_ray(answer.reason)}", terms=terms)
        for worker, _ in lost:
            self.release(worker)
            self.start_worker(worker.worker_id)

    def _give_up(self) -> None:
        raise WorkerStalled(
            f"{self.unplaced_text()}, for longer than placement_timeout={self.wanted.placement_timeout:g} s. Ask for "
            f"less, add nodes, or end what uses the cluster: a loader keeps its actors until it is closed or deleted"
        )

    def unplaced_text(self) -> str:
        """Return how many actors have no place, what they ask for, and what the cluster has."""
        return (
            f"{self.num_unplaced()} of {len(self.workers)} Ray actors wait for room. Each asks for "
            f"{self.wanted.describe_need()}. The cluster has "
            f"{self._connection.describe(self.wanted.resources or ())}"
        )

    def num_unplaced(self, for_s: float = 0.0) -> int:
        """Return how many actors have had no place for so many seconds."""
        unplaced = (worker.process for worker in self.workers.values() if not worker.process.is_placed)
        return sum(time.monotonic() - process.began_s >= for_s for process in unplaced)

    def _start(self, worker_id: int) -> None:
        """Start an actor with this id."""
        with self.lock, self._connection.held() as is_open:
            self.check_open()
            if not is_open:
                raise LoaderClosed(_DISCONNECTED)
            serial, self.num_started = self.num_started, self.num_started + 1
            identity = None if self.spec.options.torch is None else Identity(worker_id, self.options.num_workers)
            announce = partial(self._announce, serial)
            calls, process = self.launch.start(serial, identity, announce)
            memory = ActorMemory(self._store or ArrivalStore(0, 0, None))
            worker = Handle(worker_id, serial, calls, process, memory, process.describe)
            self.workers = {**self.workers, serial: worker}
            if self._generation:
                process.use_generation(self._generation)
        announce()  # an answer may have come before the worker was known

    def look_at_connection(self) -> ExecutorFailed | None:
        """Return an event if this process isn't connected any more. Then Ray tells of no actor's end."""
        if self._connection.is_open or not self.is_open or not self.launch.is_ready:
            return None
        self.launch.drop()  # it is told once
        return ExecutorFailed(WorkerDied(_DISCONNECTED))

    def _announce(self, serial: int) -> None:
        worker = self.workers.get(serial)
        if worker is not None:
            self.tell([worker])

    def listen(self, reader: MessageReader) -> None:
        """Make the loop's inbox, and that of the thread that takes over while the loop is busy."""
        waiting = self.mailbox.of_loop, self.mailbox.of_receiver
        self.inboxes = [ActorInbox(one, reader, self.look_at_connection) for one in waiting]

    def make_inbox(self, reader: MessageReader, posted: deque[Event]) -> WorkerInbox:
        """Raise an error: `listen` makes them."""
        raise NotImplementedError

    def close_inboxes(self) -> None:
        """Do nothing: there is nothing to close."""

    def forget(self, worker: RayWorker) -> None:
        """Do nothing: `reap` closes what it sends."""

    def run(self) -> None:
        """Take what has come up to now, which `wait_first_build` has left: the first build first."""
        built = self._first_build
        assert built is not None
        self.tell([built.worker, *(worker for worker in self.workers.values() if worker is not built.worker)])

    # Acting -----------------------------------------------------------------------------------------------------------

    def use_generation(self, generation: int) -> None:
        """Have the actors skip tasks of earlier generations."""
        self._generation = generation
        for worker in self.workers.values():
            worker.process.use_generation(generation)

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002 - they follow from the options
        """Be ready for so many actors. Starts and ends none."""
        self.options = replace(self.options, num_workers=num_workers)
        if self._store is not None:
            self._store.slots.max_free = self.options.limits.max_in_flight + 1

    def start_worker(self, worker_id: int) -> None:
        """Start another actor. Returns while Ray places it."""
        with suppress(LoaderClosed):
            self._start(worker_id)

    def reap(self, worker: RayWorker) -> None:
        """Listen to a worker no more, and say how it ended, by an event. Its actor is killed if it lives."""
        worker.channel.close()
        worker.process.kill()
        is_at_work = bool(worker.tasks) and worker.process.has_crashed
        self.tell([Ended(worker.serial, Death(None, is_at_work))])

    def dismiss(self, worker: RayWorker) -> None:
        """End an actor that has nothing left to do."""
        worker.process.kill()

    def kill(self, worker: RayWorker) -> None:
        """End an actor that hangs."""
        worker.channel.drop_results()
        worker.process.kill()

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all actors. Idempotent."""
        with self.lock:
            self._is_stopped = True
            workers: Sequence[RayWorker] = list(self.workers.values())
        for worker in workers:
            worker.process.kill()
        self.mailbox.of_loop.wake()

    def close_processes(self) -> list[Segment]:
        """Wait until the actors have ended, at most `END_LIMIT_S`, and drop all references. Idempotent."""
        deadline_s = time.monotonic() + END_LIMIT_S
        given_up: list[Segment] = []
        for worker in self.workers.values():
            if self._connection.is_open:
                worker.process.wait_end(max(0.0, deadline_s - time.monotonic()))
            given_up += worker.close()
        self.workers, self._first_build = {}, None
        self.mailbox.clear()
        self.launch.drop()
        if self._store is not None:
            given_up += self._store.slots.take_all()
        self._connection.close()
        return given_up
