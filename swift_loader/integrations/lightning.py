"""Lightning: callbacks that make a Trainer resume a loader in every configuration, and log its metrics.

The Trainer itself saves the state of its train loader. It doesn't load the state in two cases:
- The loader was set up before the checkpoint is restored, as `trainer.estimated_stepping_batches` does, which
  `OneCycleLR` needs (https://github.com/Lightning-AI/pytorch-lightning/issues/20550).
- The checkpoint was saved at the end of an epoch. Then the order of the next epoch is lost where it comes from a
  generator.

Callbacks are always restored, before the first batch. What the callback loads replaces what the Trainer has loaded.

A loader counts a batch once the Trainer has it, but the Trainer counts it once its step is done. So the callback saves
the state from before that batch if an exception ends the step.
"""

# ruff: noqa: SLF001 - Lightning has no public way to its loops

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

try:  # one package depends on the other, so both may be installed, but a program imports one
    if "lightning" in sys.modules or ("pytorch_lightning" not in sys.modules and find_spec("lightning")):
        from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
        from lightning.pytorch.utilities import rank_zero_info
    else:
        from pytorch_lightning.callbacks import Callback, OnExceptionCheckpoint
        from pytorch_lightning.utilities import rank_zero_info
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "swift_loader.integrations.lightning needs Lightning: pip install lightning", name="lightning"
    ) from error

