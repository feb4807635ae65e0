"""Hugging Face Trainer: a Trainer that loads with `swift_loader.DataLoader`, and a callback that saves the position.

The Trainer makes its loaders itself, so the import to change is that of the Trainer. The callback saves the train
loader's state in `trainer_state.json`. It takes this Trainer's loader, or a SwiftLoader that `get_train_dataloader`
returns. Set `ignore_data_skip=True` in runs that may be resumed with it. Otherwise, the Trainer skips batches to find
the position (https://github.com/huggingface/transformers/issues/26289).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import transformers
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "swift_loader.integrations.huggingface needs Transformers and Accelerate: pip install 'transformers[torch]'",
        name="transformers",
    ) from error

from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.integrations.accelerate import load_with

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import TrainerControl, TrainerState, TrainingArguments


class LoaderStateCallback(TrainerCallback, ExportableState):
    """Saves the train loader's position with each checkpoint, and restores it when `train` resumes from one.

    It takes the loader from the Trainer, so it has no arguments. Therefore it also works with
    `restore_callback_states_from_checkpoint`, which makes a new callback. Give a Trainer only one: it mixes up the
    states of two callbacks of the same name.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        """Known once training begins."""

    def state(self) -> dict[str, Any]:
        """Return what the Trainer saves. Called on the rank that saves; all ranks have the same state."""
        attributes = {} if self._loader is None else {"loader_state": self._loader.state_dict()}
        return {"args": {}, "attributes": attributes}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - the Trainer's signature
        **objects: Any,
    ) -> None:
        """Restore the loader if a checkpoint was loaded. Called on all ranks, before the first batch.

        Raises:
            TypeError: The Trainer's train loader has no `load_state_dict`.
            ValueError: The Trainer resumes without `ignore_data_skip=True`, or the checkpoint was saved without this
                callback.
        """
        loader = objects["train_dataloader"]
        if not hasattr(loader, "load_state_dict"):
            raise TypeError(
                f"the Trainer's train loader is a {type(loader).__name__}, which has no load_state_dict; use "
                f"swift_loader.integrations.huggingface.Trainer, return a SwiftLoader from get_train_dataloader, or "
                f"leave this callback out"
            )
        self._loader = loader
        if not state.global_step:
            return
        if not args.ignore_data_skip:
            raise ValueError(
                "ignore_data_skip=False makes the Trainer skip the batches before the checkpoint, but the loader "
                "resumes at the checkpoint by itself, so batches would be skipped twice; set ignore_data_skip=True"
            )
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("loader_state")
        if saved is None:
            raise ValueError(
                f"the checkpoint at step {state.global_step} has no state of the loader because it was saved without a "
                f"{type(self).__name__}; resume without this callback, which restarts the epoch"
            )
        loader.load_state_dict(saved)


class SwiftLoading:
    """Mixin for a Trainer of yours: `class MyTrainer(SwiftLoading, Trainer)` loads with `swift_loader.DataLoader`."""

    def get_train_dataloader(self) -> Any:
        """Return the train loader."""
        return load_with(DataLoader, super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> Any:
        """Return the loader for evaluation."""
        return load_with(DataLoader, super().get_eval_dataloader(eval_dataset))  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Dataset[Any]) -> Any:
        """Return the loader for prediction."""
        return load_with(DataLoader, super().get_test_dataloader(test_dataset))  # type: ignore[misc]


class Trainer(SwiftLoading, transformers.Trainer):
    """`transformers.Trainer` with `swift_loader.DataLoader`."""
