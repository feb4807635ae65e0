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
        self._saved_num_samples: int | None = None

    @property
    def num_samples(self) -> int | None:
        """Length of the dataset, if it is known."""
        return self._num_samples

    @property
    def has_own_seed(self) -> bool:
        """Whether the seed was chosen, or comes from a state; otherwise each process has another one."""
        return "seed" in self._chosen

    def state_dict(self) -> dict[str, int]:
        """Return the state."""
        num_samples = self._saved_num_samples if self._num_samples is None else self._num_samples
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
            _compare_lengths(saved.num_samples, self._num_samples)
        self.order = saved.order
        self._saved_num_samples = saved.num_samples
        self._chosen |= {"seed"}
        self.progress.restore(saved.position)

    def take_seed(self, seed: int) -> None:
        """Use this seed, which the ranks agreed on."""
        self.order = replace(self.order, seed=seed)

    def note_length(self, num_samples: int) -> None:
        """Take note of the dataset's length.

        Raises:
            StateMismatch: The state that was loaded is of another dataset.
        """
        _compare_lengths(self._saved_num_samples, num_samples)
        self._num_samples = num_samples


def _compare_lengths(saved: int | None, present: int) -> None:
    if saved not in (None, present):
        raise StateMismatch(
            f"the state was saved with num_samples={saved}, but the dataset now has num_samples={present}: its order "
            f"is another one. Give the same dataset, or begin a new run without load_state_dict()"
        )
