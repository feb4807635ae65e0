"""Finds a batch of a past run and builds it again, in this process.

The batch comes from the code that worker processes run, so its bytes are those that the run's loop got, if the samples
depend on their index, the seed and the epoch alone, which is what the loader guarantees with `rng="sample"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.checks import check_integer, check_optional_integer
from swift_loader.errors import StateMismatch
from swift_loader.notices import warn
from swift_loader.ranks.ranks import Ranks
from swift_loader.replay.sources import SampleSource
from swift_loader.sampling.checkpoint import Checkpoint
from swift_loader.sampling.plan import MAX_EPOCH, Plan, PlanSettings, Position
from swift_loader.sampling.run import Run
from swift_loader.sampling.skips import NO_SKIPS, Skips
from swift_loader.scheduler.sample_errors import SampleFailure, delivered_batch
from swift_loader.session import Session
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import length_of

__all__ = ["PastBatch", "Rebuilt", "rebuild"]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A batch of a past run."""

    batch: Any
    """What the run's loop got, on the host."""
    epoch: int
    step: int | None
    """Counted from the epoch's first batch. None: the batch doesn't begin where such a step begins."""
    position: int
    """How many samples of the epoch's order come before the batch, on all ranks together."""
    rank: int
    world_size: int
    indices: NDArray[np.int64]
    """`(n,)` dataset indices, in the order of the samples."""
    num_padding: int
    """How many samples at the end are padding."""
    failures: tuple[SampleFailure, ...]
    """Samples that `on_error` left out or replaced."""


def rebuild(
    source: Any,
    state: Mapping[str, Any],
    step: int | None = None,
    *,
    epoch: int | None = None,
    position: int | None = None,
    batch_size: int | None = None,
    rank: int = 0,
    world_size: int | None = None,
) -> Rebuilt:
    """Rebuild a batch of a past run, bit for bit. Starts no process. Random generators stay as they are.

    Args:
        source: The run's dataset, its `SwiftLoader`, or a function or class that returns one of them. Of a loader, the
            options count (`collate_fn`, `batch_size`, `on_error`, `rng`, `uneven`, …); it isn't started.
        state: What the run's `state_dict()` returned, at any time.
        step: Which batch: counted from the epoch's first one, as `enumerate(loader)` does in an epoch that begins at
            its start and skips nothing. A skipped step can be rebuilt, too. Default: the last batch before the state.
        epoch: Which epoch. Default: the state's.
        position: Instead of `step`: the samples of the epoch before the batch, on all ranks together. It is what
            `state_dict()["position"]` was before this batch. Needed in an epoch that was resumed with another batch
            size or number of ranks, where steps begin elsewhere.
        batch_size: Samples per batch and rank. Default: the loader's.
        rank: Which rank's batch.
        world_size: Number of ranks of the run. Default: the loader's `nb_consumer`, or 1.

    Raises:
        StateMismatch: The state isn't one of a `SwiftLoader`, or the dataset has another length, or the loader was
            given another seed or order.
        TypeError: An argument has the wrong type.
        ValueError: The run has no such batch.
        Exception: Whatever building the batch raised.
    """
    return PastBatch.find(
        source,
        state,
        step,
        epoch=epoch,
        position=position,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
    ).rebuild()


