"""Has Ray start actors: what they are made of, and what each of them asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift_loader.executors.environment import environ_for_workers, import_path, working_directory
from swift_loader.executors.ray.calls import ActorCalls
from swift_loader.executors.ray.connection import Connection
from swift_loader.executors.ray.memory import MAX_INLINE_BYTES
from swift_loader.executors.ray.process import ActorProcess
from swift_loader.ray_executor import RayExecutor
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import Identity
from swift_loader.transport.payload import Environment, PayloadLayout, pack_payload
from swift_loader.worker.actor import BatchActor, Payload, Surroundings
from swift_loader.worker.spec import WorkerSpec


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
