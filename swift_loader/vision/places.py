"""A sample's place in a run, and the dataset that builds samples by their places. Runs in the worker.

A sample that comes several times in an epoch has several places, and each has its own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from swift_loader.worker.seeding import seeded_by

__all__ = ["Place", "PlacedImages"]


class Place(NamedTuple):
    """What a sample is built from."""

    sample_index: int
    """The dataset index."""
    choice: int
    """Which transform it gets."""
    key: int
    """64-bit key of its random numbers."""


class PlacedImages:
    """Gives the samples of a map-style dataset by their places.

    `random`, the legacy `numpy.random`, torch's default generator and `sample_rng()` are seeded with the place's key
    before each sample. The `collate_fn` draws on from the global generators, as the last sample leaves them.
    """

    def __init__(self, dataset: Any, transforms: Sequence[Callable[[Any], Any]] = ()) -> None:
        """Choose what to give.

        Args:
            dataset: Whose samples are tuples or lists, with the image in front.
            transforms: One for each choice. None: the dataset transforms its images itself.
        """
        self.dataset = dataset
        self._transforms = tuple(transforms)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Place) -> Any:
        """Return the sample at a place.

        Raises:
            TypeError: A sample isn't a tuple or a list, and there are transforms.
        """
        index, choice, key = place
        with seeded_by(key):
            sample = self.dataset[index]
            if not self._transforms:
                return sample
            if not isinstance(sample, (tuple, list)) or not sample:
                raise TypeError(
                    f"sample {index} is a {type(sample).__name__}; with input_size_choices, it must be a tuple (image, "
                    f"target): change the dataset"
                )
            return (self._transforms[choice](sample[0]), *sample[1:])
