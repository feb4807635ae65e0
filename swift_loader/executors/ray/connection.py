"""The connection of this process to a Ray cluster. Ray is imported here, and only once it is needed.

A process has one connection. If the user has made it, it is left alone. If there is none, the first loader makes it,
and the last one ends it.

Ray ends the process, with status 1, at a call during or after `ray.shutdown()`, also where a reference to an object is
dropped. So all of that is done in `Connection.held`, with the lock that `ray.shutdown()` holds.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from swift_loader.errors import warn


def imported_ray() -> Any:
    """Return the module `ray`. Raises `ImportError` if Ray isn't installed."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"RayExecutor needs Ray, which can't be imported ({error}). Install it with pip install ray"
        ) from error
    return ray


KNOCK_LIMIT_S = 5.0
"""How long a cluster's head may take to accept a connection."""


HOLD_LIMIT_S = 4.0
"""How long a thread waits for another one's call, or for the end of `ray.shutdown()`. There, the garbage collector may
close a loader, which waits for the thread that waits here."""

NEXT_HOLD_LIMIT_S = 0.05
"""The same after a wait that was in vain: closing a loader waits several times."""


class _Shared:
    """Counts the loaders that use a connection which this package made."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Where Ray has no lock of its own."""
        self.num_users = 0
        """0: the package has made no connection."""


_SHARED = _Shared()


def _lock() -> Any:
    """Return the lock that Ray holds while it connects and shuts down. Private, but nothing public tells of that."""
    return getattr(sys.modules.get("ray._private.worker"), "_connect_or_shutdown_lock", _SHARED.lock)


class Connection:
    """A loader's use of the connection: CLOSED ─open─► OPEN ─close─► CLOSED. Any thread."""

    def __init__(self, address: str | None) -> None:
        """Connect nothing. `address`: see `RayExecutor`."""
        self._address = address
        self._is_ours = False
        """Whether this package made the connection, and this loader counts as its user."""
        self._job: Any = None
        """Of the connection. Another one has another job."""
        self.ray: Any = None
        """The module. None: not open."""
        self._limit_s = HOLD_LIMIT_S

    def open(self) -> None:
        """Connect this process to the cluster, unless it is connected.

        Raises `ImportError` if Ray isn't installed, `ConnectionError` if there is no cluster, `RuntimeError` if the
        process uses Ray Client, which has no object store.
        """
        ray = imported_ray()
        with _lock():
            if not ray.is_initialized():
                self._connect(ray)
                _SHARED.num_users = 0
                self._is_ours = True
            else:
                self._is_ours = _SHARED.num_users > 0
                if not self._is_ours:
                    self._compare_address(ray)
            _SHARED.num_users += self._is_ours
            if getattr(ray.util, "client", None) is not None and ray.util.client.ray.is_connected():
                raise RuntimeError(
                    "this process is connected by Ray Client (ray://), which brings batches through a proxy; run the "
                    "trainer on a node of the cluster, and call ray.init() or ray.init(address='auto')"
                )
            self.ray, self._job = ray, ray.get_runtime_context().get_job_id()

    def _compare_address(self, ray: Any) -> None:
        """Warn if this process is connected to another cluster than the one asked for."""
        if self._address in (None, "auto"):
            return
        connected = ray.get_runtime_context().gcs_address
        if self._address.rpartition(":")[2] != connected.rpartition(":")[2]:  # a host has several names
            warn(
                f"RayExecutor(address={self._address!r}) has no effect, because this process is connected to the "
                f"cluster at {connected!r}; leave address out, or call ray.shutdown() before the loader starts"
            )

    def _connect(self, ray: Any) -> None:
        address = self._address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            _knock(address)
            with _kept_signal_handlers():
                ray.init(address=address, configure_logging=False, log_to_driver=False)
        except OSError as error:  # ConnectionError is one
            raise ConnectionError(
                f"there is no Ray cluster at address={address!r} ({error}); call ray.init() before the loader starts, "
                f"start one with `ray start --head`, or give RayExecutor(address=...)"
            ) from error

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Keep `ray.shutdown()` from running meanwhile. Yields whether calls to Ray work: False once it has run.

        Ask before each call: without a connection, some of Ray's functions would start a cluster.
        """
        ray = self.ray
        if ray is None:
            yield False
            return
        with self._locked() as has_lock:
            yield has_lock and ray.is_initialized() and bool(ray.get_runtime_context().get_job_id() == self._job)

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        has_lock = (lock := _lock()).acquire(timeout=self._limit_s)
        self._limit_s = HOLD_LIMIT_S if has_lock else NEXT_HOLD_LIMIT_S
        try:
            yield has_lock
        finally:
            if has_lock:
                lock.release()

    @property
    def is_open(self) -> bool:
        """Whether calls to Ray work now."""
        with self.held() as is_open:
            return is_open

    def describe(self, wanted: Iterable[str] = ()) -> str:
        """Return what the cluster has and what of it is free, in words. `wanted`: also say so if it has none of it."""
        with self.held() as is_open:
            if not is_open:
                return "no connection to this process any more"
            total, free = self.ray.cluster_resources(), self.ray.available_resources()
            num_alive = sum(bool(node.get("Alive")) for node in self.ray.nodes())
            return describe_room(num_alive, {**dict.fromkeys(wanted, 0.0), **total}, free)

    def close(self) -> None:
        """Stop using the connection. The last loader ends it, if this package made it. Idempotent."""
        ray, self.ray = self.ray, None
        if ray is None:
            return
        with self._locked() as has_lock:
            # Without the lock, another thread connects or disconnects this process, so the connection is left to it.
            if not (self._is_ours and has_lock):
                return
            self._is_ours = False
            _SHARED.num_users -= 1
            if not _SHARED.num_users and ray.is_initialized():
                with _kept_signal_handlers():
                    ray.shutdown()


def describe_room(num_nodes: int, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Return what a cluster has and what of it is free, in words."""
    parts = []
    for name in sorted(total):
        if name == "memory":
            parts.append(f"{free.get(name, 0) / 1e9:.3g} of {total[name] / 1e9:.3g} GB of memory")
        elif name != "object_store_memory" and not name.startswith("node:"):
            parts.append(f"{free.get(name, 0):g} of {total[name]:g} {name}")
    return f"{num_nodes} node{'s' * (num_nodes != 1)} with {', '.join(parts) or 'nothing'} free"


def _knock(address: str) -> None:
    """Raise an OSError if nobody listens at `host:port`. Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_LIMIT_S).close()


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Put the handler of SIGTERM back afterwards: Ray replaces it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # None: it is of C code
            with suppress(ValueError):  # this isn't the main thread, so Ray has changed nothing
                signal.signal(signal.SIGTERM, before)
