"""What comes after the loader, on a GPU: copies, their hiding behind a training step, their integrity, image rates.

    python benchmarks/device.py [--device cuda] [--quick] [--only PART ...] [--json FILE]

- rate: GB/s from the host to the device, by the kind of memory.
- step: time of a training step on batches that are there already, and on those of each loader; the loop waits for each
  step, or never.
- integrity: checksums of 10,000 batches (`--quick`: 1,000), three times. A mismatch makes the exit status 1, and so
  does a control, wrong on purpose, that isn't seen.
- images: normalised images per second on the device, side by side.

Needs torch, NumPy and cloudpickle; no network. Takes about 5 minutes, with `--quick` 2. Systems take turns; tables give
medians over the rounds with their extremes. `--device cpu` runs all parts on the CPU with tiny sizes, to test the
benchmark itself. Without a GPU, the exit status is 2.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

import numpy as np
import torch
from common.report import Result, describe_machine, format_machine, write_json
from gpu.accelerator import Accelerator, Cpu, Gpu
from gpu.images import measure_images
from gpu.integrity import check_integrity
from gpu.outcome import Outcome
from gpu.rate import measure_rate
from gpu.scale import FULL, QUICK, TINY, Scale
from gpu.step import measure_step

_PARTS: dict[str, Callable[[Accelerator, Scale], Outcome]] = {
    "rate": measure_rate,
    "step": measure_step,
    "integrity": check_integrity,
    "images": measure_images,
}
_NO_DEVICE = 2


def main() -> int:
    arguments = parse_arguments()
    accelerator = find_accelerator(arguments.device)
    if accelerator is None:
        how = "--device cpu tries the machinery out without one"
        print(f"no device {arguments.device}: torch sees no such GPU; {how}", file=sys.stderr)
        return _NO_DEVICE
    scale = (QUICK if arguments.quick else FULL) if accelerator.is_gpu else TINY
    machine, line = describe(accelerator)
    print(f"{line}\ndevice: {accelerator.describe()}\n", flush=True)
    results: list[Result] = []
    is_right = True
    for name in arguments.only or _PARTS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        outcome = _PARTS[name](accelerator, scale)
        print(f"{name}, {time.perf_counter() - begin:.0f} s\n{outcome.text}\n", flush=True)
        results += outcome.results
        is_right = is_right and outcome.is_right
    if arguments.json:
        write_json(arguments.json, machine, asdict(scale), results)
    return 0 if is_right else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", type=torch.device, help="cuda, cuda:1, ..., or cpu (default: cuda)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer batches")
    parser.add_argument("--only", nargs="+", choices=list(_PARTS), metavar="PART", help=f"of: {', '.join(_PARTS)}")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    if arguments.device.type not in ("cuda", "cpu"):
        parser.error(f"--device {arguments.device}: give cuda, or cpu")
    return arguments


def find_accelerator(device: torch.device) -> Accelerator | None:
    """Return the device, ready to work; None if there is no such thing."""
    if device.type == "cpu":
        return Cpu()
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        return None
    return Gpu(device)


def describe(accelerator: Accelerator) -> tuple[dict[str, Any], str]:
    """Return what the figures depend on, and the host's part of it in a line."""
    try:
        machine = describe_machine()
        line = format_machine(machine)
    except metadata.PackageNotFoundError:  # of one that other benchmarks need
        machine = {"cores": len(os.sched_getaffinity(0)), "system": f"{platform.system()} {platform.release()}"}
        machine |= {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        line = ", ".join(f"{name} {value}" for name, value in machine.items())
    machine["device"] = accelerator.describe()
    return machine, line


if __name__ == "__main__":
    sys.exit(main())
