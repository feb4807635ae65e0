"""Measures mixtures of 64 and 1,000 sources of 10^9 rows: start, resume, time per sample, shares and memory.

    python benchmarks/mixtures.py [--rounds 3] [--only CASE ...] [--json FILE]

Needs `pip install grain==0.2.18`; without it, only swift_loader is measured. The weights are 1, 1/2, 1/3 and so on.
Each system builds its batches in the calling thread. Each measurement is a process of its own, and imports don't count.

Columns of the table, medians over the rounds:

- start: ms from the sources to the first batch of 250 samples, the median of five;
- us/sample: CPU time over 10^5 samples. "order alone" computes the indices, the others the samples, too;
- share: the largest difference of a source's number of samples and its share of 10^4 samples. Of a case with changes,
  this is of the first 10^4;
- resume: the same from the sources and a saved state. The batch must be the one that the uninterrupted pass gave;
- state: bytes of that state as JSON;
- growth: MiB of memory that the process takes more, from before the start to the end of the pass.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import psutil
from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from common.turns import make_parser, parse
from composition.mixers import BATCH_SIZE, Mixer, MixerCase, mixers, nbytes_of, source_of

CASES = (
    MixerCase("64 sources", 64, 0),
    MixerCase("64 sources, 10 changes", 64, 10),
    MixerCase("1,000 sources", 1000, 0),
)
_UNITS = ("start", "us/sample", "share", "resume", "state", "growth")
_NUM_SHARED = 10**4
_NUM_SAMPLES = 10**5
_NUM_STARTS = 4


def main() -> None:
    parser = make_parser(__doc__, [case.name for case in CASES], rounds=3, seconds=None)
    parser.add_argument(
        "--system", choices=list(mixers()), help="measure only this one, in this process, and print JSON"
    )
    arguments = parse(parser)
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    if arguments.system:
        print(json.dumps(measure(cases[0], arguments.system)))
        return
    machine = describe_machine()
    print(format_machine(machine))
    results: list[Result] = []
    for case in cases:
        print(f"measuring {case.name} ...", file=sys.stderr, flush=True)
        # Grain's weights are constant.
        systems = [name for name in mixers() if not (case.num_changes and name.startswith("Grain"))]
        samples: dict[tuple[str, str], list[float]] = {}
        for _ in range(arguments.rounds):
            for system in systems:
                command = [sys.executable, __file__, "--only", case.name, "--system", system]
                output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
                for unit, figure in json.loads(output.splitlines()[-1]).items():
                    samples.setdefault((system, unit), []).append(figure)
        results += [Result(case.name, system, unit, figures) for (system, unit), figures in samples.items()]
    print(make_table(results))
    if arguments.json:
        write_json(arguments.json, machine, {"rounds": arguments.rounds}, results)


def measure(case: MixerCase, system: str) -> dict[str, float]:
    make, process = mixers()[system], psutil.Process()
    next(iter(make(MixerCase("warm-up", 2, 0))))  # what is imported late
    before = process.memory_info().rss
    start_s, mixer, batches, first = start(make, case)
    counts = np.bincount(source_of(first), minlength=case.num_sources) if system != "order alone" else None
    began_s = time.process_time()
    for number, batch in enumerate(islice(batches, _NUM_SAMPLES // BATCH_SIZE), 2):
        if counts is not None and number * BATCH_SIZE <= _NUM_SHARED:
            counts += np.bincount(source_of(batch), minlength=case.num_sources)
    used_s = time.process_time() - began_s
    growth, state = process.memory_info().rss - before, mixer.state_dict()
    expected = next(batches)
    state = json.loads(json.dumps(state))
    resume_s, _, _, resumed = start(make, case, state)
    assert np.array_equal(resumed, expected), f"{system} resumed with another batch"
    starts, resumes = ([start(make, case, *args)[0] for _ in range(_NUM_STARTS)] for args in ((), (state,)))
    figures = {
        "start": 1e3 * statistics.median([start_s, *starts]),
        "us/sample": 1e6 * used_s / _NUM_SAMPLES,
        "resume": 1e3 * statistics.median([resume_s, *resumes]),
        "state": float(nbytes_of(state)),
        "growth": growth / 2**20,
    }
    if counts is not None:
        shares = np.array(case.weights()[0]) / sum(case.weights()[0])
        figures["share"] = float(np.abs(counts - _NUM_SHARED * shares).max())
    return figures


def start(make: Callable[..., Mixer], case: MixerCase, *state: Any) -> tuple[float, Mixer, Iterator[Any], Any]:
    """Make a mixer. Return the seconds until its first batch, the mixer, its iterator, and that batch."""
    began_s = time.perf_counter()
    mixer = make(case, *state)
    batches = iter(mixer)
    first = next(batches)
    return time.perf_counter() - began_s, mixer, batches, first


def make_table(results: Sequence[Result]) -> str:
    medians = {(result.case, result.system, result.unit): result.median for result in results}
    rows: list[list[str]] = []
    for case, system in dict.fromkeys((result.case, result.system) for result in results):
        if rows and rows[-1][0] != case:
            rows.append([])
        figures = [medians.get((case, system, unit)) for unit in _UNITS]
        rows.append([case, system, *("-" if figure is None else format_number(figure) for figure in figures)])
    return format_table(["case", "system", *_UNITS], rows)


if __name__ == "__main__":
    main()
