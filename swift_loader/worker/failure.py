"""An exception of the user's code, made ready to travel."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import numpy as np

from swift_loader.transport.arena import Arena
from swift_loader.transport.codec import decode, encode
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.messages import Failure, SampleFailed, Stage
from swift_loader.transport.walk import type_name

__all__ = ["BuildError", "describe_failure"]

_MAX_PICKLED_BYTES = 16 * 1024
_MAX_TEXT_BYTES = 12 * 1024
"""Kept of a traceback's end and of a message, in UTF-8: with the exception they fit into one message."""
_MAX_NAME_BYTES = 1024


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
        _shortened(message, _MAX_TEXT_BYTES),
        _shortened(text, _MAX_TEXT_BYTES, at_end=False),
    )


def _shortened(text: str, limit: int, *, at_end: bool = True) -> str:
    """Return a text of at most so many bytes in UTF-8, without half a character at the cut."""
    data = text.encode("utf-8", "backslashreplace")
    return (data[:limit] if at_end else data[-limit:]).decode("utf-8", "ignore")


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
