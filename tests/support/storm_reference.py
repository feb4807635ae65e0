"""What a case should give: the batches of a loader without workers, and how others are compared with them."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from swift_loader import SwiftLoader, TooManyErrors
from tests.support.storm_case import NUM_EPOCHS, TRAITS, Case
from tests.support.storm_datasets import KEYS, Layout, PlantedError, Sizes, Stormy, StormyInBulk, as_list

_PAUSE_S = 0.0002
"""Long enough for another worker to come in between."""


class Deviation(AssertionError):
    """What must not happen."""


def storm_loader(case: Case, folder: str, workers: int, slow_s: float = 0.0, **options: Any) -> SwiftLoader:
    """Return a loader of a case; each sample takes so long."""
    layout = Layout(
        case.num_samples,
        folder,
        case.sizes,
        case.fails,
        pause_s=_PAUSE_S if workers else 0.0,
        slow_s=slow_s,
        is_noisy=case.closes_standard and workers > 0,
    )
    dataset_class = StormyInBulk if case.in_bulk else Stormy
    if case.as_instance:
        source: dict[str, Any] = {"dataset": dataset_class(replace(layout, is_noisy=False), case.kind)}
    else:
        source = {"dataset_class": dataset_class, "dataset_kwargs": {"kind": case.kind, "layout": layout}}
    return SwiftLoader(
        **source,
        batch_size=case.batch_size,
        nb_consumer=case.num_consumers,
        worker_per_consumer=workers,
        shuffle=case.shuffle,
        nearby_shuffle=case.nearby_shuffle if case.shuffle else None,
        seed=case.seed,
        drop_last=case.drop_last,
        uneven=case.uneven,
        on_error=case.on_error,
        collate_fn=None if case.sizes == Sizes.EQUAL else as_list,
        **options,
    )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two batches have the same only if they are equal."""

    form: str
    """Types and shapes."""
    ids: tuple[int, ...]
    checksums: tuple[int, ...]
    """Of the samples; none, if they aren't to be compared."""
    nbytes: int

    @classmethod
    def of(cls, batch: Any) -> Fingerprint:
        """Return that of a batch."""
        if isinstance(batch, dict):
            ids, rows = np.asarray(batch["id"]).tolist(), list(np.asarray(batch["data"]))
            parts = [np.asarray(part) for part in batch.values()]
            form = ", ".join(f"{name}: {array.dtype} {array.shape}" for name, array in zip(batch, parts, strict=True))
        else:
            ids, rows = [int(sample["id"]) for sample in batch], [np.asarray(sample["data"]) for sample in batch]
            form = ", ".join(f"{row.dtype} {row.shape}" for row in rows)
        checksums = tuple(zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in rows)
        return cls(form, tuple(ids), checksums, sum(row.nbytes for row in rows))

    def without_checksums(self) -> Fingerprint:
        """Return what is left if the samples' bytes don't count."""
        return replace(self, checksums=())

    def differs_from(self, expected: Fingerprint) -> str:
        """Return in words what is another than expected; empty if nothing is."""
        if self.ids != expected.ids:
            return f"has the samples {_shown(self.ids)} instead of {_shown(expected.ids)}"
        if self.checksums != expected.checksums:
            wrong = [self.ids[n] for n, due in enumerate(expected.checksums) if self.checksums[n] != due]
            return f"has other bytes in {len(wrong)} of its {len(self.ids)} samples: {_shown(wrong)}"
        return "" if self == expected else f"has the form {self.form[:200]} instead of {expected.form[:200]}"


@dataclass(frozen=True, slots=True)
class Epoch:
    """What a pass should give."""

    batches: tuple[Fingerprint, ...]
    ending: str
    """The name of the type of the error that ends it; empty if none does."""


class Agreement:
    """Whether the workers of one loader have the same dataset, where nobody else has it."""

    def __init__(self, case: Case) -> None:
        traits = TRAITS[case.kind]
        hash_seed = os.environ.get("PYTHONHASHSEED", "random")
        is_known = not traits.differs_by_itself and hash_seed != "random"
        self.is_needed = traits.compares_with_itself and not is_known
        self._seen: dict[int, int] = {}

    def note(self, batch: Fingerprint, where: str) -> Fingerprint:
        """Return what is to be compared with the reference. Raises if a sample isn't what another worker made of it."""
        if not self.is_needed:
            return batch
        pairs = list(zip(batch.ids, batch.checksums, strict=True))
        wrong = [index for index, checksum in pairs if self._seen.setdefault(index % KEYS, checksum) != checksum]
        if wrong:
            raise Deviation(f"wrong data: {where}: samples {_shown(wrong)} aren't what another worker made of them")
        return batch.without_checksums()

    def expected(self, batch: Fingerprint) -> Fingerprint:
        """Return what a batch of the reference is compared as."""
        return batch.without_checksums() if self.is_needed else batch


def compare_in_order(got: Fingerprint, expected: Fingerprint, where: str) -> None:
    """Fail if a batch isn't the one that was due."""
    difference = got.differs_from(expected)
    if difference:
        raise Deviation(f"wrong data: {where} {difference}")


def compare_unordered(got: Sequence[Fingerprint], expected: Sequence[Fingerprint], where: str) -> None:
    """Fail if there is a batch that isn't due, or comes too often."""
    surplus = list((Counter(got) - Counter(expected)).elements())
    if not surplus:
        return
    first = surplus[0]
    alike = [one for one in expected if one.ids == first.ids]
    difference = first.differs_from(alike[0]) if alike else f"has the samples {_shown(first.ids)}, which none has"
    is_double = not difference
    raise Deviation(f"wrong data: {where}: a batch {'comes twice' if is_double else difference}")


def make_reference(case: Case, folder: str) -> list[Epoch]:
    """Return the first epochs; made in a fork of the trainer, because constructors leave things behind."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            made: list[Epoch] | str
            try:
                made = _make_here(case, folder)
            except BaseException as error:
                made = repr(error)
            with open(write, "wb") as stream:
                pickle.dump(made, stream)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        told = stream.read()
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the kernel reaps
        os.waitpid(pid, 0)
    result = pickle.loads(told) if told else "its process died"
    if isinstance(result, str):
        raise Deviation(f"the inline executor failed: {result}")
    epochs: list[Epoch] = result
    return epochs


def _make_here(case: Case, folder: str) -> list[Epoch]:
    epochs = []
    with warnings.catch_warnings(), storm_loader(case, folder, workers=0) as loader:
        warnings.simplefilter("ignore")
        loader.start(case.seed % case.num_consumers)
        for number in range(NUM_EPOCHS):
            loader.set_epoch(number)
            batches, ending = [], ""
            try:
                for batch in loader:
                    batches.append(Fingerprint.of(batch))  # noqa: PERF401 - those before an error count
            except (PlantedError, TooManyErrors) as error:
                ending = type(error).__name__
            epochs.append(Epoch(tuple(batches), ending))
    return epochs


def _shown(numbers: Sequence[int]) -> str:
    return f"{list(numbers[:8])}{' and more' if len(numbers) > 8 else ''}"
