"""Lightning: callbacks that make a Trainer resume a loader in every configuration, and log its metrics.

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
    from lightning.pytorch.utilities import rank_zero_info
except ModuleNotFoundError:
    try:
        from pytorch_lightning.callbacks import Callback
        from pytorch_lightning.utilities import rank_zero_info
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "swift_loader.integrations.lightning needs Lightning: pip install lightning", name="lightning"
        ) from error

from swift_loader.dataloader.options import lightning_begins_an_epoch

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from swift_loader.dataloader.dataloader import DataLoader
    from swift_loader.loader import SwiftLoader


class LoaderStateCallback(Callback):
    """Saves a loader's position with each checkpoint, and restores it when `fit` resumes from one."""

    def __init__(self, loader: SwiftLoader | None = None, name: str = "train") -> None:
        """Attach a loader. This starts nothing.

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
            loader, state, self._to_load = self._trainers_loader(), self._to_load, None
            loader.load_state_dict(state)
            loader._passes_epoch = lightning_begins_an_epoch(trainer.fit_loop)  # noqa: SLF001 - of this package
            iter(trainer.fit_loop._data_fetcher)  # noqa: SLF001 - replaces that iterator

    def _trainers_loader(self) -> Any:
        return _with_method("load_state_dict", None if self._trainer is None else self._trainer.train_dataloader)


class LoaderMetrics(Callback):
    """Logs a loader's metrics with the Trainer's loggers, and after each epoch whether the loop waited for data."""

    def __init__(
        self,
        loader: SwiftLoader | DataLoader[Any] | None = None,
        every_n_steps: int | None = None,
        prefix: str = "swift_loader/",
    ) -> None:
        """Attach a loader. This starts nothing.

        Args:
            loader: The loader that the Trainer iterates over. None: the Trainer's train loader, which has to be a
                SwiftLoader or a `swift_loader.DataLoader`.
            every_n_steps: How often the metrics are logged. Default: the Trainer's `log_every_n_steps`.
            prefix: What each key begins with.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1")
        self._loader = loader
        self._every_n_steps = every_n_steps
        self._prefix = prefix
        self._before: dict[str, float] = {}
        """The metrics when the epoch began. Empty if it was resumed in its middle: then all measured is the epoch's."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Remember the totals. Called on all ranks."""
        self._before = self._loader_of(trainer).metrics(prefix="")

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 - Lightning's
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Log the metrics. Called on all ranks; loggers write those of rank 0."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001 - the axis of Lightning's own logs
        every_n_steps = self._every_n_steps or trainer.log_every_n_steps
        if every_n_steps and (step + 1) % every_n_steps == 0:
            self._log(trainer, self._loader_of(trainer).metrics(prefix=self._prefix), step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Log the share of the epoch that the loop waited, and print what that means."""
        loader = self._loader_of(trainer)
        waited, ran = (loader.metrics(prefix="")[name] - self._before.get(name, 0.0) for name in _WAITED_AND_RAN)
        if ran <= 0:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001
        self._log(trainer, {f"{self._prefix}epoch_wait_share": waited / ran}, step)
        rank_zero_info(
            f"epoch {trainer.current_epoch}: {loader.report().verdict.bound.value}, the loop waited for data "
            f"{100 * waited / ran:.0f} % of {ran:.3g} s"
        )

    def _log(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def _loader_of(self, trainer: Trainer) -> Any:
        return self._loader if self._loader is not None else _with_method("metrics", trainer.train_dataloader)


_WAITED_AND_RAN = ("waited_s_total", "elapsed_s_total")


def _with_method(name: str, loader: Any) -> Any:
    """Return the Trainer's loader, if it has a method."""
    if not hasattr(loader, name):
        raise TypeError(
            f"the Trainer's train loader is a {type(loader).__name__}, which has no {name}; make it a "
            f"swift_loader.DataLoader, or pass a SwiftLoader to this callback"
        )
    return loader
