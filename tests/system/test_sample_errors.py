"""Samples that fail, as the loop sees them: which batches it is given, what it is told, and when it is too much."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest

from swift_loader import (
    DataLoader,
    Mixture,
    RemoteTraceback,
    SampleFailure,
    SwiftLoader,
    SwiftLoaderWarning,
    TooManyErrors,
    WorkerError,
    WorkerStalled,
    sample_rng,
)
from swift_loader.scheduler.sample_errors import MAX_KEPT_FAILURES, SampleErrors
from tests.support import datasets
from tests.support.fronts import Stream
from tests.support.helpers import exhaustive, ids_of, make_loader, needs_own_generators

WORKERS = pytest.mark.parametrize("workers", [0, 2])
SLOW_WITH_WORKERS = pytest.mark.parametrize("workers", [0, exhaustive(2)])
"""For what happens in the trainer, or is shown by `test_the_number_of_workers_does_not_show_in_the_bytes`."""
POLICIES = pytest.mark.parametrize("on_error", ["skip", "replace"])


class Failing(datasets.Counting):
    def __init__(self, num_samples: int = 40, *, bad: Sequence[int] = (13,), deed: str = "raise") -> None:
        super().__init__(num_samples)
        self.bad, self.deed = frozenset(bad), deed

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            datasets.misbehave(self.deed)
        return {"id": index}


class FailingInBulk(Failing):
    """Has both."""

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class BulkOnly:
    def __init__(self, num_samples: int = 40, *, bad: Sequence[int] = (13,)) -> None:
        self.inner = Failing(num_samples, bad=bad)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self.inner[index] for index in indices]


class DrawsAndFails(datasets.Counting):
    """Draws in every way, and fails at some samples, after having drawn."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = (random.random(), np.random.rand(2), sample_rng().random())
        if index % 11 == 5:
            raise datasets.CustomError(f"{drawn}")
        return {"id": index, "drawn": np.hstack(drawn)}


class TwoErrors(datasets.Counting):
    """Raises errors of two types."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in (3, 20, 21):
            raise FileNotFoundError(f"no\nfile \x1b[1m{index}")
        if index == 30:
            raise datasets.CustomError("a custom one")
        return {"id": index}


def failing(dataset_class: Any = Failing, **options: Any) -> SwiftLoader:
    """A loader that skips; in order, four samples a batch."""
    chosen: dict[str, Any] = {"on_error": "skip", "shuffle": False, "batch_size": 4} | options
    return make_loader(dataset_class, **chosen)


@pytest.fixture
def quiet() -> Iterator[None]:
    """The summary of an epoch is of no interest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwiftLoaderWarning)
        yield


def without(indices: Sequence[int], num_samples: int = 40) -> list[int]:
    return [index for index in range(num_samples) if index not in indices]


# What the loop is given ----------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("dataset_class", [Failing, exhaustive(FailingInBulk), exhaustive(BulkOnly)])
@pytest.mark.usefixtures("quiet")
def test_skipped_samples_are_left_out_of_their_batches(workers: int, dataset_class: Any) -> None:
    bad = (0, 13, 14, 39)
    with failing(dataset_class, workers=workers, kwargs={"bad": bad}) as loader:
        for _ in range(2):
            batches = list(loader)
            assert ids_of(batches) == without(bad)
            assert [len(batch["id"]) for batch in batches] == [3, 4, 4, 2, 4, 4, 4, 4, 4, 3]
        assert [failure.index for failure in loader.failures] == [*bad, *bad]


@WORKERS
@pytest.mark.parametrize("dataset_class", [Failing, exhaustive(FailingInBulk), exhaustive(BulkOnly)])
@pytest.mark.usefixtures("quiet")
def test_replaced_samples_have_another_one_in_their_place(workers: int, dataset_class: Any) -> None:
    bad = (0, 13, 14, 39)
    with failing(dataset_class, workers=workers, kwargs={"bad": bad}, on_error="replace") as loader:
        epochs = [ids_of(loader) for _ in range(2)]
        found = [(failure.epoch, failure.index, failure.replaced_by) for failure in loader.failures]
    assert epochs[0] != epochs[1], "each epoch has other replacements"
    assert found == [(epoch, index, epochs[epoch][index]) for epoch in range(2) for index in bad]
    for epoch in epochs:
        assert [epoch[index] for index in without(bad)] == without(bad)
        assert not set(epoch) & set(bad)


