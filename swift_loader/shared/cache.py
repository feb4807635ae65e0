"""A dataset that makes the deterministic part of each sample once, and keeps it for all processes of the machine.

`shared.store` has the bytes. Here is what they stand for: how a sample becomes bytes and is made again, and what tells
that a file has the samples of this dataset.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from operator import index as as_index
from types import SimpleNamespace
from typing import Any

import numpy as np

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.batch.tree import type_name
from swift_loader.checks import check_callable
from swift_loader.errors import CacheMismatch, EncodeError, nbytes_text
from swift_loader.metrics.machine import available_memory
from swift_loader.ranks.ranks import torch_distributed
from swift_loader.sampling.mixture import Mixture
from swift_loader.shared.memory import SharedMemory, shared_with_ranks
from swift_loader.shared.store import MAX_FILE_BYTES, Facts, Packed, Store, data_offset, new_file_bytes
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode
from swift_loader.transport.encoder import CodeNeeded, Encoder
from swift_loader.worker.seeding import fetched_without_draws, preserved_generators

_MEMORY = "memory"

_SHARE_OF_FREE = 0.75
"""How much of the memory that is free now a cache in memory may take."""

_NUM_COMPARED = 8
_COMPARING_S = 0.25
"""No further sample is compared after this time."""
_NUM_LOOKED_AT = 1 << 22
"""So many words of the index, in a row, are searched for samples to compare."""

_NUM_WATCHED, _WATCH_EVERY = 64, 8
"""The first samples that a process makes are watched for draws, then one of eight. It takes 80 us."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?)(i?)b", re.IGNORECASE)

_NO_DEFINITIONS = Definitions()

_number = itertools.count()
"""Numbers the caches in memory."""


def cached(
    dataset: Any,
    transform: Callable[[Any], Any] | None = None,
    *,
    where: str | os.PathLike[str] = _MEMORY,
    budget: str | int = "64GB",
    version: str | int | None = None,
) -> CachedDataset:
    """Return a dataset that makes each sample of `dataset` once, and keeps it for all later epochs.

    Put what is slow and always the same into `dataset`: read, decode, resize. Put what is random into `transform`,
    which runs on each access. The bytes of batches are the same as without a cache, and so are states. All workers,
    loaders and ranks of the machine fill and read one copy. Use it as any dataset, also with torch's DataLoader.

        photos = cached(Photos("train"), transform=random_crop, where="/data/train.cache")
        loader = SwiftLoader(dataset=photos, batch_size=64)

    Over the budget, what is kept stays, and the other samples are made on each access. `repr` tells how much is kept.

    Args:
        dataset: Map-style. Its samples are arrays, tensors, images, numbers, text, containers of these, or anything
            that pickle can serialise. They may not draw random numbers.
        transform: Gets a sample, and returns what the dataset returns. It may change the sample in place.
        where: `"memory"`, or the path of a file on a local disk. Memory belongs to this object and its workers. If
            torch.distributed is initialised, the ranks of one machine share it, if their datasets have equal attributes
            and they call this function in the same order. A file is made if there is none, and stays for the next
            run. Processes that use one path share it. Open no file that you don't trust: samples are unpickled from
            it.
        budget: The most that samples may take, in bytes or such as `"500MB"` or `"16GiB"`. In memory, it is at most
            three quarters of what is free.
        version: Any text or number that you change when the samples change. A file of another version is refused.
            None: the dataset's attributes are compared instead. Of a file, some samples are also made again and
            compared. A single changed sample may be missed.

    Raises:
        CacheMismatch: The file isn't a cache of this dataset. The message says what differs.
        CacheCorrupt: The file's header is damaged. Samples that are damaged are made again, without an error.
        OSError: The file can't be opened, or its file system has no locks.
        TypeError, ValueError: An argument is wrong.
    """
    check_callable("transform", transform)
    limit = _check_budget(budget)
    if isinstance(dataset, Mixture):
        raise TypeError("a Mixture can't be cached, only its sources: Mixture({'web': cached(web), ...})")
    num_samples = len(dataset)
    if where == _MEMORY:
        limit = min(limit, int(_SHARE_OF_FREE * available_memory()) or limit)
        memory = SharedMemory([new_file_bytes(num_samples)], data_offset(num_samples) + limit)
        if torch_distributed() is not None:
            facts = _facts_of(dataset, version)
            if all(facts.values()):
                memory = shared_with_ranks(memory, f"cache {next(_number)} of {num_samples}: {facts}")
        return CachedDataset(dataset, transform, Store(num_samples, memory.address.nbytes, memory))
    path = os.path.abspath(os.fspath(where))
    store = Store.in_file(path, num_samples, limit, _facts_of(dataset, version))
    with preserved_generators():
        different = _different_sample(dataset, store)
    store.rest()
    if different is not None:
        raise CacheMismatch(
            f"the cache {path!r} has another sample {different} than the dataset makes now: the dataset has changed, "
            f"or makes another one each time. Delete the file, or name another one in where="
        )
    return CachedDataset(dataset, transform, store)


