"""The trainer's handle on one worker process: its channel, its process, its tasks and its shared memory.

One thread at a time processes its messages. The thread that holds the dispatch lock sends its tasks.
"""

from __future__ import annotations

import errno
import mmap
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from swift_loader.errors import EncodeError, NoDescriptorsLeft, ProtocolError
from swift_loader.executors.failures import task_of
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.memory import ReturnedSlots, WorkerMemory
from swift_loader.runtime import raise_interrupt
from swift_loader.sampling.plan import PlanSettings
from swift_loader.sampling.work import StreamWork, Work
from swift_loader.scheduler.messages import Send
from swift_loader.transport.messages import BuildReport, Hung, Identity, NewPlan, Ready, SegmentMade
from swift_loader.transport.segments import NUM_BEGUN, NUM_LEFT_OUT, Segment
from swift_loader.transport.task import LostKeys, Task
from swift_loader.worker.torch_worker import Resume

# Where each worker's dataset continues if another process takes the worker's place. No I/O.

_BEGINNING = (None, 0)


class ResumePoints:
    """The last snapshot of each worker in the current generation, or what the generation began with.

    Whoever listens to workers notes snapshots; whoever holds the dispatch lock begins generations and looks points up.
    """

    def __init__(self) -> None:
        self._current: tuple[int, dict[int, tuple[bytes | None, int]]] = (0, {})
        """The generation, and by worker id: a packed `Resume`, and the turn of the first batch after it. Replaced as a
        whole: several threads read it."""

    def begin(self, generation: int, resume: Mapping[int, bytes] | None) -> None:
        """Forget the points so far. `resume` has those at which the new generation begins, by worker id."""
        self._current = generation, {worker_id: (point, 0) for worker_id, point in (resume or {}).items()}

    def note(self, worker_id: int, generation: int, snapshot: bytes, work: Work) -> None:
        """Note a snapshot that was taken after this work. One of an earlier generation is ignored."""
        current, points = self._current
        if current == generation:
            turn = work.turn + 1 if isinstance(work, StreamWork) else 0
            points[worker_id] = Resume(snapshot).pack(), turn

    def of(self, worker_id: int) -> tuple[bytes | None, int]:
        """Return the point of a worker: a packed `Resume`, and the turn of the first batch after it."""
        return self._current[1].get(worker_id, _BEGINNING)


COUNTERS = None
"""Stands for the page of counters, where a slot's number stands for its segment."""

GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
"""Errors of a send to a worker that has ended, or whose channel was closed here."""


class Hang(NamedTuple):
    """Why a worker is being killed."""

    text: str
    """Where it hung, and for how long."""
    traces: str
    is_at_sample: bool
    """Whether `on_error` would leave out the sample at which it hung."""


