"""The iterator over one epoch of a DataLoader."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader

from swift_loader.dataloader.epoch import Epoch, lost_batch
from swift_loader.dataloader.state import LoaderPosition
from swift_loader.delivery.iterator import LoopIterator, Turn
from swift_loader.errors import ForkHangs
from swift_loader.executors.processes import ProcessView
from swift_loader.options import AutoWorkers
from swift_loader.scheduler.delivery import Delivery


class LoaderIterator(LoopIterator):
    """Yields the batches of one epoch. When nobody refers to it any more, the workers are free.

    An error of the user's code takes the place of its batch: the next call continues with the batch after it.
    """

    def __init__(self, loader: DataLoader[Any], epoch: Epoch, pin_device: str | None, *, passes_epoch: bool) -> None:
        """Begin with an epoch. The arguments are those of `restart`."""
        super().__init__(Turn())
        self.restart(loader, epoch, pin_device, passes_epoch=passes_epoch)

    def restart(self, loader: DataLoader[Any], epoch: Epoch, pin_device: str | None, *, passes_epoch: bool) -> None:
        """Begin again, with another epoch. With persistent workers, a loader has one iterator, as with torch.

        `pin_device` None: don't pin. `passes_epoch`: the loop has left this epoch, so the first batch is that of
        the next one.
        """
        self._epoch = epoch
        self._is_begun = False
        """Whether a batch was asked for."""
        self._loader: Any = weakref.ref(loader)
        self.kept: object = None
        """Keeps the loader of `for batch in DataLoader(...)` alive, to begin again."""
        self._hangs: ForkHangs | None = None
        """Why there are no more batches."""
        self._is_tuned = isinstance(loader.num_workers, AutoWorkers)
        self._passes_epoch = passes_epoch
        self._index_sampler = loader._index_sampler  # noqa: SLF001 - for `len`, as torch
        self._dataset_name = str(type(loader.dataset).__name__)
        self._length_called: int | None = loader._IterableDataset_len_called  # noqa: SLF001
        self._has_workers = bool(loader.num_workers)
        self._pin_device = pin_device
        self._num_yielded = 0
        self._interrupt: BaseException | None = None
        """What may have lost a batch."""

    def _advance(self) -> Delivery:
        if not self._epoch.is_whole:
            raise lost_batch() from self._interrupt
        if self._hangs is not None:
            raise self._hangs
        loader, recorded = self._loader(), None
        if self._is_tuned and loader is not None:
            loader._tune()  # noqa: SLF001
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # noqa: SLF001
            recorded = torch.autograd.profiler.record_function("enumerate(DataLoader)#LoaderIterator.__next__")
            recorded.__enter__()  # type: ignore[no-untyped-call]
        try:
            delivery = self._taken = self._epoch.next() if self._is_begun else self._first(loader)
        except StopIteration:
            if loader is not None:
                loader._end_epoch()  # noqa: SLF001
            raise
        except ForkHangs as error:
            delivery = self._taken = self._replace_forks(loader, error)
        finally:
            if recorded is not None:
                recorded.__exit__(None, None, None)
        self._num_yielded += 1
        if self._length_called is not None and self._num_yielded > self._length_called:
            self._warn_of_length(self._length_called)
        if self._pin_device is not None:
            from torch.utils.data._utils.pin_memory import pin_memory

            delivery.batch = pin_memory(delivery.batch, self._pin_device)  # type: ignore[no-untyped-call]
        self._epoch.is_whole = True
        return delivery

    def _take_back(self, delivery: Delivery | None, error: BaseException) -> None:
        if delivery is not None or self._taken is not None:  # it counts as delivered, and nobody gets it
            self._taken, self._epoch.is_whole = None, False
        if self._interrupt is None and not self._epoch.is_whole:
            self._interrupt = error

    def _replace_forks(self, loader: Any, error: ForkHangs) -> Delivery:
        """Have fresh interpreters go on where the loop is, as a fork of the program hangs. Return the next batch."""
        if loader is None:
            raise error
        self._hangs = error  # in case that nothing takes its place
        self._continue_with(loader, self._epoch.position(), error)
        self._hangs = None
        return self._epoch.next()

    def _first(self, loader: Any) -> Delivery:
        """Return the first batch. `set_epoch` may have been called since `iter`, and counts."""
        if loader is not None and (self._passes_epoch or self._epoch.is_stale):
            self._continue_with(loader, None if self._passes_epoch else self._epoch.position())
        self._is_begun = True
        return self._epoch.next()

    def _continue_with(self, loader: Any, *where: LoaderPosition | ForkHangs | None) -> None:
        self._epoch.close()
        self._epoch = loader._begin_epoch(*where)  # noqa: SLF001

    def _warn_of_length(self, length: int) -> None:
        advice = (
            " For multiprocessing data-loading, this means that each worker's copy of the dataset gives everything: "
            "let it give only its share, see torch.utils.data.get_worker_info."
            if self._has_workers
            else ""
        )
        warnings.warn(
            f"Length of IterableDataset {self._dataset_name} was reported to be {length} (when accessing "
            f"len(dataloader)), but {self._num_yielded} samples have been fetched.{advice}",
            stacklevel=4,
        )

    @property
    def _workers(self) -> list[ProcessView]:
        """The worker processes that serve this epoch now, or served it last. Programs look at torch's so."""
        if not self._has_workers:
            raise AttributeError(f"{type(self).__name__} has no _workers with num_workers=0")
        return self._epoch.processes()

    def _shutdown_workers(self) -> None:
        """End the workers, as programs do it with torch's iterators. The next epoch gets new ones."""
        self._epoch.shut_down()

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __del__(self) -> None:  # no weakref.finalize: that would keep the epoch, whose error may refer to this iterator
        self._epoch.close()

    def __getstate__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} can't be pickled; pickle the loader")
