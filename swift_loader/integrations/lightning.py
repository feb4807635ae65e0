"""Lightning: a callback that makes a Trainer resume a loader in every configuration.

The Trainer itself saves the state of its train loader. It doesn't load the state if the loader was set up before the
checkpoint is restored, as `trainer.estimated_stepping_batches` does, which `OneCycleLR` needs
(https://github.com/Lightning-AI/pytorch-lightning/issues/20550). Callbacks are always restored, before the first batch.
If Trainer and callback both load a state, it is the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "swift_loader.integrations.lightning needs Lightning: pip install lightning", name="lightning"
        ) from error

if TYPE_CHECKING:
    from swift_loader.loader import SwiftLoader

__all__ = ["LoaderStateCallback"]


class LoaderStateCallback(Callback):
    """Saves a loader's position with each checkpoint, and restores it when `fit` resumes from one."""

    def __init__(self, loader: SwiftLoader, name: str = "train") -> None:
        """Attach a loader. Starts nothing.

        Args:
            loader: The loader that the Trainer iterates over on this rank.
            name: Name of the loader in the checkpoint. Each saved loader needs its own.
        """
        self._loader = loader
        self._name = name

    @property
    def state_key(self) -> str:
        """The key in the checkpoint's `callbacks`."""
        return str(self._generate_state_key(name=self._name))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state. Called on all ranks. Rank 0's is saved; all are the same."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader. Called on all ranks, after `setup` and before the first batch."""
        self._loader.load_state_dict(state_dict)
