"""Ranks that need the same batches: the first of them loads, and broadcasts each batch to the others.

Before each batch, all say where they are; a rank at another place is an error on all. Then the batch travels as one
uint8 tensor. It goes over gloo, because it is in host memory: with NCCL, nobody would notice that a rank has died.

    loop ─next─► engine ─batch─► Broadcast.send ──gloo──► Broadcast.receive ◄─wait─ engine ◄─next─ loop
                          rank that loads │ another rank
"""

from __future__ import annotations

import ctypes
import io
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import EncodeError, LoaderClosed, RankDied, RankMismatch, RankStalled, SwiftLoaderError, warn
from swift_loader.executors.failures import rebuild_with
from swift_loader.executors.inline import InlineExecutor
from swift_loader.runtime import ProcessOwner, is_interrupt
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import Answered, Event, SampleFailed, Send
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import Failure, FailureStage
from swift_loader.worker.failure import describe_failure
from swift_loader.worker.torch_worker import ordinary_tensors

if TYPE_CHECKING:
    from swift_loader.executors.process.reader import OnArrival
    from swift_loader.metrics.metrics import Metrics
    from swift_loader.worker.spec import WorkerSpec

_NO_LIMIT_S = 1e8
"""For gloo, which takes no infinite time. Three years."""

START = (-1, -1)
"""The place of the dataset's length, which is shared before the first batch."""

ANYWHERE = (-2, -2)
"""The place of an error after which the rank that loads has no more batches."""


class Broadcast:
    """The ranks that need the same batches. Each call waits for all of them. Loop's thread."""

    def __init__(
        self, store: Any, ranks: Sequence[int], rank: int, timeout_s: float | None, stall_warning_s: float | None
    ) -> None:
        """Connect the ranks. Blocks until all are here.

        `store`: of torch.distributed; nobody else uses these names in it. `ranks`: their numbers in torch.distributed;
        the first one loads. `timeout_s`: how long a batch waits for the other ranks at most; None: no limit.
        `stall_warning_s`: after how long the user is warned; None: never.
        """
        import torch.distributed as dist

        self.is_leader = rank == ranks[0]
        self.num_ahead = 0
        """How many batches this rank wants ahead of its loop. From the first exchange on, the fewest of all ranks: all
        must take batches at the same time, because each waits for the others."""
        self._rank, self._ranks = rank, list(ranks)
        self._timeout_s, self._stall_warning_s = timeout_s or _NO_LIMIT_S, stall_warning_s
        self._gloo: Any = dist.ProcessGroupGloo(
            store, self._ranks.index(rank), len(ranks), dist.distributed_c10d.default_pg_timeout
        )
        self._error: BaseException | None = None
        """Why the ranks aren't in step any more. Each later call raises it."""
        self._answered = threading.Event()
        """Set when the others have answered, and by `close`. A signal handler can end this wait, unlike gloo's."""
        self._is_waiting = False

    def send(self, place: tuple[int, int], content: Any, failures: Sequence[Any] = ()) -> None:
        """Give the other ranks what belongs to a place: an epoch and a step. An error is raised there.

        Raises `EncodeError` if the content can't be sent; the others have this error in its place. Raises
        `RankMismatch` if a rank is at another place, `RankDied` if one has ended or has closed its loader,
        `RankStalled` if one didn't come in time.
        """
        pairs = [(replace(one, exception=None), _described(one.exception)) for one in failures]
        refused = None
        try:
            packed = _pack((_described(content) if isinstance(content, BaseException) else content, pairs))
        except Exception as error:
            if is_interrupt(error):
                raise
            refused = EncodeError(
                f"the batch can't be sent to the ranks that share it ({type(error).__name__}: {error})"
            )
            packed = _pack((_described(refused), pairs))
        self._in_step(place, packed)
        if refused is not None:
            raise refused

    def receive(self, place: tuple[int, int]) -> tuple[Any, list[Any]]:
        """Return what the rank that loads has for a place, and the samples that failed in it.

        Raises as `send` does, or the error that this rank has there.
        """
        content, pairs = pickle.loads(self._in_step(place, None))
        if isinstance(content, Failure):
            raise self._rebuilt(content)
        return content, [replace(one, exception=self._rebuilt(failure)) for one, failure in pairs]

    def _rebuilt(self, failure: Failure) -> Exception:
        return rebuild_with(failure, f"In rank {self._ranks[0]}, which loads for rank {self._rank}:", Definitions())

    def _in_step(self, place: tuple[int, int], packed: Any) -> Any:
        """Broadcast the bytes once all ranks are at this place. Return them."""
        if self._error is not None:
            raise self._error
        try:
            return self._exchange(place, packed)
        except BaseException as error:
            self._error = self._error or self._explained(error)
            self._disconnect()  # the others needn't wait for this rank
            if is_interrupt(error) or not isinstance(error, RuntimeError):
                raise
            raise self._error from error

    def _exchange(self, place: tuple[int, int], packed: Any) -> Any:
        import torch
        from torch.distributed import distributed_c10d

        options: Any = distributed_c10d

        mine = torch.tensor([*place, 0 if packed is None else len(packed), self.num_ahead], device="cpu")
        places = [torch.empty_like(mine) for _ in self._ranks]
        gathering, broadcasting = options.AllgatherOptions(), options.BroadcastOptions()
        limit = timedelta(seconds=self._timeout_s)
        if place == START:  # building the dataset may take longer
            limit = max(limit, options.default_pg_timeout)
        gathering.timeout = broadcasting.timeout = limit
        self._wait(self._gloo.allgather([places], [mine], gathering))
        self.num_ahead = int(min(numbers[3] for numbers in places))
        for rank, (epoch, step, *_) in zip(self._ranks, torch.stack(places).tolist(), strict=True):
            if [epoch, step] != places[0][:2].tolist() != list(ANYWHERE):
                raise RankMismatch(
                    f"ranks {self._ranks[0]} and {rank} share batches, but rank {self._ranks[0]} has taken "
                    f"{_named(*places[0][:2].tolist())} where rank {rank} takes {_named(epoch, step)}. Take the same "
                    f"batches on all ranks, or call start(share_batches=False)"
                )
        memory = torch.from_numpy(np.empty(int(places[0][2]), np.uint8) if packed is None else packed)
        self._wait(self._gloo.broadcast([memory], broadcasting))
        return memory.numpy()

    def _wait(self, work: Any) -> None:
        self._answered.clear()
        self._is_waiting = True
        work.get_future().add_done_callback(lambda _: self._answered.set())
        if self._gloo is not None and not self._answered.wait(self._stall_warning_s):
            warn(f"rank {self._rank} has waited for ranks {self._others} for {self._stall_warning_s:g} s")
            self._answered.wait()
        if self._gloo is None:  # `close` may also have set the event before it was cleared
            raise LoaderClosed("the loader was closed while it shared a batch")
        self._is_waiting = False
        work.wait()  # returns at once, or raises why it failed

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self._rank]

    def _explained(self, error: BaseException) -> BaseException:
        """Return the error for this call and all later ones."""
        if isinstance(error, SwiftLoaderError):
            return error
        if is_interrupt(error) or not isinstance(error, RuntimeError):
            return SwiftLoaderError(
                f"the loop was interrupted ({type(error).__name__}) while ranks shared a batch; make a new loader"
            )
        if "timed out" in str(error).lower():
            return RankStalled(
                f"rank {self._rank} has waited longer than timeout={self._timeout_s:g} s for ranks {self._others}, "
                f"with which it shares batches. Take the same batches on all ranks, or give a longer timeout"
            )
        return RankDied(
            f"one of ranks {self._others}, with which rank {self._rank} shares batches, has ended or has closed its "
            f"loader: see its own error"
        )

    def close(self) -> None:
        """Disconnect, which is an error in the others' next call. Any thread. Idempotent."""
        self._error = self._error or LoaderClosed("the loader was closed; make a new one")
        self._disconnect()

    def _disconnect(self) -> None:
        gloo, self._gloo = self._gloo, None
        self._answered.set()
        if self._is_waiting and gloo is not None:
            # Its end would block until the others answer, with the GIL. So it stays until the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))


