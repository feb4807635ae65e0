"""The two ways to write a message's body: fields of fixed sizes, or a pickle. Pure.

Unpickling is safe, because the sender is a process of ours on a private pipe.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from dataclasses import Field, fields
from typing import Any, ClassVar, TypeVar

from swift_loader.errors import ProtocolError
from swift_loader.transport.frames import Frame, Kind, pack_frame

_Fixed = TypeVar("_Fixed", bound="FixedBody")
_Pickled = TypeVar("_Pickled", bound="PickledBody")


def malformed(frame: Frame) -> ProtocolError:
    """Return the error for a body that its sender can't have written."""
    return ProtocolError(f"a message of kind {frame.kind.name} has a malformed body of {len(frame.body)} bytes")


class FixedBody:
    """Base of a dataclass whose fields are packed by `LAYOUT`, in their order."""

    __slots__ = ()

    KIND: ClassVar[Kind]
    LAYOUT: ClassVar[struct.Struct]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(self.KIND, self.LAYOUT.pack(*_values(self)))

    @classmethod
    def unpack(cls: type[_Fixed], frame: Frame) -> _Fixed:
        """Return the message in a frame.

        Raises:
            ProtocolError: The body has another length, or the class refuses the values.
        """
        try:
            return cls(*cls.LAYOUT.unpack(frame.body))
        except (struct.error, ValueError) as error:
            raise malformed(frame) from error


class PickledBody:
    """Base of a dataclass whose fields are pickled together."""

    __slots__ = ()

    KIND: ClassVar[Kind]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def pack(self) -> bytes:
        """Return the frame."""
        return pack_frame(self.KIND, pickle.dumps(tuple(_values(self))))

    @classmethod
    def unpack(cls: type[_Pickled], frame: Frame) -> _Pickled:
        """Return the message in a frame.

        Raises:
            ProtocolError: The body isn't a pickle of as many fields.
        """
        try:
            return cls(*pickle.loads(frame.body))
        except Exception as error:  # pickle raises all sorts
            raise malformed(frame) from error


def _values(message: FixedBody | PickledBody) -> Iterable[Any]:
    return (getattr(message, field.name) for field in fields(message))
