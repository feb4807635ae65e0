"""What runs in the worker: collates samples into the memory that a batch is sent in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.collate import BatchMemory, default_collate
from swift_loader.device.move import to_device

if TYPE_CHECKING:
    import torch


def fast_collate(samples: Sequence[Any], memory: BatchMemory | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of samples `(image, target)` as two tensors. Further parts of a sample are ignored, as by timm.

    It is for images as bytes, which the device converts to floats. With augmentation splits, a sample has several
    images: `((image, image, ...), target)`. Then the batch has all first images, then all second ones, and so on. The
    targets are repeated to match.

    Args:
        samples: At least one sample. Images are arrays or tensors `(C, H, W) uint8`, all of the same shape. Targets are
            numbers, or arrays or tensors of the same shape.
        memory: Where to put the tensors; None: on the heap.

    Returns:
        Images `(B, C, H, W) uint8`, and targets `(B,) int64`, or `(B, ...)` with their own dtype if they are arrays.

    Raises:
        TypeError: A sample isn't such a pair, or an image isn't uint8; the message names the sample.
        ValueError: Shapes or numbers of images differ, and the message names the sample; or there is no sample.
    """
    import torch

    memory, splits = memory or BatchMemory(), list[tuple[Any, ...]]()
    for number, sample in enumerate(samples):
        if not isinstance(sample, (tuple, list)) or len(sample) < 2:  # noqa: PLR2004 - a pair
            raise TypeError(
                f"sample {number} of the batch is a {type(sample).__name__}; it must be a tuple (image, target): "
                f"change the dataset, or pass your own collate_fn"
            )
        splits.append(sample[0] if isinstance(sample[0], tuple) else (sample[0],))
        if len(splits[-1]) != len(splits[0]) or not splits[0]:
            raise ValueError(
                f"sample {number} of the batch has {len(splits[-1])} images, but sample 0 has {len(splits[0])}; all "
                f"samples of a batch must have the same number of images, at least one"
            )
    targets = to_device(default_collate([sample[1] for sample in samples]), "cpu")
    if not isinstance(targets, torch.Tensor):
        raise TypeError(
            f"sample 0 of the batch has a target of type {type(samples[0][1]).__name__}; all targets must be numbers, "
            f"or arrays or tensors of the same shape: give the dataset a target_transform, or pass a collate_fn"
        )
    arrays: list[NDArray[np.uint8]] = []
    for index, image in enumerate(chain.from_iterable(zip(*splits, strict=True))):
        array = image.numpy() if isinstance(image, torch.Tensor) and image.dtype == torch.uint8 else image
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
            kind = f"{image.dtype}" if isinstance(image, (np.ndarray, torch.Tensor)) else type(image).__name__
            raise TypeError(
                f"sample {index % len(samples)} of the batch has an image of type {kind}; fast_collate takes arrays "
                f"and tensors of uint8: return bytes from the dataset's transform, as timm's does with "
                f"use_prefetcher=True, or pass collate_fn=tensor_collate"
            )
        if arrays and array.shape != arrays[0].shape:
            raise ValueError(
                f"sample {index % len(samples)} of the batch has an image of shape {array.shape}, but sample 0 has one "
                f"of {arrays[0].shape}; all images of a batch must have the same shape: resize or crop them in the "
                f"dataset's transform"
            )
        arrays.append(array)
    batch = memory.empty_tensor((len(arrays), *arrays[0].shape), torch.uint8)
    # Images from Pillow have the channels last in memory. For those, NumPy takes half as long as torch.
    np.stack(arrays, out=batch.numpy())
    dtype = torch.int64 if targets.dim() == 1 else targets.dtype
    repeated = memory.empty_tensor((len(arrays), *targets.shape[1:]), dtype)
    repeated.view(len(splits[0]), *targets.shape)[:] = targets
    return batch, repeated


def tensor_collate(samples: Sequence[Any], memory: BatchMemory | None = None) -> Any:
    """Return the default collate's batch, with numbers and numeric arrays as tensors, as in torch's own collate.

    It is for finished samples. Unlike in torch's, containers keep their type: tuples give a tuple.

    Args:
        samples: At least one sample; all have the same structure.
        memory: Where to put arrays and tensors; None: on the heap.

    Raises:
        ValueError: Structures, lengths or shapes differ; the message names the path and the difference.
    """
    # Arrays become tensors before collation, without a copy: an object made in `memory` must stay the same object.
    return to_device(default_collate([to_device(sample, "cpu") for sample in samples], memory), "cpu")
