"""Mixtures of datasets: which sample of which source stands at a position. Pure arithmetic, but for the `Mixture`.

Guarantees: the sample at a position depends on the sources' lengths, the changes of their weights, the seed and the
position, and on nothing else. Seeking is O(log sources), memory is O(sources * changes). At any position, each source
has had its share within one or two samples, also over changes of the weights.

    position ──► segment of constant weights ──► down a tree: source, and how many of its samples came before
             ──► epoch and position in that source ──► the source's order ──► row

The tree is Huffman's: the two lightest nodes are joined until one is left. Of the first n samples of a node,
`floor(share * n + phase)` are the left child's. Both children's counts grow by at most one with n, so the next sample
is the child's whose count grows. The phases carry over what a source is owed from the segment before.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import StateMismatch, counted, noted
from swift_loader.sampling.integers import Form, as_integer, check_same, field_of, integer
from swift_loader.sampling.permutation import Positions, Purpose, Shuffle, derive_key, derive_keys, visit
from swift_loader.sampling.skips import EXCLUDED, NO_SKIPS, Position, Skips

MAX_SOURCES = 1000
MAX_POSITION = 1 << 62
"""Positions, over all epochs, are below this."""

RAMP_PIECES = 64
"""So many steps approximate a ramp from one change to the next."""

MAX_ROWS = 10**12
_EPOCH_UNIT, _SOURCE_UNIT = 10**16, 10**12
"""The index of a sample is `(epoch + 1) * 10**16 + source * 10**12 + row`. So it can be read, and is more than any row
number of all sources."""
_NUM_EPOCHS = 900
"""Indices fit into 63 bits, so epochs of a source begin again after so many."""

_SHARE_BITS = 32
MAX_EXACT = 1 << 31
"""Integer weights with at most this sum give exact shares. Products of a weight and a count fit into 64 bits."""

_BLOCK = 256
"""So many samples of streams are assigned to sources at once."""

MAX_GAPS = 1 << 20
"""So many places that are left out are computed at once."""

NO_ROWS = np.empty(0, np.uint64)

_MIXED = 0x313D
"""Tells the keys of the sources from those of a dataset's order."""

Weights = tuple[float, ...]
"""Of each source. At least 0, and not all 0."""
Changes = tuple[tuple[int, Weights], ...]
"""Positions, in order, from which on weights hold. The first is 0."""


class Row(NamedTuple):
    """Which sample an index of a mixture is."""

    source: str
    row: int
    """Its index in the source."""
    epoch: int
    """How often the source was visited before, modulo 900. Random draws of the sample depend on it."""


