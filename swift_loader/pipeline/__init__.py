"""Stages over any source: in threads, coroutines and processes of the same scheduler.

The path of an item, and where each part runs:

    sources     pulls items from what the user gave                     the first filling thread
    stage       `Filler` pulls from upstream, and waits for room        a thread of each stage that has workers
                `Feed` numbers items, and keeps the place of each       under the stage's lock
    scheduler   decides which worker takes the item; pure               any thread of the stage
    functions   calls the user's function                               worker thread, event loop or worker process
    stage       `Stage` gives results in order, or as they come         the filling thread of the next stage
    nodes       filter, batch, unbatch, shuffle, shard                  whoever pulls
    stage       `Relay` waits for the loop, at most `buffer_size`       between the last filling thread and the loop
    epochs      hands results to the loop, and knows their place        the loop's thread

A stage is a `Engine` over an executor, as the loader's workers are. `stage` says what a resume needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_loader.pipeline.pipeline import Pipeline, StageLoader
    from swift_loader.pipeline.tally import ItemFailure

__all__ = ["ItemFailure", "Pipeline", "StageLoader"]

_HOMES = {"ItemFailure": "tally", "Pipeline": "pipeline", "StageLoader": "pipeline"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: worker processes need little of this package."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
