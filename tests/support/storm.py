"""Does everything to loaders at once, at random, and looks at every byte that arrives.

`python -m tests.support.storm --minutes 60 --seed 1` runs case after case in one process and ends with a summary; each
deviation comes with the seed of its case, and `--case SEED` repeats that one alone. test_storm.py runs a few.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.storm_case import TRAITS, Case, Deed, draw_case
from tests.support.storm_run import Result, Verdict, run_case

_SEEDS_PER_STORM = 1_000_000

_GIVEN_UP_AFTER_S = 180.0
"""A case that can't even be interrupted ends the process, with all stacks."""


@dataclass(slots=True)
class Storm:
    """Many cases, counted."""

    is_verbose: bool = False
    details: Path | None = None
    """Where all that is known of deviations is written."""
    results: list[Result] = field(default_factory=list)

    def run(self, case: Case) -> Result:
        """Run a case and take note of it."""
        result = run_case(case)
        self.results.append(result)
        if self.is_verbose or result.verdict is Verdict.DEVIATION:
            print(result.line(), flush=True)
        if self.details is not None and result.verdict is Verdict.DEVIATION:
            with self.details.open("a") as file:
                file.write(f"{case.describe()}\n{result.text}\n\n")
        return result

    @property
    def deviations(self) -> list[Result]:
        """What must not be."""
        return [result for result in self.results if result.verdict is Verdict.DEVIATION]

    def summary(self) -> str:
        """Return how many cases ended how, what was done, and all deviations."""
        deeds: Counter[Deed] = sum((result.deeds for result in self.results), Counter())
        seconds = sum(result.seconds for result in self.results)
        num_batches = sum(result.num_batches for result in self.results)
        lines = [f"{len(self.results)} cases, {num_batches} batches, {seconds:.0f} s"]
        verdicts = Counter(result.verdict for result in self.results)
        lines += ["", *(f"{count:8} {verdict.value}" for verdict, count in verdicts.most_common())]
        lines += ["", *(f"{count:8} times {deed.value}" for deed, count in deeds.most_common())]
        symptoms = Counter(f"{result.symptom} ({result.case.kind})" for result in self.deviations)
        lines += ["", *(f"{count:8} deviations: {symptom}" for symptom, count in symptoms.most_common())]
        lines += ["", *(result.line() for result in self.deviations)]
        return "\n".join(lines)


def main() -> None:
    """Run cases until the time is up, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first case, in millions")
    parser.add_argument("--case", type=int, help="run the case of this seed alone, and say all about it")
    parser.add_argument("--kind", choices=sorted(TRAITS), help="only datasets of this kind")
    parser.add_argument("--details", type=Path, help="a file, to which the deviations' stacks and cases are added")
    parser.add_argument("--verbose", action="store_true", help="print a line for each case")
    arguments = parser.parse_args()
    storm = Storm(arguments.verbose, arguments.details)
    if arguments.case is not None:
        case = draw_case(arguments.case, arguments.kind)
        print(case.describe())
        print(storm.run(case).text)
    else:
        _run_for(storm, 60 * arguments.minutes, _SEEDS_PER_STORM * arguments.seed, arguments.kind)
    print(storm.summary())
    sys.exit(bool(storm.deviations))


def _run_for(storm: Storm, seconds: float, seed: int, kind: str | None) -> None:
    stderr = os.dup(2)  # during a case, descriptor 2 is another
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        faulthandler.dump_traceback_later(_GIVEN_UP_AFTER_S, exit=True, file=stderr)
        storm.run(draw_case(seed, kind))
        seed += 1
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)


if __name__ == "__main__":
    main()
