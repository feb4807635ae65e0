"""Writes an object together with the code that it needs, as a sequence of pickles that share one memo.

The first pickles create each class and function empty, and then fill it. The last pickle holds the content. So a class
is complete before an instance of it is rebuilt, and cycles need no special care. The recursion depth depends on the
data, not on how the script's functions call each other.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.errors import EncodeError
from swift_loader.transport import rebuild
from swift_loader.transport.code import CodeEncoder, Space
from swift_loader.transport.encoder import CodeNeeded
from swift_loader.transport.fills import REMEDY, Call, DryRunPickler, Fill, FillState

_EMPTY: dict[type, Callable[[Any], object]] = {
    **{kind: lambda full: type(full)() for kind in (dict, list, set, OrderedDict)},
    weakref.WeakValueDictionary: lambda _: weakref.WeakValueDictionary(),
    weakref.WeakKeyDictionary: lambda _: weakref.WeakKeyDictionary(),
    defaultdict: lambda full: defaultdict(full.default_factory),
}


class CodeWriter:
    """Writes what an encoder creates and what it notes to be filled."""

    def __init__(self, encoder: CodeEncoder) -> None:
        self._encoder = encoder
        self._fills = encoder.fills
        self._kept: list[object] = []
        """The memo knows objects by address, so they must stay alive."""

    def write(self, content: object) -> None:
        """Write all pickles.

        Raises `EncodeError` if a variable of the script can't be sent, or an attribute of one of its classes; another
        error if the content can't be sent.
        """
        self._fills.add(Fill(None, content, ""))  # without a name: the caller explains an error of the content
        self._write_fills()
        self._write_last()
        self._encoder.dump(content)
        self._write_fills()  # for objects that a reducer creates anew each time
        self._write_last()
        self._dump(Call(rebuild.Finished, content, self._encoder.noted()))

    def _write_fills(self) -> None:
        """Write all waiting fills, each value after everything that its code needs."""
        self._write_soon()
        while (fill := self._fills.next()) is not None:
            if fill.state is FillState.WAITING:
                self._open(fill)
            else:
                self._finish(fill)

    def _open(self, fill: Fill) -> None:
        """Write the code that a value needs. Finish the fill, unless other fills must come first."""
        encoder = self._encoder
        dry_run = DryRunPickler(encoder.is_known)
        try:
            dry_run.dump(fill.value)
        except Exception as error:
            fill.state = FillState.DONE
            self._refuse(fill, error)
            return
        fill.state = FillState.OPEN
        for thing in dry_run.found:
            if id(thing) not in encoder.things:
                self._dump_as(_name_of(thing), thing)
        self._write_soon()
        if dry_run.runs_code or fill.owner is None:
            for other in self._fills.put_first(id(thing) for thing in dry_run.found):
                self._put_stand_in(other)
            return
        for thing in dry_run.found:  # their fills are written later; whoever needs this owner needs them, too
            self._fills.link(fill.owner, id(thing))
        self._finish(fill)

    def _finish(self, fill: Fill) -> None:
        if fill.call is not None:
            self._dump(fill.call)
        fill.state = FillState.DONE

    def _put_stand_in(self, fill: Fill) -> None:
        """Set a stand-in for a value in a cycle: the code that creates the value already looks the value up.

        The stand-in of a container is the container itself, empty. Any other value is None until it can be set, as in a
        class that creates its only instance later.
        """
        stand_in, value = fill.stand_in, fill.value
        if stand_in is None:
            return
        fill.stand_in = None
        make_empty = _EMPTY.get(type(value))
        if make_empty is None:
            self._dump(stand_in(None))
            fill.call = stand_in(value)
            return
        memo = self._encoder.memo.copy()
        if id(value) in memo:  # the receiver has it already, complete
            self._dump(stand_in(value))
            fill.state = FillState.DONE
            return
        empty = make_empty(value)
        self._dump(stand_in(empty))
        memo = self._encoder.memo.copy()
        memo[id(value)] = (memo.pop(id(empty))[0], value)  # the memo's size must stay: the unpickler counts entries
        self._encoder.memo = memo
        content = dict(value) if hasattr(value, "keys") else list(value)  # type: ignore[call-overload]
        fill.call = Call(rebuild.refill, value, content)

    def _write_last(self) -> None:
        """Write what comes after all fills, and what that needs."""
        self._fills.soon.extend(self._fills.last)
        self._fills.last.clear()
        self._write_fills()

    def _refuse(self, fill: Fill, error: Exception) -> None:
        """Raise for a value that can't be sent. If it isn't required, record the reason instead."""
        if isinstance(error, EncodeError) or (fill.is_required and not fill.where):
            raise error
        path, culprit, error = find_unencodable(fill.value, error, lambda part: DryRunPickler().dump(part))
        holds = f"holds at {path} a" if path else "is a"
        fill.why_missing = (
            f"{holds} {type_name(culprit)}, which can't be sent to another process ({type(error).__name__}: {error})"
        )
        if fill.is_required:
            raise EncodeError(f"{fill.where} {fill.why_missing}", REMEDY) from error

    def _write_soon(self) -> None:
        soon = self._fills.soon
        while soon:
            call = soon.popleft()
            filled, what = call.reduced[1][:2]
            self._dump_as(f"the global variable {what!r}" if isinstance(filled, Space) else _name_of(filled), call)
        used = self._encoder.submodules.take_used()
        if used:
            self._dump(Call(rebuild.import_modules, used))

    def _dump_as(self, name: str, part: object) -> None:
        """Write code. Raises `EncodeError` that begins with `name` if it can't be sent."""
        try:
            self._dump(part)
        except (EncodeError, CodeNeeded):
            raise
        except Exception as error:
            text = f"{name} can't be sent to another process ({type(error).__name__}: {error})"
            raise EncodeError(text, REMEDY) from error

    def _dump(self, part: object) -> None:
        self._kept.append(part)
        self._encoder.dump(part)


def _name_of(thing: Any) -> str:
    if isinstance(thing, types.CellType):
        return "a variable of a function"
    return f"the {'class' if isinstance(thing, type) else 'function'} {thing.__qualname__}"
