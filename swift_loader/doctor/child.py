"""What runs in the process that runs the user's dataset: builds it, measures its samples, and fills in a `Diagnosis`.

The module `examination` says what the process shares with the doctor. The user's code gets an empty stdin, and its
output goes to a file.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from swift_loader.__main__ import CommandError, find_target, made_by
from swift_loader.batch.collate import BatchMemory, collate_into
from swift_loader.batch.tree import type_name
from swift_loader.doctor import samples
from swift_loader.doctor.examination import Diagnosis, Line, Settings, Timing, quoted
from swift_loader.doctor.samples import SEED, Fetch, Place, StackSampler, Subject, text_of, within
from swift_loader.errors import counted, time_text
from swift_loader.loader import SwiftLoader
from swift_loader.sampling.mixture import Mixture
from swift_loader.testing import assert_resume_exact
from swift_loader.worker.process import die_with_parent, end_process
from swift_loader.worker.seeding import Rng, seed_for_construction
from swift_loader.worker.torch_worker import set_num_threads

_SAMPLES_SHARE, _AGAIN_SHARE, _BATCH_SHARE, _RANDOMNESS_SHARE = 0.5, 0.1, 0.15, 0.25
"""Of the seconds for measurements."""

_MAX_BATCHES = 20
_ENOUGH_HITS = 200
"""Of a small dataset of fast samples, one pass shows too few stacks."""
_NUM_CLOSE = 64
"""How many samples are looked at more closely: what they draw, and whether they are the same again."""

_NUM_AGAIN = 3
"""The machine may be busy once, hardly three times."""
_TAIL = 5.0
"""A sample is slow if it takes so many times the median."""
_LEAST_TAIL_S = 1e-3
"""And so much more than the median, in seconds: less is the noise of the machine."""

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
    examiner = _Examiner(Path(folder))
    try:
        examiner.examine()
        examiner.diagnosis.is_complete = True
        examiner.save(examiner.diagnosis)
    except CommandError as error:
        examiner.save(error)
    end_process(0)  # not sys.exit: the dataset's threads may go on for ever


class _Examiner:
    """Goes from part to part, and saves the diagnosis after each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings: Settings = pickle.loads((folder / "request").read_bytes())
        self._place = Place(folder / "place", self._settings.stall_s)
        self.diagnosis = Diagnosis(self._settings.target)
        self._collate_fn: Any = None  # SwiftLoader's own

    def save(self, found: Diagnosis | CommandError) -> None:
        """Keep what was found out so far, in case the process dies."""
        (self._folder / "new").write_bytes(pickle.dumps(found))
        (self._folder / "new").replace(self._folder / "diagnosis")

    def examine(self) -> None:
        """Examine the dataset in this process, then run a loader over some of its samples."""
        folder = os.getcwd()
        good = self._examine_in_this_process()
        os.chdir(folder)  # the dataset may have changed it
        if self.diagnosis.timing is not None:
            seconds = max(_LEAST_RESUME_S, _RESUME_SHARE * self._settings.seconds)
            affordable = int(seconds / self.diagnosis.timing.mean_s / _NUM_BUILDS)
            num_samples = min(_MAX_RESUMED, max(_NUM_BATCHES, affordable))
            self._resume([sample.index for sample in good[:num_samples]])

    def _examine_in_this_process(self) -> list[Fetch]:
        """Return the samples that can be fetched; none if the dataset can't be used."""
        self._place.at("importing the module")
        dataset = self._build()
        num_samples = None if dataset is None else self._length_of(dataset)
        self.save(self.diagnosis)
        if not num_samples:
            return []
        self._place.at("looking at the dataset's attributes")
        held = list(samples.walk(dataset))
        samples.judge_containers(held, self.diagnosis)
        lengths = samples.lengths_of(held)
        subject = Subject(dataset, num_samples, self._place)
        good = self._measure(subject)
        self.save(self.diagnosis)
        if self.diagnosis.timing is None:
            return []
        self._judge_collating(subject, [sample.index for sample in good], self.diagnosis.timing.mean_s)
        self.save(self.diagnosis)
        close, seconds = [sample.index for sample in good[:_NUM_CLOSE]], _RANDOMNESS_SHARE * self._settings.seconds
        samples.judge_randomness(subject, close, seconds, self.diagnosis)
        samples.judge_growth(lengths, list(samples.walk(dataset)), len(good), self.diagnosis)
        self.save(self.diagnosis)
        return good

    # The dataset

    def _build(self) -> Any:
        """Return the dataset; None if it can't be built."""
        find_target(self._settings.target)
        set_num_threads(1)  # as in the loader's processes: torch's threads would outlive the constructor
        self._place.at("building the dataset")
        seed_for_construction(Rng.SAMPLE)
        try:
            made = made_by(self._settings.target)
            dataset = without_loader(made)
        except (Exception, SystemExit) as error:
            self.diagnosis.fault(
                "faults",
                "The dataset can't be built.",
                text_of(error.__cause__ or error),
                "Make the function or class work without arguments, then examine the dataset again.",
            )
            return None
        if getattr(made, "batch_size", None):  # a loader that forms batches
            self.diagnosis.batch_size, self._collate_fn = made.batch_size, getattr(made, "collate_fn", None)
        self.diagnosis.dataset = type_name(dataset)
        return dataset

    def _length_of(self, dataset: Any) -> int:
        """Return the dataset's length; 0 if it can't be used."""
        evidence = f"a {type_name(dataset)} has no __getitem__"
        if hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
            try:
                self.diagnosis.num_samples = length = len(dataset)
            except Exception as raised:
                evidence = f"len(dataset) raised {text_of(raised)}"
            else:
                if not length:
                    remedy = "Check the paths and filters from which the constructor makes its list of samples."
                    self.diagnosis.fault("length", "The dataset is empty.", "len(dataset) is 0", remedy)
                return length
        remedy = "Give the dataset __getitem__(index) and __len__(); a stream is for DataLoader, not for the doctor."
        self.diagnosis.fault("length", "The dataset has no usable length.", evidence, remedy)
        return 0

    # Its samples

    def _measure(self, subject: Subject) -> list[Fetch]:
        """Fetch samples one by one for some seconds, and find what is wrong. Return those that succeeded."""
        good: list[Fetch] = []
        failures: list[Fetch] = []
        seen: set[int] = set()
        sampler = StackSampler()
        for index in within(_SAMPLES_SHARE * self._settings.seconds, cycle(samples.probe_order(subject.num_samples))):
            if index in seen and sampler.num_hits >= _ENOUGH_HITS:
                break
            fetch = subject.fetch(index, sampler)
            if index not in seen:
                seen.add(index)
                (good if fetch.error is None else failures).append(fetch)
        sampler.stop()
        self._judge_failures(subject, failures, len(good))
        if good:
            self.diagnosis.timing = timing = samples.timing_of(good)
            self.diagnosis.lines = sampler.shares()
            self._judge_slow(subject, timing, sampler)
        return good

    def _judge_failures(self, subject: Subject, failures: Sequence[Fetch], num_good: int) -> None:
        """Find samples that raise, by kind of error, and a length that is too large."""
        length, first = subject.num_samples, subject.num_samples
        of_last = [one for one in failures if one.index == length - 1 and isinstance(one.error, _BEYOND_THE_END)]
        if of_last:
            first = subject.first_failing() or length  # if all samples fail, the length isn't what is wrong
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
            self.diagnosis.fault(
                "faults",
                f"{counted(len(indices), 'sample')} of {len(failures) + num_good:,} raised {kind}.",
                f"dataset indices {quoted(indices)}: {text_of(group[0].error)}{'' if line is None else f' at {line}'}",
                "Repair or remove these samples, or pass on_error='skip' or 'replace' to leave them out.",
                indices,
            )

    def _judge_slow(self, subject: Subject, timing: Timing, sampler: StackSampler) -> None:
        """Find samples that take much longer than the others, each time."""
        limit_s = max(_TAIL * timing.p50_s, timing.p50_s + _LEAST_TAIL_S)
        slow: dict[int, str] = {}
        for index, took_s in within(_AGAIN_SHARE * self._settings.seconds, timing.slowest):
            again_s = min(subject.fetch(index).took_s for _ in range(_NUM_AGAIN))
            if min(took_s, again_s) > limit_s:
                slow[index] = f"{index} ({time_text(took_s)}, again {time_text(again_s)})"
        if not slow:
            return
        lines = sampler.shares({index for index, _ in timing.slowest})
        where = f"; {lines[0].share:.0%} of their time is in {lines[0].line}" if lines else ""
        self.diagnosis.warning(
            "time",
            "Some samples take much longer than the others, each time.",
            f"the median is {time_text(timing.p50_s)}; dataset indices {quoted(list(slow.values()))}{where}",
            "Make that line cheaper for these samples, or prepare them once on disk: a batch waits for its slowest "
            "sample.",
            list(slow),
        )

    def _judge_collating(self, subject: Subject, good: Sequence[int], mean_s: float) -> None:
        """Make batches of these samples for some seconds, and find out how long collating takes."""
        seconds, times = _BATCH_SHARE * self._settings.seconds, list[float]()
        size = min(self.diagnosis.batch_size, max(2, int(seconds / mean_s)), len(good))
        try:
            for begin in within(seconds, range(0, min(len(good), _MAX_BATCHES * size), size)):
                batch = []
                for index in good[begin : begin + size]:
                    with subject.seeded(index):
                        batch.append(subject.singles[index])
                self._place.at("collating a batch")
                began_s = time.perf_counter()
                collate_into(self._collate_fn)(batch, BatchMemory())
                times.append(time.perf_counter() - began_s)
        except Exception as error:
            self.diagnosis.fault(
                "leaves",
                "Samples can't be collated into a batch.",
                text_of(error),
                "Pad or crop to one shape in __getitem__, and return arrays, tensors, numbers or containers of "
                "them; or pass a collate_fn, such as one that pads to the longest sample of the batch.",
            )
            return
        self.diagnosis.batch_size, self.diagnosis.collate_s = size, median(times)

    # A run of the loader

    def _resume(self, indices: list[int]) -> None:
        """Run a loader over some samples, stop it, resume it, and compare every byte."""
        if len(indices) < _NUM_BATCHES:
            self.diagnosis.warning(
                "resume",
                "Whether a run resumes exactly wasn't checked.",
                f"such a run needs {_NUM_BATCHES} samples that can be fetched",
                "Examine a dataset with more samples, or pass a larger --seconds.",
            )
            return

        def make_loader(num_workers: int) -> SwiftLoader:
            self._place.at("running a loader over the dataset")
            return SwiftLoader(
                part_of,
                {"target": self._settings.target, "indices": indices},
                batch_size=len(indices) // _NUM_BATCHES,
                worker_per_consumer=num_workers,
                seed=SEED,
                nb_consumer=1,
                collate_fn=list,  # samples needn't have the same leaves here
                benchmark=False,
            )

        run = f"a run over {counted(len(indices), 'sample')} with {_NUM_WORKERS} workers"
        try:
            assert_resume_exact(
                lambda: make_loader(_NUM_WORKERS),
                resume_with=lambda: make_loader(1),
                num_batches=_NUM_BATCHES,
                num_cuts=_NUM_CUTS,
            )
        except AssertionError as mismatch:
            text = " ".join(str(mismatch).split()).partition(". A sample must depend")[0]  # the remedy says it
            what = "A stopped run doesn't resume exactly."
            if "simply run again" in text:
                what = "A run can't be repeated, so it can't resume exactly either."
            self.diagnosis.fault("resume", what, f"{run}: {text}", samples.KEEP_NOTHING)
        except Exception as failure:
            text = " ".join(text_of(failure).split())
            remedy = "Follow the error's advice, then examine the dataset again."
            self.diagnosis.fault("resume", "The loader can't run this dataset.", f"{run}: {text}", remedy)
        else:
            self.diagnosis.healthy.append(f"{run}, stopped and resumed with one, gives the same bytes")


class Part:
    """Some samples of a dataset, in bulk if the dataset has `__getitems__`."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self._singles, self._indices = samples.singles_of(dataset), list(indices)
        if hasattr(dataset, "__getitems__"):  # a loader looks for it
            self.__getitems__ = lambda numbers: dataset.__getitems__([self._indices[number] for number in numbers])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> Any:
        return self._singles[self._indices[number]]


def part_of(target: str, indices: Sequence[int]) -> Part:
    """Return some samples of the dataset that a target names. A loader's own processes call it."""
    return Part(without_loader(made_by(target)), indices)


def without_loader(thing: Any) -> Any:
    """Return the dataset of a loader, the rows of a mixture, and anything else as it is."""
    is_loader = hasattr(thing, "dataset") and not hasattr(type(thing), "__getitem__")
    dataset = thing.dataset if is_loader else thing
    return dataset.rows if isinstance(dataset, Mixture) else dataset
