"""The training run that a loader is part of: its order, how far it has got, and how that is saved. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.order import OrderSettings
from swift_loader.progress import Progress
from swift_loader.state import SavedState

__all__ = ["Run"]


class Run:
    """An order and a place in it; it may go on in another loader, with other ranks, workers and batches."""

    def __init__(self, order: OrderSettings, chosen: frozenset[str]) -> None:
        """Begin a run.

        Args:
            order: Its order.
            chosen: The fields of a state that are the user's choice, so that another value in a state is an error.
                Any other value is taken over from it.
        """
        self.order = order
        self.progress = Progress()
        self._chosen = chosen
        self._num_samples: int | None = None
        self._saved: SavedState | None = None
        """What was loaded last."""

    @property
    def num_samples(self) -> int | None:
        """Length of the dataset, if it is known."""
        return self._num_samples

    @property
    def has_own_seed(self) -> bool:
        """Whether the seed was chosen, or comes from a state; otherwise the process drew one for itself."""
        return "seed" in self._chosen or self._saved is not None

    def state_dict(self) -> dict[str, int]:
        """Return the state."""
        saved = self._saved
        num_samples = saved.num_samples if self._num_samples is None and saved is not None else self._num_samples
        return SavedState(self.order, self.progress.position, num_samples).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the run that the state is of.

        Raises:
            TypeError: It isn't a dict.
            StateMismatch: It can't be continued here; nothing has changed then.
        """
        saved = SavedState.from_dict(state)
        before, now = saved.to_dict(), self.state_dict()
        for name in ("shuffle", "nearby_shuffle", "seed"):
            if name in self._chosen and before[name] != now[name]:
                raise StateMismatch(
                    f"the state was saved with {name}={before[name]}, but this loader was given {name}={now[name]}; "
                    f"give it the saved value, or begin a new run without load_state_dict()"
                )
        if self._num_samples is not None:
            _check_length(saved, self._num_samples)
        self.order = saved.order
        self._saved = saved
        self.progress.restore(saved.position)

    def take_seed(self, seed: int) -> None:
        """Use this seed, which the ranks agreed on."""
        self.order = replace(self.order, seed=seed)

    def note_length(self, num_samples: int) -> None:
        """Take note of the dataset's length.

        Raises:
            StateMismatch: The state that was loaded is of another dataset.
        """
        if self._saved is not None:
            _check_length(self._saved, num_samples)
        self._num_samples = num_samples


def _check_length(saved: SavedState, present: int) -> None:
    if saved.position.num_samples > present:
        raise StateMismatch(
            f"the state was saved with position={saved.position.num_samples}, but the dataset now has "
            f"num_samples={present}. Give the same dataset, or begin a new run without load_state_dict()"
        )
    if saved.num_samples not in (None, present):
        raise StateMismatch(
            f"the state was saved with num_samples={saved.num_samples}, but the dataset now has "
            f"num_samples={present}: its order is another one. Give the same dataset, or begin a new run without "
            f"load_state_dict()"
        )
