"""What runs in the process that runs the user's dataset: builds it, measures its samples, and fills in a `Diagnosis`.

The module `examination` says what the process shares with the doctor. The user's code gets an empty stdin, and its
output goes to a file.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from swift_loader.batch.collate import Collate, HeapMemory, collate_into, torch_collate
from swift_loader.batch.tree import type_name
from swift_loader.cli import CommandError, find_target, made_by
from swift_loader.doctor.contents import hazards_now, judge_containers, judge_growth, judge_sharing, lengths_of
from swift_loader.doctor.diagnosis import (
    BatchTime,
    Diagnosis,
    Line,
    Settings,
    Timing,
    count_text,
    quoted,
    time_text,
    workers_needed,
)
from swift_loader.doctor.examination import PLACE_SIZE, place_text
from swift_loader.doctor.samples import (
    KEEP_NOTHING,
    SEED,
    Fetch,
    Subject,
    fetch_one,
    first_failing,
    judge_leaves,
    judge_randomness,
    layout_of,
    probe_order,
    text_of,
    timing_of,
)
from swift_loader.doctor.stacks import StackSampler
from swift_loader.loader import SwiftLoader
from swift_loader.metrics.machine import available_cores
from swift_loader.testing import assert_resume_exact
from swift_loader.worker.process import die_with_parent, end_process
from swift_loader.worker.seeding import Rng, seed_for_construction
from swift_loader.worker.torch_worker import set_num_threads

_SAMPLES_SHARE, _AGAIN_SHARE, _BATCHES_SHARE, _RANDOMNESS_SHARE = 0.5, 0.1, 0.15, 0.25
"""Of the seconds for measurements."""

_MAX_PRINTED = 120
_MAX_BATCHES = 20
_ENOUGH_HITS = 200
"""Of a small dataset of fast samples, one pass shows too few stacks."""
_NUM_CLOSE = 64
"""How many samples are looked at more closely: what they draw, and whether they are the same again."""

_NUM_SLOW = 8
_NUM_AGAIN = 3
"""The machine may be busy once, hardly three times."""
_TAIL = 5.0
"""A sample is slow if it takes so many times the median."""
_LEAST_TAIL_S = 1e-3
"""And so much more than the median, in seconds: less is the noise of the machine."""

_PRINTS_EACH = 0.5
"""Lines printed per sample from which on samples are said to print."""

_BEYOND_THE_END = (IndexError, KeyError, StopIteration)
"""What a dataset raises for an index that it doesn't have."""

_NUM_WORKERS = 2
_NUM_BATCHES = 4
_NUM_CUTS = 2
"""After the first and the third of four batches. Resumed with one worker, the fourth batch is then the worker's third
and its first, so that a dataset with a state of its own gives it another content at least once.
"""
_NUM_BUILDS = 6
"""How often such a run builds each sample, about."""
_MAX_RESUMED = 48
_RESUME_SHARE, _LEAST_RESUME_S = 0.5, 3.0


def main(folder: str, parent: int) -> None:
    """Examine the dataset of the request. `parent` is the doctor's process id."""
    if sys.platform == "linux":
        die_with_parent(parent)
    faulthandler.enable()
    settings, avoid = pickle.loads((Path(folder) / "request").read_bytes())
    examiner = _Examiner(Path(folder), settings, avoid)
    try:
        examiner.examine()
        examiner.diagnosis.is_complete = True
        examiner.save()
    except CommandError as error:
        (Path(folder) / "unusable").write_text(str(error), encoding="utf-8")
    end_process(0)  # not sys.exit: the dataset's threads may go on for ever


