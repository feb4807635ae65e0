"""Lightning: a callback that makes a Trainer resume a loader in every configuration.

The Trainer itself saves the state of its train loader. It doesn't load the state in two cases:
- The loader was set up before the checkpoint is restored, as `trainer.estimated_stepping_batches` does, which
  `OneCycleLR` needs (https://github.com/Lightning-AI/pytorch-lightning/issues/20550).
- The checkpoint was saved at the end of an epoch. Then the order of the next epoch is lost where it comes from a
  generator.

Callbacks are always restored, before the first batch. If Trainer and callback both load a state, it is the same one.
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
    from lightning.pytorch import LightningModule, Trainer

    from swift_loader.loader import SwiftLoader

__all__ = ["LoaderStateCallback"]


class LoaderStateCallback(Callback):
    """Saves a loader's position with each checkpoint, and restores it when `fit` resumes from one."""

    def __init__(self, loader: SwiftLoader | None = None, name: str = "train") -> None:
        """Attach a loader. Starts nothing.

        Args:
            loader: The SwiftLoader that the Trainer iterates over on this rank. None: the Trainer's train loader, which
                has to be a `swift_loader.DataLoader`. The Trainer may have made it anew from the one that it was given.
            name: Name of the loader in the checkpoint. Each saved loader needs its own.
        """
        self._loader = loader
        self._name = name
        self._trainer: Trainer | None = None
        self._to_load: dict[str, Any] | None = None
        """The state for the Trainer's loader, which isn't there yet when the callback is restored."""

    @property
    def state_key(self) -> str:
        """The key in the checkpoint's `callbacks`."""
        return str(self._generate_state_key(name=self._name))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Remember the Trainer."""
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state. Called on all ranks. Rank 0's is saved; all are the same."""
        loader = self._loader if self._loader is not None else self._trainers_loader()
        return dict(loader.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader. Called on all ranks, after `setup` and before the first batch."""
        if self._loader is not None:
            self._loader.load_state_dict(state_dict)
        else:
            self._to_load = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Restore the Trainer's loader. Called on all ranks, when the Trainer has its iterator already."""
        if self._to_load is not None:
            self._trainers_loader().load_state_dict(self._to_load)
            self._to_load = None
            iter(trainer.fit_loop._data_fetcher)  # noqa: SLF001 - replaces that iterator

    def _trainers_loader(self) -> Any:
        loader = None if self._trainer is None else self._trainer.train_dataloader
        if not hasattr(loader, "load_state_dict"):
            raise TypeError(
                f"the Trainer's train loader is a {type(loader).__name__}, which has no load_state_dict; make it a "
                f"swift_loader.DataLoader, or pass a SwiftLoader to this callback"
            )
        return loader
