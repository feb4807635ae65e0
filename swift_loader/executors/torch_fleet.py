"""Worker processes that torch's own DataLoader starts, and whose batches it carries: on macOS and Windows.

Each worker is a DataLoader of torch's with one worker process, and a thread that waits for it. Where the batches come
from, their order and their bytes are the same as with the loader's own processes. What those have beyond torch's is
missing: memory that is used again, the stacks of hung workers, a page-locked arrival.
"""

from __future__ import annotations

import errno
import os
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_start_method
from multiprocessing.connection import wait
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch.utils.data import DataLoader

from swift_loader.errors import LoaderClosed
from swift_loader.executors.called import ArrivedMemory, CalledFleet, CalledHandle, Failed, who_is
from swift_loader.executors.environment import Launch, environ_for_workers, working_directory
from swift_loader.executors.fleet import EXIT_LIMIT_S
from swift_loader.executors.handle import Handle
from swift_loader.runtime import LoaderThread
from swift_loader.scheduler.messages import Death, Ended, ExecutorFailed
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import out_of_descriptors_error
from swift_loader.transport.messages import Identity
from swift_loader.transport.payload import Environment, Payload, pack_payload
from swift_loader.transport.segments import Segment
from swift_loader.worker.called import Reply
from swift_loader.worker.process import refuse_start
from swift_loader.worker.spec import StartMethod, definitions_of
from swift_loader.worker.torch_dataset import CalledDataset, Given, as_it_is

LOOK_S = 0.2
"""How often a thread that waits for its process looks whether that has ended, or is to end."""

START_LIMIT_S = 2.0
"""How long `stop` waits for a process that is just starting, and can't be killed yet."""

MAX_TASKS = 16
"""How many calls torch has at a time. More wait here."""

_HASH_SEED = "PYTHONHASHSEED"


class _HashSeed:
    """Gives sets of strings one order in all processes that start within it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_starting = 0
        self._before: str | None = None
        """The program's own."""

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_starting:
                self._before = os.environ.get(_HASH_SEED)
                os.environ[_HASH_SEED] = environ_for_workers()[_HASH_SEED]
            self._num_starting += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_starting -= 1
            if not self._num_starting:
                del os.environ[_HASH_SEED]
                os.environ.update({} if self._before is None else {_HASH_SEED: self._before})


_hash_seed = _HashSeed()


