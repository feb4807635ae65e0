"""Checks every option and translates its public name into the internal one. No other file does either."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar

from swift_loader.engine.ledger import Limits
from swift_loader.engine.settings import ProcessSettings, StartMethod
from swift_loader.in_flight import InFlight
from swift_loader.integers import MAX_BITS, as_integer, shown
from swift_loader.log import LogSettings
from swift_loader.order import OrderSettings
from swift_loader.placement import Placement
from swift_loader.plan import MAX_EPOCH, PlanSettings, Uneven
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng
from swift_loader.worker.setup import DatasetSource, WorkerSetup

__all__ = ["Options", "check_collate", "check_epoch", "check_integer", "check_rank", "make_options"]

LOG_KEYS = ("path", "stdout", "level")
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")

MAX_WORKERS = 4096
"""Each worker is a process with several descriptors. No machine runs this many."""

MAX_WAIT_S = 1e6
"""Eleven days. poll(2) takes less than 2**31 ms. A longer limit counts as no limit."""

_Choice = TypeVar("_Choice", bound=Enum)


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of a loader."""

    source: DatasetSource
    batch_size: int
    world_size: int | None
    """None: the world size of torch.distributed or of the launcher."""
    num_workers: int
    shuffle: bool
    seed: int
    chosen: frozenset[str]
    """The fields of a state that the user set explicitly."""
    made_in_pid: int
    """The process that drew the seed. A loader that was forked or pickled has its seed from there."""
    drop_last: bool
    uneven: Uneven
    window: int | None
    """None: derived from the batch size."""
    rng: Rng
    on_error: OnError
    max_errors: float | None
    """An integer counts samples; a float is a fraction of the epoch's samples."""
    in_flight: InFlight
    limits: Limits
    collate_fn: Callable[[list[Any]], Any] | None
    batch_encoder: Callable[[Any], bytes] | None
    batch_decoder: Callable[[bytes], Any] | None
    log: LogSettings | None
    benchmark: bool
    benchmark_file: str | None
    validate: bool
    thread_per_worker: bool
    max_on_device: int
    pin_memory: bool
    timeout_s: float | None
    stall_warning_s: float | None
    max_restarts: int
    start_method: StartMethod
    dataset_per_worker: bool

    def worker_setup(self, plan: PlanSettings) -> WorkerSetup:
        """Return what is sent to the workers of a rank."""
        return WorkerSetup(
            source=self.source,
            plan=plan,
            rng=self.rng,
            collate_fn=self.collate_fn,
            batch_encoder=self.batch_encoder,
            dataset_per_worker=self.dataset_per_worker,
            on_error=self.on_error,
            forks=self.start_method is StartMethod.TEMPLATE,
            validate=self.validate,
        )

    def order_settings(self) -> OrderSettings:
        """Return the order of a new run."""
        return OrderSettings.of(seed=self.seed, shuffle=self.shuffle, window=self.window, batch_size=self.batch_size)

    def plan_settings(self, order: OrderSettings, placement: Placement) -> PlanSettings:
        """Return the settings that determine the batches of a rank."""
        return PlanSettings(
            order=order,
            batch_size=self.batch_size,
            world_size=placement.world_size,
            rank=placement.rank,
            uneven=self.uneven,
            drop_last=self.drop_last,
        )

    def facts(self) -> dict[str, int | str]:
        """Return the options that must be equal on all ranks, by public name."""
        return {
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "uneven": self.uneven.value,
            "drop_last": self.drop_last,
            "rng": self.rng.value,
            "on_error": self.on_error.value,
        }

    def process_settings(self) -> ProcessSettings:
        """Return the settings of the engine of worker processes."""
        return ProcessSettings(
            num_workers=self.num_workers,
            limits=self.limits,
            start_method=self.start_method,
            validate=self.validate,
            thread_per_worker=self.thread_per_worker,
            batch_decoder=self.batch_decoder,
            max_restarts=self.max_restarts,
            stall_warning_s=self.stall_warning_s,
            timeout_s=self.timeout_s,
        )


