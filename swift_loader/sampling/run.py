"""The training run that a loader is part of: its order, its skips, its progress and its saved state; and a sampler's
passes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.sampling.integers import MAX_BITS, check_version, checked_fields
from swift_loader.sampling.plan import MAX_EPOCH, NO_SKIPS, BatchPlan, Plan, Position, SkippedRange, Skips, Uneven
from swift_loader.sampling.shuffle import OrderSettings

VERSION = 1
"""Version of the state's fields and of the permutation. With another version, the order would be another one."""

_ANY = (0, 2**MAX_BITS - 1)
_RANGES = {
    "seed": _ANY,
    "epoch": (0, MAX_EPOCH),
    "position": (0, MAX_EPOCH),
    "shuffle": _ANY,
    "nearby_shuffle": _ANY,
    "run_length": (1, _ANY[1]),
}
_OPTIONAL = {"num_samples": _ANY}
_SKIPPED = "skipped"
"""The field of the skips. A run that skips nothing doesn't have it."""


@dataclass(slots=True)
class _Pass:
    """One pass through an epoch, and how far it is."""

    plan: Plan
    begin: Position
    first_step: int
    num_steps: int
    """Steps of the epoch that are done, including those before the pass."""
    is_ended: bool = False

    @property
    def position(self) -> Position:
        """The position after the last delivered batch."""
        epoch = self.begin.epoch
        if self.is_ended:
            return self.plan.end_of(epoch)
        return self.begin if self.num_steps == self.first_step else self.plan.position_after(epoch, self.num_steps - 1)

    @property
    def is_complete(self) -> bool:
        """Whether this rank got all its batches of the epoch."""
        return self.is_ended or self.num_steps >= self.plan.num_batches(self.begin.epoch)


