"""Settings of the process that a sample had better leave alone."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ProcessState", "queued_so_far_s"]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The settings at one time."""

    settings: dict[str, Any]

    @classmethod
    def now(cls) -> ProcessState:
        """Return the present settings."""
        settings: dict[str, Any] = {
            "the working directory": os.getcwd(),
            "os.environ": dict(os.environ),
            "sys.path": list(sys.path),
            "numpy.seterr": np.geterr(),
            "the recursion limit": sys.getrecursionlimit(),
            "the handler of SIGINT": signal.getsignal(signal.SIGINT),
            "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        }
        torch = sys.modules.get("torch")
        if torch is not None:
            settings |= {
                "torch's default dtype": str(torch.get_default_dtype()),
                "torch's number of threads": torch.get_num_threads(),
                "torch's grad mode": torch.is_grad_enabled(),
                "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
            }
        return cls(settings)

    def changed_since(self, before: ProcessState) -> tuple[str, ...]:
        """Return the names of the settings that differ. What torch set when it was imported doesn't count."""
        return tuple(
            name for name, value in before.settings.items() if name in self.settings and self.settings[name] != value
        )


def queued_so_far_s() -> float:
    """Return for how long this thread was ready to run and had no core, in seconds; 0 where the kernel doesn't say."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