from swift_loader.errors import warn
from swift_loader.sampling.plan import Plan

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from swift_loader.dataloader.dataloader import DataLoader
    from swift_loader.lifecycle import Lifecycle
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
        self._trainer: Any = None
        self._to_load: dict[str, Any] | None = None
        """The state for the Trainer's loader, which isn't there yet when the callback is restored."""
        self._before: tuple[int, dict[str, Any]] | None = None
        """How many steps were done when the Trainer asked for the last batch, and the state then. None: not needed."""

    @property
    def state_key(self) -> str:
        """The key in the checkpoint's `callbacks`."""
        return str(self._generate_state_key(name=self._name))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - Lightning's
        """Remember the Trainer."""
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state. Called on all ranks. Rank 0's is saved; all are the same."""
        if self._before is not None and self._trainer.interrupted and self._before[0] == _num_steps(self._trainer):
            return self._before[1]
        return dict(_loader_of(self._trainer, self._loader).state_dict())

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002 - Lightning's
        """Warn if the epoch can't be resumed. Called on all ranks."""
        loop = checkpoint["loops"]["fit_loop"]
        batches, states = loop["epoch_loop.batch_progress"], loop["state_dict"].get("combined_loader")
        is_inside = batches["current"]["processed"] and not batches["is_last_batch"]
        if trainer.training and is_inside and not states and self.state_key not in checkpoint["callbacks"]:
            warn(
                "the checkpoint was saved in the middle of an epoch with a loader that has no state. So this epoch "
                "repeats samples and leaves others out; resume from a checkpoint of an epoch's end"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loader. Called on all ranks, after `setup` and before the first batch."""
        self._to_load = state_dict
        if self._loader is not None:  # before it is asked for its length
            self._loader.load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Restore the Trainer's loader. Called on all ranks, when the Trainer has its iterator already."""
        fit_loop: Any = trainer.fit_loop
        if self._to_load is not None:
            loader, state, self._to_load = _loader_of(trainer, self._loader), self._to_load, None
            loader.load_state_dict(state)
            if self._loader is None:
                loader._passes_epoch = _has_ended_epoch(fit_loop)
            iter(fit_loop._data_fetcher)  # replaces that iterator
            fit_loop.max_batches = fit_loop._data_fetcher.length or fit_loop.max_batches
        elif fit_loop.restarting and fit_loop._combined_loader_states_to_load:  # it was saved without this callback
            fit_loop._load_combined_loader_states()
            iter(fit_loop._data_fetcher)
        self._before = None
        if any(isinstance(c, OnExceptionCheckpoint) or getattr(c, "save_on_exception", 0) for c in trainer.callbacks):
            fit_loop.epoch_loop._on_before_fetch = self._note_before

    def _note_before(self) -> None:
        """Note the state before the Trainer asks for a batch."""
        trainer, self._before = self._trainer, None
        with suppress(RuntimeError):  # with in_order=False, a SwiftLoader has no state in the middle of an epoch
            self._before = _num_steps(trainer), dict(_loader_of(self._trainer, self._loader).state_dict())
        type(trainer.fit_loop.epoch_loop)._on_before_fetch(trainer.fit_loop.epoch_loop)


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
        self._before = _loader_of(trainer, self._loader, "metrics").metrics(prefix="")

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:  # noqa: ARG002 - Lightning's
        """Log the metrics. Called on all ranks; loggers write those of rank 0."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the axis of Lightning's own logs
        every_n_steps = self._every_n_steps or trainer.log_every_n_steps
        if every_n_steps and (step + 1) % every_n_steps == 0:
            self._log(trainer, _loader_of(trainer, self._loader, "metrics").metrics(prefix=self._prefix), step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        """Log the share of the epoch that the loop waited, and print what that means."""
        loader = _loader_of(trainer, self._loader, "metrics")
        figures, names = loader.metrics(prefix=""), ("waited_s_total", "elapsed_s_total")
        waited, ran = (figures[name] - self._before.get(name, 0.0) for name in names)
        if ran <= 0:
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._log(trainer, {f"{self._prefix}epoch_wait_share": waited / ran}, step)
        rank_zero_info(
            f"epoch {trainer.current_epoch}: {loader.report().verdict.bound.value}, the loop waited for data "
            f"{100 * waited / ran:.0f} % of {ran:.3g} s"
        )

    def _log(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)


def _num_steps(trainer: Any) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


def _loader_of(trainer: Any, own: Any, method: str = "load_state_dict") -> Any:
    """Return the loader that a callback was given, or the Trainer's, which needs this method."""
    loader = trainer.train_dataloader if own is None and trainer is not None else own
    if not hasattr(loader, method):
        raise TypeError(
            f"the Trainer's train loader is a {type(loader).__name__}, which has no {method}; make it a "
            f"swift_loader.DataLoader, or pass a SwiftLoader to this callback"
        )
    return loader


# What a loader asks with `ask_framework`. `caller`: the frame of Lightning's function that calls the loader -----------


def _before_shuffled_sampler(_loader: SwiftLoader, caller: Any) -> None:
    """Raise `ValueError` if the Trainer would replace the sampler of a loader that shuffles."""
    if caller.f_back is not None and caller.f_back.f_code.co_name == "_resolve_overfit_batches":
        raise ValueError("overfit_batches needs the same batches in each epoch; give SwiftLoader(shuffle=False)")


def _begins_an_epoch(_loader: DataLoader[Any], caller: Any) -> bool:
    """Return whether the Trainer takes the next batch of a loader for the first one of an epoch.

    So it does where it resumes from a checkpoint of an epoch's last batch (`_FitLoop.reset`), be that the loader's last
    one or that of `limit_train_batches`. In a plain loop, and with torchdata's `StatefulDataLoader`, the same state
    means that the rest of the loader's epoch follows.
    """
    return _has_ended_epoch(_fit_loop_of(caller))


def _after_set_epoch(lifecycle: Lifecycle, caller: Any) -> None:
    """Let a Trainer that begins or resumes an epoch count as a SwiftLoader does.

    After a resume with another batch size or number of ranks, it counts steps that are others here. And it takes the
    length of the first epoch for that of all epochs, but the first one is shorter if a part of it came before or is
    skipped. So it has to ask again when the next one begins.
    """
    if (loop := _fit_loop_of(caller)) is None:
        return
    batches, reloads = loop.epoch_loop.batch_progress, loop.trainer.reload_dataloaders_every_n_epochs
    num_samples = lifecycle.num_samples()
    plan, begin = Plan.of(num_samples, lifecycle.plan_settings()), lifecycle.run.next_begin(num_samples)
    is_at_end = loop.restarting and _has_ended_epoch(loop)
    if is_at_end or (loop.restarting and begin.num_samples):
        done = loop.max_batches if is_at_end else plan.resumed_at(begin)[1]
        batches.current.increment_by(done - batches.current.processed)
    if not reloads or reloads is True:  # the user gives an integer
        is_shorter = not is_at_end and lifecycle.next_plan()[0].last_irregular_epoch >= begin.epoch
        loop.trainer.reload_dataloaders_every_n_epochs = is_shorter
        loop._data_source.instance = loop._combined_loader.iterables  # the same loader again


def _fit_loop_of(caller: Any) -> Any:
    """Return the Trainer's fit loop if one of its methods called the caller, else None."""
    loop = caller.f_back and caller.f_back.f_locals.get("self")
    return loop if type(loop).__name__ == "_FitLoop" else None


def _has_ended_epoch(loop: Any) -> bool:
    """Return whether the step of an epoch's last batch is done. It isn't if an exception ended it."""
    batches = loop and loop.epoch_loop.batch_progress
    return bool(batches and batches.is_last_batch and batches.current.ready == batches.current.processed)
