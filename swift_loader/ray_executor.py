"""The options for workers that are Ray actors. Doesn't import Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from swift_loader.checks import check_integer, check_seconds

_STRATEGIES = ("SPREAD", "DEFAULT")

_SMALLEST = 1e-4
"""Ray's smallest amount of a resource."""


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """Workers that are Ray actors, anywhere in a cluster. For the option `executor` of the loaders.

    Ray is imported when the loader starts. If this process isn't connected to a cluster then, the loader connects it,
    and disconnects it when it is closed. It never starts a cluster.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of its range.
    """

    num_workers: int
    """How many actors there are, at least 1."""
    num_cpus: float = 1.0
    """Cores that an actor reserves."""
    resources: Mapping[str, float] | None = None
    """Resources that an actor reserves, by name: `{"data": 1}` places it on nodes that have `data`; also `GPU`."""
    memory: int | None = None
    """Bytes of memory that an actor reserves. None: nothing is reserved."""
    runtime_env: Mapping[str, Any] | None = None
    """Ray's runtime environment for the actors: `working_dir`, `pip`, `env_vars` and so on."""
    scheduling_strategy: Any = "SPREAD"
    """Where Ray places actors: `"SPREAD"`, `"DEFAULT"`, or an object of `ray.util.scheduling_strategies`."""
    address: str | None = None
    """The cluster to connect to. None: `RAY_ADDRESS`, or the cluster that runs on this machine."""
    placement_timeout: float | None = 300.0
    """Seconds that `start()` waits until a node has room for an actor. None or 0: no limit."""
    placement_warning: float | None = 10.0
    """Seconds after which a warning says that actors have no room. None or 0: no warning."""

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
