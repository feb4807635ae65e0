"""Packing: sequences of different lengths in one batch without padding.

`best_fit` chooses which samples form a batch, `PackCollate` makes the batch, and `PackedDataset` cuts documents into
pieces that fill batches to the last token. Pure. Runs in workers and in the trainer. It uses torch only if the samples
have tensors.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.collate import BatchMemory
from swift_loader.checks import check_flag, check_integer, check_optional_integer
from swift_loader.sampling.shuffle import Order, OrderSettings

Indices = NDArray[np.int64]

MAX_TOTAL = 2.0**61
"""Lengths are rounded up and added as 64-bit integers."""

_TOKENS = "input_ids"
"""Name of the tokens if samples are arrays or tensors."""

_MADE = ("position_ids", "cu_seqlens", "max_seqlen")
"""What `PackCollate` adds."""


def checked_lengths(lengths: Sequence[int] | Indices, name: str = "lengths") -> Indices:
    """Return the lengths as a new array, `(n,) int64`. `name`: of the argument."""
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; it must have one, with a number for each sample")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} are {array.dtype}; they must be integers, one for each sample")
    if array.size and array.min() < 0:
        index = int(np.argmax(array < 0))
        raise ValueError(f"{name}[{index}]={array[index]} is negative; it must be at least 0")
    if array.sum(dtype=np.float64) >= MAX_TOTAL:
        raise ValueError(f"the sum of {name} is {array.sum(dtype=np.float64):g}; it must be below 2**61")
    return array.astype(np.int64)


def best_fit(costs: Indices, max_tokens: int, max_samples: int, num_buckets: int) -> tuple[Indices, Indices]:
    """Fill batches from each of `num_buckets` buckets of neighbours; return `(n,)` places and where batches end.

    A batch begins with the longest sample left, goes on in the given order, and is filled up with the longest that
    fits. The first keeps long samples from being left over, the second mixes lengths as the order does. Batches are as
    full as with first-fit decreasing, where those of a batch have one length. Takes 1 us per sample.
    """
    places: list[Indices] = []
    stops: list[int] = []
    bounds = np.arange(num_buckets + 1) * len(costs) // num_buckets
    for begin, end in itertools.pairwise(bounds.tolist()):
        by_length = np.argsort(costs[begin:end], kind="stable")
        taken, ends = _fill(costs[begin:end][by_length].tolist(), by_length, max_tokens, max_samples)
        places.append(begin + by_length[taken])
        stops += [begin + stop for stop in ends]
    return np.concatenate(places), np.array(stops, np.int64)


def _fill(costs: list[int], by_length: Indices, max_tokens: int, max_samples: int) -> tuple[Indices, list[int]]:
    """Return the samples of a bucket batch after batch, and where batches end. `costs`: ascending."""
    num_samples, queued = len(costs), 0
    queue = np.zeros(num_samples + 1, np.int64)
    queue[by_length] = np.arange(1, num_samples + 1)
    order = queue.tolist()
    # Node n is sample n - 1, and 0 means none. A node points to itself, or if it is taken to one below it: union-find.
    below = list(range(num_samples + 1))
    taken: list[int] = []
    stops: list[int] = []
    while len(taken) < num_samples:
        node, room, most = num_samples, max_tokens, len(taken) + max_samples
        while len(taken) < most:
            while below[node] != node:  # go to the longest one left up to this node, and shorten the way to it
                below[node] = node = below[below[node]]
            if not node:
                break
            below[node] = node - 1
            taken.append(node - 1)
            room -= costs[node - 1]
            while below[order[queued]] != order[queued]:
                queued += 1
            node = order[queued] if costs[order[queued] - 1] <= room else bisect_right(costs, room)
        stops.append(len(taken))
    return np.array(taken, np.int64), stops


@dataclass(frozen=True)
class PackCollate:
    """A `collate_fn` that joins sequences without padding, for attention that knows where each document begins.

    A sample is a document: a dict whose arrays or tensors have equal lengths, such as tokens and labels; or one array
    or tensor, which the batch calls `input_ids`. Without these, lists of numbers become tensors. The batch is a dict:

    - each of these fields, joined: `(tokens, ...)`;
    - `position_ids`: `(tokens,) int64`, from 0 in each document;
    - `cu_seqlens`: `(documents + 1,) int32`, where documents begin, from 0, and the end of the last one;
    - `max_seqlen`: the length of the longest document, an int;
    - each other field, as a list of what the samples have: one for each document, None for the padding.

    Arrays stay arrays, and tensors stay tensors; then what is added are tensors, too. FlashAttention takes it as it is:
    `flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)`. Samples that are
    packed already, as those of `PackedDataset`, keep their documents. A `position_ids` of a sample is replaced.

        sampler = TokenBudgetBatchSampler(lengths, 16_384, padded=False, fit="best")
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackCollate(mask_first=True))

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of its range; or of a batch: there is nothing to join, lengths differ in a sample, or
            there are more tokens or documents than `pad_to` or `max_documents`.
    """

    fields: Sequence[str] | None = None
    """Names of the fields to join. None: all arrays and tensors of the first sample that have an axis; if it has
    none, all lists of numbers."""
    pad_to: int | None = None
    """Tokens of each batch, for static shapes as with `torch.compile`. What is added is a document of its own. None: no
    padding."""
    pad_value: int = 0
    """Value of the tokens that are added, in all fields but the labels."""
    max_documents: int | None = None
    """Documents of each batch, with that of the padding, for static shapes: empty ones follow. None: as many as there
    are. `max_seqlen` varies all the same: where it must not, pass `pad_to` to the model."""
    mask_first: bool = False
    """Whether the label of each document's first token is `ignore_index`, because a model that shifts the labels would
    predict it from the document before."""
    labels: str = "labels"
    """Name of the field with labels. In the padding, they are `ignore_index`. Integers become int64. If samples have
    none, they are a copy of `input_ids`, or of the first field if there is none of that name: with `mask_first`, and
    with `pad_to` if the field has integers."""
    ignore_index: int = -100
    """Label that the loss leaves out. The default is torch's."""

    def __post_init__(self) -> None:
        check_optional_integer("pad_to", self.pad_to, 1)
        check_optional_integer("max_documents", self.max_documents, 1)
        check_flag("mask_first", self.mask_first)
        if isinstance(self.fields, str):
            raise TypeError(f"fields={self.fields!r} is a str; it must be a list of names")

    def __call__(self, samples: Sequence[Any], memory: BatchMemory | None = None) -> dict[str, Any]:
        """Return a batch of at least one sample. `memory`: where to put it; None: on the heap."""
        samples = [_document(sample, self.fields) for sample in samples]
        names = _joined(self.fields, samples[0] if samples else {})
        if odd := next((sorted(sample) for sample in samples if sample.keys() != samples[0].keys()), None):
            raise ValueError(f"sample 0 of the batch has the fields {sorted(samples[0])}, but another one has {odd}")
        lengths = [length for number, sample in enumerate(samples) for length in _lengths(sample, names, number)]
        total = sum(lengths)
        size = total if self.pad_to is None else self.pad_to
        lengths += [size - total] * (size > total)
        if total > size or len(lengths) > (self.max_documents or len(lengths)):
            raise ValueError(
                f"the batch has {total} tokens in {len(lengths)} documents, with that of the padding; pad_to="
                f"{self.pad_to} and max_documents={self.max_documents} allow less. Raise them, or take fewer samples"
            )
        ends = np.full(1 + max(len(lengths), self.max_documents or 0), size)
        ends[: 1 + len(lengths)] = np.cumsum([0, *lengths])
        starts, counts = ends[:-1], np.diff(ends)
        tokens = _TOKENS if _TOKENS in names else names[0]
        if self.labels not in samples[0]:
            if self.mask_first or (self.pad_to is not None and _array(samples[0], tokens, 0).dtype.kind in "iu"):
                samples, names = [{**sample, self.labels: sample[tokens]} for sample in samples], [*names, self.labels]
        elif self.mask_first and self.labels not in names:
            raise ValueError(
                f"mask_first=True can't mask {self.labels!r}, which isn't joined; it must be an array or a tensor, and "
                f"be in fields=[...] if these are given"
            )
        batch: dict[str, Any] = dict.fromkeys(samples[0])
        for name in names:
            parts = [_array(sample, name, number) for number, sample in enumerate(samples)]
            is_label = name == self.labels
            _check_joins(name, parts)
            dtype = np.result_type(*{part.dtype for part in parts})
            dtype = np.dtype(np.int64) if is_label and dtype.kind in "iu" else dtype
            fill = self.ignore_index if is_label else self.pad_value
            if size > total and dtype.kind in "biu" and np.asarray(fill).astype(dtype) != fill:
                raise ValueError(
                    f"{name!r} is {dtype}, which has no {fill}, the value of its padding. Choose another pad_value or "
                    f"type, or leave it out of fields=[...]"
                )
            batch[name], joined = _empty((size, *parts[0].shape[1:]), dtype, samples[0][name], memory)
            np.concatenate(parts, out=joined[:total], casting="unsafe")
            joined[total:] = fill
            if is_label and self.mask_first:
                joined[starts[counts > 0]] = self.ignore_index
        for key in batch.keys() - {*names, *_MADE}:
            batch[key] = [one for each in samples for one in (each[key] if "cu_seqlens" in each else [each[key]])]
            batch[key] += [None] * (len(counts) - len(batch[key]))
        positions = np.arange(size) - np.repeat(starts, counts)
        for name, numbers in (("position_ids", positions), ("cu_seqlens", ends.astype(np.int32))):
            batch[name], placed = _empty(numbers.shape, numbers.dtype, batch[names[0]], memory)
            placed[...] = numbers
        batch["max_seqlen"] = int(counts.max(initial=0))
        return batch


