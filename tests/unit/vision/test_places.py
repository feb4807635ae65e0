from __future__ import annotations

import random
from typing import Any

import pytest

from swift_loader.vision.places import Place, PlacedImages
from swift_loader.worker.generators import preserved_generators


class Drawn:
    """Sample i is an image that is drawn, and i."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[float, int]:
        return random.random(), index


def test_a_sample_depends_on_its_place_alone() -> None:
    images = PlacedImages(Drawn())
    with preserved_generators():
        one, other, same = (images[Place(3, 0, key)] for key in (1, 2, 1))
    assert one == same != other
    assert one[1] == 3
    assert len(images) == 7


def test_the_image_gets_the_transform_that_was_chosen() -> None:
    images = PlacedImages([(10, "a", "b"), [20, "c"]], [lambda image: image + 1, lambda image: -image])
    with preserved_generators():
        assert images[Place(0, 0, 5)] == (11, "a", "b")
        assert images[Place(1, 1, 5)] == (-20, "c")


@pytest.mark.parametrize("sample", [5, (), "image"])
def test_a_sample_without_an_image_is_refused(sample: Any) -> None:
    images = PlacedImages([sample], [lambda image: image])
    with preserved_generators(), pytest.raises(TypeError, match=r"sample 0 is a .* it must be a tuple"):
        images[Place(0, 0, 5)]
