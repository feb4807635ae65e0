"""Turns an exception of the user's code into a message to the trainer."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence

import numpy as np

from swift_loader.batch.tree import type_name
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode, encode
from swift_loader.transport.encoder import Encoded
from swift_loader.transport.messages import Failure, FailureStage, SampleFailed

_MAX_PICKLED_BYTES = 40 * 1024
_MAX_TEXT_BYTES = 12 * 1024
"""Bytes of UTF-8 kept of the traceback's end and of the message; fewer if the pickled exception is long."""
_MAX_ALL_BYTES = 60 * 1024
"""Limit for the exception and its texts together, so that they fit into one message."""
_MAX_NAME_BYTES = 1024
_MAX_ARGUMENT = 4096
"""Characters kept of each string in an exception that is too long to be sent as it is."""


class BuildError(Exception):
    """Says in which stage its `__cause__` was raised. It never leaves the process that builds the batch."""

    def __init__(
        self, stage: FailureStage, index: int | None = None, *, note: str = "", failures: Sequence[SampleFailed] = ()
    ) -> None:
        """Record what was being done.

        `index`: the dataset index of the sample that was being fetched, if known. `note`: text to append to the
        traceback. `failures`: if all samples of a batch failed, these, in the order of the batch; else empty.
        """
        super().__init__(stage.value)
        self.stage = stage
        self.index = index
        self.note = note
        self.failures = failures


def describe_failure(
    error: BaseException, stage: FailureStage, definitions: Definitions, *, index: int | None = None, note: str = ""
) -> Failure:
    """Return the message about an exception. Works for every exception, also if it can't be pickled or printed.

    The caller sets generation and sequence, if the failure is that of a task.
    """
    pickled, num_blocks = _try_round_trip(error, definitions)
    if pickled is None and (shorter := _with_short_texts(error, definitions)) is not None:
        pickled, num_blocks = _try_round_trip(shorter, definitions)
    limit = min(_MAX_TEXT_BYTES, (_MAX_ALL_BYTES - len(pickled or b"")) // 2)
    message = _text(error)
    text = "".join(traceback.format_exception(error)) + note
    return Failure(
        0,
        0,
        stage,
        index,
        pickled,
        num_blocks,
        _shortened(type_name(error), _MAX_NAME_BYTES),
        _shortened(message, limit),
        _shortened(text, limit, at_end=False),
    )


def _shortened(text: str, limit: int, *, at_end: bool = True) -> str:
    """Return the text, cut to at most `limit` bytes of UTF-8, with no partial character at the cut."""
    data = text.encode("utf-8", "backslashreplace")
    return (data[:limit] if at_end else data[-limit:]).decode("utf-8", "ignore")


def _text(value: object) -> str:
    """Return what an exception or an argument of one says. A broken `__str__` must not hide the failure itself."""
    try:
        return str(value)
    except Exception as error:
        return f"<its __str__ raised {type_name(error)}>"


def _with_short_texts(error: BaseException, definitions: Definitions) -> BaseException | None:
    """Return an exception of the same type with long strings cut, and with texts of what can't be sent. None: same."""

    def cut(value: object) -> object:
        return _cut(value if _try_encode(value, definitions) is not None else _text(value))

    try:
        shorter = copy.copy(error)
        shorter.args = tuple(cut(argument) for argument in error.args)
        for name, value in vars(error).items():
            setattr(shorter, name, [cut(part) for part in value] if isinstance(value, list) else cut(value))
    except Exception:  # the exception's class may not support copying or setting attributes
        return None
    return shorter


def _cut(value: object) -> object:
    if isinstance(value, str) and len(value) > _MAX_ARGUMENT:
        return f"{value[:_MAX_ARGUMENT]}... ({len(value):,} characters)"
    return value


def _try_round_trip(error: BaseException, definitions: Definitions) -> tuple[bytes | None, int]:
    """Return the encoded exception and its number of buffers; None and 0 if decoding doesn't give an equal one."""
    if not isinstance(error, Exception):
        return None, 0
    encoded = _try_encode(error, definitions)
    if encoded is None or len(encoded.meta) > _MAX_PICKLED_BYTES:
        return None, 0
    try:
        rebuilt = decode(memoryview(encoded.meta), encoded.num_blocks, np.empty(0, np.uint8), definitions)
    except Exception:  # whatever the reason, the text is sent instead
        return None, 0
    is_same = type(rebuilt) is type(error) and _text(rebuilt) == _text(error)
    return (encoded.meta, encoded.num_blocks) if is_same else (None, 0)


def _try_encode(value: object, definitions: Definitions) -> Encoded | None:
    """Return an encoded value; None if it can't be encoded, or not without memory of its own, as a tensor."""
    arena = Arena(np.empty(0, np.uint8))
    try:
        encoded = encode(value, arena, definitions)
    except Exception:
        return None
    return None if arena.used else encoded
