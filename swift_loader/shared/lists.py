"""Long lists in flat memory, which processes share also while they read it.

Reading an object of a list changes its reference count, so each forked worker soon has its own copy of the list's
pages. A `SharedList` has no objects: it has one array of bytes, and one of the offsets at which each element ends, in
memory that all processes map. An access makes a new object of a few bytes.
"""

from __future__ import annotations

import ctypes
import gc
import io
import operator
import pickle
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partialmethod
from hashlib import blake2b
from itertools import chain, islice, repeat
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.errors import EncodeError, nbytes_text
from swift_loader.ranks.ranks import torch_distributed
from swift_loader.shared.memory import SharedMemory, shared_with_ranks
from swift_loader.transport.by_value import Definitions, travels_by_value

LONG = 5_000
"""Elements from which on `share_lists` replaces a list: a shorter one takes less than what a process takes anyway."""

_CHUNK = 4096
"""Elements that are encoded at once. The objects of a generator are there only as long."""

_TRIMMED = 1 << 20
"""Bytes of a list from which on freed memory goes back to the system."""

_NUMBERS: dict[type, Any] = {int: np.dtype(np.int64), float: np.dtype(np.float64), bool: np.dtype(np.bool_)}
_INT64 = range(-(1 << 63), 1 << 63)

_HINT = "Keep files, locks and connections out of the list, or leave it an ordinary list, without shared=True"

_Element_co = TypeVar("_Element_co", covariant=True)
_State = tuple[SharedMemory, type, int, tuple[Any, ...], "SharedList[Any] | None"]
"""The memory, the type of all elements (`object`: they are pickled), their number, and what their pickles refer to:
code, and what several of them hold."""

_LIGHT = (int, float, complex, bool, type(None), type, FunctionType, ModuleType)
_NUM_REFS = next(map(sys.getrefcount, [object()]))
"""What `getrefcount` says so of an object that one list holds."""
_LONG_PART = 100
"""Bytes from which on it is worth it to keep something once. Then an access takes 3 us longer."""


class SharedList(Sequence[_Element_co]):
    """A list that can't be changed, in memory that processes share.

    All workers, and the training process, use the same copy. It doesn't grow while they read it, as a list does:

        class Photos:
            def __init__(self, root):
                self.paths = SharedList(sorted(glob.glob(f"{root}/**/*.jpg", recursive=True)))

    It takes what a list holds. It is smallest and fastest if all elements are `str`, or all `bytes`, `int`, `float` or
    `bool`. Anything else is pickled, element by element: tuples, dicts, None, objects of your own classes, of which the
    script may define some. What several elements of a given list or tuple are or hold is kept once.

    Each access makes a new object, of the same type and value as the original. So changing that object changes nothing
    in the list. `nbytes` says how much memory the elements take. It has what a list has, but what changes a list raises
    `TypeError`. A slice is an ordinary list, and so is what `+`, `*` and `copy` return.

    It reaches another process by address, so pickling it takes no time: the process that made it must be on the same
    machine, and live. In a file, its pickle is of no use. Ranks of torch.distributed on one machine share the memory of
    equal lists. It needs Linux, and a file descriptor in the process that makes it. The memory is freed with the last
    process that uses it.
    """

    def __init__(self, objects: Iterable[_Element_co]) -> None:
        """Copy the objects into shared memory.

        Args:
            objects: The elements. From a generator, a few thousand of them exist at a time, and each is kept by itself.

        Raises:
            EncodeError: An element can't be pickled. The message names it.
            SharedMemoryFull: There is not enough memory, or no file descriptor is left.
            SharedMemoryLost: When it is unpickled: the process that made it has ended, or is on another machine.
        """
        self._set_up(*_encode_list(objects, "objects"))

    @classmethod
    def _of(cls, *state: Any) -> SharedList[Any]:
        shared: SharedList[Any] = cls.__new__(cls)
        shared._set_up(*state)
        return shared

    def _set_up(self, *state: Any) -> None:
        memory, kind, count, things, parts = state
        self._state: _State = (memory, kind, count, things, parts)
        """It keeps the memory mapped for `_read`."""
        self._places = range(count)
        self._read = _reader(memory.bytes.data.toreadonly(), kind, count, things, parts)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the elements take, in all processes together."""
        parts = self._state[-1]
        return self._state[0].address.nbytes + (0 if parts is None else parts.nbytes)

    @overload
    def __getitem__(self, index: int) -> _Element_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Element_co]: ...
    def __getitem__(self, index: Any) -> Any:
        try:
            place = self._places[index]  # as a list: negative ones, what has __index__, slices
        except IndexError:
            raise IndexError("SharedList index out of range") from None
        return list(map(self._read, place)) if type(place) is range else self._read(place)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[_Element_co]:
        yield from map(self._read, self._places)  # the generator keeps the memory, the map doesn't

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, SharedList)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def copy(self) -> list[_Element_co]:
        """Return an ordinary list."""
        return list(self)

    def _as_lists(self, calculate: Callable[[Any, Any], Any], other: object, *, is_swapped: bool = False) -> Any:
        own, other = list(self), list(other) if isinstance(other, SharedList) else other
        return calculate(other, own) if is_swapped else calculate(own, other)

    __add__, __mul__ = partialmethod(_as_lists, operator.add), partialmethod(_as_lists, operator.mul)
    __radd__, __rmul__ = partialmethod(_as_lists, operator.add, is_swapped=True), __mul__
    __lt__, __le__ = partialmethod(_as_lists, operator.lt), partialmethod(_as_lists, operator.le)
    __gt__, __ge__ = partialmethod(_as_lists, operator.gt), partialmethod(_as_lists, operator.ge)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "a SharedList can't be changed, because other processes read it; change a copy, list(shared), and make "
            "another SharedList of it"
        )

    if not TYPE_CHECKING:  # which then refuses them, too
        append = clear = extend = insert = pop = remove = reverse = sort = _refuse
        __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __deepcopy__(self, memo: object) -> SharedList[_Element_co]:
        return self  # nothing in it can change

    def __reduce__(self) -> tuple[Any, ...]:
        return self._of, self._state

    def __repr__(self) -> str:
        return f"<SharedList of {len(self):,} {self._state[1].__name__}, {nbytes_text(self.nbytes)}>"


def _reader(
    memory: memoryview, kind: type, count: int, things: tuple[Any, ...], parts: SharedList[Any] | None
) -> Callable[[int], Any]:
    """Return what returns the element at a place: a new object, which doesn't refer to the memory."""
    if kind in _NUMBERS:
        return memory[: count * _NUMBERS[kind].itemsize].cast(_NUMBERS[kind].char).__getitem__
    begin = 8 * (count + 1)
    ends, data = memory[:begin].cast("q"), memory[begin:]
    if kind is str:
        return lambda place: str(data[ends[place] : ends[place + 1]], "utf-8", "surrogatepass")
    if kind is bytes:
        return lambda place: bytes(data[ends[place] : ends[place + 1]])
    buffers = repeat(things) if things else None
    if parts is None:
        return lambda place: pickle.loads(data[ends[place] : ends[place + 1]], buffers=buffers)

    def read_with_parts(place: int) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(data[ends[place] : ends[place + 1]]), buffers=buffers)
        unpickler.persistent_load = cache(parts.__getitem__)  # type: ignore[method-assign]  # once in an element
        return unpickler.load()

    return read_with_parts