class CachedDataset:
    """What `cached` returns."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Any] | None, store: Store) -> None:
        self.dataset = dataset
        """What makes the samples."""
        self.transform = transform
        self._store = store
        self._as_views = False
        self._num_made = 0

    def __getitem__(self, index: int) -> Any:
        """Return a sample, transformed."""
        number = as_index(index)
        if not 0 <= number < self._store.num_samples:
            if not -self._store.num_samples <= number < 0:
                raise IndexError(f"index {number} of a cached dataset of {self._store.num_samples} samples")
            number += self._store.num_samples
        packed = self._store.read(number, as_view=self._as_views)
        sample = self._fill(number) if packed is None else unpack(packed)
        return sample if self.transform is None else self.transform(sample)

    def __len__(self) -> int:
        return self._store.num_samples

    @property
    def _swift_loader_views(self) -> CachedDataset:
        """The same with samples that are views of memory, for the loader's own collate, which copies them."""
        if self.transform is not None:
            return self
        views = CachedDataset(self.dataset, None, self._store)
        views._as_views = True
        return views

    def _fill(self, index: int) -> Any:
        """Return a sample that isn't there, and keep it if there is space."""
        if self._store.is_full:
            return self._make(index)
        with self._store.claim(index) as is_ours:
            packed = self._store.read(index)  # another process may have made it meanwhile
            if packed is not None:
                return unpack(packed)
            sample = self._make(index)
            if is_ours:
                self._store.write(index, *_pack(sample, index))
            return sample

    def _make(self, index: int) -> Any:
        self._num_made += 1
        if self._num_made > _NUM_WATCHED and self._num_made % _WATCH_EVERY:
            return self.dataset[index]
        sample, drew = fetched_without_draws(lambda: self.dataset[index])
        if drew:
            raise ValueError(
                f"sample {index} of a cached dataset, a {type_name(self.dataset)}, draws random numbers, which would "
                f"be the same in each epoch. Move what is random from the dataset to cached(transform=...)"
            )
        return sample

    def __repr__(self) -> str:
        store = self._store
        num_kept = sum(
            len(store.kept(begin, min(begin + _NUM_LOOKED_AT, len(self))))
            for begin in range(0, len(self), _NUM_LOOKED_AT)
        )
        place, limit = store.path or _MEMORY, store.end - data_offset(len(self))
        return (
            f"<CachedDataset of {len(self):,} samples, {num_kept:,} of them kept in {place}: "
            f"{nbytes_text(store.nbytes())} of {nbytes_text(limit)}>"
        )


# Samples as bytes -----------------------------------------------------------------------------------------------------