def make_options(
    *,
    dataset_class: Callable[..., Any] | None,
    dataset_kwargs: Mapping[str, Any] | None,
    dataset: Any,
    batch_size: int,
    nb_consumer: int | None,
    worker_per_consumer: int,
    shuffle: bool,
    seed: int | None,
    drop_last: bool,
    uneven: str,
    in_order: bool,
    data_queue_size: int | None,
    message_queue_size: int,
    max_buffer_size: int | None,
    nearby_shuffle: int | None,
    rng: str | None,
    on_error: str,
    max_errors: float | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_encoder: Callable[[Any], bytes] | None,
    batch_decoder: Callable[[bytes], Any] | None,
    logger: str | Mapping[str, Any] | None,
    benchmark: bool,
    benchmark_file: str | os.PathLike[str] | None,
    validate: bool,
    multithread: bool,
    max_nb_batch_on_device: int,
    pin_memory: bool,
    timeout: float | None,
    stall_warning: float | None,
    worker_restarts: int,
    start_method: str,
    dataset_per_worker: bool,
) -> Options:
    """Check the options and return them under their internal names.

    Raises:
        TypeError: An argument has the wrong type, or two arguments exclude each other.
        ValueError: A value is out of its range. The message names the value, what is allowed and what to change.
    """
    batch_size = check_integer("batch_size", batch_size, 1)
    num_workers = check_integer("worker_per_consumer", worker_per_consumer, 0, MAX_WORKERS)
    queue_size = None if data_queue_size is None else check_integer("data_queue_size", data_queue_size, 1)
    in_flight = InFlight.of(queue_size, num_workers, in_order=_flag("in_order", in_order))
    per_worker = in_flight.per_worker if max_buffer_size is None else max_buffer_size
    check_collate(collate_fn)
    _callable("batch_encoder", batch_encoder)
    _callable("batch_decoder", batch_decoder)
    if (batch_encoder is None) != (batch_decoder is None):
        raise ValueError(
            "batch_encoder and batch_decoder need each other, but only one was given; give both or neither"
        )
    return Options(
        source=_source(dataset_class, dataset_kwargs, dataset),
        batch_size=batch_size,
        world_size=None if nb_consumer is None else check_integer("nb_consumer", nb_consumer, 1),
        num_workers=num_workers,
        shuffle=_flag("shuffle", shuffle),
        seed=_default_seed() if seed is None else check_integer("seed", seed, 0),
        chosen=frozenset(
            {"shuffle"}
            | ({"seed"} if seed is not None else set())
            | ({"nearby_shuffle"} if nearby_shuffle is not None and shuffle else set())
        ),
        made_in_pid=os.getpid(),
        drop_last=_flag("drop_last", drop_last),
        uneven=_choice("uneven", uneven, Uneven),
        window=None if nearby_shuffle is None else check_integer("nearby_shuffle", nearby_shuffle, 0),
        rng=_choice("rng", "none" if rng is None else rng, Rng),
        on_error=_choice("on_error", on_error, OnError),
        max_errors=_max_errors(max_errors, on_error),
        in_flight=in_flight,
        limits=Limits(
            max_in_flight=in_flight.num_batches,
            max_ready_per_worker=check_integer("max_buffer_size", per_worker, 1),
            max_tasks=check_integer("message_queue_size", message_queue_size, 1),
            in_order=in_flight.in_order,
        ),
        collate_fn=collate_fn,
        batch_encoder=batch_encoder,
        batch_decoder=batch_decoder,
        log=_log_settings(logger),
        benchmark=_flag("benchmark", benchmark),
        benchmark_file=_path("benchmark_file", benchmark_file),
        validate=_flag("validate", validate),
        thread_per_worker=_flag("multithread", multithread),
        max_on_device=check_integer("max_nb_batch_on_device", max_nb_batch_on_device, 1),
        pin_memory=_flag("pin_memory", pin_memory),
        timeout_s=_seconds("timeout", timeout),
        stall_warning_s=_seconds("stall_warning", stall_warning),
        max_restarts=check_integer("worker_restarts", worker_restarts, 0),
        start_method=_choice("start_method", start_method, StartMethod),
        dataset_per_worker=_flag("dataset_per_worker", dataset_per_worker),
    )


def check_collate(collate_fn: Any) -> Any:
    """Return `collate_fn` if it is callable or None; else raise `TypeError`."""
    _callable("collate_fn", collate_fn)
    return collate_fn


def check_epoch(epoch: Any) -> int:
    """Return the epoch as an integer from 0 to `MAX_EPOCH`; else raise `TypeError` or `ValueError`."""
    return check_integer("epoch", epoch, 0, MAX_EPOCH)


def check_rank(rank: Any) -> int | None:
    """Return the rank as an integer of at least 0, or None if none was given; else raise."""
    return None if rank is None else check_integer("consumer_index", rank, 0)