def _encode_list(objects: Iterable[Any], name: str) -> _State:
    """Return the state of a list, with what several elements are or hold in a list of its own."""
    parts = list[Any]()
    if isinstance(objects, (list, tuple)):  # else elements may be gone, and others have their addresses
        counts = Counter(map(id, _heavy(objects)))
        repeated = {id(one): one for one in _heavy(objects) if counts[id(one)] > 1}
        with suppress(Exception):  # of what can't be pickled, `_encode` tells
            parts.extend(one for one in repeated.values() if len(_Pickler().pickled(one)) >= _LONG_PART)
    return _encode(objects, name, object if parts else None, parts)


def _heavy(objects: Sequence[Any]) -> Iterator[Any]:
    """Yield the elements, and what they hold, apart from numbers, code, short text and what only one thing holds."""
    for begin in range(0, len(objects), _CHUNK):
        chunk = list(objects[begin : begin + _CHUNK])
        chunk += gc.get_referents(*{id(one): one for one in chunk}.values())
        for one, num_refs in zip(chunk, list(map(sys.getrefcount, chunk)), strict=True):
            if num_refs <= _NUM_REFS + 1 or isinstance(one, _LIGHT):  # one is the chunk's
                continue
            if not (isinstance(one, (str, bytes)) and len(one) < _LONG_PART):
                yield one


def _encode(objects: Iterable[Any], name: str, kind: type | None = None, parts: Sequence[Any] = ()) -> _State:
    """Return the state of a list. `name`: of the objects, for errors. `kind`: None: that of the first elements.

    `parts`: what is kept apart, because several elements are or hold it.
    """
    pieces, lengths, count, pickler = deque[NDArray[np.uint8]](), [np.zeros(1, np.int64)], 0, _Pickler(parts)

    def finished() -> _State:
        if kind not in _NUMBERS:
            pieces.appendleft(np.concatenate(lengths).cumsum().view(np.uint8))
            lengths.clear()
        nbytes = sum(map(len, pieces))
        memory = SharedMemory((pieces.popleft() for _ in range(len(pieces))), nbytes)
        if nbytes >= _TRIMMED and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # in less than 1 ms. Else glibc may keep the freed pieces, as much again
        if torch_distributed() is not None:
            memory = shared_with_ranks(memory, blake2b(memory.bytes.data, digest_size=16).hexdigest())
        kept_apart = SharedList._of(*_encode(parts, f"a part of {name}", object)) if parts else None  # noqa: SLF001
        return memory, kind or object, count, pickler.things(), kept_apart

    source = iter(objects)
    while values := list(islice(source, _CHUNK)):
        found = _kind_of(values)
        kind = kind or found
        if kind not in (found, object):
            before = SharedList._of(*finished())  # noqa: SLF001
            return _encode(chain(before, values, source), name, object)
        if kind in _NUMBERS:
            pieces.append(np.array(values, _NUMBERS[kind]).view(np.uint8))
        else:
            encoded = _encoded(values, kind, pickler, name, count)
            lengths.append(np.fromiter(map(len, encoded), np.int64))
            pieces.append(np.frombuffer(b"".join(encoded), np.uint8))
        count += len(values)
    return finished()