class Progress:
    """Counts what the loop got, and decides where the next pass begins. Not thread-safe: the loop's thread.

    A pass goes through one epoch. Frameworks call `set_epoch` before `iter()`, after it or in the middle, even for the
    current epoch. So its value only takes effect when a pass begins, with the first `next`:

        state restored, no set_epoch      resumes at the restored position; at an epoch's end, with the next epoch
        state restored, its own epoch     resumes at the restored position, even if nothing is left there
        another epoch                     that epoch, from its first batch
        the current epoch                 no effect: the next epoch, or the same one if the loop left it unfinished
        none of these                     the epoch after the last pass
    """

    def __init__(self) -> None:
        self._start = Position(0, 0)
        """Where the first pass begins, or the first pass after a restore."""
        self._pass: _Pass | None = None
        """The last pass since then."""
        self._chosen: int | None = None
        """The epoch of the last `set_epoch` since the last pass began."""
        self._chosen_while_partly_delivered = False
        """Whether `set_epoch` named the epoch of the pass that was running. That doesn't choose the next epoch."""

    @property
    def position(self) -> Position:
        """Where a run that stops now has to resume."""
        reached = self._start if self._pass is None else self._pass.position
        chosen = self._choice
        is_repeat = self._pass is not None and self._pass.is_complete
        if chosen is None or (chosen == reached.epoch and not is_repeat):
            return reached
        return Position(chosen, 0)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass has begun and has batches left, and no other epoch was chosen since."""
        current = self._pass
        return current is not None and not current.is_complete and self._choice in (None, current.begin.epoch)

    @property
    def is_partly_delivered(self) -> bool:
        """Whether a pass has delivered some but not all of its batches, and no other epoch was chosen since."""
        current = self._pass
        return self.is_in_pass and current is not None and current.num_steps > current.first_step

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass. After a restore, the epoch of the restored position."""
        if self._choice is not None:
            return self._choice
        return self._start.epoch if self._pass is None else self._pass.begin.epoch + 1

    def batch(self, step: int) -> BatchPlan:
        """Return the plan of one batch of the pass."""
        assert self._pass is not None
        return self._pass.plan.batch(self._pass.begin.epoch, step)

    def restore(self, position: Position) -> None:
        """Resume at a saved position. Discards an epoch chosen before."""
        self._start = position
        self._pass = self._chosen = None

    def choose_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        current = self._pass
        self._chosen = epoch
        self._chosen_while_partly_delivered = (
            current is not None and not current.is_complete and epoch == current.begin.epoch
        )

    def next_begin(self, num_samples: int) -> Position:
        """Return where the next pass begins, given the dataset's length, unless another epoch is chosen until then."""
        if self._pass is None and self._chosen in (None, self._start.epoch):
            at_end = 0 < num_samples <= self._start.num_samples
            return Position(self._start.epoch + 1, 0) if at_end and self._chosen is None else self._start
        return Position(self.next_epoch, 0)

    def reached_in(self, epoch: int, num_samples: int) -> int:
        """Return how many samples of an epoch are behind the loop. Of an epoch that is past, all are."""
        current, begin = self._pass, self.next_begin(num_samples)
        if current is not None and not current.is_complete and epoch == current.begin.epoch:
            return current.position.num_samples
        if epoch == begin.epoch:
            return begin.num_samples
        return num_samples if epoch < begin.epoch else 0

    def begin(self, position: Position, plan: Plan, first_step: int) -> None:
        """Record that a pass begins at this position, which is where `first_step` begins."""
        self._pass = _Pass(plan, position, first_step, first_step)
        self._chosen = None

    @property
    def pass_position(self) -> Position:
        """The position in the pass, whatever epoch was chosen since it began."""
        assert self._pass is not None
        return self._pass.position

    def replan(self, plan: Plan) -> None:
        """Go on with a plan whose steps up to here are the same."""
        assert self._pass is not None
        self._pass.plan = plan

    def advance(self, num_steps: int) -> None:
        """Record how many steps of the epoch are done."""
        assert self._pass is not None
        self._pass.num_steps = num_steps

    def end(self) -> None:
        """Record that the loop reached the end of the epoch, where another rank may have one more batch."""
        assert self._pass is not None
        self._pass.is_ended = True

    @property
    def _choice(self) -> int | None:
        if self._chosen_while_partly_delivered and self._pass is not None and self._pass.is_complete:
            return None
        return self._chosen


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of `state_dict()`: the position of a run, its order, and what it skips, as plain JSON types.

    It is the same on every rank. It doesn't contain the number of ranks, the number of workers or the batch size,
    because they may change when the run resumes.
    """

    order: OrderSettings
    position: Position
    num_samples: int | None
    """Length of the dataset; None if it wasn't known, because the loader wasn't started."""
    skips: Skips = NO_SKIPS

    def to_dict(self) -> dict[str, Any]:
        """Return the dict that `state_dict()` returns."""
        state: dict[str, Any] = {
            "version": VERSION,
            "seed": self.order.seed,
            "epoch": self.position.epoch,
            "position": self.position.num_samples,
            "shuffle": int(self.order.shuffle),
            "nearby_shuffle": self.order.window,
            "run_length": self.order.run_length,
        }
        if self.num_samples is not None:
            state["num_samples"] = self.num_samples
        if self.skips:
            state[_SKIPPED] = self.skips.to_list()
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Checkpoint:
        """Return the state from a dict made by `to_dict`."""
        check_version(state, VERSION, "SwiftLoader")
        unknown = sorted(map(str, set(state) - {"version", *_RANGES, *_OPTIONAL, _SKIPPED}))
        if unknown:
            raise StateMismatch(
                f"the state has the unknown fields {', '.join(unknown)}; pass the dict that state_dict() returned, "
                f"unchanged"
            )
        given = {name: limits for name, limits in _OPTIONAL.items() if name in state}
        fields = checked_fields(state, _RANGES | given)
        num_samples, position = fields.get("num_samples"), fields["position"]
        if num_samples is not None and position > num_samples:
            raise StateMismatch(
                f"the state's position={position} is greater than its num_samples={num_samples}; pass the dict that "
                f"state_dict() returned, unchanged"
            )
        order = OrderSettings(fields["seed"], bool(fields["shuffle"]), fields["nearby_shuffle"], fields["run_length"])
        skips = Skips.from_list(state.get(_SKIPPED, []), num_samples)
        return cls(order, Position(fields["epoch"], position), num_samples, skips)


class Run:
    """An order and a position in it. Another loader can continue it, with other ranks, workers and batch sizes."""

    def __init__(self, order: OrderSettings, chosen: frozenset[str]) -> None:
        """Begin a run.

        `chosen` are the fields of a state that the user set explicitly. A state with another value raises
        `StateMismatch`. Other fields take the value of the state.
        """
        self.order = order
        self.progress = Progress()
        self.skips = NO_SKIPS
        """What the run leaves out."""
        self._chosen = chosen
        self.num_samples: int | None = None
        """Length of the dataset; None if it isn't known yet."""
        self._saved: Checkpoint | None = None
        """The state that was loaded last."""

    @property
    def has_own_seed(self) -> bool:
        """Whether the user chose the seed or a state set it. Otherwise this process drew it."""
        return "seed" in self._chosen or self._saved is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON types."""
        saved = self._saved
        num_samples = saved.num_samples if self.num_samples is None and saved is not None else self.num_samples
        return Checkpoint(self.order, self.progress.position, num_samples, self.skips).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a saved state. If this run can't continue it, nothing has changed."""
        saved = Checkpoint.from_dict(state)
        before, now = saved.to_dict(), self.state_dict()
        for name in ("shuffle", "nearby_shuffle", "seed"):
            if name in self._chosen and before[name] != now[name]:
                raise StateMismatch(
                    f"the state was saved with {name}={before[name]}, but this loader was given {name}={now[name]}; "
                    f"give the saved value, or start a new run without load_state_dict()"
                )
        if self.num_samples is not None:
            _check_length(saved, self.num_samples)
        self.order = saved.order
        self.skips = saved.skips
        self._saved = saved
        self.progress.restore(saved.position)

    def skip(self, asked: Iterable[SkippedRange], num_samples: int) -> None:
        """Leave ranges out from now on. What is skipped already may be asked for again.

        If the loop got a part of a range already, nothing has changed.
        """
        ranges = [one for one in asked if not self.skips.cover(one)]
        for one in ranges:
            reached = self.progress.reached_in(one.epoch, num_samples)
            if one.begin < reached:
                raise ValueError(
                    f"samples {one.begin} to {one.end - 1} of epoch {one.epoch} can't be skipped: the loop is beyond "
                    f"its first {reached} samples. Skip later steps, or load a state from before these"
                )
        self.skips = self.skips.added(ranges)

    def take_seed(self, seed: int) -> None:
        """Use the seed that the ranks agreed on."""
        self.order = replace(self.order, seed=seed)

    def fits(self, num_samples: int) -> bool:
        """Return whether `note_length` would accept this length."""
        saved = self._saved
        return saved is None or (saved.position.num_samples <= num_samples and saved.num_samples in (None, num_samples))

    def note_length(self, num_samples: int) -> None:
        """Record the dataset's length. A StateMismatch if the loaded state is of another dataset."""
        if self._saved is not None:
            _check_length(self._saved, num_samples)
        self.num_samples = num_samples


