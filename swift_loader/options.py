"""The options of a loader: four groups, by who reads them.

    SamplingOptions   plan: which samples form which batch
    WorkerOptions     worker processes: how a batch is made (in worker/spec.py, because it is sent to them)
    DeliveryOptions   trainer: how batches come from the workers to the loop
    ReportOptions     trainer: what is recorded, and how many bad samples are too many

Each option is one field. Its line says the internal name, the type, the public name and the check. The defaults are in
the signature of `SwiftLoader`. DataLoader and the stages of a pipeline make `WorkerOptions` and `DeliveryOptions`, too:
what they don't have is as the field says.
"""

from __future__ import annotations

import difflib
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import Any

from swift_loader.checks import (
    check_callable,
    check_choice,
    check_flag,
    check_integer,
    check_max_errors,
    check_optional_integer,
    check_path,
    check_progress,
    check_seconds,
    checked,
    option,
)
from swift_loader.errors import counted, nbytes_text, warn
from swift_loader.log import LogSettings, check_logger
from swift_loader.ranks.ranks import Ranks
from swift_loader.runtime import ProcessOwner
from swift_loader.sampling.mixture import mix_of
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.run import fixed_fields
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.scheduler.queues import Limits, default_in_flight
from swift_loader.scheduler.scheduler import SchedulerSettings
from swift_loader.worker.fetch import OnError
from swift_loader.worker.mapped import tasks_ahead
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import WorkerOptions

# The value `"auto"` of the options that give a number of workers.

AUTO = "auto"


class AutoWorkers(int):
    """A number of workers that the loader chose, and that it may change."""

    __slots__ = ()


def check_num_workers(name: str, value: Any, at_least: int, at_most: int) -> int:
    """Return a number of workers within bounds. `"auto"` gives the first number of one that changes, 1."""
    if isinstance(value, AutoWorkers):
        return value
    if isinstance(value, str) and value == AUTO:
        return AutoWorkers(1)
    try:
        return check_integer(name, value, at_least, at_most)
    except TypeError as error:
        raise TypeError(f"{error}, or {AUTO!r}") from None


# Error messages for options that SwiftLoader doesn't have: misspelt ones and those of other loaders.

_NO_SAMPLER = (
    "shuffle, nearby_shuffle and seed determine the order, and each rank gets its own part automatically. For a "
    "subset, weights or your own order, give a dataset that looks up the index in a list, such as "
    "torch.utils.data.Subset"
)

_INSTEAD = {
    # torch.utils.data.DataLoader
    "sampler": _NO_SAMPLER,
    "batch_sampler": (
        "batches have batch_size samples, in the order that shuffle, nearby_shuffle and seed determine. For your own "
        "batches, give a dataset of whole batches, batch_size=1 and a collate_fn that returns samples[0]"
    ),
    "workers": "give worker_per_consumer, the number of worker processes of this rank",
    "num_workers": "give worker_per_consumer, the number of worker processes of this rank",
    "generator": "give seed: it determines the order and, with rng='sample', all random draws",
    "worker_init_fn": (
        "set up what each worker needs in the constructor of dataset_class, with dataset_per_worker=True if workers "
        "can't share it; random generators are seeded automatically (rng='sample')"
    ),
    "persistent_workers": "leave it out: workers stay from epoch to epoch, until close()",
    "prefetch_factor": (
        "give data_queue_size, the batches in flight of all workers together: prefetch_factor times the number of "
        "workers"
    ),
    "pin_memory_device": "leave it out: pin_memory=True is for the current accelerator. start(device=...) moves them",
    "multiprocessing_context": (
        "give start_method: 'template' forks workers from one fresh interpreter, 'spawn' starts a fresh one for each "
        "worker; 'fork' forks the training process"
    ),
    # torch.utils.data.DistributedSampler, and other names for ranks
    "num_replicas": "give nb_consumer, or leave it out to use the world size of torch.distributed or the launcher",
    "world_size": "give nb_consumer, or leave it out to use the world size of torch.distributed or the launcher",
    "rank": "call loader.start(rank), or leave it out to use the rank in torch.distributed or the launcher",
    "consumer_index": "call loader.start(consumer_index)",
    # Removed; until 0.3
    "share_dataset": "leave it out: each rank has a dataset of its own. Give memory-mapped data, which ranks share",
    # Parameters of start(), and names from other loaders
    "device": "call loader.start(device=...)",
    "to_device": "call loader.start(device=..., to_device=...)",
    "dtype": "call loader.start(device=..., dtype=...)",
    "resume": "call loader.load_state_dict(state)",
    "prefetch": "give data_queue_size, the batches in flight of all workers together",
    "epochs": "leave it out: each `for` loop over the loader is one epoch",
    "epoch": "call loader.set_epoch(epoch)",
    "snapshot_every_n_steps": "leave it out: state_dict() is exact after every batch and costs nothing",
}