def _kind_of(values: list[Any]) -> type:
    """Return the type that all these values have, if there is a form for it; else `object`."""
    first, *others = set(map(type, values))
    if others or (first is int and not (min(values) in _INT64 and max(values) in _INT64)):
        return object
    return first if first in (str, bytes, *_NUMBERS) else object


def _encoded(values: list[Any], kind: type, pickler: _Pickler, name: str, first: int) -> list[bytes]:
    if kind is str:
        return [value.encode("utf-8", "surrogatepass") for value in values]
    if kind is bytes:
        return values
    encoded: list[bytes] = []
    try:
        encoded.extend(map(pickler.pickled, values))
    except Exception as error:
        index = len(encoded)
        path, culprit, reason = find_unencodable(values[index], error, pickler.pickled)
        raise EncodeError(
            f"{name}[{first + index}]{path} is a {type_name(culprit)}, which can't be shared "
            f"({type(reason).__name__}: {reason})",
            _HINT,
        ) from error
    return encoded


class _Pickler(pickle.Pickler):
    """Pickles elements. Their pickles refer by number to classes and functions that other processes can't import."""

    def __init__(self, parts: Sequence[Any] = ()) -> None:
        self._stream, self._definitions = io.BytesIO(), Definitions()
        self._mark = mark = pickle.PickleBuffer(bytearray(1))
        """Stands for all these things. `pickle.loads` puts there what `buffers` gives it."""
        super().__init__(self._stream, protocol=5, buffer_callback=lambda buffer: buffer is not mark)
        if parts:
            numbers = {id(part): number for number, part in enumerate(parts)}
            self.persistent_id = lambda thing: numbers.get(id(thing))  # type: ignore[method-assign]

    def pickled(self, value: object) -> bytes:
        """Return the pickle of an element."""
        self.clear_memo()
        self._stream.seek(0)
        self._stream.truncate()
        self.dump(value)
        return self._stream.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and travels_by_value(obj):
            return operator.getitem, (self._mark, self._definitions.add(obj))
        return NotImplemented

    def things(self) -> tuple[Any, ...]:
        """Return what the pickles refer to, by number."""
        return tuple(self._definitions[number] for number in range(len(self._definitions)))


# The lists of a dataset -----------------------------------------------------------------------------------------------

_PLAIN = (str, bytes, list, tuple, dict)


def share_lists(dataset: Any) -> Any:
    """Replace the long lists of a dataset, and of those that it holds, by shared ones. Return it, or what replaces it.

    A list of arrays, tensors or datasets stays: an access would copy the whole element. Raises `EncodeError` that names
    the list if it can't be shared.
    """
    shared: dict[int, tuple[list[Any], SharedList[Any]]] = {}
    """By the address of the list, which is kept so that no other gets the address."""
    whole = SimpleNamespace(dataset=dataset)
    seen, to_see = dict[int, Any](), [("dataset", dataset), ("", whole)]
    while to_see:
        path, thing = to_see.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        for name, value in _attributes(thing):
            if type(value) is list and len(value) >= LONG and not any(map(_is_indexable, set(map(type, value)))):
                if id(value) not in shared:
                    state = _encode_list(value, f"{path}.{name}".lstrip("."))
                    shared[id(value)] = value, SharedList._of(*state)  # noqa: SLF001
                object.__setattr__(thing, name, shared[id(value)][1])
            else:
                held = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [value]
                to_see += [(f"{path}.{name}", one) for one in held if _is_dataset(one)]
    return whole.dataset


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    slots = (vars(kind).get("__slots__", ()) for kind in type(thing).__mro__)
    names = chain.from_iterable([one] if isinstance(one, str) else one for one in slots)
    found = [(name, getattr(thing, name)) for name in names if hasattr(thing, name)]
    return [*found, *getattr(thing, "__dict__", {}).items()]


def _is_indexable(kind: type) -> bool:
    return hasattr(kind, "__getitem__") and not issubclass(kind, _PLAIN)


def _is_dataset(thing: object) -> bool:
    return _is_indexable(type(thing)) and hasattr(type(thing), "__len__") and not isinstance(thing, np.ndarray)
