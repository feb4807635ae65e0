"""Everything that a process needs to build the dataset, as one block of bytes.

A template gets it in an anonymous file, so nothing is written to a folder; a worker that is called, by other means.
Layout: bulk data | environment (pickle) | structure (the codec's, with code). The environment is read before the
structure, because reading the structure runs the user's code.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import get_start_method, process, util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.errors import EncodeError, NoDescriptorsLeft
from swift_loader.runtime import handled_signals, is_interrupt, raise_interrupt
from swift_loader.transport.by_value import MAIN_MODULES, Definitions, can_be_found
from swift_loader.transport.channel import explaining_limits
from swift_loader.transport.codec import decode_with_code, encode_with_code, try_out
from swift_loader.transport.messages import Message
from swift_loader.transport.reducers import Inherited, handing_over
from swift_loader.transport.segments import Segment, capacity_for, new_file

_OPTIONS = ".options."
"""Path in a worker's set-up to the options, which have the names that the user knows."""

_HINT = (
    "Open files and connections where they are used, and keep them out of what is sent (`__getstate__`). SwiftLoader "
    "takes dataset_class= and dataset_kwargs= instead, and runs the constructor in its own processes. "
    'start_method="fork" (DataLoader: multiprocessing_context="fork") sends nothing. Or use 0 workers'
)


@dataclass(frozen=True, slots=True)
class Environment:
    """Settings of the trainer's interpreter that a new interpreter must copy, beyond its command line."""

    argv: list[str]
    torch_dtype: str = ""
    """torch's default dtype; empty for float32, torch's initial one."""
    torch_threads: int = 1
    """Number of threads that torch uses in a worker."""
    recursion_limit: int = 1000
    """Python's recursion limit in the trainer."""
    modules: tuple[str, ...] = ()
    """The modules that define the dataset and the callables. They are imported before anything else is rebuilt."""
    preparation: dict[str, Any] = field(default_factory=dict)
    """What `multiprocessing.spawn.prepare` takes."""
    handled: tuple[int, ...] = ()
    """The signals that the program handles."""

    @classmethod
    def of_this_process(cls, modules: tuple[str, ...] = ()) -> Environment:
        """Return the settings of this process, the trainer."""
        torch = sys.modules.get("torch")
        dtype = "" if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")
        dtype = "" if dtype == "float32" else dtype
        argv = list(getattr(sys, "argv", [""]))
        limit = sys.getrecursionlimit()
        return cls(argv, dtype, chosen_threads(), limit, modules, _preparation(), handled_signals())


def _preparation() -> dict[str, Any]:
    """Return what `multiprocessing.spawn.get_preparation_data` does, if it doesn't fix the program's start method."""
    data = {"authkey": bytes(process.current_process().authkey), "orig_dir": process.ORIGINAL_DIR}  # type: ignore[attr-defined]
    data |= {"log_to_stderr": util._log_to_stderr, "start_method": get_start_method(allow_none=True)}  # type: ignore[attr-defined]  # noqa: SLF001
    logger = util._logger  # type: ignore[attr-defined]  # noqa: SLF001
    data["log_level"] = None if logger is None else logger.getEffectiveLevel()
    return {name: value for name, value in data.items() if value is not None}


def chosen_threads() -> int:
    """Return the number of torch threads that the user set by OMP_NUM_THREADS or `torch.set_num_threads`; else 1.

    The default is 1 because many workers with many threads each compete for the cores.
    """
    torch = sys.modules.get("torch")
    by_environment = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and not by_environment:
        number: int = torch.get_num_threads()
        return 1 if number in _usual_threads() else number
    return int(by_environment) if by_environment.isdecimal() and int(by_environment) else 1


