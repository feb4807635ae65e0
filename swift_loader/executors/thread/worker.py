"""One worker thread: it takes tasks and posts events until it is stopped.

It shares the dataset, and nothing else, with other worker threads. It never blocks but for a task and in the user's
code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from swift_loader.errors import WorkerDied
from swift_loader.executors.local_builder import LocalBuilder
from swift_loader.executors.thread.task_thread import TaskThread
from swift_loader.scheduler.messages import Disconnected, Event, ExecutorFailed, Ready, Send, Skipped, StreamEnded
from swift_loader.transport.messages import NewPlan
from swift_loader.worker.seeding import keep_to_this_thread
from swift_loader.worker.stream import StreamEnd


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all worker threads of a loader use."""

    post: Callable[[Iterable[Event]], None]
    """Hands events over."""
    is_needed: Callable[[int], bool]
    """Returns whether batches of a generation are needed."""
    watching: Callable[[], AbstractContextManager[None]]
    """Surrounds the building of a batch."""
    describe_end: Callable[[ThreadWorker, Send | None], str]
    """Returns which worker it is, and at which task."""


class ThreadWorker:
    """A worker thread, and what it does. The executor uses it; `_serve` and what it calls are on the thread itself."""

    def __init__(
        self, serial: int, worker_id: int, make_builder: Callable[[], LocalBuilder], surroundings: Surroundings
    ) -> None:
        """Make a worker that isn't started.

        `serial`: unique among all workers of the loader. `worker_id`: which of the n workers it is, from 0.
        `make_builder` is called on the thread, before it is ready. It may build a dataset.
        """
        self.serial = serial
        self.worker_id = worker_id
        self._make_builder = make_builder
        self._builder: LocalBuilder | None = None
        """None until it is ready."""
        self._plan_generation = 0
        """The first generation of the builder's plan; 0: the plan that it was made with."""
        self._around = surroundings
        self._thread: TaskThread[tuple[Send, NewPlan]] = TaskThread(self._serve, f"worker-{worker_id}")

    @property
    def place(self) -> str:
        """Where it runs."""
        return "a thread"

    @property
    def largest_nbytes(self) -> int:
        """Bytes of its largest batch so far."""
        return 0 if self._builder is None else self._builder.largest_nbytes

    def position_in_batch(self) -> int | None:
        """Return the position of the sample that it is fetching; None if unknown."""
        return None if self._builder is None else self._builder.counters.position_in_batch()

    def stack(self) -> str:
        """Return its Python stack; empty if it has ended."""
        return self._thread.stack()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, task: Send, plan: NewPlan) -> None:
        """Give it a task, and the plan of which it is. A plan of generation 0 is the first one."""
        self._thread.send((task, plan))

    def stop(self) -> None:
        """Make the thread end after its current batch. Any thread. Idempotent."""
        self._thread.stop()

    def dismiss(self) -> None:
        """Make the thread end. It has no task."""
        self._thread.stop()

    def join(self, limit_s: float) -> None:
        """Wait until the thread has ended, at most `limit_s`. Does nothing on the thread itself."""
        self._thread.join(limit_s)

    def _serve(self, orders: Iterator[tuple[Send, NewPlan]]) -> None:
        keep_to_this_thread()
        task: Send | None = None
        try:
            self._builder = builder = self._make_builder()
            self._around.post([Ready(self.serial, self.worker_id)])
            for order in orders:
                task, plan = order
                self._around.post(self._answer(builder, task, plan))
                task = None
            self._around.post([Disconnected(self.serial, self.worker_id)])
        except Exception as error:  # of building a dataset, or ours: those of samples are answers
            self._around.post([ExecutorFailed(error)])
        except BaseException as error:  # SystemExit of the dataset, above all: the loop must hear of it
            self._around.post([ExecutorFailed(self._died(task, error))])

    def _answer(self, builder: LocalBuilder, task: Send, plan: NewPlan) -> list[Event]:
        if not self._around.is_needed(task.generation):
            return [Skipped(self.serial, task.generation)]
        try:
            if plan.generation != self._plan_generation:
                self._plan_generation = plan.generation
                builder.use_plan(plan.settings, plan.resume)
            with self._around.watching():
                encoded = builder.encode(task)
            return builder.decode(task, encoded)
        except StreamEnd:
            return [StreamEnded(self.serial, task.generation, task.sequence)]
        except Exception as error:
            return builder.failed(task, error)

    def _died(self, task: Send | None, error: BaseException) -> WorkerDied:
        died = WorkerDied(
            f"{self._around.describe_end(self, task)} was ended by {error!r}, and a worker thread isn't replaced. The "
            f"dataset's code ended it: look for sys.exit"
        )
        died.__cause__ = error
        return died

    def __repr__(self) -> str:
        return f"<ThreadWorker {self.worker_id}{'' if self._thread.is_alive else ' ended'}>"