def _source(dataset_class: Any, dataset_kwargs: Any, dataset: Any) -> DatasetSource:
    if (dataset_class is None) == (dataset is None):
        what = "neither dataset_class nor dataset was" if dataset is None else "both dataset_class and dataset were"
        raise TypeError(f"{what} given; give dataset_class (with dataset_kwargs) or dataset, an instance")
    if dataset is not None:
        if dataset_kwargs is not None:
            raise TypeError(
                "dataset_kwargs was given with dataset, which is an instance and takes no arguments; leave "
                "dataset_kwargs out, or give dataset_class"
            )
        if isinstance(dataset, type):
            raise TypeError(f"dataset={dataset.__name__} is a class; give an instance, or pass it as dataset_class")
        return DatasetSource(instance=dataset)
    if not callable(dataset_class):
        raise TypeError(
            f"dataset_class is a {type(dataset_class).__name__}, which can't be called; give a class or a function "
            f"that returns a dataset, or pass an instance as dataset="
        )
    if dataset_kwargs is not None and not isinstance(dataset_kwargs, Mapping):
        raise TypeError(f"dataset_kwargs is a {type(dataset_kwargs).__name__}; give a dict of keyword arguments")
    return DatasetSource(factory=dataset_class, kwargs=dict(dataset_kwargs or {}))


def check_integer(name: str, value: Any, at_least: int, at_most: int = 2**MAX_BITS - 1) -> int:
    """Return the value as an integer from `at_least` to `at_most`; else raise `TypeError` or `ValueError`."""
    number = as_integer(value)
    if number is None:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be an integer")
    if number < at_least:
        raise ValueError(f"{name}={shown(number)} is too small; it must be at least {at_least}")
    if number > at_most:
        limit = f"at most {at_most}" if at_most.bit_length() < MAX_BITS else f"below 2**{MAX_BITS}"
        raise ValueError(f"{name}={shown(number)} is too large; it must be {limit}")
    return number


def _default_seed() -> int:
    """Return the seed of torch's default generator, without drawing from it; without torch, a seed from the clock.

    It is what the program passed to `torch.manual_seed`. If it didn't call that, it is 64 bits that torch drew for this
    process. Nothing tells the two apart.
    """
    generator = getattr(sys.modules.get("torch"), "default_generator", None)  # also None during the import of torch
    return time.time_ns() // 1_000_000 if generator is None else int(generator.initial_seed())


def _max_errors(value: Any, on_error: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, Integral) or not isinstance(value, Real):
        checked: float = check_integer("max_errors", value, 0)
    elif 0 < _float(value) < 1:
        checked = float(value)
    else:
        raise ValueError(
            f"max_errors={value} isn't a fraction between 0 and 1; give one, or an integer to count samples, or None"
        )
    if on_error == OnError.RAISE:
        raise ValueError(
            f"max_errors={value} has no effect with on_error='raise' because the first bad sample raises its error; "
            f"give on_error='skip' or on_error='replace', or leave max_errors out"
        )
    return checked


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; it must be True or False")
    return value


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; it must be a number of seconds, or None")
    seconds = _float(value)
    if not seconds >= 0:
        raise ValueError(f"{name}={shown(value)} isn't a duration; it must be at least 0 seconds, or None for no limit")
    return seconds if 0 < seconds <= MAX_WAIT_S else None  # 0 means no limit, as in torch


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1e308
        return math.inf if value > 0 else -math.inf


def _path(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; it must be a path, or None")
    return str(os.fspath(value))


def _choice(name: str, value: Any, choices: type[_Choice]) -> _Choice:
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(repr(choice.value) for choice in choices)
        raise ValueError(f"{name}={shown(value)} is unknown; it must be one of {allowed}") from None


def _callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} is a {type(value).__name__}, which can't be called; give a function, or None")


def _log_settings(logger: Any) -> LogSettings | None:
    if logger is None:
        return None
    if isinstance(logger, (str, os.PathLike)):
        return LogSettings(os.fspath(logger), stdout=False, level="DEBUG")
    if not isinstance(logger, Mapping):
        raise TypeError(
            f"logger is a {type(logger).__name__}; give a file prefix, or a dict with the keys {', '.join(LOG_KEYS)}"
        )
    for key in logger:
        if key not in LOG_KEYS:
            raise ValueError(f"logger has the unknown key {key!r}; the allowed keys are {', '.join(LOG_KEYS)}")
    level = str(logger.get("level", "DEBUG")).upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"logger's level {level!r} is unknown; it must be one of {', '.join(LOG_LEVELS)}")
    path = _path("logger['path']", logger.get("path"))
    stdout = _flag("logger['stdout']", logger.get("stdout", False))
    return LogSettings(path, stdout, level)
