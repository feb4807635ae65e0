"""A dataset that makes the deterministic part of each sample once, and keeps it for all processes of the machine.

`shared.store` has the bytes. Here is what they stand for: how a sample becomes bytes and is made again, and which
datasets use the same bytes.

Nothing is guessed from a dataset's attributes. The user says which cache is meant: a path, or a name that the ranks
have in common. Class, length and version must agree. Then some samples are made by a process of its own, so that the
program's dataset opens nothing, and compared by value with what is there.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from operator import index as as_index
from types import FunctionType
from typing import Any
from weakref import WeakSet

import numpy as np

from swift_loader.batch.digests import difference
from swift_loader.batch.tree import type_name
from swift_loader.checks import check_callable
from swift_loader.errors import (
    CacheMismatch,
    EncodeError,
    ForkHangs,
    SamplesDraw,
    SwiftLoaderError,
    counted,
    nbytes_text,
    warn,
)
from swift_loader.metrics.machine import available_memory
from swift_loader.runtime import ProcessOwner
from swift_loader.sampling.mixture import Mixture
from swift_loader.shared.memory import noted_by_ranks, place_of_ranks, shared_with_ranks
from swift_loader.shared.store import MAX_FILE_BYTES, Facts, Packed, Store, data_offset, spread
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode
from swift_loader.transport.encoder import CodeNeeded, Encoder
from swift_loader.worker.process import is_importing
from swift_loader.worker.seeding import fetched_without_draws
from swift_loader.worker.torch_worker import limited_threads

_MEMORY = "memory"

_SHARE_OF_FREE = 0.75
"""How much of the memory that is free the caches in memory may take together."""

_NUM_COMPARED = 8

_LIMIT_S = 300.0
"""How long the process that makes samples to compare may take for one of them."""

_SCRATCH_BYTES = 1 << 32
"""Room for one sample. It takes no memory until it is written."""

_NUM_WATCHED, _WATCH_EVERY = 64, 8
"""The first samples that a process makes are watched for draws, then one of eight. It takes 80 us."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?)(i?)b", re.IGNORECASE)

_NO_DEFINITIONS = Definitions()

_num_named = Counter[str]()
"""How many caches in memory this process has made, by name."""

_in_memory = WeakSet[Store]()
"""Those of this process."""


