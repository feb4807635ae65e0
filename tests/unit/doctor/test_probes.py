"""What is seen in the process that runs the dataset."""

from __future__ import annotations

import functools
import io
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_loader import sample_rng
from swift_loader.doctor.probes.board import Board, Phase, Request, Role
from swift_loader.doctor.probes.draws import watch_draws
from swift_loader.doctor.probes.holdings import (
    containers_of,
    generators_of,
    growths,
    holders_of,
    lengths_of,
    unsendable_part,
)
from swift_loader.doctor.probes.leaves import digests_of, large_views, layout_of, requiring_grad
from swift_loader.doctor.probes.own_code import shown_file
from swift_loader.doctor.probes.process_state import ProcessState
from swift_loader.doctor.probes.samples import first_failing, measure, probe_order
from swift_loader.doctor.probes.stack_sampler import StackSampler
from swift_loader.doctor.probes.subject import Subject, describe_failure
from swift_loader.doctor.probes.walk import walk
from swift_loader.doctor.settings import Settings
from swift_loader.worker.generators import preserved_generators

MODULE_RNG = np.random.default_rng(1)


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Slotted:
    __slots__ = ("inside",)
    inside: Any


@pytest.fixture
def board() -> Any:
    with tempfile.TemporaryFile() as file:
        board = Board.create(file, Request(Role.EXAMINE, Settings("a:b"), (), 1.0))
        yield board
        board.close()


def subject_of(dataset: Any, board: Board) -> Subject:
    return Subject(dataset, len(dataset), board)


class Samples:
    """A dataset of a function."""

    def __init__(self, function: Any, num_samples: int = 20) -> None:
        self.function = function
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def test_the_board_says_what_the_process_does(board: Board) -> None:
    assert board.request().settings.target == "a:b"
    before = board.read()
    board.enter(Phase.FETCHING, 17)
    after = board.read()
    assert (after.phase, after.index) == (Phase.FETCHING, 17)
    assert after.count != before.count
    board.enter(Phase.LOOKING)
    assert board.read().index is None


def test_all_that_an_object_holds_has_a_path() -> None:
    inner = Slotted()
    inner.inside = 1 + 2j, [object()]
    wanted, captured = io.BytesIO(), io.StringIO()

    def transform() -> Any:
        return captured

    whole = Holder(files={"a": [wanted]}, slotted=inner, calls=[functools.partial(transform)])
    paths = dict(walk(whole))
    assert paths[".files['a'][0]"] is wanted
    assert paths[".calls[0].func.<captured>"] is captured
    assert any(path.startswith(".slotted.inside[1]") for path in paths)


def test_a_cycle_ends() -> None:
    whole = Holder()
    vars(whole)["self"] = whole
    assert [path for path, _ in walk(whole) if path.startswith(".self")] == []


def test_open_files_and_threads_are_found_and_closed_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    wake = threading.Event()
    thread = threading.Thread(target=wake.wait)
    ended = threading.Thread(target=int)
    with (tmp_path / "a").open() as file:
        thread.start()
        try:
            whole = Holder(
                file=file, thread=thread, ended=ended, memory=io.BytesIO(), lock=threading.Lock(), err=sys.stderr
            )
            found = {holder.path: holder.what for holder in holders_of(whole)}
        finally:
            wake.set()
            thread.join()
    assert found == {".file": "an open file", ".thread": "a running thread"}
    assert holders_of(whole) == ()


def test_what_can_not_be_serialised_is_named() -> None:
    part = unsendable_part(Holder(good=[1], bad={"x": (i for i in range(3))}))
    assert part is not None
    assert part.path == ".bad['x']"
    assert part.kind == "generator"
    assert unsendable_part(Holder(function=lambda: 3)) is None


def test_large_containers_are_estimated() -> None:
    strings = [f"{number:040d}" for number in range(100_000)]
    shared = ["the same"] * 100_000
    found = {
        one.path: one for one in containers_of(Holder(strings=strings, shared=shared, few=[1, 2], array=np.ones(9)))
    }
    assert set(found) == {".strings", ".shared"}
    assert found[".strings"].num_objects == pytest.approx(100_000, rel=0.01)
    assert found[".strings"].nbytes == pytest.approx(100_000 * (89 + 8), rel=0.05)
    assert found[".shared"].nbytes < found[".strings"].nbytes / 5


def test_pairs_in_a_list_are_counted_with_what_they_hold() -> None:
    pairs = [(f"/data/{number:030d}", number + 10**6) for number in range(20_000)]
    (found,) = containers_of(Holder(pairs=pairs))
    assert found.num_objects == pytest.approx(3 * 20_000, rel=0.01)


def test_keys_and_values_of_a_dict_are_counted() -> None:
    (found,) = containers_of(Holder(labels={f"{number:020d}": 0 for number in range(20_000)}))
    assert found.num_objects == pytest.approx(20_000, rel=0.6)
    assert found.nbytes > 20_000 * 69


def test_arrays_of_objects_are_containers() -> None:
    (found,) = containers_of(Holder(names=np.array([f"name {number}" for number in range(5000)], object)))
    assert found.path == ".names"
    assert found.num_objects == pytest.approx(5000, rel=0.01)


def test_only_columns_of_objects_count_in_a_frame() -> None:
    pd = pytest.importorskip("pandas")
    objects = pd.Series([f"name {number}" for number in range(5000)], dtype=object)
    frame = pd.DataFrame({"number": np.arange(5000), "name": objects})
    assert [one.path for one in containers_of(Holder(frame=frame))] == [".frame['name']"]


def test_containers_that_become_longer_are_told() -> None:
    whole = Holder(cache={}, log=[], fixed=[1])
    before = lengths_of(whole)
    whole.cache[3] = "x"
    whole.log.extend([1, 2])
    found = {growth.path: growth.after - growth.before for growth in growths(before, lengths_of(whole))}
    assert found == {".cache": 1, ".log": 2}