class _Examiner:
    """Goes from part to part, and saves the diagnosis after each."""

    def __init__(self, folder: Path, settings: Settings, avoid: frozenset[int]) -> None:
        self.diagnosis = Diagnosis(settings.target)
        self._folder, self._settings, self._avoid = folder, settings, avoid
        with (folder / "place").open("r+b") as file:
            self._place = mmap.mmap(file.fileno(), PLACE_SIZE)
        self._armed_s = -float("inf")

    def at(self, doing: str, index: int | None = None) -> None:
        """Say what comes next. If it takes too long, the process ends itself with the stacks of its threads."""
        self._place[:] = place_text(doing, index)
        stall_s = self._settings.stall_s
        if time.monotonic() > self._armed_s + stall_s / 10:  # arming takes too long for each sample
            faulthandler.dump_traceback_later(1.1 * stall_s, exit=True)
            self._armed_s = time.monotonic()

    def save(self) -> None:
        """Keep what was found out so far, in case the process dies."""
        (self._folder / "new").write_bytes(pickle.dumps(self.diagnosis))
        (self._folder / "new").replace(self._folder / "diagnosis")

    def examine(self) -> None:
        folder, path, environ = os.getcwd(), list(sys.path), dict(os.environ)
        indices = self._examine_in_this_process()
        os.chdir(folder)  # the dataset may have changed them
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environ)
        if indices is not None:
            self._resume(indices)

    def _examine_in_this_process(self) -> list[int] | None:
        """Return the samples for a run of the loader; None if the dataset can't be used."""
        self.at("importing the module")
        name = self._settings.collate
        collate = torch_collate if name == "torch" else collate_into(None if name == "default" else find_target(name))
        dataset = self._build()
        num_samples = None if dataset is None else self._length_of(dataset)
        self.save()
        if not num_samples:
            return None
        judge_containers(dataset, self._settings.num_workers, self.diagnosis)
        lengths, process = lengths_of(dataset), _process_settings()
        subject = Subject(dataset, num_samples, self.at)
        samples = self._measure(subject)
        self.save()
        if not samples:
            return None
        good = [sample.index for sample in samples]
        error = self._measure_batches(subject, samples, collate)
        self._judge_workers()
        judge_leaves([(sample.index, sample.layout) for sample in samples], error, self.diagnosis)
        self.save()
        judge_randomness(subject, good[:_NUM_CLOSE], _RANDOMNESS_SHARE * self._settings.seconds, self.diagnosis)
        self._judge_settings(process)
        judge_growth(lengths, dataset, len(samples), self.diagnosis)
        self.save()
        seconds = max(_LEAST_RESUME_S, _RESUME_SHARE * self._settings.seconds)
        mean_s = sum(sample.took_s for sample in samples) / len(samples)
        return good[: min(_MAX_RESUMED, int(seconds / max(1e-9, mean_s * _NUM_BUILDS)))]

    # The dataset

    def _build(self) -> Any:
        """Return the dataset; None if it can't be built."""
        find_target(self._settings.target)
        set_num_threads(1)  # as in the loader's processes: torch's threads would outlive the constructor
        self.at("building the dataset")
        hazards = hazards_now()
        seed_for_construction(Rng.SAMPLE)
        began_s = time.perf_counter()
        try:
            dataset = without_loader(made_by(self._settings.target))
        except (Exception, SystemExit) as error:
            self.diagnosis.fault(
                "faults",
                "The dataset can't be built.",
                text_of(error.__cause__ or error),
                "Make the function or class work without arguments, then examine the dataset again.",
            )
            return None
        self.diagnosis.build_s = time.perf_counter() - began_s
        self.diagnosis.dataset = type_name(dataset)
        self.at("looking at the dataset's attributes")
        judge_sharing(dataset, hazards, self.diagnosis)
        return dataset

    def _length_of(self, dataset: Any) -> int:
        """Return the dataset's length; 0 if it can't be used."""
        length, error = 0, ""
        if hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
            try:
                self.diagnosis.num_samples = length = len(dataset)
            except Exception as raised:
                error = f"len(dataset) raised {text_of(raised)}"
        else:
            error = f"a {type_name(dataset)} has no __getitem__"
        if error:
            self.diagnosis.fault(
                "length",
                "The dataset has no usable length.",
                error,
                "Give the dataset __getitem__(index) and __len__(); a stream is for DataLoader, not for the doctor.",
            )
        elif not length:
            self.diagnosis.fault(
                "length",
                "The dataset is empty.",
                "len(dataset) is 0",
                "Check the paths and filters from which the constructor makes its list of samples.",
            )
        return length

    # Its samples

    def _measure(self, subject: Subject) -> list[Fetch]:
        """Fetch samples one by one for some seconds, and find what is wrong. Return those that succeeded."""
        samples: list[Fetch] = []
        failures: list[Fetch] = []
        num_printed = len(self._printed())
        sampler = StackSampler(fetch_one.__code__.co_filename)
        deadline_s = time.perf_counter() + _SAMPLES_SHARE * self._settings.seconds
        for index in probe_order(subject.num_samples):
            if index in self._avoid:
                continue
            fetch = fetch_one(subject, index, sampler)
            (samples if fetch.error is None else failures).append(fetch)
            if time.perf_counter() > deadline_s:
                break
        for sample in cycle(samples):
            if sampler.num_hits >= _ENOUGH_HITS or time.perf_counter() > deadline_s:
                break
            fetch_one(subject, sample.index, sampler)
        sampler.stop()
        self._judge_output(subject.num_fetches, self._printed()[num_printed:])
        self._judge_failures(subject, failures, len(samples))
        if samples:
            if not failures:
                self.diagnosis.healthy.append(f"{count_text(len(samples), 'sample')} were fetched without an error")
            self.diagnosis.timing = timing = timing_of(samples)
            self.diagnosis.lines = sampler.shares()
            self._judge_slow(subject, samples[1:], timing, sampler)
        return samples

    def _judge_failures(self, subject: Subject, failures: Sequence[Fetch], num_good: int) -> None:
        """Find samples that raise, by kind of error, and a length that is too large."""
        length, first = subject.num_samples, subject.num_samples
        of_last = [one for one in failures if one.index == length - 1 and isinstance(one.error, _BEYOND_THE_END)]
        if of_last:
            first = first_failing(subject) or length  # if all samples fail, the length isn't what is wrong
        if first < length:
            self.diagnosis.fault(
                "length",
                f"len(dataset) is wrong: it is {length:,}, but samples from index {first:,} on fail.",
                f"index {first:,} to {length - 1:,} raised {text_of(of_last[0].error)}; index {first - 1:,} is fine",
                f"Let __len__ return {first:,}, or provide the missing samples.",
                sorted({first, length - 1}),
            )
        groups: dict[tuple[str, Line | None], list[Fetch]] = defaultdict(list)
        for one in failures:
            if one.index < first:
                groups[type(one.error).__name__, one.line].append(one)
        for (kind, line), group in groups.items():
            indices = sorted(one.index for one in group)
            whole = count_text(len(indices), "sample") if num_good else "Each sample"
            self.diagnosis.fault(
                "faults",
                f"{whole} of those looked at {'raise' if num_good and len(indices) > 1 else 'raises'} {kind}.",
                f"dataset indices {quoted(indices)}: {text_of(group[0].error)}{'' if line is None else f' at {line}'}",
                "Repair or remove these samples, or pass on_error='skip' or 'replace' to leave them out.",
                indices,
            )

    def _judge_slow(self, subject: Subject, samples: Sequence[Fetch], timing: Timing, sampler: StackSampler) -> None:
        """Find samples that take much longer than the others, each time."""
        limit_s = max(_TAIL * timing.p50_s, timing.p50_s + _LEAST_TAIL_S)
        slow: list[tuple[int, str]] = []
        looked_at = sorted(samples, key=lambda sample: -sample.took_s)[:_NUM_SLOW]
        deadline_s = time.perf_counter() + _AGAIN_SHARE * self._settings.seconds
        for sample in looked_at:
            again_s = min(fetch_one(subject, sample.index).took_s for _ in range(_NUM_AGAIN))
            if min(sample.took_s, again_s) > limit_s:
                slow.append((sample.index, f"{sample.index} ({time_text(sample.took_s)}, again {time_text(again_s)})"))
            if time.perf_counter() > deadline_s:
                break
        if not slow:
            spread = f"p50 {time_text(timing.p50_s)}, p99 {time_text(timing.p99_s)}"
            self.diagnosis.healthy.append(f"no sample takes much longer than the others each time ({spread})")
            return
        lines = sampler.shares({sample.index for sample in looked_at})
        where = f"; {lines[0].share:.0%} of their time is in {lines[0].line}" if lines else ""
        self.diagnosis.warning(
            "time",
            "Some samples take much longer than the others, each time.",
            f"the median is {time_text(timing.p50_s)}; dataset indices {quoted([text for _, text in slow])}{where}",
            "Make that line cheaper for these samples, or prepare them once on disk: a batch waits for its slowest "
            "sample.",
            [index for index, _ in slow],
        )

    def _printed(self) -> bytes:
        sys.stdout.flush()
        sys.stderr.flush()
        return (self._folder / "output").read_bytes()

    def _judge_output(self, num_fetches: int, printed: bytes) -> None:
        lines = printed.decode(errors="replace").splitlines()
        if len(lines) >= _PRINTS_EACH * max(1, num_fetches):
            self.diagnosis.warning(
                "side effects",
                "Samples print, which slows workers down and floods the terminal.",
                f"{len(lines):,} lines for {count_text(num_fetches, 'sample')}, such as {lines[-1][:_MAX_PRINTED]!r}",
                "Remove the print, or silence the library's warnings.",
            )
        elif not lines:
            self.diagnosis.healthy.append("fetching samples prints nothing")

    def _judge_settings(self, before: dict[str, Any]) -> None:
        now = _process_settings()  # what torch set when it was imported doesn't count
        changed = [name for name, value in before.items() if now.get(name, value) != value]
        if changed:
            self.diagnosis.warning(
                "side effects",
                "Fetching a sample changes settings of the whole process.",
                f"changed while samples were fetched: {quoted(changed)}",
                "Set it back at the end of __getitem__, or set it once in the constructor.",
            )
        else:
            self.diagnosis.healthy.append("fetching samples changes no setting of the process")

    # Batches

    def _measure_batches(self, subject: Subject, samples: Sequence[Fetch], collate: Collate) -> str:
        """Build batches for some seconds, at least one, as a worker does. Return what the collate function raised."""
        seconds, mean_s = _BATCHES_SHARE * self._settings.seconds, sum(one.took_s for one in samples) / len(samples)
        batch_size = min(self._settings.batch_size, max(2, int(seconds / max(mean_s, 1e-9))))
        indices = [sample.index for sample in samples]
        took: list[float] = []
        collated: list[float] = []
        nbytes = 0
        deadline_s = time.perf_counter() + seconds
        for number in range(_MAX_BATCHES):
            chosen = np.resize(np.roll(indices, -number * batch_size), batch_size).tolist()
            self.at("building batches")
            began_s = time.perf_counter()
            try:
                fetched = list(subject.fetcher.fetch(SEED, 0, chosen).samples)
                if subject.batch_seeding.needs_rebuild():  # the first batch shows whether samples draw
                    fetched = list(subject.fetcher.fetch(SEED, 0, chosen).samples)
                    subject.batch_seeding.needs_rebuild()
                fetched_s = time.perf_counter()
                batch = collate(fetched, HeapMemory())
            except Exception as error:
                return text_of(error)
            ended_s = time.perf_counter()
            took.append(ended_s - began_s)
            collated.append(ended_s - fetched_s)
            nbytes = nbytes or sum(leaf.nbytes for leaf in layout_of(batch))
            if ended_s > deadline_s:
                break
        took, collated = took[1:] or took, collated[1:] or collated
        batch_s = float(np.mean(took))
        self.diagnosis.batch = BatchTime(
            batch_size, float(np.median(took)), batch_s, float(np.median(collated)), nbytes
        )
        return ""

    def _judge_workers(self) -> None:
        """Find out how many workers keep a training step fed."""
        step_s, timing, batch = self._settings.step_s, self.diagnosis.timing, self.diagnosis.batch
        if step_s is None or timing is None:
            return
        sample_s = timing.mean_s if batch is None else batch.mean_s / batch.batch_size
        batch_s = sample_s * self._settings.batch_size
        self.diagnosis.workers = workers_needed(batch_s, timing.cpu_share, step_s, available_cores())

    # A run of the loader

    def _resume(self, indices: list[int]) -> None:
        """Run a loader over some samples, stop it, resume it, and compare every byte."""
        if len(indices) < _NUM_BATCHES:
            is_small = (self.diagnosis.num_samples or 0) < _NUM_BATCHES
            self.diagnosis.note(
                "resume",
                "Whether a run resumes exactly wasn't checked.",
                f"such a run builds at least {_NUM_BATCHES} samples {_NUM_BUILDS} times",
                "Examine a dataset with more samples." if is_small else "Pass a larger --seconds.",
            )
            return

        def make_loader(num_workers: int) -> SwiftLoader:
            self.at("running a loader over the dataset")
            return SwiftLoader(
                Some,
                {"target": self._settings.target, "indices": indices},
                batch_size=len(indices) // _NUM_BATCHES,
                worker_per_consumer=num_workers,
                seed=SEED,
                nb_consumer=1,
                collate_fn=list,  # samples needn't have the same leaves here
                benchmark=False,
            )

        run = f"a run over {count_text(len(indices), 'sample')} with {_NUM_WORKERS} workers"
        try:
            assert_resume_exact(
                lambda: make_loader(_NUM_WORKERS),
                resume_with=lambda: make_loader(1),
                num_batches=_NUM_BATCHES,
                num_cuts=_NUM_CUTS,
            )
        except AssertionError as mismatch:
            text = " ".join(str(mismatch).split()).partition(". A sample must depend")[0]  # the remedy says it
            self.diagnosis.fault("resume", "A stopped run doesn't resume exactly.", f"{run}: {text}", KEEP_NOTHING)
        except Exception as failure:
            text = " ".join(text_of(failure).split())
            remedy = "Follow the error's advice, then examine the dataset again."
            self.diagnosis.fault("resume", "The loader can't run this dataset.", f"{run}: {text}", remedy)
        else:
            self.diagnosis.healthy.append(f"{run}, stopped and resumed with one, gives the same bytes")


class Some:
    """Some samples of the dataset that a target names. A loader's own processes make it."""

    def __init__(self, target: str, indices: Sequence[int]) -> None:
        """Build the dataset."""
        self._dataset = without_loader(made_by(target))
        self._indices = list(indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._indices[index]]


def without_loader(thing: Any) -> Any:
    """Return the dataset of a loader, and anything else as it is."""
    is_loader = hasattr(thing, "dataset") and not hasattr(type(thing), "__getitem__")
    return thing.dataset if is_loader else thing


def _process_settings() -> dict[str, Any]:
    """Return settings of the process that a sample had better leave alone."""
    settings: dict[str, Any] = {
        "the working directory": os.getcwd(),
        "os.environ": dict(os.environ),
        "sys.path": list(sys.path),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        settings |= {
            "torch's default dtype": str(torch.get_default_dtype()),
            "torch's number of threads": torch.get_num_threads(),
            "torch's grad mode": torch.is_grad_enabled(),
        }
    return settings