class TorchProcess:
    """The trainer's end of what would be a pipe, and a worker process: see `executors.handle`.

    Its thread alone uses torch's iterator. Any thread uses the rest.
    """

    outbox = ()

    def __init__(self, fleet: TorchFleet, serial: int, dataset: CalledDataset, payload: Payload | None) -> None:
        """Start nothing. The first call builds the dataset, from a payload if there is one."""
        self._fleet, self._serial = fleet, serial
        self._calls: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        """For the thread. None: end."""
        # Not with the process: that would wait for it to read a large one, for ever if it has ended meanwhile.
        self._waiting: deque[Any] = deque([payload])
        """Calls that torch hasn't got yet. The thread uses it, and the next one."""
        self._num_left = 0
        """How many torch has, and hasn't answered."""
        self._kept: list[bytes] = []
        """Messages that go with the next task."""
        self._answers: deque[Reply | Failed] = deque()
        """Not taken yet."""
        self._end: Failed | None = None
        """After all answers."""
        self._process: Any = None
        """A `multiprocessing.Process`; None before it has started."""
        self._is_killed = False
        self._thread = LoaderThread(self._serve, "torch-worker", dataset)

    def start(self) -> None:
        """Start the process in the background."""
        self._thread.start()

    # The thread -------------------------------------------------------------------------------------------------------

    def _serve(self, dataset: CalledDataset) -> None:
        """Start the process, and take its answers until it is to end, or has ended."""
        iterator: Any = None
        try:
            iterator = self._open(dataset)
            while self._take_calls():
                while self._waiting and self._num_left < MAX_TASKS:
                    iterator._try_put_index()  # noqa: SLF001 - nothing public has torch ask its sampler again
                if self._receive(iterator):
                    self._fleet.note_news(self._serial)
            self._end = Failed(EOFError("it was told to end"), is_lost=True)
        except BaseException as error:
            if "ancdata" in str(error) or (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
                self._fleet.post(ExecutorFailed(out_of_descriptors_error()))  # each batch has one
            self._end = Failed(error, is_lost=self._process is not None)
        if iterator is not None:
            iterator._shutdown_workers()  # noqa: SLF001 - now, whoever refers to it
        self._fleet.note_news(self._serial)

    def _open(self, dataset: CalledDataset) -> Any:
        given: Any = dataset
        loader: DataLoader[Any] = DataLoader(
            given,
            batch_size=None,
            sampler=self,
            num_workers=1,
            collate_fn=as_it_is,
            timeout=LOOK_S,
            prefetch_factor=MAX_TASKS,
            persistent_workers=True,
            multiprocessing_context=self._fleet.method,
            generator=torch.Generator(),  # else it draws from the program's
        )
        get_temp_dir()  # the worker uses the same, so if it is killed, it leaves none behind
        with _hash_seed:
            iterator: Any = iter(loader)
        # Else torch's signal handler, if the program uses its DataLoader, too, tells the program of a death.
        handlers: Any = torch._C  # noqa: SLF001
        handlers._remove_worker_pids(id(iterator))  # noqa: SLF001
        iterator._worker_pids_set = False  # noqa: SLF001
        self._process = iterator._workers[0]  # noqa: SLF001 - as many programs do
        if self._is_killed:
            self._process.kill()
        return iterator

    def __iter__(self) -> Iterator[Any]:
        """Return itself: torch's sampler."""
        return self

    def __next__(self) -> Any:
        """Return the next call. If there is none, there may be one later."""
        if not self._waiting:
            raise StopIteration
        self._num_left += 1
        return self._waiting.popleft()

    def _take_calls(self) -> bool:
        """Take in the calls that are here; block for one if there is nothing to do. Return False if it is to end."""
        while not self._calls.empty() or not (self._waiting or self._num_left):
            call = self._calls.get()
            if call is None:
                return False
            self._waiting.append(call)
        return True

    def _receive(self, iterator: Any) -> bool:
        """Take the next answer, if it comes soon. Raises if the process has ended."""
        try:
            answer = pickle.loads(next(iterator))
        except RuntimeError as error:
            if self._has_exited or not str(error).startswith("DataLoader timed out"):
                raise
            return False
        self._num_left -= 1
        if isinstance(answer, Exception):
            self._answers.append(Failed(answer, is_lost=False))
        else:
            messages, memory = answer
            self._answers.append(Reply(messages, None if memory is None else memory.numpy()))
        return True

    @property
    def _has_exited(self) -> bool:
        """Whether the process has. `is_alive` never says so in a program that ignores SIGCHLD."""
        return bool(wait([self._process.sentinel], 0))

    # As a channel -----------------------------------------------------------------------------------------------------

    def post(self, message: bytes, *, is_task: bool = False) -> None:
        """Send a message. What isn't a task waits for the next one."""
        self._kept.append(message)
        if is_task:
            kept, self._kept = self._kept, []
            self._calls.put(kept)

    def peek(self) -> Reply | Failed | None:
        """Return what `take` would return, and leave it there."""
        end = self._end  # first: nothing is added after it
        return self._answers[0] if self._answers else end

    def take(self) -> Reply | Failed | None:
        """Return the next answer; None if it isn't here. After the end there is none."""
        answer = self.peek()
        if answer is not None and answer is self._end:
            self._end = None
        elif answer is not None:  # else its end may have come since
            self._answers.popleft()
        return answer

    def fileno(self) -> int:
        """Return -1: there is no descriptor of ours."""
        return -1

    # As a process -----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Its process id; 0 before it has started."""
        return 0 if self._process is None else int(self._process.pid)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, and all that it has answered is here."""
        return not self._thread.is_alive()

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal. None until it has ended, or in a fork of the trainer."""
        with suppress(AssertionError):  # of multiprocessing, in a fork
            return None if self._process is None else self._process.exitcode
        return None

    def wait_end(self, limit_s: float | None) -> bool:
        """Wait until it has ended. Return False if that takes longer."""
        self._thread.join(limit_s)
        return self.has_ended

    def request_exit(self) -> None:
        """Let it end. Returns at once. Idempotent."""
        self._calls.put(None)

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()
        self.request_exit()

    def close(self) -> None:
        """Do nothing: it has ended, and its thread has closed all."""

    def attach(self, slot: int | None, nbytes: int, descriptors: list[int]) -> Segment:  # noqa: ARG002
        """Return memory of this process: torch's workers show no counters."""
        return Segment.private(nbytes)

    def num_fetched(self, length_address: int) -> int | None:  # noqa: ARG002
        """Return None: nothing tells how far its batch is."""
        return None

    def ask_for_stacks(self, *, by_force: bool = False) -> str:  # noqa: ARG002
        """Return nothing: torch's workers can't be asked."""
        return ""


class TorchFleet(CalledFleet):
    """The workers of one loader."""

    has_segments = False
    _given: Payload | Given | None = None
    """None before `start_first`."""
    _started_in: tuple[Launch, str | None]
    """The environment and the working directory."""

    @property
    def method(self) -> str:
        """Of multiprocessing."""
        return "fork" if self.spec.options.start_method is StartMethod.FORK and hasattr(os, "fork") else "spawn"

    @property
    def notice(self) -> str:
        """Why starting takes longer than on Linux."""
        return (
            "torch's DataLoader starts the workers, as this system isn't Linux. Each builds its own dataset, so "
            "starting takes longer"
        )

    def start_first(self) -> None:
        """Start the first worker, unless that was done; see `Fleet`."""
        self.check_open()
        if self._given is None:
            refuse_start()
            get_start_method()  # fixes the program's, as torch's DataLoader will: it is part of the payload
            self._started_in, spec = (Launch(), working_directory()), self.spec
            if self.method == "fork":
                self.definitions = Definitions(definitions_of(spec.options))
                environment = replace(Environment.of_this_process(spec.modules), torch_threads=1)
                self._given = spec, self.definitions, environment
            else:
                self._given, self.definitions = pack_payload(spec, spec.modules)
            self._began_s = time.monotonic()
            self._start(0)

    def start_ahead(self) -> None:
        """Start all workers that weren't started. Returns while they build the dataset."""
        self.start_first()
        for worker_id in range(len(self.workers), self.options.num_workers):
            self._start(worker_id)

    def is_current(self) -> bool:
        """Return whether another start would build the same. The dataset or the environment may have changed."""
        if not isinstance(self._given, Payload):
            return False
        launch, directory = self._started_in
        if not launch.is_current() or directory != working_directory():
            return False
        return self._given.is_same(pack_payload(self.spec, self.spec.modules)[0])

    def wait_built(self, *, warns: bool = False) -> tuple[int, float]:
        """Do the same, and wait until the first worker has built the dataset; see `Fleet`."""
        self.start_first()
        limit_s = self.options.stall_warning_s
        return self.await_first([(limit_s, self.warn_of_build)] if warns and limit_s is not None else [])

    def begin_again(self, lost: Sequence[tuple[CalledHandle, Failed]]) -> None:
        """Raise: the dataset ends the process that builds it."""
        worker = lost[0][0]
        exit_code, guard = worker.process.exit_code, ""
        if exit_code == 1 and self.method != "fork":
            guard = '. A script that starts a loader needs if __name__ == "__main__": around that'
        raise self.explainer.died(who_is(worker), exit_code, f"{self.explainer.build}{guard}")

    def start_worker(self, worker_id: int) -> None:
        """Start another worker. Returns while it builds the dataset."""
        with suppress(LoaderClosed):
            self._start(worker_id)

    def _start(self, worker_id: int) -> None:
        with self.lock:
            self.check_open()
            assert self._given is not None, "it was started"
            serial = self.next_serial()
            identity = None if self.spec.options.torch is None else Identity(worker_id, self.options.num_workers)
            payload, given = (self._given, None) if isinstance(self._given, Payload) else (None, self._given)
            process = TorchProcess(self, serial, CalledDataset(given, serial, identity), payload)
            self.add(CalledHandle(worker_id, serial, process, process, ArrivedMemory()))
            process.start()  # once it is known: an interrupt leaves none that nobody ends

    def reap(self, worker: Handle) -> None:
        """Find out how a worker ended, which an event tells. Blocks for half a second if its process goes on."""
        process = worker.process
        if not process.wait_end(EXIT_LIMIT_S):
            process.kill()
        self.post(Ended(worker.serial, Death(process.exit_code, bool(worker.tasks))))

    def dismiss(self, worker: Handle) -> None:
        """Have a worker end that has nothing left to do."""
        worker.process.request_exit()

    def stop(self) -> None:
        """Stop all processes, within 4 s. One that is just starting ends once it has read the dataset. Idempotent."""
        super().stop()
        deadline_s = time.monotonic() + START_LIMIT_S
        for worker in self.workers.values():
            worker.process.wait_end(max(0.0, deadline_s - time.monotonic()))
