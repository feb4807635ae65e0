"""A started loader: its engine, its log and its metrics.

It holds no reference to the loader. So the loader can be garbage-collected, which closes the session.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from dataclasses import replace
from typing import Any

from swift_loader.device.move import Target
from swift_loader.device.prefetch import PrefetchQueue
from swift_loader.device.streams import CopiesInFlight, Transfer
from swift_loader.engine.engine import Engine
from swift_loader.engine.observer import Observer
from swift_loader.errors import SwiftLoaderError, warn
from swift_loader.executors.base import Executor
from swift_loader.executors.broadcast import ANYWHERE, START, Broadcast, ReceivingExecutor
from swift_loader.executors.executor import WorkerExecutor
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.inline import InlineExecutor
from swift_loader.executors.threads import ThreadExecutor
from swift_loader.log import Log
from swift_loader.options import DeliveryOptions, Options
from swift_loader.report.report import SWIFT_LOADER
from swift_loader.runtime import ProcessOwner
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.sampling.plan import PastPlans, Plan, PlanSettings
from swift_loader.sampling.run import Run
from swift_loader.sampling.work import PlannedSource
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import SchedulerSettings
from swift_loader.worker.spec import WorkerSpec


class Session:
    """One rank, from `start()` to `close()`."""

    def __init__(
        self,
        options: Options,
        run: Run,
        settings: PlanSettings,
        target: Target | None,
        *,
        file_number: int = 0,
        dataset: Any = None,
        fleet: Fleet | None = None,
        broadcast: Broadcast | None = None,
    ) -> None:
        """Make the engine. The caller must call `close()` from here on.

        `run`: what it delivers. `settings`: of this rank's plan. `target` None leaves batches as they are.
        `file_number` tells this process from others with the same options, in the names of files. `dataset`: if batches
        are built in this process. `fleet`: the session owns it once that is made; None: there are no worker processes.
        `broadcast`: to the ranks that share batches with this one, owned by the session; None: there are no others.
        """
        self._run = run
        self._broadcast = broadcast
        if broadcast is not None and target is not None and target.moves:
            broadcast.num_ahead = options.delivery.max_on_device
        self._options = options
        self._target = target
        self.settings = settings
        """Of the plan of the current pass."""
        self.plan: Plan
        """The plan of the current pass. Known after `start`."""
        self.past_plans = PastPlans()
        """Those of all passes."""
        self._copies: CopiesInFlight | None = None
        """Made when there is something to copy."""
        self.observer = Observer(SWIFT_LOADER, enabled=options.report.benchmark)
        self._notices: deque[str] = deque()
        """Any thread adds messages; the loop's thread issues them as warnings."""
        self._process = ProcessOwner()
        self._log = Log(options.report.log, file_number)
        self._benchmark_path = options.report.benchmark_path(file_number)
        self._at_close = contextlib.ExitStack()
        """What `close` does after the engine's end: the last first, each once and also if another one fails."""
        self._at_close.callback(self._log.close)
        try:
            self.engine = self._make_engine(fleet, dataset)
        except BaseException:
            self._at_close.close()
            raise

    def _make_engine(self, fleet: Fleet | None, dataset: Any) -> Engine:
        """Return the engine of worker processes if there is a fleet, else one that builds batches here."""
        delivery, metrics = self._options.delivery, self.observer.metrics
        spec = WorkerSpec(self._options.workers, self.settings)
        settings = delivery.scheduling
        executor: Executor
        page_lock = on_arrival = None
        if self._target is not None and fleet is not None and fleet.has_segments:
            page_lock = self._target.make_page_lock(self._notices)
        if self._target is not None and not (self._broadcast is not None and self._target.moves):  # it is sent as it is
            is_locked = page_lock is not None and delivery.batch_decoder is None  # it makes batches elsewhere
            on_arrival = self._target.on_arrival(self._notices, is_locked=is_locked)
        if self._broadcast is not None and not self._broadcast.is_leader:
            executor = ReceivingExecutor(self._broadcast, spec, metrics, on_arrival)
            settings = SchedulerSettings(Limits(1, 1, in_order=delivery.in_order))
        elif fleet is not None:
            executor = WorkerExecutor(fleet, metrics, self._log.write, self._notices, page_lock, on_arrival)
        elif delivery.uses_threads:
            executor = ThreadExecutor(spec, delivery, metrics, dataset, self._notices, on_arrival)
        else:
            executor = InlineExecutor(spec, metrics, delivery.batch_decoder, dataset, on_arrival)
            settings = SchedulerSettings(Limits(1, 1, in_order=delivery.in_order))
        return Engine(executor, settings, metrics, self._notices, self._log)

    @property
    def _loads(self) -> bool:
        """Whether this rank loads its batches itself."""
        return self._broadcast is None or self._broadcast.is_leader

    def start(self) -> None:
        """Start the engine, and block until it runs where the run's next pass begins.

        With `validate`, block until the first batch is there, too. Another thread may close the session meanwhile.
        """
        engine, workers, delivery = self.engine, self._options.workers, self._options.delivery
        try:
            engine.start()
            if self._run.fits(engine.num_samples):  # else all ranks raise the same error soon
                self.seek(awaits_first=workers.validate and delivery.num_workers > 0 and self._loads)
        except Exception:
            with contextlib.suppress(Warning):  # a filter may make it an error; this one matters more
                engine.issue_warnings()  # what led to the error
            raise
        if self._broadcast is not None and self._loads:
            self._broadcast.send(START, engine.num_samples)
        settings, facts = self.settings, f"{engine.num_samples} samples, seed {self.settings.order.seed}"
        self._log.write(f"rank {settings.rank} of {settings.world_size} started: {facts}")
        self._at_close.callback(self._report)
        self._at_close.callback(self._end_copies)

    def seek(self, source: PlannedSource | None = None, *, awaits_first: bool = False) -> PlannedSource:
        """Make the engine build from where a pass is; None: from where the run's next one begins. Return the pass.

        It is without what the run skips by now. `awaits_first`: see `Engine.begin`.
        """
        run, num_samples = self._run, self.engine.num_samples
        if source is not None:
            source.settle()
        begin = run.next_begin(num_samples) if source is None else source.position
        plan = Plan.of(num_samples, replace(self.settings, order=run.order, skips=run.skips))
        self.plan, step = plan.resumed_at(begin)
        self.settings = self.plan.settings
        self.past_plans.note(time.perf_counter_ns(), self.plan)
        if source is None:
            source = PlannedSource(self.plan, begin, step)
        else:
            source.replan(self.plan)
        self.engine.begin(source, self.settings, awaits_first=awaits_first)
        return source

    def begin_pass(self) -> PassSource:
        """Begin the run's next pass. Return what its batches come from: nothing is to be taken after the last one."""
        source = self.seek()
        batches = self._batches_of(source)
        self._run.begin_pass(source)
        return batches

    def reopen_pass(self) -> PassSource:
        """Continue the run's pass where the loop is, without what it skips by now. Return the same as `begin_pass`.

        Batches that were built or moved ahead of the loop are dropped.
        """
        assert self._run.this is not None, "it has begun"
        return self._batches_of(self.seek(self._run.this))

    def _batches_of(self, source: PlannedSource) -> PassSource:
        if self._target is None or not self._target.moves:
            return self.engine if self._broadcast is None else self
        depth, num_left = self._options.delivery.max_on_device, source.num_batches - len(source.steps)
        depth = depth if self._broadcast is None else self._broadcast.num_ahead
        self._copies = self._copies or CopiesInFlight(self._target.make_stream(), depth)
        in_background = self._target.moves_in_background
        return PrefetchQueue(self, self._copies, depth, num_left, in_background=in_background)

    def resize(self, options: Options) -> None:
        """Have as many workers from now on as these options say. Any thread."""
        if self._loads:  # else the workers are those of another rank
            self.engine.resize(options.delivery.num_workers, options.delivery.limits)
        self._options = options
        if not options.delivery.is_auto:
            self.observer.autotuner = None
        self._log.write(f"worker_per_consumer={options.delivery.num_workers} from now on")

    def close(self) -> None:
        """Stop the engine, then write the metrics to the file or the log. Idempotent and thread-safe.

        Waits for running copies to the device, because they read memory that is freed here.
        """
        if not self._process.is_here():  # a fork of the trainer: everything here belongs to the parent
            return
        if self._broadcast is not None:
            self._broadcast.close()
        self.engine.close()
        self._at_close.close()

    def _end_copies(self) -> None:
        if self._copies is None:
            return
        try:
            self._copies.close()
        except Exception as error:  # a device error: its next user gets it too, and the loop's own error matters here
            self._log.write(f"waiting for copies to the device failed: {error}")

    def take(self) -> Delivery:
        """Return the next batch on the host, or the error in its place. Loop's thread. Blocks."""
        delivery = self.engine.take()
        if self._broadcast is None or not self._broadcast.is_leader:
            return delivery
        return self._hand_on(delivery, self._broadcast)

    def _hand_on(self, delivery: Delivery, broadcast: Broadcast) -> Delivery:
        """Give a batch, or the error in its place, to the ranks that share it. Blocks until they want it."""
        place = ANYWHERE if delivery.work is None else (delivery.work.epoch, delivery.work.step)
        content = delivery.batch if delivery.error is None else delivery.error
        try:
            broadcast.send(place, content, delivery.failures)
        except SwiftLoaderError as error:
            return Delivery(error=delivery.error or error)
        return delivery

    def end_pass(self) -> None:
        """Record that the loop met the end of its pass. Say what would help, if it waited. Loop's thread."""
        self.engine.end_pass()
        is_auto = self._options.delivery.is_auto  # then it does what it would say
        if self.settings.rank == 0 and self._loads and not is_auto and (line := self.observer.tell(self)):
            self._log.write(line)

    def _observed(self) -> tuple[DeliveryOptions, int, bool]:
        """Return what the loader is now, for its observer. Any thread."""
        return self._options.delivery, self._options.sampling.batch_size, self._target is not None

    def is_ready(self) -> bool:
        """Return whether to take a batch ahead of the loop. Loop's thread.

        If it wouldn't block; or if ranks share batches: all of them do it then.
        """
        return self._broadcast is not None or self.engine.is_ready()

    def move(self, delivery: Delivery, transfer: Transfer) -> Any:
        """Return a batch on the device. Loop's thread, or the one that moves."""
        assert self._target is not None
        began_ns = time.perf_counter_ns()
        moved = self._target.move(delivery.batch, transfer)
        self.observer.metrics.note_copy(delivery.number, time.perf_counter_ns() - began_ns)
        return moved

    def key_of(self, delivery: Delivery) -> int:
        """Return the key of a batch that is moved, see `batch_key`."""
        assert delivery.work is not None
        settings, epoch = self.settings, delivery.work.epoch
        position = self.plan.end_of_step(epoch, delivery.work.step)
        return derive_key(settings.order.seed, Purpose.DEVICE.value, epoch, position.num_samples, settings.rank)

    def _report(self) -> None:
        report = self.observer.metrics.report()
        if report and self._benchmark_path is not None:
            try:
                self._benchmark_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            except OSError as error:  # the loop may be ending with an error of its own, which says more
                warn(f"benchmark_file isn't written: {error}")
        elif report:
            self._log.write(f"stages: {json.dumps(report)}")
        self._log.write(f"rank {self.settings.rank} closed")

    def __repr__(self) -> str:
        return f"<Session rank {self.settings.rank} of {self.settings.world_size}, {self.engine!r}>"


PassSource = Engine | Session | PrefetchQueue
"""What `take` of returns the next batch of a pass, or the error in its place."""
