"""The simulated accelerator `sim`. Importing this builds it, once per machine, and gives torch two such devices.

The whole process has them from then on. So it is imported by `pytest -p tests.device.simulated`, and by scripts.
`torch.sim` has no streams: those of `torch.Stream`, `torch.Event` and `torch.accelerator` are all that there is.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
COUNTS = ("direct", "staged", "awaited", "violations")


def _build() -> Path:
    """Return the library. The first process that needs it builds it, and the others wait."""
    source = Path(__file__).with_name("device.cpp")
    command = [*COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(source), "-ltorch_cpu", "-lc10"]
    key = hashlib.sha256(repr((source.read_bytes(), command, torch.__version__, torch.__file__)).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swift_loader_tests"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"simulated-{key[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            from torch.utils.cpp_extension import include_paths, library_paths

            unfinished = library.with_suffix(".unfinished")
            paths = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
            subprocess.run([*command, *paths, "-o", str(unfinished)], check=True)
            unfinished.rename(library)
    return library


rename_privateuse1_backend("sim")
_library = ctypes.CDLL(str(_build()))
_library.sim_is_forked.restype = ctypes.c_bool
_library.sim_num_registered.restype = _library.sim_count.restype = ctypes.c_int64
_library.sim_start()
_module: Any = ModuleType("torch.sim")
_module.is_available = lambda: True
_module.device_count = lambda: 2
_module.current_device = torch.accelerator.current_device_index
_module.set_device = torch.accelerator.set_device_index
_module.synchronize = torch.accelerator.synchronize
_module.manual_seed_all = lambda seed: None
_module._is_in_bad_fork = _library.sim_is_forked
torch._register_device_module("sim", _module)


def stall(milliseconds: float) -> None:
    """Keep the current stream busy. Returns at once."""
    _library.sim_stall(ctypes.c_int64(int(milliseconds * 1000)))


def set_copy_delay(milliseconds: float) -> None:
    """Have each copy to the device begin so much later than its turn."""
    _library.sim_set_copy_delay(ctypes.c_int64(int(milliseconds * 1000)))


def counts() -> dict[str, int]:
    """Return how many copies to the device read the memory later, how many were staged, and for how many copies the
    caller waited; how often memory was unregistered too early, or a copy read past its end."""
    return {name: _library.sim_count(which) for which, name in enumerate(COUNTS)}


def num_registered() -> int:
    """Return how many ranges of memory are registered."""
    return int(_library.sim_num_registered())


class Registry:
    """What `CudaRegistry` is for CUDA."""

    def register(self, address: int, nbytes: int) -> str | None:
        code = _library.sim_register(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
        return "" if code == 0 else f"error {code}"

    def unregister(self, address: int) -> bool:
        return _library.sim_unregister(ctypes.c_void_p(address)) in (0, 713)
