"""Compares ways to make batches of samples of different lengths: padding, steps, and the speed of a fixed model step.

    python benchmarks/packing.py [--rounds 3] [--ranks N] [--only CASE ...] [--data FOLDER] [--json FILE]

Needs `pip install online-dynamic-batching==0.1.2 grain==0.2.18`; a system that isn't installed is left out, and the
output says so. Lengths come from Debian's packages and from Python's standard library: see `composition/lengths.py`.
A case whose packages can't be got is left out, too. All systems get the same samples, once each, and the same budget.

Columns of the table:

- efficiency: the samples' tokens as a share of those that the model computes, padding included;
- steps: batches of the pass;
- largest: tokens that the largest batch computes, as multiples of the budget;
- ranks: with `--ranks`, the efficiency if each step takes as long as that of the rank that computes most;
- tokens/s: real tokens per second of CPU time of a model step, without the loader, on one thread: the median over the
  rounds, of 32 steps each. The model is an MLP, forward and backward: its cost is proportional to the tokens computed;
- loading: seconds of CPU time of all processes for the whole pass through the loader, its start included.

One pass each. The first three columns are the same in each run.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from common.turns import make_parser, measure_in_turns, parse
from composition.lengths import CASES, LengthCase
from composition.packers import Lengths, Packer, Shape, odb, packers
from composition.ranks import largest_of_neighbours, largest_of_odb

_WIDTH, _HIDDEN = 32, 128
_NUM_STEPS = 32
_UNITS = ("efficiency", "steps", "largest", "ranks", "tokens/s", "loading")
_FORMATS = ("{:.3f}".format, "{:,.0f}".format, "{:.2f}".format, "{:.3f}".format, format_number, "{:.2f}".format)


def main() -> None:
    parser = make_parser(__doc__, [case.name for case in CASES], rounds=3, seconds=None)
    parser.add_argument("--data", metavar="FOLDER", type=Path, help="keep the packages there (default: nowhere)")
    parser.add_argument("--ranks", metavar="N", type=int, help="so many ranks, too; takes minutes (default: no)")
    arguments = parse(parser)
    torch.set_num_threads(1)
    machine = describe_machine()
    print(format_machine(machine))
    systems = packers()
    for name in ("ODB", "Grain"):
        if not any(system.startswith(name) for system in systems):
            print(f"{name} isn't installed, and is left out")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or Path(folder)
        for case in CASES:
            if not arguments.only or case.name in arguments.only:
                print(f"measuring {case.name}: {case.title} ...", file=sys.stderr, flush=True)
                try:
                    lengths = case.lengths(data)
                except RuntimeError as error:
                    print(f"{case.name} is left out: {error}")
                else:
                    results += measure_case(case, lengths, systems, arguments)
    print()
    print(make_table(results))
    if arguments.json:
        write_json(arguments.json, machine, {"rounds": arguments.rounds}, results)


def measure_case(
    case: LengthCase, lengths: Lengths, systems: dict[str, Packer], arguments: argparse.Namespace
) -> list[Result]:
    longest = case.max_tokens // 2
    percentiles = ", ".join(f"{number:,.0f}" for number in np.percentile(lengths, (5, 50, 95, 99, 100)))
    print(f"{case.name}: {len(lengths):,} lengths, {lengths.sum():,} tokens")
    print(f"    percentiles 5, 50, 95, 99, 100: {percentiles}")
    print(f"    {(lengths > longest).sum():,} are cut at {longest:,}; budget {case.max_tokens:,}", flush=True)
    lengths = np.minimum(lengths, longest)
    shapes: dict[str, list[Shape]] = {}
    results: list[Result] = []
    for name, make in systems.items():
        shapes[name], loading_s = drain(make(lengths, case.max_tokens))
        check(name, shapes[name], lengths)
        computed = np.array([shape.rows * shape.columns for shape in shapes[name]])
        figures = {
            "efficiency": int(lengths.sum()) / float(computed.sum()),
            "steps": float(len(computed)),
            "largest": float(computed.max()) / case.max_tokens,
            "loading": loading_s,
        }
        if num_ranks := arguments.ranks:
            if isinstance(make, partial) and make.func is odb:
                largest = largest_of_odb(lengths, case.max_tokens, make.keywords["buffer_size"], num_ranks)
            else:
                largest = largest_of_neighbours(shapes[name], num_ranks)
            figures["ranks"] = int(lengths.sum()) / (num_ranks * largest)
        results += [Result(case.name, name, unit, [figure]) for unit, figure in figures.items()]
    turns = {name: partial(speed_of, made) for name, made in shapes.items()}
    return results + measure_in_turns(case.name, "tokens/s", turns, arguments.rounds, is_warm=True)


def check(name: str, shapes: Sequence[Shape], lengths: Lengths) -> None:
    """Each sample came once. Of a packer that cuts, all tokens came."""
    came = np.sort(np.concatenate([shape.lengths for shape in shapes]))
    if "cut" in name:
        assert came.sum() == lengths.sum(), f"{name}: {came.sum():,} of {lengths.sum():,} tokens came"
    elif not np.array_equal(came, np.sort(lengths)):
        print(f"    {name}: {len(came):,} of {len(lengths):,} samples came", flush=True)


def speed_of(shapes: Sequence[Shape]) -> float:
    """Return the real tokens per second of CPU time of some steps, evenly spaced over the pass."""
    steps = shapes[:: -(-len(shapes) // _NUM_STEPS)]
    ids = torch.zeros(max(shape.rows * shape.columns for shape in steps), dtype=torch.int32)
    model = torch.nn.Sequential(
        torch.nn.Embedding(2, _WIDTH),
        torch.nn.Linear(_WIDTH, _HIDDEN),
        torch.nn.GELU(),
        torch.nn.Linear(_HIDDEN, _WIDTH),
    )
    began_s = 0.0
    for number, shape in enumerate([steps[0], *steps]):  # the first one warms up
        if number == 1:
            began_s = time.process_time()
        model(ids[: shape.rows * shape.columns].view(shape.rows, shape.columns)).mean().backward()
        model.zero_grad()
    return sum(sum(shape.lengths) for shape in steps) / (time.process_time() - began_s)


def drain(made: Iterator[Shape | None]) -> tuple[list[Shape], float]:
    """Return all batches, and the CPU seconds that they took. After the last one, a system yields None."""
    began_s, loading_s, shapes = cpu_s(), 0.0, []
    for shape in made:
        if shape is None:
            loading_s = cpu_s() - began_s
        else:
            shapes.append(shape)
    gc.collect()
    return shapes, loading_s


def cpu_s() -> float:
    """Return the CPU time of this process and of all that it started, whether they live or have ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    living = [sum(child.cpu_times()[:4]) for child in psutil.Process().children(recursive=True)]
    return sum(use.ru_utime + use.ru_stime for use in uses) + sum(living)


def make_table(results: Sequence[Result]) -> str:
    medians = {(result.case, result.system, result.unit): result.median for result in results}
    rows: list[list[str]] = []
    for case, system in dict.fromkeys((result.case, result.system) for result in results):
        if rows and rows[-1][0] != case:
            rows.append([])
        figures = [medians.get((case, system, unit)) for unit in _UNITS]
        cells = ["-" if figure is None else form(figure) for figure, form in zip(figures, _FORMATS, strict=True)]
        rows.append([case, system, *cells])
    return format_table(["case", "system", *_UNITS], rows)


if __name__ == "__main__":
    main()
