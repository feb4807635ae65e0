"""What `create_loader` takes its batches from if each sample isn't given once per epoch, in batches of one size.

It is a DataLoader: of a stream, or of a batch sampler that gives samples repeatedly, images of several sizes, or a
number of batches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swift_loader.checks import check_integer
from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.dataloader.epoch import Epoch, Gate
from swift_loader.device.prefetch import LazyPass
from swift_loader.ranks.ranks import Ranks
from swift_loader.runtime import Closing
from swift_loader.samplers.base import ResumableSampler, seed_of
from swift_loader.sampling.permutation import Purpose, derive_key, derive_keys
from swift_loader.sampling.run import Pass, PassState
from swift_loader.sampling.shuffle import Order, OrderSettings
from swift_loader.scheduler.delivery import Delivery
from swift_loader.worker.seeding import preserved_generators

SELECTED_ROUND = 256
"""Of a larger dataset, repeated augmentation visits a multiple of this many samples, as timm's `RepeatAugSampler` does.
The number is that of the reference implementation of DeiT (Touvron et al., 2021)."""

_CYCLE = 0xC7C1E
"""Tells the keys of the orders of further cycles from other keys of the same seed."""


def num_items_of(num_samples: int, ranks: Ranks, num_repeats: float) -> int:
    """Return how many items of an epoch a rank gets."""
    if num_repeats == 1 or num_samples < SELECTED_ROUND:
        return -(-num_samples // ranks.world_size)
    return num_samples // SELECTED_ROUND * SELECTED_ROUND // ranks.world_size


class ImageBatches(ResumableSampler[list[tuple[Any, int]]]):
    """Yields batches of `(what KeyedImages looks up, key of its random numbers)`.

    All samples are put in the epoch's order, each `num_repeats` times in a row. Rank r of R gets the items r, r + R,
    r + 2R and so on, so the repeats of a sample go to different ranks. With repeats, a rank stops after `1 / R` of the
    number of samples: an epoch isn't longer than without them.

    The position is what the loop got, which an `ImageLoader` notes. It isn't what was drawn ahead.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        ranks: Ranks,
        seed: int | None,
        *,
        is_training: bool,
        window: int = 0,
        num_repeats: float = 1.0,
        num_batches: int | None = None,
        sizes: Any = None,
    ) -> None:
        """`sizes` is timm's sampler, over `num_items_of` items, which chooses the sizes of images and batches."""
        super().__init__(ranks, seed, is_seed_used=is_training)
        self._name = "create_loader"
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self._num_samples, self._num_repeats, self._is_training = num_samples, num_repeats, is_training
        self._window = check_integer("nearby_shuffle", window, 0)
        self._num_items = num_items_of(num_samples, ranks, num_repeats)
        if not self._num_items:
            raise ValueError(f"the dataset has {num_samples} samples, too few for {ranks.world_size} ranks; add some")
        is_more = num_batches is not None and num_batches * batch_size >= self._num_items
        self._num_batches = None if is_more and not is_training else num_batches  # in evaluation, nothing comes twice
        self._sizes = sizes
        if sizes is not None:
            self.batch_sizes, self.average_batch_size = sizes.batch_sizes, sizes.average_batch_size
        layout = self._steps(0), float(num_repeats)
        self._facts = {
            "num_samples": num_samples,
            "num_replicas": ranks.world_size,
            "nearby_shuffle": self._window,
            "checksum of batch sizes and repeats": zlib.crc32(repr(layout).encode()),
        }
        self._length = len(layout[0])
        self.begun = Pass(0, 0)
        """The pass that is drawn. The loader advances it."""

    def __iter__(self) -> Iterator[list[tuple[Any, int]]]:
        """Begin the next pass, and return its batches, or the rest of a saved one."""
        self._agree()
        if self.num_replicas != self._facts["num_replicas"]:
            raise RuntimeError(
                f"create_loader was called before init_process_group: it split the dataset over "
                f"{self._facts['num_replicas']} ranks, but there are {self.num_replicas}. Call it afterwards"
            )
        self.begun = self._passes.begin()
        return self._batches(self.begun.epoch, self.begun.position)

    def _batches(self, epoch: int, first: int) -> Iterator[list[tuple[Any, int]]]:
        steps = self._steps(epoch)
        starts = [0, *accumulate(num_samples for _, num_samples in steps)]
        base = derive_key(self._seed, Purpose.SAMPLE.value, epoch, self.rank)
        for start, (choice, num_samples) in list(zip(starts, steps, strict=False))[first:]:
            items = np.arange(start, start + num_samples, dtype=np.int64)
            keys = derive_keys(base, items.view(np.uint64)).tolist()
            indices = self._indices(epoch, items).tolist()
            found = indices if self._sizes is None else [(index, choice) for index in indices]
            yield list(zip(found, keys, strict=True))

    def __len__(self) -> int:
        """Return the number of batches of an epoch. It is the same in all epochs."""
        return self._length

    def _steps(self, epoch: int) -> list[tuple[int, int]]:
        """Return of each batch of an epoch which size of images it has, and how many samples. The same on all ranks."""
        if self._sizes is not None:
            self._sizes.set_epoch(epoch)
            return [(batch[0][1], len(batch)) for batch in self._sizes]
        if self._num_batches is not None:
            return [(0, self.batch_size)] * self._num_batches
        num_full, rest = divmod(self._num_items, self.batch_size)
        return [(0, self.batch_size)] * num_full + [(0, rest)] * (rest > 0 and not self._is_training)

    def _indices(self, epoch: int, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset indices of this rank's items with these numbers, `(n,) -> (n,)`.

        If an epoch has more items than the dataset, it goes through it in cycles, each in an order of its own.
        """
        cycles, numbers = np.divmod(items, self._num_items)
        places = (self.rank + self.num_replicas * numbers) % math.ceil(self._num_samples * self._num_repeats)
        places = np.floor_divide(places, self._num_repeats).astype(np.int64)
        found: NDArray[np.int64] = np.empty_like(places)
        for cycle in np.unique(cycles).tolist():
            chosen = cycles == cycle
            seed = self._seed if cycle == 0 else derive_key(self._seed, _CYCLE, cycle)
            size = self.batch_size
            order = OrderSettings.of(seed=seed, shuffle=self._is_training, window=self._window, batch_size=size)
            found[chosen] = Order(self._num_samples, order).indices(epoch, places[chosen])
        return found


class ImageLoader(DataLoader[Any], Closing):
    """A DataLoader of `ImageBatches` or of a stream. A pass begins with its first `next`.

    With `ImageBatches`, the state is a few integers, the same on all ranks, and resuming is O(1).
    """

    def __init__(self, dataset: Any, ranks: Ranks, seed: int | None, num_batches: int | None, **options: Any) -> None:
        """Starts no worker. `num_batches` limits a stream."""
        self._seed = seed_of(seed)
        self._rank = ranks.rank
        generator = torch.Generator().manual_seed(derive_key(self._seed, Purpose.WORKER.value, ranks.rank))
        super().__init__(dataset, generator=generator, **options)
        self._batches: ImageBatches | None = options.get("batch_sampler")
        self._limit = None if self._batches is not None else num_batches
        self._this = Pass(0, 0)
        """How far the loop is in its pass."""
        if self._batches is not None:
            vars(self)["sampler"] = self._batches  # for frameworks; torch makes one that isn't used, without set_epoch

    def __iter__(self) -> Any:
        """Return an iterator over the next pass, or the rest of a saved one."""
        return LazyPass(self)

    def _begin_pass(self) -> Iterator[Any]:
        """Begin the pass. See `LazyPass`."""
        batches: Iterator[Any] = super().__iter__()
        return batches

    def _begin_epoch(self, *where: Any) -> Epoch:
        epoch = super()._begin_epoch(*where)
        if self._batches is None:
            self._this, num_batches = Pass(epoch.number, epoch.position().num_yielded, PassState.RUNNING), self._limit
        else:
            self._this, num_batches = self._batches.begun, len(self._batches)
        # Without workers, samples seed the generators of this process.
        guard = nullcontext if self.num_workers or self._batches is None else preserved_generators
        num_before = self._this.position - epoch.position().draws.num_drawn
        epoch.gate = _Counter(self._this, num_before, num_batches, is_stream=self._batches is None, guard=guard)
        return epoch

    def __len__(self) -> int:
        """Return the number of batches of an epoch. timm's streams of unknown length have the length 0."""
        if self._limit is None:
            return super().__len__()
        try:
            return min(super().__len__() or self._limit, self._limit)
        except TypeError:
            return self._limit

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. Of a stream, the dataset may have a `set_epoch`."""
        taker = self.dataset if self._batches is None else self._batches
        if callable(choose := getattr(taker, "set_epoch", None)):
            choose(epoch)

    def device_key(self) -> int:
        """Return the key of the last batch, see `device.prefetch.batch_key`. For a `DevicePrefetcher`."""
        seed = self._seed if self._batches is None else self._batches.state_dict()["seed"]
        return derive_key(seed, Purpose.DEVICE.value, self._this.epoch, max(0, self._this.position - 1), self._rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that the loop got: the batch sampler's state, or a stream's."""
        return super().state_dict() if self._batches is None else self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there with the next pass. An empty dict changes nothing."""
        if self._batches is None:
            super().load_state_dict(state)
        elif state or not isinstance(state, Mapping):
            self._batches.load_state_dict(state)

    def close(self) -> None:
        """Let the workers go. Batches that the user keeps stay valid. Idempotent."""
        if self._latest is not None:
            self._latest.shut_down()
        if self._workers is not None:
            self._workers.close()


class _Counter(Gate):
    """Notes how far the loop is in its pass of at most `num_batches`, of which `num_before` are before the epoch's."""

    def __init__(self, this: Pass, num_before: int, num_batches: int | None, *, is_stream: bool, guard: Any) -> None:
        self._this, self._num_before, self._num_batches = this, num_before, num_batches
        self._is_stream, self._guard = is_stream, guard

    def next(self, epoch: Epoch) -> Delivery:
        """Return the epoch's next batch."""
        this = self._this
        if self._is_stream and this.position == self._num_batches:
            epoch.end()
            raise StopIteration
        try:
            with self._guard():
                delivery = epoch.take()
        except StopIteration:
            this.end()
            raise
        except Exception:  # the epoch knows whether the batch is lost
            this.position = self._num_before + epoch.position().draws.num_drawn
            raise
        this.advance(this.position + 1, at_end=this.position + 1 == self._num_batches)
        return delivery