def _pack(sample: Any, index: int) -> tuple[list[Any], bytes, int]:
    """Return a sample's bulk data in pieces, its structure, and its number of blocks.

    The sample must not change until the pieces are written.
    """
    stream, arena = io.BytesIO(), Arena(np.empty(0, np.uint8), copies_late=True)
    encoder = Encoder(stream, arena, _NO_DEFINITIONS)
    hint = "Return arrays, tensors, numbers, text or containers of them, with classes that can be imported"
    try:
        encoder.dump(sample)
    except CodeNeeded:
        raise EncodeError(f"sample {index} of a cached dataset has a class that can't be imported", hint) from None
    except Exception as error:
        fact = f"sample {index} of a cached dataset can't be kept ({type_name(error)}: {error})"
        raise EncodeError(fact, hint) from error
    encoded = encoder.encoded(stream)
    return list(arena.pieces()), encoded.meta, encoded.num_blocks


def unpack(packed: Packed) -> Any:
    """Return the sample. Its arrays are views of the bytes."""
    return decode(packed.structure, packed.num_blocks, packed.data, _NO_DEFINITIONS)


_GONE = object()


def _digests(sample: Any) -> list[tuple[str, bytes]]:
    return [(path, digest_of(leaf)) for path, leaf in leaves_of(sample)]


def _different_sample(dataset: Any, store: Store) -> int | None:
    """Make some of the samples that are kept; return one that isn't what is kept."""
    draw, deadline_s = random.SystemRandom(), time.monotonic() + _COMPARING_S
    begin = draw.randrange(max(1, store.num_samples - _NUM_LOOKED_AT))
    kept = store.kept(begin, min(store.num_samples, begin + _NUM_LOOKED_AT)).tolist()
    for index in draw.sample(kept, min(_NUM_COMPARED, len(kept))):
        packed = store.read(index)
        sample: Any = _GONE
        with suppress(Exception):
            sample = copy.copy(dataset)[index]  # a copy, because it may open files, which a fork must not have
        if packed is None or sample is _GONE:  # it can't be made any more, so what is kept is used
            continue
        try:
            is_equal = _digests(unpack(packed)) == _digests(sample)
        except Exception:
            is_equal = False
        if not is_equal:
            return int(index)
        if time.monotonic() > deadline_s:
            break
    return None


# What tells one dataset from another ----------------------------------------------------------------------------------


def _facts_of(dataset: Any, version: str | int | None) -> Facts:
    kind = type(dataset)
    facts: Facts = {"class": f"{kind.__module__}.{kind.__qualname__}"[-200:]}
    if version is not None:
        return {**facts, "version": str(version)[:200]}
    attributes = {name: _digest(value) for name, value in getattr(dataset, "__dict__", {}).items()}
    if len(attributes) <= _MAX_NAMED:
        facts |= {f"attribute {name[:40]}": digest for name, digest in attributes.items()}
    return {**facts, "content": _digest(dataset)}  # such as that of a list or a tensor


_MAX_NAMED = 30
"""Attributes whose digests have room in a file's header."""


class _Content(pickle.Pickler):
    """Pickles what is in shared memory instead of its address."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is SharedMemory:
            return bytes, (blake2b(obj.bytes.data).digest(),)
        return NotImplemented


def _digest(value: Any) -> str:
    """Return the digest of an attribute; empty if it has none."""
    digest = blake2b(digest_size=8)
    with suppress(Exception):  # locks, open files and the like are no part of what a sample is
        _Content(SimpleNamespace(write=digest.update), protocol=4).dump(value)
        return digest.hexdigest()
    return ""


_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def _check_budget(budget: str | int) -> int:
    found = _SIZE.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if found is not None:
        number, power, binary = found.groups()
        nbytes = int(float(number) * (1024 if binary else 1000) ** _POWERS[power.lower()])
    elif isinstance(budget, int) and not isinstance(budget, bool):
        nbytes = budget
    else:
        raise TypeError(f"budget={budget!r} must be a number of bytes, or a text such as '500MB' or '16GiB'")
    if not 0 < nbytes <= MAX_FILE_BYTES:
        raise ValueError(f"budget={budget!r} must be at least 1 byte and at most {nbytes_text(MAX_FILE_BYTES)}")
    return nbytes