def _check_length(saved: Checkpoint, present: int) -> None:
    if saved.position.num_samples > present:
        raise StateMismatch(
            f"the state was saved with position={saved.position.num_samples}, but the dataset now has "
            f"num_samples={present}. Give the same dataset, or start a new run without load_state_dict()"
        )
    if saved.num_samples not in (None, present):
        raise StateMismatch(
            f"the state was saved with num_samples={saved.num_samples}, but the dataset now has "
            f"num_samples={present}, which changes the order. Give the same dataset, or start a new run without "
            f"load_state_dict()"
        )


# The passes of a sampler, and its part of what is drawn.


class PassState(Enum):
    """How far a pass is."""

    READY = "ready"
    """Nothing is drawn yet. The position is where it begins."""
    RUNNING = "running"
    """Something may be left."""
    OVER = "over"
    """Nothing is left."""


@dataclass(slots=True)
class Pass:
    """One pass through an epoch. The iterator that makes it advances it; an iterator left behind has its own."""

    epoch: int
    position: int
    """How much of the epoch was drawn, over all ranks. The unit is the sampler's."""
    state: PassState
    at_end: bool = False
    """Whether the position is the end of the epoch."""

    def advance(self, position: int, *, at_end: bool) -> None:
        """Record how much is drawn. Call it before the item is given out, so that a saved state counts it."""
        self.position = position
        if at_end:
            self.end()

    def end(self) -> None:
        """Record that nothing is left."""
        self.state = PassState.OVER
        self.at_end = True


