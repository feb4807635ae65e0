"""An exception of the user's code, made ready to travel."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence

import numpy as np

from swift_loader.transport.arena import Arena
from swift_loader.transport.codec import decode, encode
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.messages import Failure, SampleFailed, Stage
from swift_loader.transport.walk import type_name

__all__ = ["BuildError", "describe_failure"]

_MAX_PICKLED_BYTES = 40 * 1024
_MAX_TEXT_BYTES = 12 * 1024
"""Kept of a traceback's end and of a message, in UTF-8; less if the exception itself is long."""
_MAX_ALL_BYTES = 60 * 1024
"""The exception and its texts: they fit into one message."""
_MAX_NAME_BYTES = 1024
_MAX_ARGUMENT = 4096
"""Characters kept of each text in an exception that is too long to be sent as it is."""


class BuildError(Exception):
    """Says where the exception that is its `__cause__` came from; never leaves the worker."""

    def __init__(
        self, stage: Stage, index: int | None = None, *, note: str = "", failures: Sequence[SampleFailed] = ()
    ) -> None:
        """Say what was being done.

        Args:
            stage: In which stage of building a batch.
            index: The dataset index whose sample was being fetched, if it is known.
            note: What else there is to say.
            failures: The samples of a batch all of whose samples failed, in the order of the batch; else none.
        """
        super().__init__(stage.value)
        self.stage = stage
        self.index = index
        self.note = note
        self.failures = failures


def describe_failure(
    error: BaseException,
    stage: Stage,
    definitions: Definitions,
    *,
    index: int | None = None,
    note: str = "",
    generation: int = 0,
    sequence: int = 0,
) -> Failure:
    """Return the message about an exception; works for any exception, however odd."""
    pickled, num_blocks = _try_round_trip(error, definitions)
    if pickled is None and (shorter := _with_short_texts(error)) is not None:
        pickled, num_blocks = _try_round_trip(shorter, definitions)
    limit = min(_MAX_TEXT_BYTES, (_MAX_ALL_BYTES - len(pickled or b"")) // 2)
    try:
        message = str(error)
    except Exception as str_error:  # a broken __str__ must not hide the failure itself
        message = f"<its __str__ raised {type_name(str_error)}>"
    text = "".join(traceback.format_exception(error)) + note
    return Failure(
        generation,
        sequence,
        stage,
        index,
        pickled,
        num_blocks,
        _shortened(type_name(error), _MAX_NAME_BYTES),
        _shortened(message, limit),
        _shortened(text, limit, at_end=False),
    )


def _shortened(text: str, limit: int, *, at_end: bool = True) -> str:
    """Return a text of at most so many bytes in UTF-8, without half a character at the cut."""
    data = text.encode("utf-8", "backslashreplace")
    return (data[:limit] if at_end else data[-limit:]).decode("utf-8", "ignore")


def _with_short_texts(error: BaseException) -> BaseException | None:
    """Return an exception of the same type, with less of the texts that it is made of; None if it has no long ones."""
    try:
        shorter = copy.copy(error)
        shorter.args = tuple(_cut(argument) for argument in error.args)
        for name, value in vars(error).items():
            setattr(shorter, name, [_cut(part) for part in value] if isinstance(value, list) else _cut(value))
        is_shorter = (shorter.args, vars(shorter)) != (error.args, vars(error))
    except Exception:  # of a class that has its own mind about it
        return None
    return shorter if is_shorter else None


def _cut(value: object) -> object:
    if isinstance(value, str) and len(value) > _MAX_ARGUMENT:
        return f"{value[:_MAX_ARGUMENT]}... ({len(value):,} characters)"
    return value


def _try_round_trip(error: BaseException, definitions: Definitions) -> tuple[bytes | None, int]:
    """Return the exception, encoded, if it comes out of the codec as it went in."""
    if not isinstance(error, Exception):
        return None, 0
    try:
        arena = Arena(np.empty(0, np.uint8))
        encoded = encode(error, arena, definitions.number_of)
        memory = np.empty(0, np.uint8)
        rebuilt = decode(memoryview(encoded.meta), encoded.num_blocks, memory, definitions)
        same = type(rebuilt) is type(error) and str(rebuilt) == str(error)
    except Exception:  # any reason is reason enough: the text travels instead
        return None, 0
    if not same or arena.used or len(encoded.meta) > _MAX_PICKLED_BYTES:
        return None, 0
    return encoded.meta, encoded.num_blocks
