"""What a template needs to build the dataset, in one anonymous file: nothing is ever written to a folder.

Layout: bulk data | environment (pickle) | structure (the codec's, with code). The environment comes first when reading:
the structure runs the user's code.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift_loader.errors import EncodeError, ProtocolError
from swift_loader.transport.codec import decode_with_code, encode_with_code, try_out
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.descriptors import duplicate
from swift_loader.transport.frames import Frame, Kind, pack_frame
from swift_loader.transport.segments import Segment, capacity_for
from swift_loader.transport.walk import find_unencodable, type_name

__all__ = [
    "Environment",
    "PayloadLayout",
    "chosen_threads",
    "read_environment",
    "read_payload",
    "same_payload",
    "write_payload",
]

_OPTIONS = {
    ".source.instance": "dataset",
    ".source.factory": "dataset_class",
    ".source.kwargs": "dataset_kwargs",
    ".collate_fn": "collate_fn",
    ".batch_encoder": "batch_encoder",
}
"""What the user calls the parts of a worker's set-up."""

_LAYOUT = struct.Struct("<QQQQI")


@dataclass(frozen=True, slots=True)
class Environment:
    """What of the trainer's interpreter a fresh one must have, besides what it is started with."""

    argv: list[str]
    torch_dtype: str = ""
    """torch's default dtype, if it isn't the one that torch begins with."""
    torch_threads: int = 1
    """How many threads torch is to compute with in a worker."""
    recursion_limit: int = 1000
    """Python's, if the trainer has raised it."""
    modules: tuple[str, ...] = ()
    """Those that define the dataset and the callables; imported before anything else is rebuilt."""

    @classmethod
    def of_this_process(cls, modules: tuple[str, ...] = ()) -> Environment:
        """Return the trainer's."""
        torch = sys.modules.get("torch")
        dtype = "" if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")
        dtype = "" if dtype == "float32" else dtype
        return cls(list(sys.argv), dtype, chosen_threads(), sys.getrecursionlimit(), modules)


def chosen_threads() -> int:
    """Return how many threads the user has chosen for torch, by OMP_NUM_THREADS or `torch.set_num_threads`; else 1.

    Many workers with many threads each only fight for the cores.
    """
    torch = sys.modules.get("torch")
    by_environment = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and not by_environment:
        number: int = torch.get_num_threads()
        return 1 if number in _usual_threads() else number
    return int(by_environment) if by_environment.isdecimal() and int(by_environment) else 1


def _usual_threads() -> set[int]:
    """Return the numbers that torch begins with: a thread per core, hyper-threads counted or not."""
    counts = {os.cpu_count() or 1, len(os.sched_getaffinity(0))}
    return counts | {max(1, count // 2) for count in counts}


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Sizes of the parts, in the order of the file."""

    total_nbytes: int
    bulk_nbytes: int
    environment_nbytes: int
    structure_nbytes: int
    num_blocks: int

    def pack(self) -> bytes:
        """Return the frame that announces the payload; its descriptor is attached."""
        sizes = (self.total_nbytes, self.bulk_nbytes, self.environment_nbytes)
        return pack_frame(Kind.SETUP, _LAYOUT.pack(*sizes, self.structure_nbytes, self.num_blocks))

    @classmethod
    def unpack(cls, frame: Frame) -> PayloadLayout:
        """Return the layout in a frame.

        Raises:
            ProtocolError: The parts are larger than the whole, or it isn't a layout at all.
        """
        if len(frame.body) == _LAYOUT.size:
            layout = cls(*_LAYOUT.unpack(frame.body))
            if layout.ends[-1] <= layout.total_nbytes:
                return layout
        raise ProtocolError(f"a message of kind {frame.kind.name} has a malformed body of {len(frame.body)} bytes")

    @property
    def ends(self) -> tuple[int, int, int]:
        """Where each part ends."""
        environment = self.bulk_nbytes + self.environment_nbytes
        return self.bulk_nbytes, environment, environment + self.structure_nbytes


def write_payload(content: object, environment: Environment) -> tuple[PayloadLayout, int, Definitions]:
    """Put an object where another process can rebuild it.

    Returns:
        The layout, a descriptor that the caller owns, and what travelled by value: the template's copies get the same
        numbers.

    Raises:
        EncodeError: Something in it can't be sent.
    """
    definitions = Definitions()
    try:
        encoded, arena = encode_with_code(content, definitions.add)
    except EncodeError:
        raise
    except Exception as error:
        raise EncodeError(_explain(content, error)) from error
    first = pickle.dumps(environment)
    parts = (first, encoded.meta)
    used = arena.used + sum(map(len, parts))
    segment, descriptor = Segment.create(capacity_for(used))
    memory = segment.array()
    arena.move_to(memory)
    position = arena.used
    for part in parts:
        memory[position : position + len(part)] = np.frombuffer(part, np.uint8)
        position += len(part)
    layout = PayloadLayout(segment.nbytes, arena.used, len(first), len(encoded.meta), encoded.num_blocks)
    return layout, descriptor, definitions


def read_environment(layout: PayloadLayout, segment: Segment) -> Environment:
    """Return the first part, which needs nothing but the standard library."""
    start, end, *_ = layout.ends
    environment = pickle.loads(segment.memory[start:end])
    if not isinstance(environment, Environment):
        raise TypeError(f"the payload begins with a {type(environment).__name__} instead of an Environment")
    return environment


def read_payload(layout: PayloadLayout, segment: Segment) -> tuple[Any, Definitions]:
    """Return the object and the definitions, as they were sent, also when it is not the first time.

    Its arrays are views of the segment, which must outlive them.
    """
    segment.restore()
    _, begin, end = layout.ends
    bulk = segment.array()[: layout.bulk_nbytes]
    content, things = decode_with_code(segment.memory[begin:end], layout.num_blocks, bulk)
    return content, Definitions(things)


def same_payload(one: tuple[PayloadLayout, int], other: tuple[PayloadLayout, int]) -> bool:
    """Return whether two payloads, given by layout and descriptor, are the same bytes. The descriptors stay open."""
    if one[0] != other[0]:
        return False
    mappings = [Segment.attach(duplicate(descriptor), layout.total_nbytes) for layout, descriptor in (one, other)]
    end = one[0].ends[-1]
    return bool(np.array_equal(mappings[0].array()[:end], mappings[1].array()[:end]))


def _explain(content: object, error: Exception) -> str:
    path, culprit, reason = find_unencodable(content, error, try_out)
    for inner, option in _OPTIONS.items():
        if path.startswith(inner):
            path = option + path[len(inner) :]
            break
    return (
        f"{path} is a {type_name(culprit)}, which can't be sent to the workers ({type(reason).__name__}: {reason}). "
        f"Give the dataset as dataset_class= with dataset_kwargs= of what can be sent, and have its constructor open "
        f"files and connections: it runs in the loader's own processes. Or give worker_per_consumer=0"
    )