@POLICIES
# The last ones are looked at when the dataset is built.
@pytest.mark.parametrize("bad", [(17, 18), pytest.param((1, 5), marks=pytest.mark.slow)], ids=str)
@pytest.mark.usefixtures("quiet")
def test_samples_that_hang_are_left_out_or_replaced(on_error: str, bad: tuple[int, int]) -> None:
    options: dict[str, Any] = {"kwargs": {"bad": bad, "deed": "hang"}, "on_error": on_error, "timeout": 1.0}
    options |= {"in_order": bad[0] > 8, "worker_restarts": 1}
    with failing(**options) as loader:
        for _ in range(2):
            batches = [batch["id"].tolist() for batch in loader]
            assert sorted({*chain.from_iterable(batches)}) == without(bad)
            assert sum(map(len, batches)) == (38 if on_error == "skip" else 40)
        assert {(one.index, one.reason[:7]) for one in loader.failures} == {(index, "Timeout") for index in bad}


@pytest.mark.slow
def test_no_sample_is_left_out_because_its_batch_is_slow() -> None:
    loader = failing(datasets.Slow, kwargs={"seconds": 0.2}, batch_size=40, timeout=3.0, workers=1)
    with loader, pytest.raises(WorkerStalled, match="has ended two workers"):
        list(loader)
    assert not loader.failures


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("is_mixed", [False, True])
def test_no_replacement_is_excluded_or_of_a_source_with_the_weight_0(is_mixed: bool) -> None:
    used: Any = Failing(num_samples=20, bad=(0, 1))
    sources = {"used": used, "other": Failing(num_samples=30, bad=())}
    mixture = Mixture(sources, weights={"used": 1, "other": 0})
    dataset, gone = used, list(range(4, 20))
    if is_mixed:
        dataset, gone = mixture, [mixture.index("used", row) for row in gone]
    with SwiftLoader(dataset=dataset, batch_size=1, worker_per_consumer=0, seed=1, on_error="replace") as loader:
        loader.exclude(gone)
        seen = {int(batch["id"][0]) for _ in range(5) for batch in loader}
        replaced_by = [failure.replaced_by for failure in loader.failures]
    assert seen == {2, 3}
    assert replaced_by


@pytest.mark.filterwarnings("ignore:data_queue_size=1 keeps:swift_loader.SwiftLoaderWarning")
@SLOW_WITH_WORKERS
def test_when_replacements_fail_as_well_the_sample_s_own_error_is_raised(workers: int) -> None:
    kwargs = {"num_samples": 2000, "bad": range(4, 2000)}
    with failing(workers=workers, kwargs=kwargs, on_error="replace", data_queue_size=1) as loader:
        iterator = iter(loader)
        assert next(iterator)["id"].tolist() == [0, 1, 2, 3]
        for _ in range(3):
            with pytest.raises(datasets.CustomError, match="no luck") as caught:
                list(iterator)
        text = str(caught.value.__cause__)
        assert "dataset index 4, batch 1 of epoch 0" in text
        assert "no replacement for dataset index 4 (on_error='replace'): all samples that were tried failed" in text
        assert loader.failures == []


@WORKERS
def test_a_batch_of_which_nothing_is_left_is_an_error_that_names_its_samples(workers: int) -> None:
    with failing(workers=workers, kwargs={"bad": range(8, 12)}) as loader:
        iterator = iter(loader)
        got = [next(iterator)["id"].tolist() for _ in range(2)]
        assert got == [[0, 1, 2, 3], [4, 5, 6, 7]]
        for _ in range(2):
            with pytest.raises(TooManyErrors, match=r"all 4 samples .* epoch 0 .*8, 9, 10, 11") as caught:
                next(iterator)
        last = caught.value.__cause__
        assert isinstance(last, datasets.CustomError)
        assert "dataset index 11" in str(last.__cause__) or not workers
        assert "batch 2 of epoch 0" in str(last.__cause__)
        assert loader.failures == []


