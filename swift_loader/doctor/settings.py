"""The settings of an examination."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to examine, and for how long."""

    target: str
    """`package.module:name` of a dataset, or of a function or class that returns one."""
    seconds: float = 10.0
    """How long samples are fetched for measurements. The other checks take some seconds more."""
    batch_size: int = 32
    collate: str = "default"
    """`default` (swift_loader's), `torch` (torch's default collate), or `package.module:name` of a function."""
    step_s: float | None = None
    """Duration of a training step; None: unknown."""
    num_workers: int = 8
    """For how many workers memory is estimated."""
    stall_s: float = 60.0
    """A process that makes no progress for so long is taken to hang, and is killed."""

    def __post_init__(self) -> None:
        for name in ("seconds", "batch_size", "num_workers", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}; give a number above 0")
        if self.step_s is not None and not self.step_s > 0:
            raise ValueError(f"step_s={self.step_s!r}; give a number of seconds above 0, or None")
