"""Finds the modules that a pickle imports, without reading the pickle. Pure.

A name may be missed, or be a string that only looks like one: the result is for a process that imports modules ahead of
need, from those that this process has imported, too.
"""

from __future__ import annotations

import re

_NAMES = re.compile(
    rb"\x8c(?s:(.))([A-Za-z_][A-Za-z0-9_.]*)\x94"  # SHORT_BINUNICODE with its length, MEMOIZE
    rb"(?:\x85|(?:\x8c(?s:.)[A-Za-z0-9_.<>]+\x94|h(?s:.)|j(?s:....))\x93)"  # TUPLE1; or another string, STACK_GLOBAL
)
"""A module's name in protocol 5: the first half of a global, or the only argument of a function that imports it."""


def modules_in(pickled: bytes) -> tuple[str, ...]:
    """Return what may be names of modules, in the order of the pickle, each once."""
    found = (match.groups() for match in _NAMES.finditer(pickled))
    return tuple(dict.fromkeys(name.decode("ascii") for length, name in found if length[0] == len(name)))