@needs_own_generators
@pytest.mark.parametrize("on_error", [exhaustive("skip"), "replace"])
@pytest.mark.usefixtures("quiet")
def test_the_number_of_workers_does_not_show_in_the_bytes(on_error: str) -> None:
    found = []
    for workers in (0, 1, 2, 4):
        checksum = hashlib.sha256()
        with failing(DrawsAndFails, workers=workers, on_error=on_error, shuffle=True, batch_size=8) as loader:
            for batch in [batch for _ in range(2) for batch in loader]:
                checksum.update(batch["id"].tobytes() + batch["drawn"].tobytes())
            failures = [(one.epoch, one.step, one.index, one.replaced_by, one.reason) for one in loader.failures]
        found.append((checksum.hexdigest(), failures))
    assert found == [found[0]] * 4
    assert len(found[0][1]) == 18


@SLOW_WITH_WORKERS
@POLICIES
@pytest.mark.usefixtures("quiet")
def test_after_a_resume_the_same_samples_fail(workers: int, on_error: str) -> None:
    def run(state: Any, num_batches: int) -> tuple[list[Any], list[Any], Any]:
        with failing(DrawsAndFails, workers=workers, on_error=on_error, shuffle=True, batch_size=8) as loader:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            seen: list[Any] = []
            while len(seen) < num_batches:
                for batch in loader:
                    assert loader.batch_indices.tolist() == batch["id"].tolist()
                    seen.append((batch["id"].tolist(), batch["drawn"].tobytes()))
                    if len(seen) == num_batches:
                        break
            return seen, [(one.epoch, one.index, one.replaced_by) for one in loader.failures], loader.state_dict()

    seen, failures, end = run(None, 20)
    before, failures_before, state = run(None, 7)
    after, failures_after, end_after = run(state, 13)
    assert before + after == seen
    assert failures_before + failures_after == failures
    assert end == end_after
    assert failures_before
    assert failures_after


@pytest.mark.usefixtures("quiet")
def test_ranks_keep_equal_steps_when_one_of_them_skips() -> None:
    steps, states = [], []
    for rank in range(2):
        options: dict[str, Any] = {"kwargs": {"num_samples": 37, "bad": range(8, 11)}, "nb_consumer": 2}
        with failing(workers=1, **options) as loader:
            loader.start(rank)
            steps.append(len(list(loader)))
            states.append(loader.state_dict())
    assert steps == [5, 5]
    assert states[0] == states[1]


@SLOW_WITH_WORKERS
@POLICIES
@pytest.mark.usefixtures("quiet")
def test_indices_and_padding_are_those_of_the_batch_as_delivered(workers: int, on_error: str) -> None:
    paddings = []
    for rank in range(3):  # 10 samples over 3 ranks: ranks 1 and 2 repeat sample 0 or 1
        options: dict[str, Any] = {"kwargs": {"num_samples": 10, "bad": (1, 9)}, "nb_consumer": 3, "on_error": on_error}
        with failing(workers=workers, validate=False, **options) as loader:
            loader.start(rank)
            for batch in loader:
                assert loader.batch_indices.tolist() == batch["id"].tolist()
            paddings.append((loader.batch_indices.tolist(), loader.num_padding, len(loader.failures)))
    total = sum(len(indices) - padding for indices, padding, _ in paddings)
    assert sum(padding for _, padding, _ in paddings) == (1 if on_error == "skip" else 2)
    assert total == (8 if on_error == "skip" else 10)
    assert sum(failures for _, _, failures in paddings) == 3, "sample 1, once more as padding, and sample 9"


# What it is told -----------------------------------------------------------------------------------------------------


@SLOW_WITH_WORKERS
@POLICIES
@pytest.mark.usefixtures("quiet")
def test_a_failure_tells_all_there_is_to_know(workers: int, on_error: str) -> None:
    with failing(workers=workers, on_error=on_error) as loader:
        assert loader.failures == []
        batches = list(loader)
        (failure,) = loader.failures
        replaced_by = None if on_error == "skip" else int(batches[3]["id"][1])
    assert isinstance(failure, SampleFailure)
    assert (failure.epoch, failure.step, failure.index, failure.position) == (0, 3, 13, 1)
    assert failure.replaced_by == replaced_by
    assert type(failure.exception) is datasets.CustomError
    assert failure.exception.args == ("no luck",)
    assert failure.exception.__traceback__ is None, "its frames would keep the dataset's objects"
    assert failure.reason == "tests.support.datasets.CustomError: no luck"
    assert "in misbehave" in failure.traceback
    cause = failure.exception.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "dataset index 13, batch 3 of epoch 0 (dataset indices 12, 13, 14, 15)" in str(cause)
    assert "in misbehave" in str(cause)
    assert ("of 2 (rank 0, pid " in str(cause)) == bool(workers)
    with pytest.raises(AttributeError):
        failure.index = 3  # type: ignore[misc]