def _document(sample: Any, fields: Sequence[str] | None) -> Mapping[str, Any]:
    """Return a sample as a dict, with tensors instead of the lists of numbers that are joined."""
    document = sample if isinstance(sample, Mapping) else {_TOKENS: sample}
    if fields is None and any(getattr(value, "ndim", 0) for value in document.values()):
        return document
    wanted = document.keys() if fields is None else fields
    lists = {name: value for name, value in document.items() if name in wanted and isinstance(value, list)}
    lists = {name: value for name, value in lists.items() if not value or isinstance(value[0], (int, float))}
    if not lists:
        return document
    import torch

    try:
        tensors = {name: torch.tensor(value, dtype=None if value else torch.int64) for name, value in lists.items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"a list of {', '.join(lists)} has something else than numbers: {error}") from error
    return {**document, **tensors}


def _check_joins(name: str, parts: Sequence[NDArray[Any]]) -> None:
    for number, part in enumerate(parts):
        if part.shape[1:] != parts[0].shape[1:] or part.dtype.kind in "OUS":
            raise ValueError(
                f"{name!r} can't be joined: sample {number} has {part.dtype} of the shape {part.shape}, and sample 0 "
                f"{parts[0].dtype} of {parts[0].shape}. They must be numbers, and their shapes equal but for the first "
                f"axis; or name the fields to join in fields=[...]"
            )