@dataclass(frozen=True, slots=True)
class PastBatch:
    """Which batch to rebuild."""

    source: SampleSource
    settings: PlanSettings
    checkpoint: Checkpoint
    """The run, stopped before this batch."""

    @classmethod
    def find(
        cls,
        source: Any,
        state: Mapping[str, Any],
        step: int | None,
        *,
        epoch: int | None,
        position: int | None,
        batch_size: int | None,
        rank: int,
        world_size: int | None,
    ) -> PastBatch:
        """Check the arguments of `rebuild`, and raise what it raises before the batch is built."""
        saved = _checked_state(state)
        for name, number in (("batch_size", batch_size), ("world_size", world_size)):
            check_optional_integer(name, number, 1)
        samples = SampleSource.of(source, batch_size, world_size)
        sampling, num_samples = samples.options.sampling, length_of(samples.dataset)
        _check_run(samples, saved, num_samples)
        world_size = sampling.world_size or 1
        ranks = Ranks(check_integer("rank", rank, 0, world_size - 1), world_size, "the past run")
        plan = Plan.of(num_samples, sampling.plan_settings(saved.order, ranks))
        at_epoch = saved.position.epoch if epoch is None else check_integer("epoch", epoch, 0, MAX_EPOCH)
        if position is None:
            found = _last_step(plan, saved, at_epoch) if step is None else check_integer("step", step, 0)
            begin, skips = _begin_of(plan, at_epoch, found, saved.skips)
        elif step is None:
            begin, skips = Position(at_epoch, check_integer("position", position, 0, num_samples)), saved.skips
        else:
            raise ValueError(f"step={step} and position={position} are both given; give the one that you know")
        settings = replace(plan.settings, skips=skips)
        _check_batch(num_samples, settings, begin)
        return cls(samples, settings, replace(saved, position=begin, skips=skips))

    def rebuild(self) -> Rebuilt:
        """Build the batch."""
        run = Run(self.checkpoint.order, frozenset())
        run.load_state_dict(self.checkpoint.to_dict())
        run.progress.choose_epoch(self.checkpoint.position.epoch)  # so that the end of it isn't the next one's start
        session = Session(self.source.options, self.settings, None, dataset=self.source.dataset)
        try:
            session.start()
            opened = session.open_epoch(run)
            delivery = session.take()
        finally:
            session.close()
        if delivery.error is not None:
            raise delivery.error
        planned = delivered_batch(session.plan.batch(opened.epoch, opened.first_step), delivery.failures)
        return Rebuilt(
            batch=delivery.batch,
            epoch=opened.epoch,
            step=self.step,
            position=self.checkpoint.position.num_samples,
            rank=self.settings.rank,
            world_size=self.settings.world_size,
            indices=planned.indices,
            num_padding=planned.num_padding,
            failures=delivery.failures,
        )

    @property
    def step(self) -> int | None:
        """The step that begins here, if one does; see `Rebuilt`."""
        step, rest = divmod(self.checkpoint.position.num_samples, self.settings.samples_per_step)
        return None if rest else step


def _checked_state(state: Mapping[str, Any]) -> Checkpoint:
    if isinstance(state, Mapping) and "_snapshot" in state:
        raise StateMismatch(
            "the state is that of a DataLoader, whose batches follow from its sampler; only those of a SwiftLoader can "
            "be rebuilt"
        )
    return Checkpoint.from_dict(state)


def _check_batch(num_samples: int, settings: PlanSettings, begin: Position) -> None:
    resumed, step = settings.resumed_at(begin)
    if step >= Plan.of(num_samples, resumed).num_batches(begin.epoch):
        raise ValueError(f"rank {settings.rank} has no batch at position {begin.num_samples} of epoch {begin.epoch}")


def _check_run(samples: SampleSource, saved: Checkpoint, num_samples: int) -> None:
    """Raise or warn if this can't be the dataset or the loader of the run."""
    run = Run(samples.options.sampling.order_settings(), samples.chosen)
    run.load_state_dict(saved.to_dict())
    run.note_length(num_samples)
    if samples.options.workers.rng is not Rng.SAMPLE:
        warn(
            f"with rng={samples.options.workers.rng.value!r}, what samples draw at random depends on the worker, so "
            f"the batch is another one than that of the run if its samples draw"
        )


def _begin_of(plan: Plan, epoch: int, step: int, skips: Skips) -> tuple[Position, Skips]:
    """Return where a step begins, and what is skipped beside it. The run may have skipped the step itself."""
    try:
        found = plan.range_of(epoch, step)
    except IndexError as error:
        raise ValueError(f"{error}, with a batch size of {plan.settings.batch_size} on {_ranks(plan)}") from error
    return Position(epoch, found.begin), NO_SKIPS if skips.touch(found) else skips


def _last_step(plan: Plan, saved: Checkpoint, epoch: int) -> int:
    """Return the step that ended at the state's position."""
    reached, skips = saved.position, saved.skips
    place = skips.place_of(epoch, reached.num_samples)
    if epoch != reached.epoch or not place:
        raise ValueError(
            f"the state says which batch was the last before it only in its own epoch, and not at the epoch's start; "
            f"it is at sample {reached.num_samples} of epoch {reached.epoch}. Give the step"
        )
    num_steps = Plan(plan.order, replace(plan.settings, rank=0)).num_batches(epoch)  # no rank has more
    end = skips.position_of(epoch, place - 1) + 1
    step = min((end - 1) // plan.settings.samples_per_step, num_steps - 1)
    is_end = not end % plan.settings.samples_per_step or end == plan.order.num_samples
    if not is_end or skips.touch(plan.range_of(epoch, step)):  # what was delivered has no skipped samples
        raise ValueError(
            f"no step of {plan.settings.batch_size} samples on {_ranks(plan)} ends at the state's position {end}; give "
            f"the run's batch size and number of ranks. If the epoch was resumed with another one, give the position "
            f"at which the batch began"
        )
    return step


def _ranks(plan: Plan) -> str:
    world_size = plan.settings.world_size
    return "one rank" if world_size == 1 else f"each of {world_size} ranks"