@WORKERS
@pytest.mark.parametrize(
    ("deed", "text"),
    [("unbuildable", "tests.support.datasets.UnbuildableError: 1 and 2"), ("stop-iteration", "StopIteration")],
)
@pytest.mark.usefixtures("quiet")
def test_an_exception_that_cannot_be_raised_is_told_as_text(workers: int, deed: str, text: str) -> None:
    with failing(workers=workers, kwargs={"deed": deed}) as loader:
        assert ids_of(loader) == without([13])
        (failure,) = loader.failures
    assert text in str(failure.exception)
    if deed == "unbuildable":
        assert isinstance(failure.exception, WorkerError)
        assert failure.reason == text


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.usefixtures("quiet")
def test_what_is_prefetched_and_thrown_away_counts_for_nothing(device: str | None) -> None:
    options: dict[str, Any] = {"kwargs": {"bad": (5, 9, 13, 17)}, "max_nb_batch_on_device": 3}
    with failing(workers=2, **options) as loader:
        loader.start(device=device)
        for number, _ in enumerate(loader):
            assert [failure.index for failure in loader.failures] == [5, 9, 13][:number]
            if number == 2:
                break
        assert [failure.index for failure in loader.failures] == [5, 9]
        list(loader)
        found = [(failure.epoch, failure.index) for failure in loader.failures]
    assert found == [(0, 5), (0, 9), (1, 5), (1, 9), (1, 13), (1, 17)]


@pytest.mark.usefixtures("quiet")
def test_in_completion_order_failures_come_with_their_batches() -> None:
    with failing(workers=2, in_order=False, kwargs={"num_samples": 80, "bad": (5, 9, 50)}) as loader:
        for batch in loader:
            assert loader.batch_indices.tolist() == batch["id"].tolist()
        assert sorted(failure.index for failure in loader.failures) == [5, 9, 50]


@pytest.mark.usefixtures("quiet")
def test_the_last_thousand_failures_are_kept() -> None:
    options: dict[str, Any] = {"kwargs": {"num_samples": 1200, "bad": range(1, 1200, 2)}, "batch_size": 60}
    with failing(workers=0, **options) as loader:
        for _ in range(2):
            list(loader)
        kept = [(failure.epoch, failure.index) for failure in loader.failures]
    assert kept == [(epoch, index) for epoch in range(2) for index in range(1, 1200, 2)][-MAX_KEPT_FAILURES:]


def test_a_failure_can_be_saved() -> None:
    with failing(workers=2) as loader, pytest.warns(SwiftLoaderWarning):
        list(loader)
    copy = pickle.loads(pickle.dumps(loader.failures[0]))
    assert (copy.index, copy.reason) == (13, "tests.support.datasets.CustomError: no luck")


@SLOW_WITH_WORKERS
@pytest.mark.parametrize(("on_error", "what"), [("skip", "left out"), ("replace", "replaced by others")])
def test_an_epoch_with_failures_ends_with_one_warning(workers: int, on_error: str, what: str) -> None:
    with failing(TwoErrors, workers=workers, on_error=on_error, kwargs={"num_samples": 40}) as loader:
        for epoch in range(2):
            with pytest.warns(SwiftLoaderWarning) as caught:
                list(loader)
            (warning,) = caught
            assert str(warning.message) == (
                f"epoch {epoch}: 4 of 40 samples failed and were {what}: FileNotFoundError 3, CustomError 1; the "
                f"first: dataset index 3 (FileNotFoundError: no file \\x1b[1m3); see loader.failures"
            )
            assert warning.filename == __file__, "it should point at the user's loop"


@pytest.mark.parametrize("end", ["next epoch", "close"])
def test_a_loop_that_stops_early_is_warned_when_it_begins_again_or_closes(end: str) -> None:
    with failing(workers=0) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        go_on = loader.close if end == "close" else iter(loader).__next__
        with pytest.warns(SwiftLoaderWarning, match="epoch 0: 1 of 40 samples") as caught:
            go_on()
        assert caught[0].filename == __file__
    loader.close()