def test_generators_are_found_in_the_dataset_and_its_module_without_the_global_ones() -> None:
    whole = Holder(rng=np.random.default_rng(0), other={"py": random.Random(0)}, torch=torch.Generator())
    vars(whole)["shared"] = [random._inst, torch.default_generator]
    names = [name.partition(" ")[0] for name in generators_of(whole)]
    assert sorted(names) == sorted(["dataset.rng", "dataset.other['py']", "dataset.torch", f"{__name__}.MODULE_RNG"])


@pytest.mark.parametrize(
    ("draw", "source"),
    [
        (lambda index: random.random(), "random"),
        (lambda index: np.random.rand(), "numpy.random"),
        (lambda index: torch.rand(1), "torch's default generator"),
        (lambda index: sample_rng().random(), "sample_rng()"),
        (lambda index: MODULE_RNG.random(), f"{__name__}.MODULE_RNG (numpy.random._generator.Generator)"),
    ],
)
def test_the_generator_that_samples_draw_from_is_named(draw: Any, source: str, board: Board) -> None:
    with preserved_generators():
        draws = watch_draws(subject_of(Samples(draw), board), range(3), 10.0)
    assert set(draws.sources) == {source}
    assert draws.sources[source] == (0, 1, 2)
    assert bool(draws.held) == ("MODULE_RNG" in source)
    assert draws.reseeded == ()


def test_a_sample_that_seeds_is_told(board: Board) -> None:
    with preserved_generators():
        draws = watch_draws(subject_of(Samples(np.random.seed), board), range(3), 10.0)
    assert draws.reseeded == ("numpy.random",)


def test_leaves_are_described_with_their_sizes() -> None:
    sample = {
        "x": np.zeros((2, 3), np.float32),
        "t": torch.zeros(4),
        "name": "abc",
        "tokens": list(range(100)),
        "n": (1, 2),
    }
    layout = {leaf.path: leaf for leaf in layout_of(sample)}
    assert (layout["['x']"].dtype, layout["['x']"].shape, layout["['x']"].nbytes) == ("float32", (2, 3), 24)
    assert layout["['t']"].nbytes == 16
    assert layout["['name']"].nbytes == 3
    assert {"['n'][0]", "['n'][1]", "['tokens']"} <= set(layout)


def test_text_of_numpy_has_one_dtype_at_any_length() -> None:
    assert {layout_of(np.str_(text))[0].dtype for text in ("a", "abc")} == {"text"}


def test_digests_tell_values_and_not_objects() -> None:
    one = {"x": np.arange(3), "s": [str(10**9)] * 100}
    other = {"x": np.arange(3), "s": [str(10**9) for _ in range(100)]}
    assert digests_of(one) == digests_of(other)
    assert digests_of(one) != digests_of({**one, "x": np.arange(3).astype(np.int32)})


def test_views_of_large_arrays_are_found_if_they_can_be_written() -> None:
    whole = np.zeros((1000, 1000), np.float32)
    assert [path for path, _, _ in large_views({"x": whole[3], "y": whole[3].copy()})] == ["['x']"]
    whole.flags.writeable = False
    assert list(large_views(whole[3])) == []
    assert [path for path, _, _ in large_views(torch.zeros(1000, 1000)[3])] == [""]


def test_tensors_that_require_grad_are_found() -> None:
    assert list(requiring_grad([torch.zeros(2), torch.zeros(2, requires_grad=True)])) == ["[1]"]


def test_settings_that_change_are_named() -> None:
    before = ProcessState.now()
    assert before.changed_since(before) == ()
    old = np.seterr(all="ignore")
    try:
        assert ProcessState.now().changed_since(before) == ("numpy.seterr",)
    finally:
        np.seterr(**old)


@given(st.integers(0, 5000))
def test_each_index_is_looked_at_once_first_and_last_before_all(num_samples: int) -> None:
    order = list(probe_order(num_samples))
    assert sorted(order) == list(range(num_samples))
    assert order[:2] == [0, num_samples - 1][: len(order)] or num_samples < 2


@pytest.mark.parametrize(("num_real", "expected"), [(20, None), (19, 19), (7, 7), (1, 1), (0, None)])
def test_the_first_index_beyond_the_end_is_found(num_real: int, expected: int | None, board: Board) -> None:
    samples = list(range(num_real))
    subject = subject_of(Samples(samples.__getitem__), board)
    sampler, failures = StackSampler(), list[Any]()
    with preserved_generators():
        measure(subject, probe_order(20), 10.0, sampler, failures.append)
        assert first_failing(subject, [one for one in failures if hasattr(one, "error")]) == expected


def test_a_failure_names_the_users_line() -> None:
    def broken(index: int) -> Any:
        raise ValueError(f"no {index}")

    with pytest.raises(ValueError, match="no 3") as raised:
        broken(3)
    failure = describe_failure(3, raised.value)
    assert failure.kind == "ValueError"
    assert failure.line is not None
    assert failure.line.function == "broken"


def test_stacks_are_taken_only_while_samples_are_fetched(board: Board) -> None:
    sampler = StackSampler()
    seen = threading.Event()

    def busy(index: int) -> int:
        while sampler.num_hits <= index and not seen.wait(0):
            pass
        return index

    subject = subject_of(Samples(busy), board)
    sampler.start()
    with preserved_generators():
        measure(subject, iter(range(3)), 10.0, sampler, lambda report: None)
    sampler.stop()
    (line,) = {(line.file, line.function) for line in sampler.stacks({2}).hits}
    assert line == (shown_file(__file__), "busy")
    assert sampler.num_hits >= 3
