"""The training run that a loader is part of: its order, its skips, its progress and its saved state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.sampling.checkpoint import Checkpoint
from swift_loader.sampling.progress import Progress
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.sampling.skips import NO_SKIPS, SkippedRange

__all__ = ["Run"]


class Run:
    """An order and a position in it. Another loader can continue it, with other ranks, workers and batch sizes."""

    def __init__(self, order: OrderSettings, chosen: frozenset[str]) -> None:
        """Begin a run.

        Args:
            order: The order of the samples.
            chosen: Fields of a state that the user set explicitly. A state with another value raises `StateMismatch`.
                Other fields take the value of the state.
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
        """Continue the run of a saved state.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: This run can't continue it. Nothing has changed then.
        """
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

        Raises:
            ValueError: The loop got a part of a range already. Nothing has changed then.
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

    def note_length(self, num_samples: int) -> None:
        """Record the dataset's length.

        Raises:
            StateMismatch: The loaded state is of another dataset.
        """
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
