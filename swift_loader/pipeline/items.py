"""What flows between stages: a value, and the place where a run continues after it.

A place is a tuple. Its first entry says where the source is, the others how many results of each counting stage came
since then. A counting stage gives several results for one item (a generator, `unbatch`), or mixes items (`shuffle`):

    source            (n,)           continues with item n
    a generator       (n, k)         runs item n again, and leaves out the first k results
    shuffle           (n, k)         fills its buffer from item n on, and leaves out the first k results
    merge, mix        ((n, place of each pipeline), ...)

Other stages pass places on: a batch has the place of its last item. So continuing costs no more than what a counting
stage leaves out.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

Place = tuple[Any, ...]
"""See above."""


class Item(NamedTuple):
    """A value between two stages."""

    value: Any
    after: Place
    """Where a run continues once this item was delivered. No two items of an epoch have the same."""


class Marker(Enum):
    """What flows in place of a value."""

    EPOCH_END = "the end of an epoch"
    """Comes after all items of the epoch, and before those of the next one."""
