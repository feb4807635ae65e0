"""Which states of datasets and iterators a stream can be resumed from.

An `IterableDataset` of the `datasets` package is a case of its own:
- Its state leaves out what is in a shuffle buffer, so such a stream is resumed by skipping batches.
- Once it has loaded a state, it begins there in each epoch of that number, and a state of its end gives no samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

_HUGGINGFACE = "datasets.iterable_dataset.IterableDataset"
_SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"
"""Both are looked for by name: the package needn't be there, and nothing public tells of a buffer."""


@runtime_checkable
class Stateful(Protocol):
    """A dataset, sampler or iterator that says where it is and continues there. It needn't derive from this class."""

    def state_dict(self) -> dict[str, Any]:
        """Return where it is. Pickled with the loader's state, so plain values are best."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        ...


def is_stateful(thing: Any) -> bool:
    """Return whether an object is `Stateful`, also by `__getattr__`, which `isinstance` doesn't see everywhere."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def has_exact_state(thing: Any) -> bool:
    """Return whether a dataset or an iterator can save a state that says all about where it is."""
    return is_stateful(thing) and not any(type(part).__name__ == _SHUFFLE_BUFFER for part in _parts(thing))


def is_huggingface(dataset: Any) -> bool:
    """Return whether a dataset is a stream of the `datasets` package."""
    return any(f"{kind.__module__}.{kind.__name__}" == _HUGGINGFACE for kind in type(dataset).__mro__)


def forget_state(dataset: Any) -> None:
    """Let a stream of the `datasets` package begin an epoch afresh. Leaves others alone: they know when one is over."""
    if is_huggingface(dataset):
        dataset.load_state_dict(None)


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield what a stream of the `datasets` package is made of."""
    left = [getattr(dataset, "_ex_iterable", None)] if is_huggingface(dataset) else []
    while left:
        part = left.pop()
        if part is not None:
            yield part
            left += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
