"""Lightning: a callback with which a Trainer resumes a loader in every configuration.

The Trainer itself saves the state of its train loader and loads it on resuming, but not where the loader was set up
before the checkpoint is restored, as `trainer.estimated_stepping_batches` does (a `OneCycleLR` asks for it;
https://github.com/Lightning-AI/pytorch-lightning/issues/20550). Callbacks are always restored, and in time. Where both
load, they load the same.
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
    """Saves where a loader is with each checkpoint, and has it go on there when `fit` resumes from one."""

    def __init__(self, loader: SwiftLoader, name: str = "train") -> None:
        """Attach a loader; starts nothing.

        Args:
            loader: The one that the Trainer iterates over, on each rank its own.
            name: Under which it is found in the checkpoint; one for each loader that is saved.
        """
        self._loader = loader
        self._name = name

    @property
    def state_key(self) -> str:
        """The key in the checkpoint's `callbacks`."""
        return str(self._generate_state_key(name=self._name))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state. Called on all ranks; rank 0's is kept, and they are all the same."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader. Called on all ranks, after `setup` and before the first batch."""
        self._loader.load_state_dict(state_dict)