def test_an_epoch_without_failures_says_nothing() -> None:
    with failing(kwargs={"bad": ()}) as loader:
        assert ids_of(loader) == list(range(40))


@WORKERS
def test_warnings_that_are_errors_do_no_harm(workers: int) -> None:
    with failing(workers=workers) as loader:
        iterator = iter(loader)
        got: list[int] = []
        with pytest.raises(SwiftLoaderWarning):  # as pytest is set up here
            got.extend(number for batch in iterator for number in batch["id"].tolist())
        assert got == without([13])
        assert list(iterator) == []
        assert loader.state_dict()["position"] == 40
        left = iter(loader)
        for _ in range(4):
            next(left)
        again = iter(loader)
        with pytest.raises(SwiftLoaderWarning, match="epoch 1"):
            next(again)
        assert next(again)["id"].tolist() == [0, 1, 2, 3]
        assert len(loader.failures) == 2


# When it is too much -------------------------------------------------------------------------------------------------


@SLOW_WITH_WORKERS
@POLICIES
@pytest.mark.parametrize("max_errors", [2, 0.05])
def test_more_failures_than_allowed_are_an_error_at_their_batch(workers: int, on_error: str, max_errors: float) -> None:
    options: dict[str, Any] = {"kwargs": {"bad": (1, 9, 17, 18, 30)}, "on_error": on_error, "max_errors": max_errors}
    with failing(workers=workers, **options) as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        for _ in range(2):
            with pytest.raises(TooManyErrors) as caught:
                next(iterator)
        text = str(caught.value)
        assert "4 of the 40 samples of epoch 0 have failed" in text
        assert f"max_errors={max_errors} allows no more than 2" in text
        assert "dataset index 18" in text
        assert isinstance(caught.value.__cause__, datasets.CustomError)
        assert isinstance(caught.value.__cause__.__cause__, RemoteTraceback)
        assert [failure.index for failure in loader.failures] == [1, 9, 17, 18]
        assert loader.state_dict()["position"] == 16, "the batch wasn't delivered"
        with pytest.raises(TooManyErrors, match="epoch 1"):
            list(loader)