class Handle:
    """One worker, seen from the trainer."""

    def __init__(self, worker_id: int, serial: int, channel: Any, process: Any, memory: WorkerMemory) -> None:
        """Handle a worker. `channel`: our end of its pipe. `process`: `Process`, `TorchProcess` or `Actor`."""
        self.worker_id = worker_id
        """Which of the n workers it is, from 0. Its replacement has the same id."""
        self.serial = serial
        """Unique among all workers of the loader."""
        self.process = process
        self.channel = channel
        self.memory = memory
        self.tasks: deque[Send] = deque()
        """Sent and not answered, in the order sent. Whoever reads its answers uses it, without a lock, and may be
        ahead of what the scheduler has taken in."""
        self.hang: Hang | None = None
        """Why it is being killed."""
        self.state: bytes | None = None
        """The state of its dataset after the batch that it announces next."""
        self._num_answered = 0
        self._looked: tuple[int, int | None] = (-1, None)
        """How many tasks it had answered at the last `look`, and at which sample it was."""
        self._returned: ReturnedSlots | None = None
        """What a task was to tell it that couldn't be sent."""
        self._plan_generation = 0
        """The generation of the last plan that was sent; 0: the plan that it started with."""
        self._counters: Segment | None = None
        """The page in which it counts; None before it is ready."""
        self._length_address = 0
        """Where the length of its list of samples is, in its memory."""
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns, apart from those of its process; -1 once closed."""
        return [self.channel.fileno()]

    def note_ready(self, ready: Ready, descriptors: list[int]) -> BuildReport:
        """Attach its counters, which show its progress. Return its report on the dataset."""
        self._length_address = ready.length_address
        self._counters = self.process.attach(COUNTERS, mmap.PAGESIZE, descriptors)
        return ready.report

    def tell_identity(self, num_workers: int, kept: Sequence[Segment]) -> None:
        """Tell it which of how many workers it is, and which memory it has. In torch mode, it waits for that."""
        for slot, segment in enumerate(kept):
            self.memory.add(slot, segment)
        self._send(Identity(self.worker_id, num_workers, len(kept)).pack())

    def send(
        self, task: Send, generation: int, plan: PlanSettings, resumes: ResumePoints, hung: Sequence[Hung] = ()
    ) -> list[Segment]:
        """Send a task with the slots that have become free. Does nothing if the worker is gone: its end is an event.

        Never blocks: what its pipe has no room for waits in `channel.outbox`. If it raises, the task wasn't sent, and
        may be sent again.

        `generation`: the plan's first one. `plan`: used from then on. It is sent with the first task that needs it,
        because frequent seeks would fill the pipe of a busy worker. `resumes` says where its dataset continues, with
        another plan. `hung`: samples of the task that fail. Returns the memory of retired slots, see `ReturnedSlots`.
        """
        if self._plan_generation != generation:
            self._send(NewPlan(generation, plan, *resumes.of(self.worker_id)).pack())
            self._plan_generation = generation
        for sample in hung:
            self._send(sample.pack())
        released, retired, given_up = self._returned = self._returned or self.memory.take_returned()
        if not self.tasks or self.tasks[-1] is not task:  # else the last attempt failed
            self.tasks.append(task)  # first: another thread may read its answer at once
        message = task_of(task, released, retired)
        try:
            self.channel.post(message.pack(), is_task=True)
        except OSError as error:
            if error.errno not in GONE:
                self._send_without_keys(message, error)
        except (EncodeError, ProtocolError) as error:
            self._send_without_keys(message, error)
        self._returned = None
        return given_up

    def _send_without_keys(self, task: Task, error: Exception) -> None:
        """Send a task whose keys are too many to be sent, so that the batch gets an error. Else raise the error."""
        raise_interrupt(error)
        if task.indices is None or not isinstance(error, (EncodeError, NoDescriptorsLeft, ProtocolError)):
            raise error
        is_whole = isinstance(error, EncodeError)
        task.indices = LostKeys(str(error) if is_whole else f"the keys of a batch can't be sent: {error}")
        self._send(task.pack(), is_task=True)

    def answered(self, generation: int, sequence: int) -> Send:
        """Remove and return its oldest task, which it answers. Raises `ProtocolError` if it answers another one."""
        task = self.tasks[0] if self.tasks else None
        if task is None or task.sequence != sequence or task.generation != generation:
            about = f"task {sequence} of generation {generation}"
            raise ProtocolError(f"worker {self.worker_id} answered {about}, but its next task is {task or 'none'}")
        self._num_answered += 1
        return self.tasks.popleft()

    @property
    def owes_first_answer(self) -> bool:
        """Whether it has yet to say that it is ready, or to answer its first task."""
        return not self._num_answered and (self._counters is None or bool(self.tasks))

    @property
    def is_at_work(self) -> bool:
        """Whether it has begun its oldest task. Still valid after its death."""
        return self._count(NUM_BEGUN) > self._num_answered

    def _count(self, word: int) -> int:
        """Return one of its counts; 0 before it is ready."""
        page = self._counters  # another thread may close the handle
        return 0 if page is None else page.memory.cast("q")[word]

    @property
    def place(self) -> str:
        """Where it runs."""
        return f"pid {self.process.pid}"

    def position_in_batch(self) -> int | None:
        """Return the position, in the batch as planned, of the sample that it is fetching; None if unknown.

        After the last sample, it is the number of samples. May block shortly.
        """
        num_left_out = self._count(NUM_LEFT_OUT)
        is_known = self._counters is not None and num_left_out >= 0
        length = self.process.num_fetched(self._length_address) if is_known else None
        return None if length is None else length + num_left_out

    def look(self) -> int | None:
        """Note the sample that it is fetching. Return its position if it was at the same one at the last look."""
        before, self._looked = self._looked, (self._num_answered, self.position_in_batch())
        return self._looked[1] if before == self._looked else None

    def add_segment(self, made: SegmentMade, descriptors: list[int]) -> Segment:
        """Map a segment that the worker announced, and return it."""
        segment: Segment = self.process.attach(made.slot, made.nbytes, descriptors)
        self.memory.add(made.slot, segment)
        return segment

    def drain(self, reader: Any, events: list[Any]) -> None:
        """Add the events of all answers that are here, if it has no pipe."""
        raise NotImplementedError

    def close(self) -> list[Segment]:
        """Close all handles. The process must have ended. Batches that the user keeps stay valid. Idempotent.

        Returns:
            The worker's memory, see `ReturnedSlots`.
        """
        self.channel.close()
        self.process.close()
        self._counters = None
        return self.memory.take_segments()

    def _send(self, message: bytes, *, is_task: bool = False) -> None:
        try:
            self.channel.post(message, is_task=is_task)
        except OSError as error:
            if error.errno not in GONE:
                raise

    # What a program may see of the process: as a `multiprocessing.Process`, which torch's iterators have. Any thread.
    # The loader owns it, and replaces a worker that somebody else ends, if it goes on.

    daemon = True

    @property
    def name(self) -> str:
        """As torch calls it."""
        return f"DataLoader worker {self.worker_id}"

    @property
    def pid(self) -> int:
        """Its process id."""
        pid: int = self.process.pid
        return pid

    ident = pid

    @property
    def exitcode(self) -> int | None:
        """Its exit code, negative for a signal. None until it has ended. 0 if the loader ended it."""
        exit_code: int | None = self.process.exit_code
        return exit_code

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return not self.process.has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for `timeout` seconds."""
        self.process.wait_end(timeout)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()

    def __repr__(self) -> str:
        end = "" if self.is_alive() else ", ended"
        return f"<{self.name}, serial {self.serial}, pid {self.pid}{end}>"