class Passes:
    """The passes of one sampler. Not thread-safe.

    `set_epoch` chooses the epoch of the next pass. It never changes a pass that runs, and that pass's own epoch chooses
    nothing. Without it:

        the last pass is over                the next epoch
        the last pass was left               the same epoch, from its start
        a state was loaded                   resumes where the state was saved; at an epoch's end, the next epoch

    After a loaded state, `set_epoch` of its own epoch keeps the position. That of another epoch discards it.
    """

    def __init__(self) -> None:
        self._last = Pass(0, 0, PassState.READY)
        self._chosen: int | None = None
        """The epoch of the last `set_epoch` since the last pass began."""

    @property
    def current(self) -> Pass:
        """The pass that a state saved now has to continue."""
        last, chosen = self._last, self._chosen
        is_begun = last.state is PassState.RUNNING
        if chosen is None or is_begun or (last.state is PassState.READY and chosen == last.epoch):
            return last
        return Pass(chosen, 0, PassState.READY)

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs; if none does, that of the next pass."""
        return self._last.epoch if self._last.state is PassState.RUNNING else self._next().epoch

    def choose(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        is_running = self._last.state is PassState.RUNNING and epoch == self._last.epoch
        self._chosen = None if is_running else epoch

    def restore(self, epoch: int, position: int, *, at_end: bool) -> None:
        """Begin the next pass at a saved position. Discards an epoch chosen before."""
        self._last = Pass(epoch, position, PassState.READY, at_end)
        self._chosen = None

    def begin(self) -> Pass:
        """Begin the next pass."""
        self._last = self._next()
        self._last.state = PassState.RUNNING
        self._chosen = None
        return self._last

    def _next(self) -> Pass:
        last, chosen = self._last, self._chosen
        keeps_position = chosen == last.epoch or (chosen is None and not last.at_end)
        if last.state is PassState.READY and keeps_position:
            return Pass(last.epoch, last.position, PassState.READY, last.at_end)
        if chosen is not None:
            return Pass(chosen, 0, PassState.READY)
        return Pass(last.epoch + last.at_end, 0, PassState.READY)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank in a sequence of items.

    In step s, rank r of R gets item `s * R + r`. So after any step the items drawn are a prefix of the sequence, and a
    run with another number of ranks can continue there.
    """

    rank: int
    world_size: int
    uneven: Uneven
    """The last step, if fewer than `world_size` items are left for it: PAD repeats these items, DROP leaves them out,
    EXACT gives nothing to some ranks."""

    def num_steps(self, num_items: int) -> int:
        """Return how many of the items this rank gets."""
        full, left = divmod(num_items, self.world_size)
        return full + (self.pick(left) is not None)

    def pick(self, num_left: int) -> int | None:
        """Return which of the next items is this rank's, given how many are left; None if it gets none."""
        if num_left >= self.world_size:
            return self.rank
        if num_left <= 0 or self.uneven is Uneven.DROP:
            return None
        if self.uneven is Uneven.PAD:
            return self.rank % num_left
        return self.rank if self.rank < num_left else None

    def is_last(self, num_left: int) -> bool:
        """Return whether nothing follows the next step on any rank, given how many items are left before it."""
        after = num_left - self.world_size
        return after <= 0 or (after < self.world_size and self.uneven is Uneven.DROP)