@pytest.mark.usefixtures("quiet")
def test_failures_are_counted_epoch_by_epoch_and_from_a_resume_on() -> None:
    options: dict[str, Any] = {"kwargs": {"bad": (1, 30)}, "workers": 0}
    with failing(max_errors=2, **options) as loader:
        for _ in range(3):
            list(loader)
    with failing(max_errors=1, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    with failing(max_errors=1, **options) as loader:
        loader.load_state_dict(state)
        assert ids_of(loader) == without([30])[4:]
    with failing(max_errors=0, **options) as loader, pytest.raises(TooManyErrors):
        next(iter(loader))


def test_a_fraction_is_of_this_rank_s_samples() -> None:
    options: dict[str, Any] = {"kwargs": {"bad": (1, 9, 17)}, "workers": 0, "nb_consumer": 2, "max_errors": 0.1}
    with failing(**options) as loader:
        loader.start(0)
        with pytest.raises(TooManyErrors, match=r"3 of the 20 samples .* no more than 2"):
            list(loader)


class Verbose(datasets.Counting):
    """Says much of a sample that fails, in letters of several bytes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise ValueError(f"{index}: " + "漢😀" * 50_000)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:epoch 0:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_with_a_very_long_text_arrives_or_is_skipped(workers: int) -> None:
    with make_loader(Verbose, workers=workers, shuffle=False) as loader, pytest.raises(ValueError, match="13: 漢😀"):
        list(loader)
    with make_loader(Verbose, workers=workers, shuffle=False, on_error="skip") as loader:
        assert ids_of(loader) == [index for index in range(100) if index != 13]
        assert loader.failures[0].reason.startswith("ValueError: 13: 漢😀")


def test_an_interrupt_between_a_batch_and_the_loop_counts_its_failures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    note = SampleErrors.note

    def interrupted(self: SampleErrors, *noted: Any) -> None:
        note(self, *noted)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(SampleErrors, "note", interrupted)
    options: dict[str, Any] = {"on_error": "skip", "max_errors": 1, "worker_per_consumer": 0, "shuffle": False}
    loader = SwiftLoader(dataset=Bad1(), batch_size=4, **options)
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 2, 3], [4, 5, 6, 7]]
    assert [failure.index for failure in loader.failures] == [1]
    with pytest.warns(SwiftLoaderWarning, match="1 of 8 samples failed"):
        loader.close()


class Bad1:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise ValueError("bad")
        return index


# A DataLoader skips, too ---------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {},
    {"seed": 1},
    {"num_workers": 1, "worker_type": "thread"},
    {"num_workers": 2},
    {"num_workers": 2, "device": "cpu", "persistent_workers": True},
]


def torchs(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, **{"batch_size": 4, "on_error": "skip", **options})


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dataset_class", [Failing, FailingInBulk, BulkOnly])
def test_a_data_loader_skips_samples(kind: Any, dataset_class: Any) -> None:
    bad, expected = (0, 13, 14, 39), "4 of 40 samples failed and were left out"
    with torchs(dataset_class(bad=bad), **kind) as loader:
        for epoch in range(2):
            with pytest.warns(SwiftLoaderWarning, match=f"epoch {epoch}: {expected}") as caught:
                batches = list(loader)
            assert ids_of(batches) == without(bad)
            assert caught[0].filename == __file__
        found = [(one.epoch, one.index, one.step, one.position) for one in loader.failures]
        assert found == [(epoch, index, index // 4, index % 4) for epoch in range(2) for index in bad]
        assert {type(one.exception.__cause__) for one in loader.failures} == {RemoteTraceback}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("max_errors", [2, 0.05])
def test_a_data_loader_stops_at_too_many(kind: Any, max_errors: float) -> None:
    with torchs(Failing(bad=(1, 9, 17, 18, 30)), max_errors=max_errors, **kind) as loader:
        for epoch in range(2):
            iterator = iter(loader)
            for _ in range(4):
                next(iterator)
            for _ in range(2):
                with pytest.raises(TooManyErrors, match=f"4 of the 40 samples of epoch {epoch} have failed") as caught:
                    next(iterator)
            assert isinstance(caught.value.__cause__, datasets.CustomError)
        assert [one.index for one in loader.failures] == [1, 9, 17, 18] * 2


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_without_samples_is_an_error_in_its_place_and_a_resume_counts_batches(num_workers: int) -> None:
    loader = torchs(Failing(20, bad=(1, 4, 5, 6, 7, 13)), num_workers=num_workers)
    iterator = iter(loader)
    assert ids_of([next(iterator)]) == [0, 2, 3]
    with pytest.raises(
        TooManyErrors, match=r"all 4 samples of a batch of epoch 0 failed \(dataset indices 4, 5, 6, 7\)"
    ):
        next(iterator)
    assert ids_of([next(iterator)]) == [8, 9, 10, 11]
    resumed = torchs(Failing(20, bad=(13,)), num_workers=num_workers)
    resumed.load_state_dict(loader.state_dict())
    assert ids_of(resumed) == ids_of(iterator) == [12, *range(14, 20)]


@pytest.mark.usefixtures("quiet")
def test_a_data_loader_names_keys_of_any_kind_and_draws_the_same_with_any_number_of_workers() -> None:
    files: Any = {"a": 1, "b": 2, "d": 4}
    drawn = []
    for num_workers in (0, 1):
        loader = torchs(files, sampler=["a", "c", "b", "d"], batch_size=2, num_workers=num_workers)
        assert [batch.tolist() for batch in loader] == [[1], [2, 4]]
        assert [(one.index, type(one.exception), one.position) for one in loader.failures] == [("c", KeyError, 1)]
        loader = torchs(DrawsAndFails(20), num_workers=num_workers, seed=3)
        drawn.append([batch["drawn"].tolist() for batch in loader])
        assert [one.index for one in loader.failures] == [5, 16]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_error": "replace"}, "on_error='replace' isn't allowed; it must be 'raise' or 'skip'"),
        ({"max_errors": 3, "on_error": "raise"}, "max_errors=3 has no effect with on_error='raise'"),
        ({"max_errors": 1.5}, "max_errors=1.5 isn't a fraction between 0 and 1"),
        ({"max_errors": 0.5, "sampler": iter([1])}, "whose number the sampler doesn't say: it has no length"),
        ({"dataset": Stream()}, "on_error='skip' is for a map-style dataset"),
    ],
)
def test_what_a_data_loader_refuses(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchs(**{"dataset": Failing(), **options})