def _usual_threads() -> set[int]:
    """Return the numbers of threads that torch may start with: one per core, hyper-threads counted or not."""
    counts = {os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        counts.add(len(os.sched_getaffinity(0)))
    return counts | {max(1, count // 2) for count in counts}


@dataclass(frozen=True, slots=True)
class PayloadLayout(Message):
    """Announces a payload, whose descriptor is attached: the sizes of its parts in bytes, in the order of the file."""

    total_nbytes: int
    bulk_nbytes: int
    environment_nbytes: int
    structure_nbytes: int
    num_blocks: int
    num_descriptors: int = 1
    """Those attached: the file's, then those that are handed over."""
    num_definitions_before: int = 0
    """How many definitions the trainer had before."""
    worker: int | None = None
    """The serial number of the worker that its receiver is to be; None: it is to be a template."""

    def __post_init__(self) -> None:
        if self.ends[-1] > self.total_nbytes:
            raise ValueError(f"the parts of a payload of {self.total_nbytes} bytes end at {self.ends[-1]}")

    @property
    def ends(self) -> tuple[int, int, int]:
        """Offset in bytes at which each part ends."""
        environment = self.bulk_nbytes + self.environment_nbytes
        return self.bulk_nbytes, environment, environment + self.structure_nbytes


@dataclass(frozen=True, eq=False, slots=True)
class Payload:
    """What processes build the dataset from: an object and the classes and functions that it needs, as bytes."""

    layout: PayloadLayout
    memory: NDArray[np.uint8]
    """`(nbytes,)`."""
    segment: Segment | None = None
    """The private mapping that the memory is, which lasts as long as this. None: the memory owns itself."""
    handed: tuple[int, ...] = ()
    """Descriptors that what is read takes duplicates of. Owned until `read`."""

    @classmethod
    def in_file(cls, layout: PayloadLayout, descriptor: int, *handed: int) -> Payload:
        """Map the payload in a file of `write_payload`, and close the descriptor."""
        segment = Segment.attach(descriptor, layout.total_nbytes, private=True)
        return cls(layout, segment.array(), segment, handed)

    def environment(self) -> Environment:
        """Return the environment. Reading it needs nothing but the standard library."""
        start, end, *_ = self.layout.ends
        environment = pickle.loads(self.memory.data[start:end])
        if not isinstance(environment, Environment):
            raise TypeError(f"the payload begins with a {type(environment).__name__} instead of an Environment")
        return environment

    def read(self) -> tuple[Any, Definitions]:
        """Return the object and the definitions, as they were sent. The object's arrays are views of the memory."""
        bulk, begin, end = self.layout.ends
        meta, blocks = self.memory.data[begin:end], self.memory[:bulk]
        Inherited.received = self.handed
        try:
            content, things = decode_with_code(meta, self.layout.num_blocks, blocks)
        finally:
            for descriptor in self.handed:
                os.close(descriptor)
        return content, Definitions(things, self.layout.num_definitions_before)

    def is_same(self, other: Payload) -> bool:
        """Return whether another payload has the same bytes."""
        end = self.layout.ends[-1]
        is_like = (self.layout.ends, self.layout.num_blocks) == (other.layout.ends, other.layout.num_blocks)
        return is_like and np.array_equal(self.memory[:end], other.memory[:end])


def write_payload(
    content: object, modules: tuple[str, ...], num_before: int = 0, *, shares_tensors: bool = False
) -> tuple[PayloadLayout, list[int], list[object]]:
    """Write a payload to an anonymous file. `modules`: see `Environment`. `num_before`: see `Definitions`.
    `shares_tensors`: see `Handover`.

    Returns the layout, descriptors that the caller owns, and the definitions that were sent by value. The template
    numbers its copies of them in this order. Raises `EncodeError` if a part of the object can't be sent.
    """
    with handing_over(shares_tensors=shares_tensors) as handover:
        layout, pieces, definitions = _encode(content, modules)
        num_descriptors = 1 + len(handover.descriptors)
        layout = replace(
            layout,
            total_nbytes=capacity_for(layout.total_nbytes),
            num_descriptors=num_descriptors,
            num_definitions_before=num_before,
        )
        file = new_file(pieces, layout.total_nbytes)
        handed, handover.descriptors = handover.descriptors, {}
    return layout, [file, *handed.values()], definitions


def pack_payload(content: object, modules: tuple[str, ...], *, hands_over: bool = False) -> tuple[Payload, Definitions]:
    """Return a payload in memory of this process, and the definitions. Raises as `write_payload` does.

    `hands_over`: as `write_payload` writes it, to compare. It is of no use to another process.
    """
    with handing_over() if hands_over else nullcontext():
        layout, pieces, definitions = _encode(content, modules)
        return Payload(layout, np.concatenate(pieces)), Definitions(definitions)


def _encode(content: object, modules: tuple[str, ...]) -> tuple[PayloadLayout, list[NDArray[np.uint8]], list[object]]:
    """Return the payload as pieces, front to back."""
    try:
        with explaining_limits():  # modules are imported, which opens files
            encoded, arena, things = encode_with_code(content)
    except (EncodeError, NoDescriptorsLeft):
        raise
    except Exception as error:
        raise_interrupt(error)  # one that came while a class was made
        if is_interrupt(error):
            raise
        path, culprit, reason = find_unencodable(content, error, try_out)
        raise EncodeError(
            f"{path.removeprefix(_OPTIONS)} is a {type_name(culprit)}, which can't be sent to the workers "
            f"({type(reason).__name__}: {reason})",
            _HINT,
        ) from error
    first, structure = pickle.dumps(Environment.of_this_process(modules)), encoded.meta
    nbytes = arena.used + len(first) + len(structure)
    layout = PayloadLayout(nbytes, arena.used, len(first), len(structure), encoded.num_blocks)
    last = (np.frombuffer(part, np.uint8) for part in (first, structure))
    return layout, [*arena.pieces(), *last], things


_NAMES = re.compile(
    rb"\x8c(?s:(.))([A-Za-z_][A-Za-z0-9_.]*)\x94"  # SHORT_BINUNICODE with its length, MEMOIZE
    rb"(?:\x85|(?:\x8c(?s:.)[A-Za-z0-9_.<>]+\x94|h(?s:.)|j(?s:....))\x93)"  # TUPLE1; or another string, STACK_GLOBAL
)
"""A module's name in protocol 5: the first half of a global, or the only argument of a function that imports it."""


def modules_of(layout: PayloadLayout, descriptor: int) -> tuple[str, ...]:
    """Return the modules that reading a payload imports, as far as they can be told without reading it.

    A name may be missed, or be a string that only looks like one: the result is for a process that imports modules
    ahead of need, from those that this process has imported, too. The descriptor stays open.
    """
    _, begin, end = layout.ends
    pieces, position = [], begin
    while position < end and (piece := os.pread(descriptor, end - position, position)):
        pieces.append(piece)
        position += len(piece)
    found = (match.groups() for match in _NAMES.finditer(b"".join(pieces)))
    names = dict.fromkeys(name.decode("ascii") for length, name in found if length[0] == len(name))
    return tuple(name for name in names if name in sys.modules and name not in MAIN_MODULES and can_be_found(name))


@functools.cache
def depends_on_torch(package: str) -> bool:
    """Return whether an installed package needs torch, always or for some of what it does."""
    import importlib.metadata

    try:
        needed = importlib.metadata.requires(package) or ()
    except (importlib.metadata.PackageNotFoundError, ValueError):  # a ValueError if there is no name
        return False
    return any(re.match(r"torch(?![\w-])", one) for one in needed)
