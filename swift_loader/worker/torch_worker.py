"""Makes a process look to the dataset like a worker of torch's DataLoader: `get_worker_info()`, the seeds, and
`default_collate`.

Only worker processes do this. torch is imported by the template, so that all workers share it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift_loader.batch.torch_collate import use_in_default_collate
from swift_loader.worker.process_exit import be_child
from swift_loader.worker.seeding import Rng
from swift_loader.worker.torch_mode import TorchMode


class TorchWorker:
    """This process, as the dataset sees it."""

    def __init__(self, mode: TorchMode, rng: Rng, worker_id: int, dataset: Any) -> None:
        self.worker_id = worker_id
        self._mode = mode
        self._rng = rng
        self._dataset = dataset
        self._info: Any = None
        self._unused_seed: int | None = None
        """What the generators were seeded with at the start, until the first generation begins."""

    def begin(self, base_seed: int) -> None:
        """Seed the generators, let torch's functions do as in its workers, and call `worker_init_fn`."""
        self.reseed(base_seed)
        self._announce(base_seed)
        self._unused_seed = base_seed
        be_child(f"DataLoader worker {self.worker_id}")
        use_in_default_collate(self._mode.collate_functions)
        if self._mode.worker_init_fn is not None:
            self._mode.worker_init_fn(self.worker_id)

    def use_seed(self, base_seed: int) -> None:
        """Begin a generation with this seed. Generators that `worker_init_fn` may have seeded aren't seeded again,
        unless they were to be seeded by the loader.
        """
        is_seeded, self._unused_seed = self._unused_seed == base_seed, None
        if is_seeded:
            return
        self._announce(base_seed)
        if self._mode.persists:  # the seed is that of all epochs, and epochs must differ
            return
        if self._rng is not Rng.NONE or self._mode.worker_init_fn is None:
            self.reseed(base_seed)

    def reseed(self, base_seed: int) -> None:
        """Seed `random`, torch's default generator and the legacy `numpy.random` as torch's workers do."""
        worker_id = self.worker_id if self._mode.shard is None else 0  # a shared stream is the same in all workers
        random.seed(base_seed + worker_id)
        _seed_torch(base_seed + worker_id)
        # The two halves of the seed: NumPy's seeds have 32 bits.
        words = [worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
        np.random.seed(np.random.SeedSequence(words).generate_state(4))  # noqa: NPY002 - the generator that users have

    def _announce(self, base_seed: int) -> None:
        """Let torch's `get_worker_info()` answer with this seed from now on."""
        from torch.utils.data._utils import worker

        self._info = worker.WorkerInfo(
            id=self.worker_id,
            num_workers=self._mode.num_workers,
            seed=base_seed + self.worker_id,
            dataset=self._dataset,
        )
        worker._worker_info = self._info  # noqa: SLF001 - torch has no other way to set it

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let `get_worker_info()` answer None, as in the main process, so that no stream is shared out twice."""
        from torch.utils.data._utils import worker

        worker._worker_info = None  # noqa: SLF001
        try:
            yield
        finally:
            worker._worker_info = self._info  # noqa: SLF001

    def __repr__(self) -> str:
        return f"<TorchWorker {self.worker_id} of {self._mode.num_workers}>"


def _seed_torch(seed: int) -> None:
    """Do what `torch.manual_seed` does. For accelerators that aren't there, it reads the source of each frame: 3 ms."""
    import torch

    builds = (getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    own = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - torch has no other way to ask
    if any(builds) or torch.backends.mps.is_built() or hasattr(torch, own):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@dataclass(frozen=True, slots=True)
class TorchThread:
    """A worker thread. It has no generators of its own, and `get_worker_info()` can't tell it from other threads."""

    worker_id: int

    def use_seed(self, base_seed: int) -> None:
        """Do nothing. `sample_rng()` is keyed by the seed in any case."""


TorchIdentity = TorchWorker | TorchThread
