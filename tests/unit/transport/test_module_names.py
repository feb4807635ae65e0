"""Modules that a pickle imports."""

from __future__ import annotations

import collections
import fractions
import importlib
import json.decoder
import os.path
import pickle

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.transport.module_names import modules_in


class Importing:
    """Pickled as a call that imports a module."""

    def __reduce__(self) -> tuple[object, ...]:
        return importlib.import_module, ("xml.dom",)


def test_modules_of_classes_and_functions_are_found_in_their_order() -> None:
    content = [fractions.Fraction(1, 3), collections.OrderedDict(), json.decoder.JSONDecoder, os.path.join, Importing()]
    found = modules_in(pickle.dumps(content, protocol=5))
    assert found == (
        "fractions",
        "collections",
        "json.decoder",
        "posixpath",
        "importlib",
        "xml.dom",
    )


@given(st.recursive(st.integers() | st.text() | st.binary(), st.lists))
def test_plain_data_has_none(data: object) -> None:
    assert modules_in(pickle.dumps(data, protocol=5)) == ()


@given(st.binary())
def test_any_bytes_can_be_searched(data: bytes) -> None:
    assert all(isinstance(name, str) for name in modules_in(data))