def refuse_unknown(unknown: Iterable[str], known: Sequence[str]) -> None:
    """Raise `TypeError` for the first unknown option of a SwiftLoader. It says what to do instead, or what is meant."""
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(known)}"
        raise TypeError(f"SwiftLoader has no option {name!r}; {_INSTEAD.get(name, hint)}")


MAX_WORKERS = 4096
"""Each worker is a process with several descriptors. No machine runs this many."""


class WorkerType(str, Enum):
    """What a worker is."""

    PROCESS = "process"
    THREAD = "thread"
    """A thread of the trainer. All share its memory and its random generators."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Which samples form which batch. The same on all ranks."""

    batch_size: int = option("batch_size", check_integer, 1)
    world_size: int | None = option("nb_consumer", check_optional_integer, 1)
    """None: the world size of torch.distributed or of the launcher."""
    shuffle: bool = option("shuffle", check_flag)
    seed: int | None = option("seed", check_optional_integer, 0)
    """None: `order_settings` takes torch's, or one from the clock."""
    window: int | None = option("nearby_shuffle", check_optional_integer, 0)
    """None: derived from the batch size."""
    drop_last: bool = option("drop_last", check_flag)
    uneven: Uneven = option("uneven", check_choice, Uneven)

    @property
    def fixed(self) -> frozenset[str]:
        """The fields of a state that the user set explicitly."""
        return fixed_fields(seed=self.seed, shuffle=self.shuffle, window=self.window)

    def order_settings(self) -> OrderSettings:
        """Return the order of a new run. It has another seed each time if none was given and torch isn't imported."""
        seed = default_seed() if self.seed is None else self.seed
        return OrderSettings.of(seed=seed, shuffle=self.shuffle, window=self.window, batch_size=self.batch_size)

    def plan_settings(self, order: OrderSettings, ranks: Ranks) -> PlanSettings:
        """Return the settings that determine the batches of a rank."""
        return PlanSettings(
            order=order,
            batch_size=self.batch_size,
            world_size=ranks.world_size,
            rank=ranks.rank,
            uneven=self.uneven,
            drop_last=self.drop_last,
        )


# Workers that are Ray actors. Nothing here imports Ray.

_STRATEGIES = ("SPREAD", "DEFAULT")

_SMALLEST = 1e-4
"""Ray's smallest amount of a resource."""


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """Workers that are [Ray](ray.md) actors, on any node of a cluster. For the option `executor` of the loaders.

    Ray is imported when the loader starts. If this process isn't connected to a cluster then, the loader connects it,
    and disconnects it when it is closed. It never starts a cluster.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of its range.
    """

    num_workers: int
    """How many actors, at least 1."""
    num_cpus: float = 1.0
    """Cores that an actor reserves. Ray doesn't hold it to them."""
    resources: Mapping[str, float] | None = None
    """Other resources that an actor reserves, by name, such as `GPU`. `{"data": 1}` needs nodes that were started with
    `--resources='{"data": 8}'`."""
    memory: int | None = None
    """Bytes of memory that an actor reserves. None: it reserves none."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's [runtime environment](https://docs.ray.io/en/latest/ray-core/handling-dependencies.html) for the actors:
    `working_dir`, `pip`, `env_vars` and so on."""
    scheduling_strategy: Any = "SPREAD"
    """Where Ray places actors: `"SPREAD"`, `"DEFAULT"`, or an object of `ray.util.scheduling_strategies`."""
    address: str | None = None
    """The cluster, as `host:port` or `"auto"`. None: `RAY_ADDRESS`, or the cluster on this machine. It has no effect in
    a process that is connected already."""
    placement_timeout: float | None = 300.0
    """Seconds that an actor may wait for a node with room. After that, `start()` raises `WorkerStalled`. With local
    workers, the loop continues with these. None or 0: no limit."""
    placement_warning: float | None = 10.0
    """Seconds after which a warning says how many actors have no room. None or 0: no warning."""

    def __post_init__(self) -> None:
        _set(self, "num_workers", check_integer("num_workers", self.num_workers, 1))
        _set(self, "num_cpus", _amount("num_cpus", self.num_cpus))
        _set(self, "resources", _amounts(self.resources))
        _set(self, "memory", None if self.memory is None else check_integer("memory", self.memory, 1))
        _set(self, "runtime_env", _mapping("runtime_env", self.runtime_env))
        _set(self, "scheduling_strategy", _strategy(self.scheduling_strategy))
        _set(self, "address", _address(self.address))
        _set(self, "placement_timeout", check_seconds("placement_timeout", self.placement_timeout))
        _set(self, "placement_warning", check_seconds("placement_warning", self.placement_warning))

    def describe_need(self) -> str:
        """Return what one actor reserves, in words."""
        wanted = [f"{self.num_cpus:g} CPU", *(f"{value:g} {name}" for name, value in (self.resources or {}).items())]
        return ", ".join([*wanted, *([] if self.memory is None else [f"{self.memory} bytes of memory"])])

    def __repr__(self) -> str:
        chosen = ", ".join(
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if one.name != "runtime_env" and getattr(self, one.name) != one.default  # it may hold secrets
        )
        return f"RayExecutor({chosen})"


