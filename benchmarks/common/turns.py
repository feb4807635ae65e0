"""What benchmarks share that let systems take turns: their arguments, the turns, and the table with ratios."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json

WARM_UP_S = 1.0
NUM_DISCARDED = 20
"""Batches at the start of each measurement that don't count: more than a loader has ready after a pause."""


def make_parser(doc: str, cases: Iterable[str], *, rounds: int, seconds: float | None) -> argparse.ArgumentParser:
    """Return a parser of `--rounds`, `--seconds`, `--only` and `--json`, with these defaults."""
    names = list(cases)
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each system (default: {rounds})")
    if seconds is not None:
        help_text = f"length of a turn in seconds (default: {seconds:g})"
        parser.add_argument("--seconds", type=float, default=seconds, help=help_text)
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    if arguments.rounds < 1 or getattr(arguments, "seconds", 1.0) <= 0:
        parser.error("--rounds and --seconds must be positive")
    return arguments


def begin(arguments: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """Print the machine and the settings. Return what the samples are written with."""
    settings = {name: getattr(arguments, name) for name in ("rounds", "seconds") if name in arguments} | settings
    machine = describe_machine()
    print(format_machine(machine))
    print(", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in settings.items()) + "\n", flush=True)
    return {"machine": machine, "settings": settings}


def end(arguments: argparse.Namespace, begun: dict[str, Any], results: Sequence[Result], *references: str) -> None:
    """Print the table. Write the samples, if that is asked for."""
    print(table_with_ratios(results, *references))
    if arguments.json:
        write_json(arguments.json, begun["machine"], begun["settings"], results)


def measure_in_turns(
    case: str, units: str | Sequence[str], systems: dict[str, Callable[[], Any]], rounds: int, *, is_warm: bool = False
) -> list[Result]:
    """Measure systems in an order that changes from round to round. The first time doesn't count, unless all are warm.

    With several units, each measurement returns as many figures.
    """
    units = (units,) if isinstance(units, str) else units
    results = {name: [Result(case, name, unit) for unit in units] for name in systems}
    names = list(systems)
    for measure in () if is_warm else systems.values():
        measure()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            figures = systems[name]()
            for result, figure in zip(results[name], figures if len(units) > 1 else (figures,), strict=True):
                result.samples.append(figure)
    return [results[name][column] for column in range(len(units)) for name in names]


def table_with_ratios(results: Sequence[Result], *references: str) -> str:
    """Return a table of all results, with the ratios of each to some systems in the same case."""
    medians = {(result.case, result.unit, result.system): result.median for result in results}
    rows: list[list[str]] = []
    for result in results:
        if rows and rows[-1][0] != result.case:
            rows.append([])
        others = [medians.get((result.case, result.unit, reference)) for reference in references]
        rows.append([*result.as_cells(), *(f"{format_number(result.median / one)}x" if one else "-" for one in others)])
    return format_table(["case", "system", "median", "min", "max", "unit", *(f"vs {one}" for one in references)], rows)


def endless(loader: Any) -> Iterator[Any]:
    """Yield batches of one epoch after another."""
    while True:
        yield from loader


def rate_of(batches: Iterator[Any], seconds: float, num_discarded: int = NUM_DISCARDED) -> tuple[float, int]:
    """Return batches per second, and how many they were. Batches that were ready before don't count."""
    for _ in range(num_discarded):
        next(batches)
    count, start = 0, time.perf_counter()
    now = start
    while now - start < seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    return count / (now - start), count
