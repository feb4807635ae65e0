"""Items of classes that a script defines go to the processes of a stage, and come back as the same classes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support.helpers import exhaustive_unless, run_script

BEGINNING = """
from swift_loader import SwiftLoaderError
from swift_loader.pipeline import Pipeline
def results(function, items):
    return list(Pipeline(items).map(function, concurrency=2, on="process", name="decode"))
"""

SCRIPTS = {
    "a dataclass that the function's parameter names": """
        from dataclasses import dataclass
        @dataclass
        class Photo:
            number: int
        def decode(photo: Photo) -> int: return photo.number + 1
        assert results(decode, [Photo(1), Photo(2)]) == [2, 3]
    """,
    "a class that the function looks for": """
        class Photo:
            def __init__(self, number): self.number = number
        def decode(item): return item.number if isinstance(item, Photo) else 1 / 0
        assert results(decode, [Photo(1), [Photo(2)][0]]) == [1, 2]
    """,
    "items that come back": """
        class Photo:
            def __init__(self, number): self.number = number
        def decode(photo: Photo): return photo
        found = results(decode, [Photo(1), Photo(2)])
        assert [photo.number for photo in found] == [1, 2]
        assert all(type(photo) is Photo for photo in found)
    """,
    "a class inside another": """
        class Album:
            class Photo:
                def __init__(self, number): self.number = number
        def decode(photo: Album.Photo): return photo
        assert all(type(photo) is Album.Photo for photo in results(decode, [Album.Photo(1), Album.Photo(2)]))
    """,
    "members of an Enum, inside a tuple": """
        from enum import Enum
        class Color(Enum):
            RED = 1
            BLUE = 2
        def decode(pair: tuple[Color, int]): return pair
        assert all(color is Color.BLUE for color, _ in results(decode, [(Color.BLUE, 1), (Color.BLUE, 2)]))
    """,
    "a named tuple of a stage before": """
        from typing import NamedTuple
        class Photo(NamedTuple):
            number: int
        def make(number): return Photo(number)
        def decode(photo: Photo): return photo._replace(number=photo.number * 2)
        made = Pipeline(range(3)).map(make).map(decode, on="process")
        assert list(made) == [Photo(0), Photo(2), Photo(4)]
    """,
    "a class that nothing names is told of": """
        class Photo:
            number = 3
        try:
            results(lambda photo: photo.number, [Photo()])
        except SwiftLoaderError as error:
            assert "the item can't be rebuilt" in str(error) and "name the class in the function" in str(error), error
        else:
            raise AssertionError("no error")
    """,
}


@pytest.mark.parametrize("name", exhaustive_unless({"a class inside another", "items that come back"}, SCRIPTS))
def test_a_script_gives_instances_of_its_classes_to_processes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    run_script(BEGINNING + textwrap.dedent(SCRIPTS[name]), folder=tmp_path)
