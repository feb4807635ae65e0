"""What is global in a process, and must be a seat's own where one process serves several loaders.

The generators, what `get_worker_info()` answers, the functions in torch's `default_collate_fn_map`, torch's default
dtype and number of threads. Whatever else the user's code sets is shared by all seats of the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift_loader.worker.generators import GeneratorStates
from swift_loader.worker.torch_settings import set_num_threads

__all__ = ["SeatContext"]


@dataclass(frozen=True, slots=True)
class SeatContext:
    """The global state of a process at one time. torch must be imported."""

    generators: GeneratorStates
    worker_info: Any
    """torch's `WorkerInfo`."""
    collate_functions: dict[Any, Any]
    """torch's `default_collate_fn_map`."""
    dtype: Any
    num_threads: int

    @classmethod
    def take(cls) -> SeatContext:
        """Return the present state."""
        import torch
        from torch.utils.data._utils import collate, worker

        return cls(
            GeneratorStates.take(),
            worker._worker_info,  # noqa: SLF001 - torch has no other way to set it
            dict(collate.default_collate_fn_map),
            torch.get_default_dtype(),
            torch.get_num_threads(),
        )

    def restore(self) -> None:
        """Make the process have this state again."""
        import torch
        from torch.utils.data._utils import collate, worker

        self.generators.restore()
        worker._worker_info = self.worker_info  # noqa: SLF001
        if self.collate_functions != collate.default_collate_fn_map:
            collate.default_collate_fn_map.clear()
            collate.default_collate_fn_map.update(self.collate_functions)
        torch.set_default_dtype(self.dtype)
        set_num_threads(self.num_threads)