def cached(
    dataset: Any,
    transform: Callable[[Any], Any] | None = None,
    *,
    where: str | os.PathLike[str] = _MEMORY,
    budget: str | int = "64GB",
    version: str | int | None = None,
    name: str = "",
) -> CachedDataset:
    """Return a dataset that makes each sample of `dataset` once, and keeps it for all later epochs.

    Put what is slow and always the same into `dataset`: read, decode, resize. Put what is random into `transform`,
    which runs on each access. The bytes of batches are the same as without a cache, and so are states. All workers,
    loaders and ranks of the machine fill and read one copy. Use it as any dataset, also with torch's DataLoader.

        photos = cached(Photos("train"), transform=random_crop, where="/data/train.cache")
        loader = SwiftLoader(dataset=photos, batch_size=64)

    Over the budget, what is kept stays, and the other samples are made on each access; a warning says so, once. `repr`
    tells how much is kept.

    Args:
        dataset: Map-style. Its samples are arrays, tensors, images, numbers, text, containers of these, or anything
            that pickle can serialise. They may not draw random numbers.
        transform: Gets a sample, and returns what the dataset returns. It may change the sample in place.
        where: `"memory"`, or the path of a file on a local disk. Memory belongs to this object and its workers. If
            torch.distributed is initialised, ranks of one machine share it: those whose datasets have the same samples,
            see `name`. A file is made if there is none, and stays for the next run. Processes that use one path share
            it. Open no file that you don't trust: samples are unpickled from it.
        budget: The most that samples may take, in bytes or such as `"500MB"` or `"16GiB"`. In memory, the budgets of
            all caches of the program, over all ranks of the machine, are at most three quarters of what is free. Larger
            ones are cut, also when another cache is made.
        version: Any text or number that you change when the samples change. A file of another version is refused. A
            file without a version gets this one.
        name: Ranks share memory under this name. By default, they share in the order in which they make their caches.
            Two caches of one rank never share.

    Before a file or another rank's memory is used, class, length and version are compared. Then eight samples are made
    again, by another process, and compared by value. A single changed sample may be missed.

    Raises:
        CacheMismatch: The file isn't a cache of this dataset. The message says what differs. Or samples draw random
            numbers.
        CacheCorrupt: The file's header is damaged. Samples that are damaged are made again, without an error.
        SharedMemoryFull: There is no memory.
        OSError: The file can't be opened, or its file system has no locks.
        TypeError, ValueError: An argument is wrong.
    """
    check_callable("transform", transform)
    limit = _check_budget(budget)
    if isinstance(dataset, Mixture):
        raise TypeError("a Mixture can't be cached, only its sources: Mixture({'web': cached(web), ...})")
    kind, num_samples = type(dataset), len(dataset)
    module = kind.__module__.replace("__mp_main__", "__main__")
    facts: Facts = {"class": f"{module}.{kind.__qualname__}"[-200:], "length": num_samples}
    if version is not None:
        facts["version"] = str(version)[:200]
    import resource  # not on Windows

    file_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_limit != resource.RLIM_INFINITY:
        limit = min(limit, max(1, file_limit - data_offset(num_samples)))
    if where == _MEMORY:
        return CachedDataset(dataset, transform, _store_in_memory(dataset, facts, limit, name))
    store = Store.in_file(os.path.abspath(os.fspath(where)), limit, facts)
    try:
        kept = store.kept()
        chosen = [int(kept[at]) for at in spread(len(kept), _NUM_COMPARED, random.SystemRandom())]
        if len(kept) < _NUM_COMPARED and place_of_ranks() is not None and not is_importing():
            # Other ranks are given the file now. If their datasets aren't the same, they must find samples that differ.
            chosen = _spread_alike(num_samples)
        if chosen:
            _check_file(dataset, store, facts, chosen, is_new=not len(kept))
        store.keep_version(facts)
    finally:
        store.rest()
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
        self._is_watched = True
        """Whether some samples are watched for draws."""
        self._program = ProcessOwner()

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
        """Return a sample that isn't there, and keep it if there is space. What it returns isn't the dataset's own."""
        if self._store.is_full:
            sample = self._make(index)
            return sample if self._as_views else unpack(_pack(sample, index))
        with self._store.claim(index) as is_ours:
            packed = self._store.read(index)  # another process may have made it meanwhile
            if packed is None:
                packed = _pack(self._make(index), index)
                if is_ours:
                    self._store.write(index, packed)
            return unpack(packed)

    def _make(self, index: int) -> Any:
        """Return what the dataset makes, with one thread as in workers: sums depend on the number of threads."""
        self._num_made += 1
        with limited_threads(1) if self._program.is_here() else nullcontext():
            if not self._is_watched or (self._num_made > _NUM_WATCHED and self._num_made % _WATCH_EVERY):
                return self.dataset[index]
            sample, asked, moved = fetched_without_draws(lambda: self.dataset[index])
        if moved and self._program.is_here() and threading.active_count() > 1:
            with suppress(SwiftLoaderError, RuntimeError):  # only a process without those threads can tell who drew
                scratch = Store.in_memory(len(self), _SCRATCH_BYTES, {})
                self._is_watched = moved = bool(_make_apart(self.dataset, scratch, [index], is_copied=True))
        if asked or moved:
            raise SamplesDraw(
                f"sample {index} of a cached dataset, a {type_name(self.dataset)}, draws random numbers, which would "
                f"be the same in each epoch. Move what is random from the dataset to cached(transform=...)"
            )
        return sample

    def __repr__(self) -> str:
        store = self._store
        place, limit = store.path or _MEMORY, store.end - data_offset(len(self))
        return (
            f"<CachedDataset of {len(self):,} samples, {len(store.kept()):,} of them kept in {place}: "
            f"{nbytes_text(store.nbytes())} of {nbytes_text(limit)}>"
        )


# Samples as bytes -----------------------------------------------------------------------------------------------------