def _joined(fields: Sequence[str] | None, sample: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that are joined, at least one."""
    found = [key for key, value in sample.items() if getattr(value, "ndim", 0) and key not in _MADE]
    if not (names := found if fields is None else list(fields)):
        raise ValueError(
            "there is nothing to pack: a sample needs an array, a tensor with one axis or more, or a list of numbers"
        )
    return names


def _lengths(sample: Mapping[str, Any], names: Sequence[str], number: int) -> list[int]:
    """Return the lengths of the documents in a sample."""
    found = {name: len(sample[name]) if getattr(sample.get(name), "ndim", 0) else None for name in names}
    length = found[names[0]]
    if length is None or set(found.values()) != {length}:
        raise ValueError(
            f"sample {number} can't be packed: the lengths of its fields are {found}, None is no array or tensor; "
            f"they must be equal. Or name the fields to join in fields=[...]"
        )
    return [length] if "cu_seqlens" not in sample else np.diff(sample["cu_seqlens"]).tolist()


def _array(sample: Mapping[str, Any], name: str, number: int) -> NDArray[Any]:
    try:
        return np.asarray(sample[name])
    except (TypeError, RuntimeError) as error:  # such as of bfloat16, or on a GPU
        raise TypeError(f"{name!r} of sample {number} can't become a NumPy array: {error}") from error


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any, memory: BatchMemory | None) -> tuple[Any, Any]:
    """Return an array or a tensor, as `like` is one, in the batch's memory; and the array to write it through."""
    memory = memory or BatchMemory()
    if isinstance(like, np.ndarray):
        array = memory.empty(shape, dtype)
        return array, array
    import torch

    tensor = memory.empty_tensor(shape, torch.from_numpy(np.empty(0, dtype)).dtype)
    return tensor, tensor.numpy()


class PackedDataset:
    """A map-style dataset of windows of exactly `max_tokens` tokens, cut from all documents in a row.

    The documents follow one another in a seeded order, the same in every process and epoch. Item `i` has tokens
    `[i * max_tokens, (i + 1) * max_tokens)` of that row, as a `PackCollate` makes them. A
    document at a border is cut, and each piece is a document of its own: its positions begin at 0, because models of
    Hugging Face find documents by that, and attention doesn't see the other piece. Shuffle the windows with the loader.
    Batches of more than one window need `collate_fn=PackCollate()`.

        windows = PackedDataset(documents, lengths, 8192, collate=PackCollate(mask_first=True))
        loader = DataLoader(windows, batch_size=None, shuffle=True, num_workers=4)

    An item takes O(log documents) and its documents. Memory is 8 bytes a document.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: Sequence[int] | Indices,
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        collate: PackCollate | None = None,
    ) -> None:
        """Add up the lengths. No document is read.

        Args:
            dataset: Map-style. Its samples are documents, as `PackCollate` takes them.
            lengths: `(n,)` tokens of each document: a list, an array or a tensor of integers.
            max_tokens: Tokens of a window.
            shuffle: Whether the documents are in shuffled order.
            seed: Seed of that order. Give the same one on all ranks, and when a run resumes.
            drop_last: Whether to leave out the tokens of the last window, fewer than `max_tokens`. Otherwise it is
                padded, as `PackCollate(pad_to=max_tokens)` pads.
            collate: Makes a window of documents. Its `pad_to` isn't used. None: `PackCollate()`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range, there is not one length for each document, or a window has more
                documents than `max_documents`; or for an item: a document has another length than `lengths` says.
        """
        self._dataset, counts = dataset, checked_lengths(lengths)
        if len(counts) != len(dataset):
            raise ValueError(f"lengths has {len(counts)} documents, but the dataset has {len(dataset)}")
        self.max_tokens, self.drop_last = check_integer("max_tokens", max_tokens, 1), check_flag("drop_last", drop_last)
        order = OrderSettings(check_integer("seed", seed, 0), check_flag("shuffle", shuffle), window=0, run_length=1)
        self._order = Order(len(counts), order)
        self._collate = replace(collate or PackCollate(), pad_to=None if self.drop_last else self.max_tokens)
        row = counts[self._order.indices(0, np.arange(len(counts), dtype=np.int64))]
        self._bounds: Indices = np.concatenate([np.zeros(1, np.int64), np.cumsum(row)])
        """`(n + 1,)` where each document of the row begins, and its end."""
        if (most := self._collate.max_documents) is not None:
            cuts = np.unique(np.concatenate([self._bounds, np.arange(len(self) + 1) * self.max_tokens]))
            needed = np.bincount(cuts // self.max_tokens)[: len(self)].max(initial=0)  # each begins a piece, or padding
            if needed > most:
                raise ValueError(
                    f"max_documents={most} is too small: a window has {needed} documents; give at least that"
                )

    def __len__(self) -> int:
        return (int(self._bounds[-1]) + (not self.drop_last) * (self.max_tokens - 1)) // self.max_tokens

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin = range(len(self))[index] * self.max_tokens
        first, last = self._bounds.searchsorted(begin, "right") - 1, self._bounds.searchsorted(begin + self.max_tokens)
        places = np.flatnonzero(np.diff(self._bounds[first : last + 1])) + first  # without empty documents
        pieces = []
        for place, number in zip(places.tolist(), self._order.indices(0, places).tolist(), strict=True):
            start, length = int(self._bounds[place]), int(self._bounds[place + 1] - self._bounds[place])
            document = _document(self._dataset[number], self._collate.fields)
            names = _joined(self._collate.fields, document)
            if (found := _lengths(document, names, number)) != [length]:
                raise ValueError(f"document {number} has {found[0]} tokens, but lengths[{number}]={length}")
            cut = slice(max(begin - start, 0), begin + self.max_tokens - start)
            pieces.append(
                {key: value[cut] if key in names else value for key, value in document.items() if key not in _MADE}
            )
        return self._collate(pieces)
