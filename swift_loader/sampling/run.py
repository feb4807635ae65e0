"""The training run that a loader is part of: its order, its skips, its position and its saved state; and the rule by
which the passes of loaders and samplers begin. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.sampling.integers import ANY_COUNT, check_same, damaged, from_state, in_state, to_state
from swift_loader.sampling.mixture import weights_of
from swift_loader.sampling.permutation import MAX_SAMPLES
from swift_loader.sampling.plan import Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.sampling.skips import NO_SKIPS, Position, SkippedRange, Skips, rows_of
from swift_loader.sampling.work import PlannedSource

VERSION = 1
"""Version of the state's fields and of the permutation. With another version, the order would be another one."""


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
    """How much of the epoch was drawn, over all ranks. The unit is the loader's or the sampler's."""
    state: PassState = PassState.READY
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


class EpochRule:
    """Where the next pass begins, and what a state that is saved now has to continue. Not thread-safe.

    A pass goes through one epoch. Frameworks call `set_epoch` before `iter()`, after it or in the middle, even for the
    current epoch. So its value only takes effect when a pass begins:

        state restored, no set_epoch      resumes at the restored position; at an epoch's end, with the next epoch
        state restored, its own epoch     resumes at the restored position, even if nothing is left there
        another epoch                     that epoch, from its start
        the current epoch                 no effect once the pass is over; else that epoch again, from its start
        none of these                     the epoch after the last pass, if that is over

    What was left before its end is behind a loader: the next epoch follows. A sampler repeats its epoch, and another
    epoch that is chosen meanwhile isn't in its state yet: what was drawn ahead may be all that was left.
    """

    def __init__(self, *, is_of_loader: bool = False) -> None:
        """Begin before epoch 0."""
        self._is_of_loader = is_of_loader
        self._last = Pass(0, 0)
        self._chosen: int | None = None
        """The epoch of the last `set_epoch` since the last pass began."""
        self._has_named_last = False
        """Whether that was the epoch of the pass that was running. It doesn't choose the next epoch."""

    @property
    def last(self) -> Pass:
        """The last pass that has begun, or where the first one begins."""
        return self._last

    @property
    def current(self) -> Pass:
        """The pass that a state saved now has to continue."""
        last, chosen = self.last, self._choice
        is_held = last.state is PassState.RUNNING and not self._is_of_loader
        if chosen is None or is_held or (chosen == last.epoch and last.state is not PassState.OVER):
            return last
        return Pass(chosen, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs; if none does, that of the next pass."""
        return self.last.epoch if self.last.state is PassState.RUNNING else self.next().epoch

    def choose(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._chosen = epoch
        self._has_named_last = self.last.state is PassState.RUNNING and epoch == self.last.epoch

    def restore(self, epoch: int, position: int, *, at_end: bool = False) -> None:
        """Begin the next pass at a saved position. Discards an epoch chosen before."""
        self._last = Pass(epoch, position, at_end=at_end)
        self._chosen = None

    def begin(self) -> Pass:
        """Begin the next pass."""
        self._last = self.next()
        self._last.state = PassState.RUNNING
        self._chosen = None
        return self._last

    def next(self, length: int = 0) -> Pass:
        """Return the next pass. `length`: of an epoch; 0: a restored position says itself whether it is the end."""
        last, chosen = self.last, self._choice
        is_ready, at_end = last.state is PassState.READY, last.at_end or 0 < length <= last.position
        if is_ready and (chosen == last.epoch or (chosen is None and not at_end)):
            return replace(last)
        if chosen is None:
            chosen = last.epoch + (at_end or (self._is_of_loader and not is_ready))
        return Pass(chosen, 0)

    @property
    def _choice(self) -> int | None:
        return None if self._has_named_last and self.last.state is PassState.OVER else self._chosen


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of `state_dict()`: the position of a run, its order, and what it skips, as plain JSON types.

    It is the same on every rank. It doesn't contain the number of ranks, the number of workers or the batch size,
    because they may change when the run resumes.
    """

    order: OrderSettings = in_state(OrderSettings)
    position: Position = in_state(Position)
    num_samples: int | None = in_state(ANY_COUNT.or_none(), older=None)
    """Length of the dataset; None if it wasn't known, because the loader wasn't started."""
    skips: Skips = in_state(Skips, default=NO_SKIPS)

    def fits(self, num_samples: int) -> bool:
        """Return whether it may be of a dataset of this length."""
        return self.position.num_samples <= num_samples and self.num_samples in (None, num_samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the dict that `state_dict()` returns."""
        return to_state(self, {"version": VERSION})

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Checkpoint:
        """Return the state from a dict made by `to_dict`."""
        saved = from_state(cls, state, "SwiftLoader", VERSION)
        num_samples, reached = saved.num_samples, saved.position.num_samples
        if num_samples is not None and reached > num_samples:
            raise damaged(f"the state's position={reached} is greater than its num_samples={num_samples}")
        return replace(saved, skips=saved.skips.checked(num_samples))


def fixed_fields(*, seed: int | None, shuffle: bool, window: int | None) -> frozenset[str]:
    """Return the fields of a state that the user has set explicitly."""
    is_given = {"shuffle": True, "seed": seed is not None, "nearby_shuffle": window is not None and shuffle}
    return frozenset(name for name, given in is_given.items() if given)


class Run(EpochRule):
    """An order and a position in it. Another loader can continue it, with other ranks, workers and batch sizes."""

    def __init__(self, order: OrderSettings, fixed: frozenset[str], *, is_of_loader: bool = True) -> None:
        """Begin a run.

        `fixed` are the fields of a state that the user set explicitly. A state with another value raises
        `StateMismatch`. Other fields take the value of the state.
        """
        super().__init__(is_of_loader=is_of_loader)
        self.order = order
        self._mix = order.mix
        """What the program says. A loaded state may have another one."""
        self.this: PlannedSource | None = None
        """The last pass since the run began or was restored."""
        self.skips = NO_SKIPS
        """What the run leaves out."""
        self._fixed = fixed
        self.num_samples: int | None = None
        """Length of the dataset; None if it isn't known yet."""
        self._saved: Checkpoint | None = None
        """The state that was loaded last."""

    @property
    def has_own_seed(self) -> bool:
        """Whether the user chose the seed or a state set it. Otherwise this process drew it."""
        return "seed" in self._fixed or self._saved is not None

    @property
    def last(self) -> Pass:
        """See `EpochRule`."""
        this = self.this
        if this is None:
            return self._last
        state = PassState.OVER if this.has_all else PassState.RUNNING
        return Pass(this.begin.epoch, this.position.num_samples, state)

    @property
    def position(self) -> Position:
        """Where a run that stops now has to resume."""
        current = self.current
        return Position(current.epoch, current.position)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass has begun and has batches left, and no other epoch was chosen since."""
        return self.last.state is PassState.RUNNING and self._choice in (None, self.last.epoch)

    @property
    def is_partly_delivered(self) -> bool:
        """Whether a pass has delivered some but not all of its batches, and no other epoch was chosen since."""
        return self.is_in_pass and self.this is not None and len(self.this.steps) > self.this.first_step

    def next_begin(self, num_samples: int) -> Position:
        """Return where the next pass begins, given the dataset's length, unless another epoch is chosen until then."""
        following = self.next(num_samples)
        return Position(following.epoch, following.position)

    def begin_pass(self, source: PlannedSource) -> None:
        """Begin a pass."""
        self.this = source
        self._chosen = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON types."""
        saved = self._saved
        num_samples = saved.num_samples if self.num_samples is None and saved is not None else self.num_samples
        return Checkpoint(self.order, self.position, num_samples, self.skips).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a saved state. If this run can't continue it, nothing has changed."""
        saved = Checkpoint.from_dict(state)
        present = self.state_dict()
        check_same(saved.to_dict(), {name: present[name] for name in sorted(self._fixed)}, "this loader was given")
        if self.num_samples is not None:
            _check_length(saved, self.num_samples)
        self.order = self._resumed_order(saved)
        self.skips = saved.skips
        self._saved = saved
        self.this = None
        epoch, position = saved.position.epoch, saved.position.num_samples
        self.restore(epoch, position, at_end=0 < (self.num_samples or 0) <= position)

    def _resumed_order(self, saved: Checkpoint) -> OrderSettings:
        mix, mix_then = self._mix, saved.order.mix
        if mix is None and mix_then is None:
            return saved.order
        if mix is None or mix_then is None:
            kinds = ("a mixture", "another dataset")
            raise StateMismatch(
                f"the state is of {kinds[mix_then is None]}, but this loader has {kinds[mix is None]}; give the "
                f"dataset that the state was saved with, or start a new run without load_state_dict()"
            )
        return replace(saved.order, mix=mix.resumed(mix_then, mix_then.position(saved.position)))

    def skip(self, asked: Iterable[SkippedRange], num_samples: int) -> None:
        """Leave ranges out from now on. What is skipped already may be asked for again.

        If the loop got a part of a range already, nothing has changed.
        """
        ranges = [one for one in asked if not self.skips.cover(one)]
        for one in ranges:
            reached = self._reached_in(one.epoch, num_samples)
            if one.begin < reached:
                raise ValueError(
                    f"samples {one.begin} to {one.end - 1} of epoch {one.epoch} can't be skipped: the loop is beyond "
                    f"its first {reached} samples. Skip later steps, or load a state from before these"
                )
        self.skips = self.skips.added(ranges)

    def exclude(self, rows: Any, num_samples: int, since: Position | None = None) -> None:
        """Leave rows out, see `SwiftLoader.exclude`. Rows that are excluded already may be asked for again.

        `since`: from which position on. None: where the next pass begins, or a state that is saved now resumes.
        """
        since = min(self.position, self.next_begin(num_samples)) if since is None else since
        if (mix := self.order.mix) is not None:
            asked = rows_of(rows, sum(mix.lengths) if callable(rows) else MAX_SAMPLES).tolist()
            self.order = replace(self.order, mix=mix.excluding(self.order, mix.position(since), asked))
            return
        skips = self.skips.excluding(since, rows_of(rows, num_samples))
        if skips.num_excluded >= num_samples > 0:
            raise ValueError(
                f"these rows can't be excluded: nothing would be left of the {num_samples} rows of the dataset. A "
                f"function must return True for the rows to leave out"
            )
        self.skips = skips

    def reweight(self, weights: Any, num_samples: int, since: Position | None = None) -> None:
        """Give the sources of a mixture other weights, see `SwiftLoader.reweight`. `since`: see `exclude`."""
        mix, since = self.order.mix, min(self.position, self.next_begin(num_samples)) if since is None else since
        if mix is None:
            raise TypeError("the dataset isn't a Mixture, so it has no weights; give SwiftLoader(dataset=Mixture(...))")
        changed = mix.reweighted(mix.position(since), weights_of(weights, mix.names))
        self.order = replace(self.order, mix=changed)

    def _reached_in(self, epoch: int, num_samples: int) -> int:
        """Return how many samples of an epoch are behind the loop. Of an epoch that is past, all are."""
        last, begin = self.last, self.next_begin(num_samples)
        if last.state is PassState.RUNNING and epoch == last.epoch:
            return last.position
        if epoch == begin.epoch:
            return begin.num_samples
        return num_samples if epoch < begin.epoch else 0

    def take_seed(self, seed: int) -> None:
        """Use the seed that the ranks agreed on."""
        self.order = replace(self.order, seed=seed)

    def fits(self, num_samples: int) -> bool:
        """Return whether `note_length` would accept this length."""
        return self._saved is None or self._saved.fits(num_samples)

    def note_length(self, num_samples: int) -> None:
        """Record the dataset's length. A StateMismatch if the loaded state is of another dataset."""
        if self._saved is not None:
            _check_length(self._saved, num_samples)
        self.num_samples = num_samples


def _check_length(saved: Checkpoint, present: int) -> None:
    if not saved.fits(present):
        length, reached = saved.num_samples, saved.position.num_samples
        then = f"position={reached}" if length is None else f"num_samples={length}"
        raise StateMismatch(
            f"the state was saved with {then}, but the dataset now has num_samples={present}. Give the same dataset, "
            f"or start a new run without load_state_dict()"
        )


# The part of a sampler in what is drawn.


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