def _pack(sample: Any, index: int) -> Packed:
    """Return a copy of a sample as bytes."""
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
    encoded, data = encoder.encoded(stream), np.empty(arena.used, np.uint8)
    arena.move_to(data)
    return Packed(data, memoryview(encoded.meta), encoded.num_blocks)


def unpack(packed: Packed) -> Any:
    """Return the sample. Its arrays are views of the bytes."""
    return decode(packed.structure, packed.num_blocks, packed.data, _NO_DEFINITIONS)


# Whether it is the same cache -----------------------------------------------------------------------------------------


def _spread_alike(num_samples: int) -> list[int]:
    """Return the indices of some samples, the same ones in each process."""
    return spread(num_samples, _NUM_COMPARED, random.Random(num_samples))  # noqa: S311 - nothing is kept secret


def _check_file(dataset: Any, store: Store, facts: Facts, chosen: list[int], *, is_new: bool) -> None:
    """Compare samples of a file with those that the dataset makes now. Put those into it that it doesn't have.

    Raises `CacheMismatch`. `is_new`: it had none.
    """
    name = f"the cache {store.path!r}"
    try:
        room = int(_SHARE_OF_FREE * available_memory()) or MAX_FILE_BYTES
        mine = Store.in_memory(store.num_samples, room, facts)
        failed = _make_apart(dataset, mine, chosen)
    except SamplesDraw:
        raise
    except (SwiftLoaderError, RuntimeError) as error:
        if is_new:
            warn(
                f"{name} can't be compared with the datasets of other ranks, because no other process can make its "
                f"samples ({type_name(error)}: {error}). Give the same dataset on all ranks, or a file to each"
            )
        if "version" in facts or is_new:
            return
        raise CacheMismatch(
            f"{name} can't be compared with the dataset, because no other process can make its samples "
            f"({type_name(error)}: {error}). If it has the right ones, say so with version="
        ) from error
    for index in chosen:
        if store.read(index) is None and (packed := mine.read(index)) is not None:
            with store.claim(index) as is_ours:
                if is_ours and store.read(index) is None:  # another rank may have written it meanwhile
                    store.write(index, packed)
    _compare(name, store, mine, chosen)
    if failed and not is_new and "version" not in facts:
        (index, reason), *_ = failed.items()
        warn(
            f"{name} is used, but {counted(len(failed), 'sample')} of {len(chosen)} that were to be compared can't be "
            f"made any more, such as {index} ({reason}). If the file has the right samples, say so with version="
        )


def _store_in_memory(dataset: Any, facts: Facts, limit: int, name: str) -> Store:
    """Return a store in memory: that of another rank whose dataset has the same samples, or a new one."""
    free, number = available_memory(), _num_named[name]
    _num_named[name] += 1
    store = Store.in_memory(facts["length"], min(limit, int(_SHARE_OF_FREE * free) or limit), facts)
    if facts["length"] and place_of_ranks() is not None and not is_importing():
        store = _agreed_with_ranks(dataset, store, facts, f"cache {name!r} {number}")
    _in_memory.add(store)
    stores = [*_in_memory, *map(Store.at, noted_by_ranks(store.memory, "caches"))]
    if free:
        _share_out({one.memory.address.inode: one for one in stores}.values(), free)
    return store


def _agreed_with_ranks(dataset: Any, store: Store, facts: Facts, key: str) -> Store:
    """Return the store that another rank told of under this key, if its samples are these. Else tell of this one."""
    theirs, chosen = "the memory of another rank", _spread_alike(len(dataset))
    try:
        failed = _make_apart(dataset, store, chosen)
        memory = shared_with_ranks(store.memory, key)
        if memory is not store.memory:
            other = Store.at(memory, theirs, facts)
            if len(failed) == len(chosen) or [one for one in chosen if other.read(one) is None] != list(failed):
                raise CacheMismatch(f"{theirs} has other samples, or none: {failed}")
            _compare(theirs, other, store, chosen)
            return other
    except SamplesDraw:
        raise
    except (SwiftLoaderError, RuntimeError) as error:
        warn(
            f"this rank doesn't share {key} with other ranks, but has memory of its own: {error}. Ranks share caches "
            f"in the order in which they make them, or by cached(name=)"
        )
    return store


