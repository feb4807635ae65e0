"""Hugging Face Trainer: a callback that keeps the train loader's state in `trainer_state.json`.

Return the loader from the Trainer's `get_train_dataloader`, and set `ignore_data_skip=True` where a run may be resumed:
otherwise the Trainer tries to find the place by going through the batches once more, which it can do with torch's own
DataLoader only (https://github.com/huggingface/transformers/issues/26289).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from transformers.trainer_callback import ExportableState, TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "swift_loader.integrations.huggingface needs Transformers and Accelerate: pip install 'transformers[torch]'",
        name="transformers",
    ) from error

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from swift_loader.loader import SwiftLoader

__all__ = ["LoaderStateCallback"]

_ATTRIBUTE = "loader_state"
"""Where the state lies among the `attributes` that the Trainer keeps of a callback."""


class LoaderStateCallback(TrainerCallback, ExportableState):
    """Saves where the train loader is with each checkpoint, and has it go on there when `train` resumes from one.

    Takes the loader from the Trainer, so it has no arguments, and `restore_callback_states_from_checkpoint`, which
    makes a new callback, does no harm. Give a Trainer one of them: of two with the same name it mixes the states up.
    """

    def __init__(self) -> None:
        self._loader: SwiftLoader | None = None
        """Known once training begins."""

    def state(self) -> dict[str, Any]:
        """Return what the Trainer is to write. Called by the rank that saves; the states of all are the same."""
        attributes = {} if self._loader is None else {_ATTRIBUTE: self._loader.state_dict()}
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
            TypeError: The Trainer trains with something that has no state.
            ValueError: Resuming needs `ignore_data_skip=True`; or the checkpoint was saved without this callback.
        """
        loader = objects["train_dataloader"]
        if not hasattr(loader, "load_state_dict"):
            raise TypeError(
                f"the Trainer trains with a {type(loader).__name__}, which has no state; have its get_train_dataloader "
                f"return a SwiftLoader, or leave this callback out"
            )
        self._loader = loader
        if not state.global_step:
            return
        if not args.ignore_data_skip:
            raise ValueError(
                "ignore_data_skip=False has the Trainer go through the batches before the checkpoint once more, and "
                "the loader continues there by itself; set ignore_data_skip=True"
            )
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get(_ATTRIBUTE)
        if saved is None:
            raise ValueError(
                f"the checkpoint at step {state.global_step} has no state of the loader: it was saved without a "
                f"{type(self).__name__}. Resume without this callback, which begins the epoch anew"
            )
        loader.load_state_dict(saved)
