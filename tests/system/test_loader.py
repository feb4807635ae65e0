"""The loader as a user sees it: order, epochs, iterators, lengths."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import pickle
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift_loader import DataLoader, LoaderClosed, SwiftLoader, SwiftLoaderWarning
from swift_loader.pipeline import Pipeline
from swift_loader.transport.channel import Channel
from tests.support import datasets
from tests.support.helpers import (
    START_METHOD,
    exhaustive,
    ids_of,
    is_gone,
    loader_children,
    loader_processes,
    make_loader,
    needs_template,
    wait_until,
    without_root,
)

WORKERS = pytest.mark.parametrize("workers", [0, exhaustive(1), 3])


@WORKERS
def test_without_shuffle_the_order_is_sequential(workers: int) -> None:
    with make_loader(datasets.Counting, workers=workers, shuffle=False) as loader:
        assert [ids_of(loader) for _ in range(3)] == [list(range(100))] * 3


@WORKERS
def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(workers: int) -> None:
    with make_loader(datasets.Counting, workers=workers) as loader:
        epochs = [ids_of(loader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_are_the_same_bytes_whatever_the_number_of_workers() -> None:
    runs = []
    for workers in (0, 1, 2, 4):
        with make_loader(datasets.Augmenting, workers=workers) as loader:
            runs.append([[pickle.dumps({k: np.array(v) for k, v in batch.items()}) for batch in loader] for _ in "ab"])
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] != runs[0][1]


def test_a_sample_is_fetched_once_in_an_epoch(tmp_path: Path) -> None:
    log = tmp_path / "fetches"
    with make_loader(lambda: datasets.Numbered(1000, path=str(log)), batch_size=50, validate=False) as loader:
        for _ in zip(range(5), loader, strict=False):
            pass
    fetched = log.read_text().split()
    assert len(fetched) == len(set(fetched))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_whole_batch_of_getitems_goes_to_the_collate_function(workers: int, batch_size: int) -> None:
    with make_loader(datasets.Columns, workers=workers, batch_size=batch_size, shuffle=False) as loader:
        with pytest.raises(TypeError, match="dict is no list of samples, which default collating takes"):
            next(iter(loader))
        with loader.with_collate_fn(datasets.identity) as whole:
            batches = [{name: column.tolist() for name, column in batch.items()} for batch in whole]
    ids = list(range(6))
    assert batches == [
        {"id": part, "minus": [-one for one in part]}
        for part in (ids[begin : begin + batch_size] for begin in range(0, 6, batch_size))
    ]


def test_batches_come_as_the_collate_returns_them() -> None:
    with make_loader(datasets.Counting, collate_fn=datasets.identity, shuffle=False, batch_size=3) as loader:
        batch = next(iter(loader))
    assert [sample["id"] for sample in batch] == [0, 1, 2]
    assert type(batch) is list


def test_arrays_are_writable_and_of_the_dtype_of_the_samples() -> None:
    with make_loader(datasets.Counting) as loader:
        batch = next(iter(loader))
    batch["x"][:] = 1
    assert batch["x"].dtype == np.float32
    assert batch["x"].shape == (8, 4)
    assert batch["id"].dtype == np.int64


def test_break_mid_epoch_starts_the_next_epoch_afresh() -> None:
    with make_loader(datasets.Counting) as loader:
        reference = [ids_of(loader) for _ in range(4)]
    with make_loader(datasets.Counting) as loader:
        for epoch in range(3):
            for number, batch in enumerate(loader):
                assert batch["id"].tolist() == reference[epoch][number * 8 : number * 8 + 8]
                if number == epoch:
                    break
        assert ids_of(loader) == reference[3]


def test_an_iterator_thrown_away_unused_costs_nothing() -> None:
    with make_loader(datasets.Counting) as loader:
        iter(loader)
        iter(loader)
        first = ids_of(loader)
    with make_loader(datasets.Counting) as loader:
        assert ids_of(loader) == first


def test_set_epoch_chooses_the_order() -> None:
    with make_loader(datasets.Counting) as loader:
        epochs = [ids_of(loader) for _ in range(4)]
        loader.set_epoch(1)
        assert [ids_of(loader), ids_of(loader)] == epochs[1:3]
        iterator = iter(loader)
        loader.set_epoch(0)  # after iter(), as some frameworks do
        assert ids_of(iterator) == epochs[0]


def test_set_epoch_takes_any_integer() -> None:
    with make_loader(datasets.Counting, workers=0) as loader:
        loader.set_epoch(np.int64(3))
        next(iter(loader))
        assert loader.state_dict()["epoch"] == 3


@pytest.mark.parametrize("value", [-1, 1.5, "2", None, True, 2**62])
def test_set_epoch_refuses_nonsense(value: Any) -> None:
    loader = make_loader(datasets.Counting)
    with pytest.raises((ValueError, TypeError), match="epoch="):
        loader.set_epoch(value)


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "workers"),
    [(0, 4, 2), exhaustive(1, 4, 2), (3, 8, 4), exhaustive(5, 1, 7), exhaustive(16, 4, 2), (0, 1, 0)],
)
def test_any_number_of_samples_works(num_samples: int, batch_size: int, workers: int) -> None:
    options: dict[str, Any] = {"kwargs": {"num_samples": num_samples}, "batch_size": batch_size, "workers": workers}
    with make_loader(datasets.Counting, **options) as loader:
        for _ in range(3):
            assert sorted(ids_of(loader)) == list(range(num_samples))
        assert len(loader) == -(-num_samples // batch_size)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("drop_last", "expected"), [(False, 13), (True, 12)])
def test_len_is_the_same_before_and_after_start(workers: int, drop_last: bool, expected: int) -> None:
    loader = make_loader(datasets.Counting, workers=workers, drop_last=drop_last)
    with loader:
        assert len(loader) == expected
        loader.start(0)
        assert len(loader) == expected
        assert len(list(loader)) == expected


def test_len_before_start_builds_no_dataset_in_the_trainer(tmp_path: Any) -> None:
    marker = tmp_path / "pids"

    class Marking(datasets.Counting):
        def __init__(self) -> None:
            super().__init__()
            with marker.open("a") as file:
                file.write(f"{os.getpid()}\n")

    with make_loader(Marking) as loader:
        assert len(loader) == 13
        assert sorted(ids_of(loader)) == list(range(100))
    assert str(os.getpid()) not in marker.read_text().split()


class CountsBuilding(datasets.Counting):
    def __init__(self, log: str) -> None:
        super().__init__()
        with Path(log).open("a") as file:
            file.write("built\n")


@needs_template
@pytest.mark.parametrize("rng", ["sample", "worker"])
def test_a_dataset_that_was_built_to_be_counted_is_not_built_again(rng: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with make_loader(CountsBuilding, kwargs={"log": str(log)}, rng=rng) as loader:
        assert len(loader) == len(loader.sampler) // 8 + 1 == 13
        assert sorted(ids_of(loader)) == list(range(100))
    assert log.read_text() == "built\n"


@needs_template
def test_what_is_loaded_or_placed_after_counting_is_not_lost(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options: dict[str, Any] = {"kwargs": {"log": str(log)}, "nb_consumer": 2}
    with make_loader(CountsBuilding, seed=3, **options) as loader:
        loader.start(1)
        state = loader.state_dict()
        expected = ids_of(loader)
    with make_loader(CountsBuilding, seed=None, **options) as loader:
        assert len(loader) == 7  # as rank 0, and with another seed
        loader.load_state_dict(state)
        loader.start(1)
        assert ids_of(loader) == expected
    assert log.read_text() == "built\n" * 2


@needs_template
def test_workers_seeded_once_are_seeded_as_the_rank_they_have_become(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with make_loader(CountsBuilding, kwargs={"log": str(log)}, nb_consumer=2, rng="worker") as loader:
        assert len(loader) == 7
        loader.start(1)
        assert len(ids_of(loader)) == 50
    assert log.read_text() == "built\n" * 2


@pytest.mark.parametrize("ending", ["close", "drop", "pickle"])
def test_a_loader_that_only_counted_leaves_nothing_behind(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_root(monkeypatch)  # so that no other template is there for a moment
    loader = make_loader(datasets.Counting)
    assert len(loader) == 13
    (template,) = loader_processes()
    if ending == "pickle":
        with pickle.loads(pickle.dumps(loader)) as twin:
            assert len(ids_of(twin)) == 100
    if ending == "close":
        loader.close()
    del loader
    wait_until(lambda: is_gone(template.pid), "the end of the template")


def test_a_dataset_that_can_not_be_counted_leaves_nothing_behind() -> None:
    loader = make_loader(datasets.FailsToBuild)
    for _ in range(2):
        with pytest.raises(datasets.CustomError):
            len(loader)
        wait_until(lambda: not loader_processes(), "the end of the template")


@pytest.mark.parametrize("uneven", ["pad", exhaustive("drop"), exhaustive("exact")])
def test_consumers_split_the_dataset(uneven: str) -> None:
    parts: list[list[int]] = []
    lengths = []
    for rank in range(3):
        with make_loader(datasets.Counting, nb_consumer=3, uneven=uneven) as loader:
            loader.start(consumer_index=rank)
            parts.append(ids_of(loader))
            lengths.append(len(loader))
    every = [number for part in parts for number in part]
    assert len(set(every)) >= 98
    assert len(every) == {"pad": 102, "drop": 99, "exact": 100}[uneven]
    assert len(set(lengths)) == 1


def test_a_padded_batch_says_how_many_samples_are_repeats() -> None:
    paddings = []
    for rank in range(3):
        with make_loader(datasets.Counting, nb_consumer=3) as loader:
            loader.start(rank)
            paddings.append([loader.num_padding for _ in loader])
    assert sum(map(sum, paddings)) == 2
    assert all(set(padding[:-1]) == {0} for padding in paddings)


def test_consumers_need_to_say_who_they_are() -> None:
    loader = make_loader(datasets.Counting, nb_consumer=2)
    with pytest.raises(RuntimeError, match=r"call loader\.start"):
        next(iter(loader))
    with pytest.raises(ValueError, match=r"consumer_index=2 with nb_consumer=2"):
        loader.start(2)


def test_an_instance_can_be_given_instead_of_a_class() -> None:
    instance = datasets.Counting(30)
    with SwiftLoader(dataset=instance, batch_size=4, worker_per_consumer=2, start_method=START_METHOD) as loader:
        assert len(loader) == 8
        assert sorted(ids_of(loader)) == list(range(30))
        assert loader.dataset is instance


def test_the_dataset_is_built_in_the_trainer_only_when_asked_for() -> None:
    with make_loader(datasets.Counting) as loader:
        next(iter(loader))
        assert len(loader.dataset) == 100
        assert loader.batch_size == 8


def test_getitems_is_used_where_it_exists() -> None:
    with make_loader(datasets.Batched) as loader:
        batches = list(loader)
    assert sorted(ids_of(batches)) == list(range(100))
    assert batches[0]["batch"].tolist() == [8] * 8


def test_custom_encoder_and_decoder_are_used() -> None:
    def encode(batch: Any) -> bytes:
        return b"#" + pickle.dumps(batch["id"].tolist())

    def decode(data: bytes) -> Any:
        assert type(data) is bytes
        assert data[:1] == b"#"
        return pickle.loads(data[1:])

    for workers in (0, 2):
        options: dict[str, Any] = {
            "batch_encoder": encode,
            "batch_decoder": decode,
            "shuffle": False,
            "workers": workers,
        }
        with make_loader(datasets.Counting, **options) as loader:
            assert [number for batch in loader for number in batch] == list(range(100))


@pytest.mark.parametrize("kind", [bytearray, memoryview, str, list])
def test_a_custom_encoder_gives_bytes_of_any_size_and_nothing_else(kind: Any) -> None:
    options: dict[str, Any] = {"batch_decoder": len, "shuffle": False, "workers": 0, "batch_size": 1}
    size = 30_000 if kind in (bytearray, memoryview) else None

    def encode(batch: Any) -> Any:
        return kind("text") if size is None else kind(bytes(size * int(batch["id"][0])))

    with make_loader(datasets.Counting, kwargs={"num_samples": 3}, batch_encoder=encode, **options) as loader:
        if size is not None:
            assert list(loader) == [0, size, 2 * size]
            return
        with pytest.raises(TypeError, match=f"batch_encoder returned a {kind.__name__}; it must return bytes"):
            next(iter(loader))


def test_starting_twice_and_using_a_closed_loader_are_errors() -> None:
    loader = make_loader(datasets.Counting)
    loader.start(0)
    with pytest.raises(RuntimeError, match="runs already"):
        loader.start(0)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    loader.close()
    for use in (lambda: next(iterator), lambda: next(iter(loader)), lambda: loader.start(0)):
        with pytest.raises(LoaderClosed):
            use()


def test_repr_shows_the_state() -> None:
    loader = make_loader(datasets.Counting)
    assert "not started" in repr(loader)
    with loader:
        loader.start(0)
        assert "started" in repr(loader)
        assert "generation 1" in repr(loader._session)
        next(iterator := iter(loader))
        next(iterator)
        assert repr(loader).startswith(
            "<SwiftLoader: 100 samples of Counting, 13 batches of 8, 2 workers, running, epoch 0, batch 2, at most"
        )
        assert repr(iterator) == "<EpochIterator: active, epoch 0, batch 2 of 13>"
    assert ", closed, epoch 0, batch 2, " in repr(loader)
    assert "<td style='text-align:left' colspan='1'>epoch 0, batch 2</td></tr>" in loader._repr_html_()


def test_repr_changes_nothing_and_asks_no_dataset_of_the_user() -> None:
    numbers = list(range(10))
    loader = SwiftLoader(dataset=numbers, batch_size=5, worker_per_consumer=0)
    assert repr(loader).startswith("<SwiftLoader: 10 samples of list, 2 batches of 5, 0 workers, not started")
    assert loader.state_dict()["num_samples"] is None
    numbers += range(10)
    assert len(list(loader)) == 4
    assert repr(SwiftLoader(dataset=datasets.Counting())).startswith("<SwiftLoader: Counting, batches of 1, ")
    assert repr(SwiftLoader.__new__(SwiftLoader)) == "<SwiftLoader: not usable>"


def test_repr_says_how_many_batches_are_in_flight_and_what_memory_that_means() -> None:
    loader = make_loader(datasets.Images, workers=4)
    assert ", at most 12 in flight>" in repr(loader)
    with loader:
        loader.start(0)
        assert next(iter(loader)).nbytes == 24_576
        assert ", at most 12 in flight (288 KiB)>" in repr(loader)
    assert ", at most 5 in flight>" in repr(make_loader(datasets.Images, workers=4, data_queue_size=5))
    assert "in flight" not in repr(make_loader(datasets.Images, workers=0))


def test_a_queue_that_is_too_short_for_the_workers_is_told_once_and_obeyed() -> None:
    with make_loader(datasets.Counting, workers=3, data_queue_size=2, shuffle=False) as loader:
        with pytest.warns(SwiftLoaderWarning, match="at most 2 of worker_per_consumer=3 workers") as told:
            loader.start(0)
        for _ in range(2):
            assert ids_of(loader) == list(range(100))
        assert len(told) == 1
        assert told[0].filename == __file__
        assert "at most 2 in flight" in repr(loader)


def test_where_warnings_are_errors_a_queue_that_is_too_short_is_one_before_anything_is_started() -> None:
    loader = make_loader(datasets.Counting, workers=3, data_queue_size=2)
    with pytest.raises(SwiftLoaderWarning, match="data_queue_size=2"):
        loader.start(0)
    assert not loader_children()


def test_a_prepared_loader_can_be_started_again_after_a_start_that_failed() -> None:
    with make_loader(datasets.Counting, workers=3, data_queue_size=2) as loader:
        loader.prepare()
        with pytest.raises(SwiftLoaderWarning, match="data_queue_size=2"):
            loader.start(0)
        with pytest.warns(SwiftLoaderWarning, match="data_queue_size=2"):
            loader.start(0)
        assert sorted(ids_of(loader)) == list(range(100))


@needs_template
def test_a_second_start_while_the_first_one_waits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_root(monkeypatch)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with make_loader(datasets.WaitsForAWriter, kwargs={"pipe": str(pipe)}) as loader:
        first = threading.Thread(target=loader.start)
        first.start()
        wait_until(lambda: bool(loader_children()), "the first start is under way")
        with pytest.raises(RuntimeError, match="runs already"):
            loader.start()
        loader.prepare()  # has nothing to do any more
        pipe.write_text("go on")
        first.join()
        assert sorted(ids_of(loader)) == list(range(100))


def test_a_loader_that_is_closed_while_it_starts_stays_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_root(monkeypatch)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loader = make_loader(datasets.WaitsForAWriter, kwargs={"pipe": str(pipe)})
    errors: list[BaseException] = []

    def start() -> None:
        try:
            loader.start()
        except LoaderClosed as error:
            errors.append(error)

    first = threading.Thread(target=start)
    first.start()
    wait_until(lambda: bool(loader_children()), "the start is under way")
    loader.close()
    first.join()
    assert len(errors) == 1
    assert "closed" in repr(loader)
    with pytest.raises(LoaderClosed):
        loader.start()


def test_a_loader_that_is_closed_while_the_ranks_agree_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader(datasets.Counting)
    monkeypatch.setattr("swift_loader.lifecycle.agree_on_run", lambda *_, **__: loader.close())
    with pytest.raises(LoaderClosed, match="while it started"):
        loader.start()
    assert not loader_children()
    assert "closed" in repr(loader)


def test_a_loader_that_has_not_started_can_be_copied_and_pickled() -> None:
    offset = 5
    loader = make_loader(datasets.Counting, collate_fn=lambda samples: [sample["id"] + offset for sample in samples])
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        with twin:
            assert sorted(number for batch in twin for number in batch) == list(range(5, 105))
    loader.start(0)
    with pytest.raises(TypeError, match="before start"):
        pickle.dumps(loader)
    loader.close()


def test_workers_import_neither_torch_nor_what_the_trainer_alone_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    without_root(monkeypatch)  # another loader may have needed torch there
    assert "torch" in sys.modules
    with make_loader(datasets.Reports) as loader:
        batch = next(iter(loader))
    assert set(batch["modules"]) == {""}
    assert set(batch["thread_env"]) == {"1"}


@needs_template
def test_a_prepared_loader_starts_from_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    without_root(monkeypatch)
    loader = make_loader(datasets.Counting, workers=2)
    loader.prepare()
    loader.prepare()  # once is enough
    with loader:
        wait_until(lambda: len(loader_children()) == 1, "the template is there")
        template = loader_children()
        assert sorted(ids_of(loader)) == list(range(100))
        assert loader_children() == template


@pytest.mark.parametrize("change", ["directory", exhaustive("environment"), exhaustive("path"), "dataset"])
def test_what_changes_after_prepare_counts(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Circumstances:
        def __init__(self) -> None:
            self.number = 1

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> list[Any]:
            return [os.getcwd(), os.environ.get("A_VARIABLE", ""), "/some/where" in sys.path, self.number]

    dataset = Circumstances()
    without_root(monkeypatch)
    with SwiftLoader(dataset=dataset, batch_size=4, worker_per_consumer=1, start_method=START_METHOD) as loader:
        loader.prepare()
        if change == "directory":
            monkeypatch.chdir(tmp_path)
        elif change == "environment":
            monkeypatch.setenv("A_VARIABLE", "set")
        elif change == "path":
            monkeypatch.syspath_prepend("/some/where")
        else:
            dataset.number = 2
        (batch,) = loader
        assert [column[0] for column in batch] == dataset[0]


@pytest.mark.parametrize("ending", ["close", "drop", pytest.param("fork", marks=needs_template)])
def test_a_loader_that_was_only_prepared_leaves_nothing_behind(ending: str) -> None:
    loader = make_loader(datasets.Counting)
    loader.prepare()
    if ending == "fork":
        child = os.fork()
        if not child:
            os._exit(0 if len(list(loader)) == 13 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if ending == "close":
        loader.close()
        with pytest.raises(LoaderClosed):
            loader.prepare()
    del loader


@needs_template
def test_what_torch_sets_in_the_environment_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    without_root(monkeypatch)
    with make_loader(datasets.Counting) as loader:
        loader.prepare()
        wait_until(lambda: len(loader_children()) == 1, "the template is there")
        template = loader_children()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/some/where")
        assert sorted(ids_of(loader)) == list(range(100))
        assert loader_children() == template


def test_an_error_while_preparing_comes_out_of_start() -> None:
    with make_loader(datasets.FailsToBuild) as loader:
        loader.prepare()
        with pytest.raises(datasets.CustomError, match="no luck"):
            loader.start()


def test_a_loader_with_another_collate_fn_is_of_the_same_class() -> None:
    class Named(SwiftLoader):
        name = "unknown"

    loader = Named(dataset=range(4), batch_size=2, worker_per_consumer=0, shuffle=False)
    loader.name = "train"
    with loader.with_collate_fn(list) as successor:
        assert (type(successor), successor.name) == (Named, "train")
        assert list(successor) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", ["SwiftLoader", "DataLoader", "persistent", "Pipeline"])
def test_a_loop_that_has_all_batches_meets_the_end_behind_another_pass(kind: str) -> None:
    numbers: Any = list(range(4))
    loader: Any = {
        "SwiftLoader": lambda: SwiftLoader(dataset=numbers, batch_size=2, worker_per_consumer=0),
        "DataLoader": lambda: DataLoader(numbers, 2),
        "persistent": lambda: DataLoader(numbers, 2, num_workers=1, persistent_workers=True),
        "Pipeline": lambda: Pipeline(numbers).batch(2),
    }[kind]()
    iterator = iter(loader)
    assert len([next(iterator) for _ in range(2)]) == len(list(loader)) == 2
    assert next(iterator, None) is None
    loader.close() if hasattr(loader, "close") else None


def test_an_empty_state_changes_nothing() -> None:
    with SwiftLoader(dataset=range(8), batch_size=2, worker_per_consumer=0, seed=1) as loader:
        iterator = iter(loader)
        next(iterator)
        before = loader.state_dict()
        loader.load_state_dict({})
        assert loader.state_dict() == before
        assert len(list(iterator)) == 3


def test_a_task_that_the_kernel_does_not_take_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    post, num_failed = Channel.post, itertools.count()

    def fail_often(self: Channel, message: bytes, *, is_task: bool = False) -> None:
        if is_task and next(num_failed) % 3:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        post(self, message, is_task=is_task)

    monkeypatch.setattr(Channel, "post", fail_often)
    found: list[int] = []
    with SwiftLoader(dataset=range(16), batch_size=2, worker_per_consumer=1, shuffle=False) as loader:
        iterator = iter(loader)
        while len(found) < 16:
            with suppress(OSError):
                found += next(iterator).tolist()
    assert found == list(range(16))
    assert next(num_failed) > 16