def _share_out(stores: Collection[Store], free: int) -> None:
    """Cut budgets: each may grow by an even part of what is left of a share of all that is free or theirs."""
    used = {one: one.nbytes() for one in stores}
    left = int(_SHARE_OF_FREE * (free + sum(used.values()))) - sum(used.values())
    smallest_first = sorted(stores, key=lambda one: one.end - data_offset(one.num_samples) - used[one])
    for number, one in enumerate(smallest_first):
        left -= one.cut(max(left, 0) // (len(stores) - number))


def _compare(name: str, kept: Store, made: Store, indices: Iterable[int]) -> None:
    """Raise `CacheMismatch` if one of these samples isn't the same in both stores."""
    for index in indices:
        there, here = kept.read(index), made.read(index)
        if there is None or here is None:  # it is damaged, or can't be made
            continue
        try:
            found = difference(unpack(there), unpack(here))
        except Exception as error:
            found = "", f"one that can't be restored ({type_name(error)}: {error})", "another one"
        if found is not None:
            path, other, own = found
            raise CacheMismatch(
                f"{name} has another sample {index} than the dataset makes now: sample{path} is {other} there, and "
                f"{own} here. The dataset has changed, or makes another one each time, or on other machines"
            )


# Samples that a process of its own makes ------------------------------------------------------------------------------


def _make_apart(dataset: Any, store: Store, indices: list[int], *, is_copied: bool = False) -> dict[int, str]:
    """Make these samples in another process, which puts them into a store in memory. Return those that failed, and why.

    It is a fork of this process, or a fresh interpreter where forks hang. It makes them from a copy of the dataset,
    unless it `is_copied`. Raises `SamplesDraw` if they draw, another `SwiftLoaderError` if there is no such process.
    """
    from swift_loader.loader import SwiftLoader  # takes 0.4 s, and most caches are new

    options: dict[str, Any] = {"worker_restarts": 0, "validate": False, "rng": None, "timeout": _LIMIT_S}
    for method in ("fork", "template"):
        apart = _Apart(CachedDataset(dataset, None, store), indices, is_copied=is_copied)
        options |= {"dataset": apart, "start_method": method, "shuffle": False, "collate_fn": list}
        with suppress(ForkHangs), SwiftLoader(nb_consumer=1, worker_per_consumer=1, **options) as loader:
            return {index: reason for index, (reason,) in zip(indices, loader, strict=True) if reason}
    return {}


class _Apart:
    """Sample i says why the i-th of some samples can't be put into a store; empty if it is there."""

    def __init__(self, made: CachedDataset, indices: list[int], *, is_copied: bool) -> None:
        self._indices = indices
        self._make: Any = made.__getitem__  # a method: the loader warns of open files that it finds in a dataset
        self._is_copied = is_copied

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> str:
        """Return the reason. In the other process."""
        made: CachedDataset = self._make.__self__
        if not self._is_copied:
            made.dataset, self._is_copied = _copied(made.dataset), True
        try:
            self._make(self._indices[number])
        except SwiftLoaderError:
            raise
        except Exception as error:
            return f"{type_name(error)}: {error}"
        return "" if made._store.read(self._indices[number]) is not None else "there is no memory for it"  # noqa: SLF001


def _copied(dataset: Any) -> Any:
    """Return a dataset as a pickle restores it, which opens its files anew. Arrays and tensors are the same.

    If it can't be pickled, it is the same, as for any fork.
    """
    same, torch = dict[int, Any](), sys.modules.get("torch")
    kinds = (np.ndarray, FunctionType, type, *([] if torch is None else [torch.Tensor]))

    def key_of(thing: Any) -> int | None:
        if not isinstance(thing, kinds):
            return None
        same[id(thing)] = thing
        return id(thing)

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.persistent_id = key_of  # type: ignore[method-assign]
    try:
        pickler.dump(dataset)
        unpickler = pickle.Unpickler(io.BytesIO(stream.getvalue()))
        unpickler.persistent_load = same.__getitem__  # type: ignore[method-assign]
        return unpickler.load()
    except Exception:
        return dataset


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
