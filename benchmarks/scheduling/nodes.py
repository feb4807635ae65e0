"""The workers of a simulated cluster, which build batches, die and are replaced."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduling.agenda import Agenda
from scheduling.network import Network
from scheduling.settings import ClusterSettings
from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.events import Built, Death, Disconnected, Ended, Event, Ready

__all__ = ["Nodes"]

_WORKER_ENDS, _NODE_ENDS = Death(is_at_work=False), Death(with_template=True)
"""Neither is the fault of a batch, so none is blamed if its worker ends twice by chance."""


@dataclass(slots=True)
class _Worker:
    serial: int
    worker_id: int
    tasks: deque[Send] = field(default_factory=deque)
    """It is building the first one."""


class Nodes:
    """All nodes, with all their workers. They tell the trainer what happens, as executors do."""

    def __init__(self, settings: ClusterSettings, agenda: Agenda, tell: Callable[[Event], None], seed: int) -> None:
        self._settings = settings
        self._agenda = agenda
        self._tell = tell
        self._random = random.Random(seed)
        self._network = Network(settings)
        self._living: dict[int, _Worker] = {}
        """By serial number."""
        self._ends: dict[int, Ended] = {}
        """How those ended that nobody has asked about yet, by serial number."""
        self._up_s = [0.0] * settings.num_nodes
        """When each node is there, if it was lost."""
        self._num_started = 0

    def start(self, worker_id: int) -> None:
        """Start a worker, once its node is there."""
        late_s = self._up_s[self._node_of(worker_id)] - self._agenda.now_s
        if late_s > 0:
            self._agenda.after(late_s, self.start, worker_id)
            return
        serial, self._num_started = self._num_started, self._num_started + 1
        self._living[serial] = _Worker(serial, worker_id)
        self._agenda.after(self._settings.latency_s, self._arrive, Ready(serial, worker_id))

    def replace(self, worker_id: int) -> None:
        """Start a worker after the time that this takes."""
        self._agenda.after(self._settings.restart_s, self.start, worker_id)

    def send(self, task: Send) -> None:
        """Send a task to its worker."""
        self._agenda.after(self._settings.latency_s, self._receive, task)

    def reap(self, serial: int) -> None:
        """Tell how a worker ended."""
        self._agenda.after(0.0, self._tell, self._ends.pop(serial))

    def kill_a_worker(self) -> None:
        """Kill any worker."""
        if self._living:
            self._kill(self._random.choice(list(self._living.values())), _WORKER_ENDS)

    def kill_a_node(self) -> None:
        """Kill any node, with all its workers. Another one takes its place later."""
        node = self._random.randrange(self._settings.num_nodes)
        self._up_s[node] = self._agenda.now_s + self._settings.restart_s
        self._network.clear(node)
        for worker in [one for one in self._living.values() if self._node_of(one.worker_id) == node]:
            self._kill(worker, _NODE_ENDS)

    def _kill(self, worker: _Worker, death: Death) -> None:
        del self._living[worker.serial]
        self._ends[worker.serial] = Ended(worker.serial, worker.worker_id, death)
        self._agenda.after(self._settings.notice_s, self._tell, Disconnected(worker.serial, worker.worker_id))

    def _node_of(self, worker_id: int) -> int:
        return worker_id // self._settings.workers_per_node

    def _receive(self, task: Send) -> None:
        worker = self._living.get(task.worker)
        if worker is not None:
            worker.tasks.append(task)
            if len(worker.tasks) == 1:
                self._build(worker)

    def _build(self, worker: _Worker) -> None:
        build_s = self._settings.build_s * self._random.lognormvariate(0.0, self._settings.build_sigma)
        self._agenda.after(build_s, self._send_batch, worker, build_s)

    def _send_batch(self, worker: _Worker, build_s: float) -> None:
        if worker.serial not in self._living:
            return
        task = worker.tasks.popleft()
        built = Built(worker.serial, task.generation, task.sequence, task.work, build_s)
        now_s = self._agenda.now_s
        self._agenda.after(self._network.send(self._node_of(worker.worker_id), now_s) - now_s, self._arrive, built)
        if worker.tasks:
            self._build(worker)

    def _arrive(self, event: Built | Ready) -> None:
        """Tell the trainer, unless the worker has died since: then its stream ends before this."""
        if event.worker in self._living:
            self._tell(event)
