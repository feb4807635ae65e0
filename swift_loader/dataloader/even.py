"""Stops an epoch on all ranks after the same number of batches, where each rank's part of a stream has its own length.

Before each batch, the ranks tell each other whether they have one, over a gloo group of their own. So the loops of all
ranks run in step, as those of DistributedDataParallel do anyway.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed

from swift_loader.dataloader.iterator import Epoch
from swift_loader.errors import ForkHangs, WorkerDied
from swift_loader.ranks.ranks import find_ranks, torch_distributed


class _Endable(Epoch, Protocol):
    """An epoch that can be ended early."""

    def end(self) -> None:
        """Take the epoch as over. Idempotent."""
        ...


class Votes:
    """The ranks' votes on whether there is another batch. Loop's thread only."""

    def __init__(self) -> None:
        """Make the group. Blocks until all ranks are here. Raises `ValueError` if they can't talk to each other."""
        ranks = find_ranks(None, None)
        self._group: Any = None
        if ranks.world_size == 1:
            return
        if torch_distributed() is None:
            raise ValueError(
                f"equal_batches=True needs torch.distributed, because {ranks.source} counts {ranks.world_size} "
                f"processes and the dataset shares itself out to them; call torch.distributed.init_process_group() "
                f"first, or give shard_stream=True"
            )
        self._group = torch.distributed.new_group(backend="gloo")

    def all_have(self, has_batch: bool) -> bool:
        """Return whether all ranks have a batch. Blocks until all have voted."""
        if self._group is None:
            return has_batch
        vote = torch.tensor(int(has_batch))
        torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, self._group)
        return bool(vote.item())


class WrappedEpoch:
    """An epoch around another one."""

    def __init__(self, epoch: Any) -> None:
        self._epoch: _Endable = epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoch, name)

    @property
    def is_whole(self) -> bool:
        """See `Epoch`."""
        return self._epoch.is_whole

    @is_whole.setter
    def is_whole(self, is_whole: bool) -> None:
        self._epoch.is_whole = is_whole


class EvenEpoch(WrappedEpoch):
    """An epoch that is over as soon as it is over on one of the ranks. An error in a batch's place counts as one."""

    def __init__(self, epoch: _Endable, votes: Votes) -> None:
        super().__init__(epoch)
        self._votes = votes

    def next(self) -> Any:
        """Return the next batch. Raises as the epoch's own `next`. Blocks until all ranks ask for theirs."""
        if self._epoch.is_over:
            raise StopIteration
        batch, error = None, None
        has_batch = True
        try:
            batch = self._epoch.next()
        except StopIteration:
            has_batch = False
        except Exception as raised:
            error = raised
        if not self._votes.all_have(has_batch):
            self._epoch.end()
            raise StopIteration
        if isinstance(error, ForkHangs):  # the ranks have voted, so the epoch can't go on with other workers
            raise WorkerDied(str(error)) from error
        if error is not None:
            raise error
        return batch