@dataclass(frozen=True)
class Mix:
    """What the order of a mixture depends on, beside its sources' `Shuffle`."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    epoch_size: int
    """Samples in an epoch of the mixture."""
    changes: Changes
    given: str
    """A digest of the changes that the program gave. A resumed run keeps its own as long as the program gives these."""
    excluded: tuple[tuple[int, Skips], ...] = ()
    """Sources of which rows are left out, and which: from a position in the source's own epochs on."""

    def __reduce__(self) -> Any:
        return type(self), (self.names, self.lengths, self.epoch_size, self.changes, self.given, self.excluded)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.lengths, self.epoch_size, self.changes, self.excluded))

    @cached_property
    def _tables(self) -> _Tables:
        return _Tables.of(self.changes, (0.0,) * len(self.lengths))

    @cached_property
    def _sizes(self) -> Positions:
        return np.array(self.lengths, np.uint64)

    @cached_property
    def _rests(self) -> dict[Any, _Rest]:
        return {}

    @cached_property
    def _ends(self) -> list[int]:
        """Where each source ends in the row of all of them."""
        return list(itertools.accumulate(self.lengths))

    def indices(self, shuffle: Shuffle, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions of an epoch as indices of the `Mixture`; `(n,) -> (n,)`."""
        if (epoch + 1) * self.epoch_size > MAX_POSITION:
            raise ValueError(f"epoch {epoch} of {self.epoch_size} samples is beyond a mixture's 2**62 samples")
        sources, rows, epochs = self.rows(shuffle, epoch * self.epoch_size + positions)
        turns = (epochs % np.uint64(_NUM_EPOCHS)).astype(np.int64) + 1
        indices: NDArray[np.int64] = turns * _EPOCH_UNIT + sources * _SOURCE_UNIT + rows.astype(np.int64)
        return indices

    def rows(self, shuffle: Shuffle, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], Positions, Positions]:
        """Return source, row and the source's epoch at each position, over all epochs."""
        sources, counts = self._tables.at(positions.astype(np.uint64))
        sizes = self._sizes[sources]
        epochs = counts // sizes
        places = counts - epochs * sizes
        for source, skips in self.excluded:
            if (here := np.flatnonzero(sources == source)).size:
                epochs[here], places[here] = self._rest(shuffle, source, skips).at(counts[here])
        return sources, _visited(shuffle, sources, sizes, epochs, places), epochs

    def _rest(self, shuffle: Shuffle, source: int, skips: Skips) -> _Rest:
        key = shuffle.seed, shuffle.shuffle, shuffle.window, shuffle.run_length, source, skips
        if key not in self._rests:
            self._rests[key] = _Rest(self.lengths[source], Shuffle(*key[:4]), source, skips)
        return self._rests[key]

    def locate(self, index: int) -> tuple[int, int, int]:
        """Return number of the source, row and epoch of an index or a row number. An IndexError if it has none."""
        number, epoch, row = 0, 0, int(index)
        if row >= _EPOCH_UNIT:
            epoch, rest = divmod(row - _EPOCH_UNIT, _EPOCH_UNIT)
            number, row = divmod(rest, _SOURCE_UNIT)
        elif 0 <= row < self._ends[-1]:
            number = bisect_right(self._ends, row)
            row -= self._ends[number] - self.lengths[number]
        if number >= len(self.lengths) or not 0 <= row < self.lengths[number]:
            raise IndexError(f"index {index} is beyond the sources' {self._ends[-1]} rows, and no sample of a batch")
        return number, row, epoch

    # Changes ----------------------------------------------------------------------------------------------------------

    def shown(self, position: int) -> str:
        """Return the shares at a position over all epochs, and how often they change."""
        weights = self.weights_at(position)
        shares = [f"{name} {weight / sum(weights):.3g}" for name, weight in zip(self.names, weights, strict=True)]
        return ", ".join([*shares, *[counted(len(self.changes) - 1, "change")] * (len(self.changes) > 1)])

    def position(self, of: Position) -> int:
        """Return a position over all epochs."""
        return of.epoch * self.epoch_size + of.num_samples

    def reweighted(self, position: int, weights: Weights) -> Mix:
        """Return the mix with these weights from a position on. Later changes are dropped."""
        return replace(self, changes=(*(one for one in self.changes if one[0] < position), (position, weights)))

    def excluding(self, shuffle: Shuffle, position: int, rows: Iterable[int]) -> Mix:
        """Return the mix without rows from a position on, given as indices or row numbers of the `Mixture`.

        A ValueError if there is no such row, or if none is left of a source.
        """
        asked: dict[int, set[int]] = {}
        for index in rows:
            try:
                source, row, _ = self.locate(index)
            except IndexError as error:
                raise ValueError(str(error)) from error
            asked.setdefault(source, set()).add(row)
        excluded, counts, here = dict(self.excluded), self._tables.counts(position), dict(self.changes)
        for source, chosen in asked.items():
            skips, length, since = excluded.get(source, NO_SKIPS), self.lengths[source], Position(0, 0)
            if counts[source]:  # behind its last sample: unlike the next one, that doesn't depend on what is left out
                last = np.array([counts[source] - 1], np.uint64)
                epoch, place = self._rest(shuffle, source, skips).at(last)
                since = Position(int(epoch[0]), int(place[0]) + 1)
            skips = skips.excluding(since, np.array(sorted(chosen), np.int64))
            if skips.num_excluded >= length:
                raise ValueError(
                    f"all {length} rows of the source {self.names[source]!r} would be excluded; give it the weight 0 "
                    f"instead"
                )
            excluded[source] = skips
        here[position] = self.weights_at(position)  # padding repeats what came since the last change
        return replace(self, changes=tuple(sorted(here.items())), excluded=tuple(sorted(excluded.items())))

    def weights_at(self, position: int) -> Weights:
        """Return the weights that hold at a position."""
        return self.changes[bisect_right(self._begins, position) - 1][1]

    def last_change(self, epoch: int) -> int:
        """Return the position in an epoch from which on nothing changes in it."""
        begin, end = epoch * self.epoch_size, (epoch + 1) * self.epoch_size
        return max(0, self._begins[bisect_left(self._begins, end) - 1] - begin)

    @cached_property
    def _begins(self) -> list[int]:
        return [begin for begin, _ in self.changes]

    def resumed(self, saved: Mix, position: int) -> Mix:
        """Return how a run goes on that was saved at this position. `self` is what the program says now.

        The past stays as it was. If the program says the same as in that run, so does the future.
        """
        num_saved = len(saved.names)
        if (self.names[:num_saved], self.lengths[:num_saved]) != (saved.names, saved.lengths):
            raise StateMismatch(
                f"the state was saved with the sources {_shown_sources(saved)}, but this mixture has "
                f"{_shown_sources(self)}. Give the same ones in the same order, with new ones behind them; a "
                f"weight of 0 takes one out"
            )
        check_same({"epoch_size": saved.epoch_size}, {"epoch_size": self.epoch_size}, "this mixture has")
        if self.given == saved.given and len(self.names) == num_saved:
            return saved
        new = (0.0,) * (len(self.names) - num_saved)
        past = [(begin, (*weights, *new)) for begin, weights in saved.changes if begin < position]
        present = self.weights_at(position)
        future = [one for one in self.changes if one[0] > position]
        return replace(self, changes=(*past, (position, present), *future), excluded=saved.excluded)

    # State ------------------------------------------------------------------------------------------------------------

    @cached_property
    def state(self) -> dict[str, Any]:
        """The mix as plain JSON types. Made once: it is in the state after each batch."""
        return {
            "sources": [[name, length] for name, length in zip(self.names, self.lengths, strict=True)],
            "epoch_size": self.epoch_size,
            "weights": [[begin, list(weights)] for begin, weights in self.changes],
            "given": self.given,
            EXCLUDED: [[source, skips.to_dict()[EXCLUDED]] for source, skips in self.excluded],
        }

    @classmethod
    def of_state(cls, state: Any) -> Mix:
        """Return the mix of a saved state."""
        return field_of({"mixture": state}, "mixture", Form("what a mixture saves", cls._read))  # type: ignore[no-any-return]

    @classmethod
    def _read(cls, state: Any) -> Mix:
        whole, size = integer(0, MAX_POSITION).read, integer(1, MAX_POSITION).read
        names, lengths = zip(*((str(name), size(length)) for name, length in state["sources"]), strict=True)
        changes = tuple((whole(begin), tuple(map(float, weights))) for begin, weights in state["weights"])
        excluded = tuple(
            (whole(source), Skips.from_dict({EXCLUDED: value}, lengths[source])) for source, value in state[EXCLUDED]
        )
        begins = [begin for begin, _ in changes]
        if begins != sorted(begins) or begins[0]:
            raise ValueError
        if not all(0 < skips.num_excluded < lengths[source] for source, skips in excluded):
            raise ValueError
        for _, weights in changes:
            check_weights(weights, len(names))
        return cls(names, lengths, size(state["epoch_size"]), changes, str(state["given"]), excluded)


class _Rest:
    """What is left of a source of which rows are excluded."""

    def __init__(self, length: int, shuffle: Shuffle, source: int, skips: Skips) -> None:
        self._length, self._shuffle, self._source = length, shuffle, source
        each = [(one.since, one.rows) for one in skips.exclusions]
        sizes = [rows.size for _, rows in each]
        self._rows = np.concatenate([rows for _, rows in each]).astype(np.uint64) if each else NO_ROWS
        begins = np.array([[since.epoch, since.num_samples] for since, _ in each], np.int64).reshape(-1, 2)
        self._since = np.repeat(begins, sizes, axis=0).T
        self._known: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        """The epoch whose gaps were computed last, and these."""
        stretches = [(0, 0, length)]  # from which epoch on, how many came before, how many an epoch has
        for turn in sorted({since.epoch for since, _ in each}):
            epoch, before, size = stretches[-1]
            before += (turn - epoch) * size
            left = length - int((self._gaps(np.array([turn], np.uint64)) < length).sum())
            past = sum(rows.size for since, rows in each if since.epoch <= turn)
            stretches += [(turn, before, left), (turn + 1, before + left, length - past)]
        self._stretches = np.array(stretches, np.uint64).T

    def at(self, counts: Positions) -> tuple[Positions, Positions]:
        """Return the source's epoch, and the place in its order, of its samples before which so many came."""
        firsts, befores, sizes = self._stretches
        here = np.searchsorted(befores, counts, side="right") - 1
        epochs, places = np.divmod(counts - befores[here], sizes[here])
        epochs += firsts[here]
        turns, which = np.unique(epochs, return_inverse=True)
        stride, num_rows = 2 * self._length + 1, len(self._rows)
        kept, per_chunk = places.astype(np.int64), max(1, MAX_GAPS // max(num_rows, 1))
        for begin in range(0, len(turns), per_chunk):
            gaps = self._gaps(turns[begin : begin + per_chunk]) - np.arange(num_rows)
            members = np.flatnonzero((which >= begin) & (which < begin + per_chunk))
            lines = which[members] - begin
            borders = (gaps + stride * np.arange(len(gaps))[:, None]).ravel()
            found = np.searchsorted(borders, kept[members] + stride * lines, side="right") - lines * num_rows
            places[members] += found.astype(np.uint64)
        return epochs, places

    def _gaps(self, turns: Positions) -> NDArray[np.int64]:
        """Return the places of each epoch that are left out, sorted, `(epochs, rows)`. Others are twice the length."""
        known = self._known
        if len(turns) == 1 and int(turns[0]) == known[0]:
            return known[1]
        num_rows, num_turns = len(self._rows), len(turns)
        sources, sizes = (np.full(num_turns * num_rows, one, np.uint64) for one in (self._source, self._length))
        epochs, rows = np.repeat(turns, num_rows), np.tile(self._rows, num_turns)
        places = _visited(self._shuffle, sources, sizes, epochs, rows, inverse=True).astype(np.int64)
        gaps, (epoch, place) = places.reshape(num_turns, num_rows), self._since
        later = turns.astype(np.int64)[:, None] - epoch
        gaps = np.sort(np.where((later > 0) | ((later == 0) & (gaps >= place)), gaps, 2 * self._length), axis=1)
        if num_turns == 1:
            self._known = int(turns[0]), gaps
        return gaps


def _visited(
    shuffle: Shuffle,
    sources: NDArray[Any],
    sizes: Positions,
    epochs: Positions,
    places: Positions,
    *,
    inverse: bool = False,
) -> Positions:
    """Return the rows that the sources' orders have at these places; with `inverse`, the places of these rows."""
    numbers = sources.astype(np.uint64)

    def key(purpose: Purpose) -> Positions:
        return derive_keys(derive_keys(derive_key(shuffle.seed, _MIXED, purpose.value), numbers), epochs)

    return visit(shuffle, places, sizes, key, inverse=inverse)


def _shown_sources(mix: Mix) -> str:
    return ", ".join(f"{name} ({length:,})" for name, length in zip(mix.names, mix.lengths, strict=True))


def check_weights(weights: Weights, num_sources: int) -> None:
    """Raise ValueError if they aren't weights of so many sources."""
    if len(weights) != num_sources or min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise ValueError(f"weights={list(weights)} must be {num_sources} numbers of at least 0, and not all of them 0")


# Which source ---------------------------------------------------------------------------------------------------------


class _Tables(NamedTuple):
    """The trees of all segments, in arrays. In each tree, node `k` is the leaf of source `k`, and others follow."""

    starts: NDArray[np.uint64]
    """`(segments,)` positions at which they begin."""
    roots: NDArray[np.int64]
    """`(segments,)`."""
    offsets: NDArray[np.int64]
    """`(segments,)` which row of `forks` and `children` is node 0 of each tree."""
    before: NDArray[np.uint64]
    """`(segments, sources)` how many samples of each source came before the segment."""
    owed: NDArray[np.float64]
    """`(segments, sources)` what each source should have had more before the segment."""
    forks: NDArray[np.uint64]
    """`(nodes, 3)`: of the first n samples of a node, `(share * n + phase) // whole` are its left child's."""
    children: NDArray[np.int64]
    """`(nodes, 2)`."""

    @classmethod
    def of(cls, changes: Changes, owed: Weights) -> _Tables:
        """Return the tables of these changes. Those made last are continued, as far as their changes are the same."""
        known, segments = _LAST.get(owed, ((), []))
        pairs = enumerate(zip(known, changes, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), min(len(known), len(changes)))
        segments, (last, last_weights) = segments[:same], changes[max(same - 1, 0)]
        for begin, weights in changes[same:]:
            end, before, owed_now = 0, [0] * len(owed), owed
            if segments:
                _, top, start, earlier, owed_then, grown, sides = segments[-1]
                counts = [0] * len(owed)
                _count(int(top[0]), begin - last, grown, sides, counts)
                end, before = int(start[0]) + len(grown), (earlier[0] + np.array(counts, np.uint64)).tolist()
                owed_now = _owed_after(begin - last, counts, last_weights, tuple(owed_then[0].tolist()))
            forks, children = [(0, 0, 1)] * len(owed), [(0, 0)] * len(owed)
            root = _plant(weights, owed_now, forks, children)
            rows: list[Any] = [[begin], [root], [end], [before], [owed_now], forks, children]
            segments.append([np.array(row, dtype) for row, dtype in zip(rows, _DTYPES, strict=True)])
            last, last_weights = begin, weights
        if len(changes) > 1:
            _LAST.clear()  # in a process, one mixture changes at a time
            _LAST[owed] = changes, segments
        return cls(*map(np.concatenate, zip(*segments, strict=True)))

    def at(self, positions: Positions) -> tuple[NDArray[np.int64], Positions]:
        """Return the source at each position, and how many of its samples came before."""
        segments = np.searchsorted(self.starts, positions, side="right") - 1
        nodes, counts = self.roots[segments], positions - self.starts[segments]
        num_sources, active = self.before.shape[1], np.arange(len(positions))
        while (active := active[nodes[active] >= num_sources]).size:
            at, count = self.offsets[segments[active]] + nodes[active], counts[active]
            share, phase, whole = self.forks[at].T
            rounds = count // whole
            rest = (count - rounds * whole) * share + phase
            left = rounds * share + rest // whole
            is_left = rest % whole + share >= whole  # so the next sample is the left child's
            counts[active] = np.where(is_left, left, count - left)
            nodes[active] = np.where(is_left, *self.children[at].T)
        return nodes, counts + self.before[segments, nodes]

    def counts(self, position: int) -> list[int]:
        """Return how many samples of each source come before a position."""
        segment = int(np.searchsorted(self.starts, np.uint64(position), side="right")) - 1
        counts: list[int] = self.before[segment].tolist()
        forks, children = (nodes[self.offsets[segment] :] for nodes in (self.forks, self.children))
        _count(int(self.roots[segment]), position - int(self.starts[segment]), forks, children, counts)
        return counts


_DTYPES = np.uint64, np.int64, np.int64, np.uint64, np.float64, np.uint64, np.int64
_LAST: dict[Weights, tuple[Changes, list[list[NDArray[Any]]]]] = {}
"""The rows of the tables made last, by segment. A loop may change weights a thousand times."""


def _plant(weights: Weights, owed: Weights, forks: list[tuple[int, int, int]], children: list[tuple[int, int]]) -> int:
    """Add the nodes of a segment's tree. Return its root. `owed`: what each source should have had more before."""
    is_exact = all(weight == int(weight) for weight in weights)
    if is_exact:
        divisor = math.gcd(*map(int, weights))
        weights = tuple(weight // divisor for weight in weights)
        is_exact = sum(weights) <= MAX_EXACT
    heap = [(weight, number, debt) for number, (weight, debt) in enumerate(zip(weights, owed, strict=True)) if weight]
    heapq.heapify(heap)
    while len(heap) > 1:
        right, right_node, right_debt = heapq.heappop(heap)
        left, left_node, left_debt = heapq.heappop(heap)
        both, debt = left + right, left_debt + right_debt
        whole = int(both) if is_exact else 1 << _SHARE_BITS
        share = int(left) if is_exact else min(round(left / both * whole), whole - 1)
        phase = whole // 2 + round((left_debt - left / both * debt) * whole)
        heapq.heappush(heap, (both, len(forks), debt))
        forks.append((share, min(max(phase, 0), whole - 1), whole))
        children.append((left_node, right_node))
    return heap[0][1]


def _count(node: int, num_samples: int, forks: Any, children: Any, counts: list[int]) -> None:
    """Add how many of the first samples of a node each source has."""
    waiting = [(node, num_samples)]
    while waiting:
        node, number = waiting.pop()
        if node < len(counts):
            counts[node] += number
        elif number:
            share, phase, whole = map(int, forks[node])
            left = (share * number + phase) // whole
            waiting += zip(map(int, children[node]), (left, number - left), strict=True)


def _owed_after(num_samples: int, counts: list[int], weights: Weights, owed: Weights) -> Weights:
    """Return what each source should have had more after so many samples of a segment, of which it had its count."""
    total, each = math.fsum(weights), zip(owed, weights, counts, strict=True)
    return tuple(debt + weight / total * num_samples - count for debt, weight, count in each)


class MixPhase:
    """Samples of streams, as long as the weights are constant."""

    def __init__(self, weights: Weights, owed: Weights) -> None:
        """Begin. `owed`: what each source should have had more before."""
        self._weights, self._owed = weights, owed
        self._tables = _Tables.of(((0, weights),), owed)

    def sources(self, num_before: int) -> Iterator[int]:
        """Return the sources of the samples after so many, without end."""
        for begin in itertools.count(num_before, _BLOCK):
            yield from self._tables.at(np.arange(begin, begin + _BLOCK, dtype=np.uint64))[0].tolist()

    def owed_after(self, num_samples: int) -> Weights:
        """Return what each source should have had more after so many samples."""
        return _owed_after(num_samples, self._tables.counts(num_samples), self._weights, self._owed)


# The dataset ----------------------------------------------------------------------------------------------------------


class Mixture:
    """Several map-style datasets with weights, for `SwiftLoader` and `ShuffleBatchSampler`.

        mixture = Mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
        loader = SwiftLoader(dataset=mixture, batch_size=32, worker_per_consumer=4, seed=0)

    Of any number of samples, each source has had its share within one or two samples. Each source has its own epochs:
    once all its rows came, it begins again, in a new order. A mixture's epoch is `epoch_size` samples, and the next one
    goes on where it ended.

    Its indices also say how often a source was visited before: `(epoch + 1) * 10**16 + source * 10**12 + row`. Only
    `SwiftLoader`, `ShuffleBatchSampler` and `ShuffleSampler` know which come next, and `locate` names their rows. Other
    samplers count from 0 and know no weights, so `mixture[0]` is an error. `mixture.rows` is what such samplers read.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | Mapping[int, Mapping[str, float]] | None = None,
        *,
        temperature: float = 1.0,
        ramp: bool = False,
        epoch_size: int | None = None,
    ) -> None:
        """Take the lengths of the sources.

        Args:
            sources: 1 to 1,000 map-style datasets by name, each with 1 to 10**12 rows.
            weights: How often each source comes, relative to the others; 0 leaves it out. Or several of them, by the
                sample from which on they hold: `{0: {"web": 1, "code": 0}, 1_000_000: {"web": 2, "code": 1}}`. Samples
                are counted over all ranks and epochs: step `s` begins at sample `s * batch_size * ranks`. Default: the
                lengths. Integers with a sum of at most 2**31 give exact shares.
            temperature: Each weight is raised to the power `1 / temperature`. More than 1 makes small sources come more
                often.
            ramp: True changes the weights linearly from each given sample to the next, in 64 steps.
            epoch_size: Samples in an epoch of the mixture, over all ranks. Default: the sum of the lengths.

        Raises:
            TypeError: A source isn't a map-style dataset, or has no name.
            ValueError: A source is empty, or weights don't name the sources.
        """
        lengths = _lengths_of(sources)
        self.sources = dict(sources)
        """The datasets by name."""
        if weights is None:
            weights = dict(zip(sources, map(float, lengths), strict=True))
        changes = changes_of(weights, tuple(sources), temperature, ramp=ramp)
        size = sum(lengths) if epoch_size is None else as_integer(epoch_size)
        if size is None or not 1 <= size < MAX_POSITION:
            raise ValueError(f"epoch_size={epoch_size!r} must be an integer of at least 1")
        digest = hashlib.blake2b(repr(changes).encode(), digest_size=8).hexdigest()
        self._mix = Mix(tuple(sources), lengths, size, changes, digest)

    def __len__(self) -> int:
        """Return the number of samples in an epoch of the mixture."""
        return self._mix.epoch_size

    def __getitem__(self, index: int) -> Any:
        """Return the sample of an index that a loader, a sampler or `index` gave.

        What a source raises has a note that names the row.

        Raises:
            ValueError: It is a row number, which would ignore the weights.
            IndexError: There is no such row.
        """
        if index < _EPOCH_UNIT:
            raise ValueError(
                f"{index} is no index of this Mixture, but a row number, as from a sampler or a wrapper that doesn't "
                f"know the weights: they would be ignored. Give SwiftLoader(dataset=mixture), or DataLoader(mixture, "
                f"batch_sampler=ShuffleBatchSampler(mixture, batch_size)), which also split it over the ranks; wrap "
                f"the sources, not the mixture. Without the weights, read mixture.rows"
            )
        name, row, _ = self.locate(index)
        try:
            return self.sources[name][row]
        except Exception as error:
            noted(error, f"of the mixture's source {name!r}, row {row}")
            raise

    def locate(self, index: int) -> Row:
        """Return which row an index is, such as one of `loader.batch_indices`, or an index of `rows`.

        Raises:
            IndexError: There is no such row.
        """
        number, row, epoch = self._mix.locate(index)
        return Row(self._mix.names[number], row, epoch)

    def index(self, source: str, row: int) -> int:
        """Return an index of a row, for `mixture[index]` and `loader.exclude`.

        Raises:
            IndexError: There is no such source or row.
        """
        number = self._mix.names.index(source) if source in self.sources else -1
        if number < 0 or not 0 <= row < self._mix.lengths[number]:
            raise IndexError(f"{source!r} has no row {row}; the sources are {_shown_sources(self._mix)}")
        return _EPOCH_UNIT + number * _SOURCE_UNIT + row

    @property
    def rows(self) -> MixtureRows:
        """All rows of all sources one after the other, each once, as a map-style dataset. It has no weights."""
        return MixtureRows(self)

    def __repr__(self) -> str:
        return f"<Mixture: {self._mix.shown(0)}, {len(self):,} samples>"


class MixtureRows:
    """The rows of a mixture's sources, as torch's `ConcatDataset` has them."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture, self._numbers = mixture, range(sum(_lengths_of(mixture.sources)))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int) -> Any:
        name, row, _ = self._mixture.locate(self._numbers[row])
        return self._mixture[self._mixture.index(name, row)]


def _lengths_of(sources: Any) -> tuple[int, ...]:
    """Return the lengths of the sources. Raises as `Mixture` does."""
    if not isinstance(sources, Mapping) or not all(isinstance(name, str) for name in sources):
        raise TypeError("sources must be a dict of datasets by name, such as {'web': web, 'code': code}")
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise ValueError(f"there are {len(sources)} sources; a mixture has 1 to {MAX_SOURCES}")
    for name, source in sources.items():
        if isinstance(source, Mixture):
            raise TypeError(
                f"the source {name!r} is a Mixture, whose weights would be ignored; name its sources in this one, with "
                f"weights of their own, or give its rows without weights: {name!r}: mixture.rows"
            )
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise TypeError(
                f"the source {name!r} is a {type(source).__name__}; it must be a map-style dataset, which has "
                f"__getitem__(index) and __len__(). For streams, use Pipeline.mix"
            )
        if not 1 <= len(source) <= MAX_ROWS:
            raise ValueError(f"the source {name!r} has {len(source)} rows; a source has 1 to {MAX_ROWS:,}")
    return tuple(map(len, sources.values()))


def mix_of(dataset: Any) -> Mix | None:
    """Return what the order of a mixture depends on; None for any other dataset."""
    return dataset._mix if isinstance(dataset, Mixture) else None  # noqa: SLF001 - of this module


def changes_of(weights: Any, names: tuple[str, ...], temperature: float, *, ramp: bool) -> Changes:
    """Return the changes that weights by name mean, or several of them by the sample from which on they hold."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be a positive number")
    given: Any = {0: weights}
    if isinstance(weights, Mapping) and weights and all(as_integer(begin) is not None for begin in weights):
        given = {as_integer(begin): chosen for begin, chosen in weights.items()}
    if 0 not in given or min(given) < 0 or max(given) >= MAX_POSITION:
        raise ValueError(f"weights change at the samples {', '.join(map(str, given))}; one of them must be 0")
    changes: list[tuple[int, Weights]] = []
    for begin in sorted(given):
        chosen = weights_of(given[begin], names, temperature)
        if ramp and changes:
            changes += _ramp(changes[-1], (begin, chosen))
        changes.append((begin, chosen))
    return tuple(changes)


def weights_of(given: Any, names: tuple[str, ...], temperature: float = 1.0) -> Weights:
    """Return weights in the order of the sources, from a dict by name."""
    if not isinstance(given, Mapping) or set(given) != set(names):
        has = ", ".join(map(repr, given)) if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise ValueError(f"weights must name each source once: {', '.join(map(repr, names))}; they are {has}")
    weights = tuple(float(given[name]) for name in names)
    check_weights(weights, len(names))
    return weights if temperature == 1 else tuple((one / max(weights)) ** (1 / temperature) for one in weights)


def _ramp(begin: tuple[int, Weights], end: tuple[int, Weights]) -> list[tuple[int, Weights]]:
    """Return the steps from one change to the next. Each has the weights of its middle."""
    (first, before), (last, after) = begin, end
    steps = []
    for piece in range(RAMP_PIECES):
        part = (piece + 0.5) / RAMP_PIECES
        shares = tuple(
            (1 - part) * one / sum(before) + part * other / sum(after) for one, other in zip(before, after, strict=True)
        )
        steps.append((first + (last - first) * piece // RAMP_PIECES, shares))
    return [one for one, following in zip(steps, [*steps[1:], end], strict=True) if one[0] < following[0]]
