"""What `start()` was told about the rank of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swift_loader.ranks.ranks import Ranks, find_ranks, ranks_of_job, ranks_of_mesh


@dataclass(frozen=True, slots=True)
class RankChoice:
    """The arguments of `start()` that say which data this rank gets. The integers are checked."""

    consumer_index: int | None = None
    rank: int | None = None
    """The same as `consumer_index`; only one of them may be given."""
    world_size: int | None = None
    """How many data-parallel ranks there are."""
    mesh: Any = None
    data_dims: Sequence[str] | None = None
    share_batches: bool = True
    """Whether ranks of one node that need the same data load it once."""

    def find(self, nb_consumer: int | None) -> Ranks:
        """Return the rank of this process. `nb_consumer` is the option, or None.

        Raises `TypeError` if two arguments exclude each other, `ValueError` if they contradict each other, the option
        or the launcher, `RuntimeError` if there are several ranks, and nothing says which one this is.
        """
        if self.consumer_index is not None and self.rank is not None:
            raise TypeError("consumer_index and rank are both given; they are one argument, so give rank only")
        rank = self.consumer_index if self.rank is None else self.rank
        if self.mesh is not None:
            if rank is not None or self.world_size is not None:
                raise TypeError("mesh says rank and world_size; give mesh, or rank and world_size, not both")
            return ranks_of_mesh(self.mesh, self.data_dims, nb_consumer)
        if self.data_dims is not None:
            raise TypeError("data_dims names dimensions of a mesh, but there is no mesh; give mesh, too")
        if self.world_size is not None and nb_consumer not in (None, self.world_size):
            raise ValueError(
                f"world_size={self.world_size}, but the loader was made with nb_consumer={nb_consumer}; they are one "
                f"number, so give world_size only"
            )
        if rank is not None and self.world_size is not None:
            return ranks_of_job(rank, self.world_size)
        return find_ranks(rank, nb_consumer if self.world_size is None else self.world_size)
