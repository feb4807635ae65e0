"""The epochs of swift_loader's own order, cut into the batches of one rank, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swift_loader.samplers.passes import Pass, Passes
from swift_loader.sampling.checkpoint import Checkpoint
from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings, Position
from swift_loader.sampling.run import Run

__all__ = ["Cut", "Epochs"]


@dataclass(frozen=True, slots=True)
class Cut:
    """One batch of this rank, and the positions around it, in samples over all ranks."""

    indices: list[int]
    before: int
    after: int
    is_last: bool
    """Whether no rank has another one."""


class Epochs:
    """The epochs of a run on one rank. Memory is O(batch), and resuming is O(1). Not thread-safe."""

    def __init__(self, num_samples: int, run: Run, settings: PlanSettings) -> None:
        """Begin a run.

        Args:
            num_samples: Length of the dataset.
            run: The order, and what the user chose of it. A loaded state may replace the order.
            settings: How the order is cut. Its `order` isn't used.
        """
        self.passes = Passes()
        self._num_samples = num_samples
        self._run = run
        self._settings = settings
        run.note_length(num_samples)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._settings.world_size

    @property
    def rank(self) -> int:
        """This rank."""
        return self._settings.rank

    @property
    def num_batches(self) -> int:
        """Batches of this rank in the whole epoch."""
        return self._plan.num_batches(self.passes.epoch)

    @property
    def num_indices(self) -> int:
        """Indices of this rank in the whole epoch, with padding."""
        return self._plan.num_samples(self.passes.epoch)

    def cuts(self, this: Pass) -> Iterator[Cut]:
        """Yield the batches of a pass. Call `this.advance` for each."""
        plan = self._plan
        settings, step = plan.settings.resumed_at(Position(this.epoch, this.position))
        plan = replace(plan, settings=settings)
        reader, num_batches, before = PlanReader(plan), plan.num_batches(this.epoch), this.position
        while step < num_batches:
            after = plan.position_after(this.epoch, step).num_samples
            indices = reader.batch(this.epoch, step).indices.tolist()
            step += 1
            yield Cut(indices, before, after, after == self._num_samples)
            before = after

    def state_dict(self) -> dict[str, int]:
        """Return the position of the pass, in the form that `SwiftLoader` has, too."""
        this = self.passes.current
        position = self._num_samples if this.at_end else this.position
        return Checkpoint(self._run.order, Position(this.epoch, position), self._num_samples).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: This run can't continue it. Nothing has changed then.
        """
        self._run.load_state_dict(state)
        position = self._run.progress.position
        at_end = 0 < self._num_samples <= position.num_samples
        self.passes.restore(position.epoch, position.num_samples, at_end=at_end)

    @property
    def _plan(self) -> Plan:
        return Plan.of(self._num_samples, replace(self._settings, order=self._run.order))

    def __repr__(self) -> str:
        return f"<Epochs of {self._num_samples} samples, {self.passes!r}>"
