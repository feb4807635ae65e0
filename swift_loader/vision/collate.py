"""Images and targets to a batch, in the memory that it is sent in. Runs in the worker.

`fast_collate` is for images as bytes, which the device makes floats of; `tensor_collate` for samples that are finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.collate import BatchMemory, HeapMemory, default_collate
from swift_loader.device.move import to_device

if TYPE_CHECKING:
    import torch

__all__ = ["fast_collate", "tensor_collate"]


def fast_collate(samples: Sequence[Any], memory: BatchMemory | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of samples `(image, target)` as two tensors; what else a sample has is left out, as by timm.

    With several images per sample, `((image, image, ...), target)`, as augmentation splits have them, the batch
    consists of all first images, then all second ones, and so on, with the targets repeated.

    Args:
        samples: At least one. Images are arrays or tensors `(C, H, W) uint8`, all of one shape. Targets are numbers, or
            arrays or tensors of one shape.
        memory: Where to put the tensors; None: on the heap.

    Returns:
        Images `(B, C, H, W) uint8`, and targets `(B,) int64`, or `(B, ...)` of their own dtype if they are arrays.

    Raises:
        TypeError: A sample isn't such a pair, or an image isn't uint8; the message names the sample.
        ValueError: Shapes, or numbers of images, differ; the message names the sample.
    """
    import torch

    if not samples:
        raise ValueError("a batch of no samples can't be collated; give at least one")
    memory = memory or HeapMemory()
    images, num_splits = _split_images(samples)
    arrays = [_as_array(image, index % len(samples)) for index, image in enumerate(images)]
    shape = arrays[0].shape
    for index, array in enumerate(arrays):
        if array.shape != shape:
            raise ValueError(
                f"sample {index % len(samples)} of the batch has an image of shape {array.shape}, but sample 0 one of "
                f"{shape}; images of one batch must be alike: resize or crop them in the dataset's transform"
            )
    batch = memory.empty_tensor((len(arrays), *shape), torch.uint8)
    # By NumPy: images that Pillow made lie with their channels side by side, and it takes half of torch's time then.
    np.stack(arrays, out=batch.numpy())
    return batch, _collate_targets([sample[1] for sample in samples], num_splits, memory)


def tensor_collate(samples: Sequence[Any], memory: BatchMemory | None = None) -> Any:
    """Return the default collate's batch, with numbers and numeric arrays as tensors, as torch's own collate has them.

    Unlike torch's, containers keep their type: samples that are tuples make a tuple.

    Args:
        samples: At least one; all of the same structure.
        memory: Where to put arrays and tensors; None: on the heap.

    Raises:
        ValueError: Structures, lengths or shapes differ; the message names the path and what was found there.
    """
    # Arrays become tensors before, where that copies nothing: what is made in `memory` has to stay the same object.
    return to_device(default_collate([to_device(sample, "cpu") for sample in samples], memory), "cpu")


def _split_images(samples: Sequence[Any]) -> tuple[list[Any], int]:
    """Return all images in the order of the batch, and how many there are per sample."""
    for number, sample in enumerate(samples):
        if not isinstance(sample, (tuple, list)) or len(sample) < 2:  # noqa: PLR2004 - a pair
            raise TypeError(
                f"sample {number} of the batch is a {type(sample).__name__}; it must be a tuple (image, target): "
                f"change the dataset, or give a collate_fn of your own"
            )
    if not isinstance(samples[0][0], tuple):
        return [sample[0] for sample in samples], 1
    num_splits = len(samples[0][0])
    for number, sample in enumerate(samples):
        found = len(sample[0]) if isinstance(sample[0], tuple) else 1
        if found != num_splits or not found:
            raise ValueError(
                f"sample {number} of the batch has {found} images, but sample 0 has {num_splits}; samples of one batch "
                f"must have equally many, and at least one"
            )
    return [sample[0][split] for split in range(num_splits) for sample in samples], num_splits


def _as_array(image: Any, number: int) -> NDArray[np.uint8]:
    """Return an image as an array, not copied; `number` is the sample's, for the message."""
    import torch

    if isinstance(image, np.ndarray) and image.dtype == np.uint8:
        return image
    if isinstance(image, torch.Tensor) and image.dtype == torch.uint8:
        array: NDArray[np.uint8] = image.numpy()
        return array
    kind = f"{image.dtype}" if isinstance(image, (np.ndarray, torch.Tensor)) else type(image).__name__
    raise TypeError(
        f"sample {number} of the batch has an image of type {kind}; fast_collate takes arrays and tensors of uint8: "
        f"let the dataset's transform end with bytes, as timm's with use_prefetcher=True does, or give tensor_collate"
    )


def _collate_targets(targets: list[Any], num_splits: int, memory: BatchMemory) -> torch.Tensor:
    """Return the targets as a tensor, `num_splits` times one after the other."""
    import torch

    collated = to_device(default_collate(targets), "cpu")
    if not isinstance(collated, torch.Tensor):
        raise TypeError(
            f"sample 0 of the batch has a target of type {type(targets[0]).__name__}; all targets must be numbers, or "
            f"arrays or tensors of one shape: give the dataset a target_transform, or the loader a collate_fn"
        )
    dtype = torch.int64 if collated.dim() == 1 else collated.dtype
    batch = memory.empty_tensor((num_splits * len(targets), *collated.shape[1:]), dtype)
    batch.view(num_splits, *collated.shape)[:] = collated
    return batch