def _set(executor: RayExecutor, name: str, value: Any) -> None:
    object.__setattr__(executor, name, value)  # the way that frozen dataclasses have


def _amount(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be a number")
    amount = float(value)
    if not (math.isfinite(amount) and amount >= 0):
        raise ValueError(f"{name}={value} isn't an amount; it must be a finite number of at least 0")
    if 0 < amount < _SMALLEST:
        raise ValueError(f"{name}={value} is too small; Ray counts in steps of {_SMALLEST:g}")
    return amount


def _mapping(name: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a dict, or None")
    return dict(value)


def _amounts(value: Any) -> dict[str, float] | None:
    given = _mapping("resources", value)
    if given is None:
        return None
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"resources has the name {name!r}, a {type(name).__name__}; it must be a text")
    if own := given.keys() & {"CPU", "memory"}:
        raise ValueError(f"resources names {', '.join(sorted(own))}; use num_cpus and memory for these")
    if "object_store_memory" in given:
        raise ValueError("resources names object_store_memory, which actors can't reserve; leave it out")
    return {name: _amount(f"resources[{name!r}]", amount) for name, amount in given.items()}


def _strategy(value: Any) -> Any:
    if isinstance(value, str) and value not in _STRATEGIES:
        allowed = ", ".join(map(repr, _STRATEGIES))
        raise ValueError(
            f"scheduling_strategy={value!r} is unknown; it must be one of {allowed}, or an object of "
            f"ray.util.scheduling_strategies"
        )
    if not isinstance(value, str) and type(value).__module__ != "ray.util.scheduling_strategies":
        raise TypeError(
            f"scheduling_strategy is a {type(value).__name__}; it must be a text, or an object of "
            f"ray.util.scheduling_strategies"
        )
    return value


def _address(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"address is a {type(value).__name__}; it must be a text, or None")
    if value == "local" or str(value).startswith("ray://"):
        raise ValueError(
            f"address={value!r} is no cluster that this process can join; give host:port or 'auto'. A cluster is "
            f"started by `ray start --head` or ray.init(), and Ray Client (ray://) has no object store here"
        )
    return value


def check_executor(name: str, value: Any) -> RayExecutor | None:
    """Return the option, or None."""
    if value is not None and not isinstance(value, RayExecutor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a swift_loader.RayExecutor, or None")
    return value


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """How batches come from the workers to the loop. Stays in the trainer."""

    num_workers: int = option("worker_per_consumer", check_num_workers, 0, MAX_WORKERS)
    worker_type: WorkerType = option("worker_type", check_choice, WorkerType)
    in_order: bool = option("in_order", check_flag)
    max_in_flight: int | None = option("data_queue_size", check_optional_integer, 1)
    """None: chosen by `Limits`. This and `max_ready_per_worker` become `limits`."""
    timeout_s: float | None = option("timeout", check_seconds)
    """How long a worker may spend on a batch that the loop waits for, before it is killed and replaced; and how long
    the loop waits for a batch that no worker has. None: no limit."""
    max_restarts: int = option("worker_restarts", check_integer, 0)
    """How many workers in a row with one id may be replaced before one of them builds a batch."""
    max_ready_per_worker: int | None = option("max_buffer_size", check_optional_integer, 1, default=None)
    """None: chosen by `Limits`."""
    thread_per_worker: bool = option("multithread", check_flag, default=True)
    batch_decoder: Callable[[bytes], Any] | None = option("batch_decoder", check_callable, default=None)
    stall_warning_s: float | None = option("stall_warning", check_seconds, default=None)
    """How long a worker may spend on such a batch before there is a warning; None: no warning."""
    max_on_device: int = option("max_nb_batch_on_device", check_integer, 1, default=1)
    pin_memory: bool = option("pin_memory", check_flag, default=False)
    executor: RayExecutor | None = option("executor", check_executor, default=None)
    """Where further workers are. They count in `num_workers`. None: all of them are on this machine."""

    num_ahead: int = 0
    """How many tasks each worker should have, because it reads ahead. 0: it doesn't."""
    num_local: int = 0
    """With an executor: how many of the workers are on this machine. They have the lowest ids."""

    @property
    def is_auto(self) -> bool:
        """Whether the loader chooses the number of workers itself, while it runs."""
        return isinstance(self.num_workers, AutoWorkers)

    @property
    def uses_processes(self) -> bool:
        """Whether batches are built in other processes."""
        return self.num_workers > 0 and self.worker_type is WorkerType.PROCESS

    @property
    def uses_threads(self) -> bool:
        """Whether batches are built by worker threads of this process."""
        return self.num_workers > 0 and self.worker_type is WorkerType.THREAD

    @property
    def scheduling(self) -> SchedulerSettings:
        """What the scheduler's decisions depend on."""
        return SchedulerSettings(
            self.limits, self.max_restarts, self.stall_warning_s, self.timeout_s, num_workers=self.num_workers
        )

    @property
    def limits(self) -> Limits:
        """How far ahead of the loop the workers may work."""
        given = self.max_in_flight, self.max_ready_per_worker
        return Limits.of(*given, self.num_workers, in_order=self.in_order, num_ahead=self.num_ahead)

    def warn_of_idle_workers(self) -> None:
        """Warn if the user's limit doesn't let all workers be busy."""
        limit, number = self.limits.max_in_flight, self.num_workers
        if limit < number:
            warn(
                f"data_queue_size={limit} keeps at most {limit} of worker_per_consumer={number} workers busy. Leave "
                f"data_queue_size out to get {default_in_flight(number, in_order=self.in_order)}, give at least "
                f"{number}, or start fewer workers"
            )

    def describe(self, dataset: Any, sizes: Sequence[int | None], *where: str, nbytes: int = 0) -> dict[str, str]:
        """Return what a loader is, for its `repr` and for notebooks.

        `dataset`: an instance, or what makes one. `sizes`: samples, batches and the batch size; None: not known.
        `where`: the loader's state, and the loop's place. `nbytes`: of a batch; 0: not known.
        """
        num_samples, num_batches, batch_size = sizes
        name = dataset.__name__ if isinstance(dataset, (type, FunctionType)) else type(dataset).__name__
        size = "" if batch_size is None else f" of {batch_size}"
        number = self.limits.max_in_flight
        memory = f" ({nbytes_text(number * nbytes)})" if nbytes else ""
        facts = {
            "dataset": name if num_samples is None else f"{counted(num_samples, 'sample')} of {name}",
            "batches": ("batches" if num_batches is None else counted(num_batches, "batch")) + size,
            "workers": counted(self.num_workers, "thread" if self.uses_threads else "worker"),
            **dict(zip(("state", "position"), where, strict=False)),
        }
        return facts | {"ahead": f"at most {number} in flight{memory}"} if self.num_workers else facts


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is recorded about a run, and how many failed samples end it."""

    log: LogSettings | None = option("logger", check_logger)
    benchmark: bool = option("benchmark", check_flag)
    benchmark_file: str | None = option("benchmark_file", check_path)
    max_errors: float | None = option("max_errors", check_max_errors)
    """An integer counts samples; a float is a fraction of the epoch's samples."""
    progress: bool = option("progress", check_progress)

    def __post_init__(self) -> None:
        if self.benchmark_file is not None and not (folder := Path(self.benchmark_file).parent).is_dir():
            raise FileNotFoundError(
                f"benchmark_file={self.benchmark_file!r}: there is no folder {str(folder)!r}; make it"
            )

    def benchmark_path(self, file_number: int) -> Path | None:
        """Return where the measurements of this process go, of those with these options. Number 0 keeps the name."""
        if self.benchmark_file is None:
            return None
        path = Path(self.benchmark_file)
        is_device = path.exists() and not path.is_file()  # /dev/null and pipes have no neighbours
        return path if is_device or file_number == 0 else path.with_stem(f"{path.stem}_rank{file_number}")


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of a loader."""

    sampling: SamplingOptions
    workers: WorkerOptions
    delivery: DeliveryOptions
    report: ReportOptions
    maker: ProcessOwner = field(default_factory=ProcessOwner)
    """The process that drew the seed. A loader that was forked or pickled has its seed from there."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Check the arguments of `SwiftLoader`, given by public name.

        Raises:
            TypeError: An argument has the wrong type, or two arguments exclude each other.
            ValueError: A value is out of its range. The message names the value, what is allowed and what to change.
        """
        check_integer("message_queue_size", given["message_queue_size"], 1)  # it has no effect
        executor, number = check_executor("executor", given.get("executor")), given["worker_per_consumer"]
        if number is None:  # on this machine: one, or none if there are others
            number = 1 if executor is None else 0
        delivery = checked(DeliveryOptions, {**given, "worker_per_consumer": number})
        if executor is not None:
            if delivery.is_auto or delivery.worker_type is WorkerType.THREAD:
                raise ValueError(
                    "worker_per_consumer='auto' and worker_type='thread' don't work with executor=; give the number of "
                    "worker processes on this machine, or leave them out"
                )
            total = check_integer("num_workers", delivery.num_workers + executor.num_workers, 1, MAX_WORKERS)
            delivery = replace(delivery, num_workers=total, num_local=delivery.num_workers)
        share: Callable[[Any], Any] | None = None
        if check_flag("shared", given["shared"]):
            from swift_loader.shared.lists import share_lists as share
        workers = checked(WorkerOptions, {**given, "shared": share})
        sampling = checked(SamplingOptions, given)
        delivery = replace(delivery, num_ahead=tasks_ahead(workers.dataset, sampling.batch_size))
        options = cls(sampling, workers, delivery, checked(ReportOptions, given))
        if share is not None and workers.dataset is not None:  # nothing else is wrong, so the dataset may be changed
            options = replace(options, workers=replace(workers, dataset=share(workers.dataset)))
        return options

    def __post_init__(self) -> None:
        if (self.workers.batch_encoder is None) != (self.delivery.batch_decoder is None):
            raise ValueError(
                "batch_encoder and batch_decoder need each other, but only one was given; give both or neither"
            )
        if self.report.max_errors is not None and self.workers.on_error is OnError.RAISE:
            raise ValueError(
                f"max_errors={self.report.max_errors} has no effect with on_error='raise' because the first bad sample "
                f"raises its error; give on_error='skip' or on_error='replace', or leave max_errors out"
            )

        if self.delivery.is_auto and not self.report.benchmark:
            raise ValueError(
                "worker_per_consumer='auto' chooses by what is measured, and benchmark=False measures nothing; give "
                "benchmark=True, or a number of workers"
            )
        if self.delivery.is_auto and self._copies_for_threads:
            raise ValueError(
                "worker_per_consumer='auto' adds workers, but worker threads can't be added with "
                "dataset_per_worker=True and a dataset instance, because it can't be copied while others use it; give "
                "dataset_class, leave dataset_per_worker out, or give a number of workers"
            )
        if self.delivery.uses_threads and self.workers.rng is Rng.WORKER:
            raise ValueError(
                "rng='worker' doesn't work with worker_type='thread' because threads share the random generators; give "
                "rng='sample' or rng=None, or worker_type='process'"
            )

    def order_settings(self) -> OrderSettings:
        """Return the order of a new run."""
        return replace(self.sampling.order_settings(), mix=mix_of(self.workers.dataset))

    @property
    def _copies_for_threads(self) -> bool:
        """Whether each worker thread has a copy of a dataset instance."""
        workers = self.workers
        return self.delivery.uses_threads and workers.dataset_per_worker and workers.dataset_class is None

    def resized(self, num_workers: int, *, is_auto: bool) -> Options:
        """Return the same options with another number of workers, at least 1.

        Args:
            num_workers: From now on.
            is_auto: Whether the loader may change it again.

        Raises:
            TypeError: It is no integer.
            ValueError: It is out of its range.
        """
        number = check_integer("worker_per_consumer", num_workers, 1, MAX_WORKERS)
        return replace(self, delivery=replace(self.delivery, num_workers=AutoWorkers(number) if is_auto else number))

    def facts(self) -> dict[str, int | str]:
        """Return the options that must be equal on all ranks, by public name."""
        sampling, workers = self.sampling, self.workers
        return {
            "shuffle": sampling.shuffle,
            "batch_size": sampling.batch_size,
            "uneven": sampling.uneven.value,
            "drop_last": sampling.drop_last,
            "rng": workers.rng.value,
            "on_error": workers.on_error.value,
        }


def default_seed() -> int:
    """Return the seed of torch's default generator, without drawing from it; without torch, a seed from the clock.

    It is what the program passed to `torch.manual_seed`. If it didn't call that, it is 64 bits that torch drew for this
    process. Nothing tells the two apart.
    """
    generator = getattr(sys.modules.get("torch"), "default_generator", None)  # also None during the import of torch
    return time.time_ns() // 1_000_000 if generator is None else int(generator.initial_seed())