class ReceivingExecutor(InlineExecutor):
    """Gets each batch from the rank that loads, in the thread that waits for it."""

    def __init__(self, broadcast: Broadcast, spec: WorkerSpec, metrics: Metrics, on_arrival: OnArrival | None) -> None:
        super().__init__(spec, metrics, None, None, on_arrival)
        self.owner = ProcessOwner()
        self._broadcast = broadcast

    def start(self) -> None:
        """Wait until the rank that loads has built the dataset. Raises its error if it couldn't."""
        num_samples, _ = self._broadcast.receive(START)
        self._builder = self._broadcast
        self._begin(num_samples)

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:  # noqa: ARG002
        """Use this plan from this generation on."""
        self._current = (generation, plan)

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Do nothing: the workers are those of another rank."""

    def _build(self, builder: Any, task: Send) -> list[Event]:
        try:
            with ordinary_tensors():
                batch, failures = builder.receive((task.work.epoch, task.work.step))
                if self._on_arrival is not None:
                    batch = self._on_arrival(batch, np.empty(0, np.uint8))
        except Exception as error:
            if is_interrupt(error):
                raise
            return [Answered(task, error=error)]
        return [*(SampleFailed(task, one) for one in failures), Answered(task, batch)]


def _described(error: BaseException) -> Failure:
    return describe_failure(error, FailureStage.FETCH, Definitions())


def _named(epoch: int, step: int) -> str:
    return "the dataset's length" if (epoch, step) == START else f"batch {step} of epoch {epoch}"


class _Pickler(pickle.Pickler):
    """Sends CPU tensors as arrays, whose memory pickle copies once."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor_of, (flat, value.dtype, value.shape)


def _tensor_of(flat: NDArray[np.uint8], dtype: Any, shape: Any) -> Any:
    import torch

    return torch.from_numpy(flat).view(dtype).reshape(shape)


def _pack(content: Any) -> NDArray[np.uint8]:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(content)
    return np.frombuffer(stream.getbuffer(), np.uint8)
