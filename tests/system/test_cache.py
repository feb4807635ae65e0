"""A cached dataset: the same batches as without a cache, each sample made once, and errors for what it can't keep."""

from __future__ import annotations

import errno
import os
import random
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, Subset

import swift_loader
from swift_loader import CacheMismatch, DataLoader, EncodeError, SwiftLoader, SwiftLoaderWarning, cached, sample_rng
from swift_loader.metrics.machine import available_memory
from swift_loader.pipeline import Pipeline
from tests.support.group import run_ranks
from tests.support.helpers import ROOT, run_script

LENGTH = 40


class Pair(NamedTuple):
    """A sample."""

    image: np.ndarray[Any, np.dtype[np.uint8]]
    tensor: torch.Tensor
    label: int
    name: str


class Photos:
    """Notes in a file which samples were made."""

    def __init__(self, log: Path, length: int = LENGTH) -> None:
        self.log = str(log)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Pair:
        with open(self.log, "a", encoding="ascii") as log:
            log.write(f"{index}\n")
        image = np.arange(3000, dtype=np.uint8).reshape(20, 50, 3) + np.uint8(index)
        return Pair(image, torch.full((7,), float(index)), index, f"photo {index}")


def augment(pair: Pair) -> dict[str, Any]:
    """Draw from all generators, and change the sample in place."""
    top = random.randrange(10)
    pair.image[:] += np.uint8(np.random.randint(5))
    pair.tensor.add_(torch.rand(7)).add_(sample_rng().random())
    return {"image": pair.image[top : top + 10], "tensor": pair.tensor, "label": pair.label, "name": pair.name}


class Augmented:
    """The same without a cache."""

    def __init__(self, photos: Photos) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return augment(self.photos[index])


def made(log: Path) -> list[int]:
    """Return which samples were made, in the order of their indices."""
    return sorted(map(int, log.read_text().split())) if log.exists() else []


def swift(dataset: Any) -> SwiftLoader:
    return SwiftLoader(dataset=dataset, batch_size=8, shuffle=True, seed=3, worker_per_consumer=2, validate=False)


def drop_in(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 8, shuffle=True, seed=3, num_workers=2)


def taken(loader: Iterable[Any], epochs: int = 2) -> list[bytes]:
    """Return the bytes of some epochs."""
    return [
        np.asarray(batch[name]).tobytes() if name != "name" else repr(batch[name]).encode()
        for _ in range(epochs)
        for batch in loader
        for name in ("image", "tensor", "label", "name")
    ]


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("make", [swift, drop_in])
def test_batches_are_those_without_a_cache_and_each_sample_is_made_once(
    make: Callable[[Any], Any], where: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    kept = cached(Photos(log), augment, where=where if where == "memory" else tmp_path / "cache")
    loader = make(kept)
    batches = taken(loader)
    assert made(log) == list(range(LENGTH))
    assert "40 of them kept" in repr(kept)
    if where == "file":
        again = cached(Photos(log), augment, where=tmp_path / "cache")
        log.unlink()  # of the samples that were compared
        assert taken(make(again)) == batches
        assert made(log) == []
    plain = make(Augmented(Photos(tmp_path / "other")))
    assert taken(plain) == batches
    for each in (loader, plain):
        if isinstance(each, SwiftLoader):
            each.close()


def test_torchs_loader_fills_it_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    kept = cached(Photos(log))
    loader = TorchLoader(kept, 8, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type, var-annotated]
    first, second = ([batch.label.tolist() for batch in loader] for _ in range(2))
    assert first == second
    assert made(log) == list(range(LENGTH))


class Wrapped:
    """Changes the samples of a dataset, and has its attributes."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return -int(self.dataset[index].label)


@pytest.mark.parametrize("make", [swift, drop_in])
def test_what_wraps_a_cache_makes_the_samples(make: Callable[[Any], Any], tmp_path: Path) -> None:
    loader = make(Wrapped(cached(Photos(tmp_path / "log"))))
    assert sorted(int(label) for batch in loader for label in batch) == list(range(1 - LENGTH, 1))
    if isinstance(loader, SwiftLoader):
        loader.close()


def test_what_does_not_fit_is_made_on_each_access(tmp_path: Path) -> None:
    log = tmp_path / "log"
    kept = cached(Photos(log), budget=LENGTH // 2 * 3392)
    with pytest.warns(SwiftLoaderWarning, match=r"memory is full .*66.25 KiB.* 20 of 40 samples.*budget=") as warned:
        labels = [kept[index].label for _ in range(2) for index in range(LENGTH)]
    assert labels == [*range(LENGTH)] * 2
    assert len(warned) == 1
    assert made(log) == sorted([*range(LENGTH), *range(LENGTH // 2, LENGTH)])
    assert "20 of them kept in memory: 66.25 KiB of 66.25 KiB" in repr(kept)


def test_one_may_write_to_what_one_gets(tmp_path: Path) -> None:
    kept = cached(Photos(tmp_path / "log"))
    for _ in range(3):
        sample = kept[-1]
        assert sample.tensor.tolist() == [LENGTH - 1.0] * 7
        assert sample.image[0, 0, 0] == LENGTH - 1
        sample.tensor.zero_()
        sample.image[:] = 0


class Drawing(Photos):
    """Draws in one of several ways."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(Path(os.devnull))
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return self.draw()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1), lambda: sample_rng().random()])
def test_random_samples_are_refused(draw: Callable[[], Any]) -> None:
    with pytest.raises(
        ValueError, match=r"sample 3 of a cached dataset, a .*Drawing, draws random numbers.*transform="
    ):
        cached(Drawing(draw))[3]


class Local(NamedTuple):
    """Can't be imported, as if it were a script's."""

    value: int


def test_what_can_not_be_kept_is_named() -> None:
    kept = cached(Drawing(lambda: (1, lambda: 2)))
    with pytest.raises(EncodeError, match="sample 0 of a cached dataset"):
        kept[0]
    with pytest.raises(IndexError, match="index 40 of a cached dataset of 40 samples"):
        kept[LENGTH]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda log: Photos(log, 41), "its length is 40, not 41"),
        (lambda log: Drawing(lambda: 0), r"its class is '.*\.Photos', not '.*\.Drawing'"),
    ],
)
def test_the_file_of_another_dataset_is_refused_by_name(
    other: Callable[[Path], Any], difference: str, tmp_path: Path
) -> None:
    path = tmp_path / "cache"
    cached(Photos(tmp_path / "log"), where=path)
    with pytest.raises(CacheMismatch, match=f"the cache '{path}' is that of another dataset: {difference}"):
        cached(other(tmp_path / "log"), where=path)


def test_the_cache_of_another_dataset_may_be_copied_over_one_in_use(tmp_path: Path) -> None:
    kept = cached(Photos(tmp_path / "log"), where=tmp_path / "cache")
    other = cached([{"label": index} for index in range(LENGTH)], where=tmp_path / "other")
    assert [kept[index].label for index in range(3)] == [other[index]["label"] for index in range(3)]
    (tmp_path / "cache").write_bytes((tmp_path / "other").read_bytes())
    assert [kept[index].name for index in range(3)] == ["photo 0", "photo 1", "photo 2"]


def test_versions_must_agree_and_a_file_without_one_gets_it(tmp_path: Path) -> None:
    path, log = tmp_path / "cache", tmp_path / "log"
    cached(Photos(log), where=path)[5]
    assert cached(Photos(tmp_path / "other"), where=path, version="2")[5].label == 5
    log.unlink()
    assert cached(Photos(log), where=path, version=2)[5].label == 5
    assert made(log) == [5]  # to compare it: its entry is still good
    for version, other in [("3", "'3'"), (None, "None")]:
        with pytest.raises(CacheMismatch, match=f"its version is '2', not {other}"):
            cached(Photos(log), where=path, version=version)


def test_bad_arguments_are_refused_at_once(tmp_path: Path) -> None:
    photos = Photos(tmp_path / "log")
    wrong: list[tuple[Any, str]] = [
        ("many", "must be a number of bytes"),
        (0, "at least 1 byte"),
        (True, "number of bytes"),
    ]
    for budget, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            cached(photos, budget=budget)
    with pytest.raises(TypeError, match="transform"):
        cached(photos, 5)  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError):
        cached(photos, where=tmp_path)
    assert swift_loader.cached is cached


class Odd(Photos, Dataset[Any]):
    """Has an attribute that is another one in each run, and opens its file when a sample is made."""

    def __init__(self, log: Path, attribute: Any) -> None:
        super().__init__(log)
        self.attribute = attribute
        self.file: Any = None

    def __getitem__(self, index: int) -> Pair:
        self.file = self.file or open(self.log, "rb", buffering=0)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "attribute", [random.random, np.random.default_rng, lambda: torch.rand(3), threading.Lock, lambda: lambda: 0]
)
def test_attributes_never_matter_and_the_program_s_dataset_opens_nothing(
    attribute: Callable[[], Any], tmp_path: Path
) -> None:
    (log := tmp_path / "log").touch()
    first, inner = Odd(log, attribute()), Odd(log, attribute())
    cached(Subset(first, range(LENGTH)), where=tmp_path / "cache")[3]
    first.file.close()
    kept = cached(Subset(inner, range(LENGTH)), where=tmp_path / "cache")
    assert inner.file is None
    assert kept[3].label == 3
    assert made(log) == [3, 3]


def test_samples_are_made_with_one_thread_as_in_workers(tmp_path: Path) -> None:
    """A sum of many numbers depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    for _ in range(2):
        assert cached(Drawing(torch.get_num_threads), where=tmp_path / "cache")[0] == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_what_is_not_kept_is_not_the_dataset_s_own_object() -> None:
    images = [np.zeros(1000, np.float32) for _ in range(8)]
    kept = cached(images, transform=lambda image: np.add(image, 1, out=image), budget=4 * 4200)
    with pytest.warns(SwiftLoaderWarning, match="3 of 8"):
        first = [image.sum() for image in (kept[index] for index in range(8))]
    assert [kept[index].sum() for index in range(8)] == first == [1000] * 8
    assert not np.any(images)


class Marked(torch.Tensor):
    """Has an attribute, too."""

    mark: int


def test_a_view_of_a_subclass_is_kept_without_the_rest_of_its_storage() -> None:
    video = torch.arange(1000 * 100).reshape(1000, 100).as_subclass(Marked)

    def frame(index: int) -> Any:
        view: Any = video[index]
        view.mark = index
        return view

    kept = cached([frame(index) for index in range(8)])
    for _ in range(2):
        sample = kept[5]
        assert (type(sample), sample.mark, sample.tolist()) == (Marked, 5, list(range(500, 600)))
    assert kept._store.nbytes() < 2000


def test_the_budgets_of_a_program_s_caches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    free = available_memory()
    monkeypatch.setattr("swift_loader.cache.available_memory", lambda: free)  # other processes may take some meanwhile
    kept = [cached([0] * 10, budget="10TB"), cached([0] * 10, budget="1MB"), cached([0] * 10, budget="10TB")]
    ends = [one._store.end for one in kept]
    assert sum(ends) <= 0.8 * free
    assert ends[0] == pytest.approx(ends[2], rel=0.1)
    assert "0 B of 976.6 KiB" in repr(kept[1])


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_limits_of_the_process_count(limit: str, tmp_path: Path) -> None:
    code = f"""
    import resource
    from swift_loader import cached
    from swift_loader.errors import SharedMemoryFull
    used = 0 if "{limit}" == "RLIMIT_FSIZE" else 4096 * int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.{limit}, (used + (64 << 20),) * 2)
    kept = cached([0] * 1000)
    print([kept[0], kept._store.end <= 64 << 20])
    try:
        cached(range(100_000_000))
    except SharedMemoryFull as error:
        print("budget=" in str(error))
    """
    assert run_script(code, folder=tmp_path, environment={"PYTHONPATH": str(ROOT)}) == "[0, True]\nTrue\n"


def test_a_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    cached([1, 2], where=tmp_path / "cache")
    os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o640


def test_a_complete_file_may_be_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opens = tmp_path / "cache", os.open
    kept = cached([1, 2], where=path)
    kept[0]

    def opened(name: Any, flags: int, *mode: Any) -> int:
        if name == str(path) and flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return opens(name, flags, *mode)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(PermissionError, match="1 of 2 samples"):
        cached([1, 2], where=path)
    monkeypatch.undo()
    kept[1]
    monkeypatch.setattr(os, "open", opened)
    kept = cached([1, 2], where=path)
    assert [kept[0], kept[1]] == [1, 2]
    assert "2 of them kept" in repr(kept)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_draws_are_no_failed_samples(on_error: Any) -> None:
    drawing = cached(Drawing(random.random))
    with (
        SwiftLoader(dataset=drawing, batch_size=4, worker_per_consumer=0, on_error=on_error) as loader,
        pytest.raises(CacheMismatch, match="draws random numbers"),
    ):
        list(loader)
    with pytest.raises(CacheMismatch, match="draws random numbers"):
        list(Pipeline(range(4)).map(cached(Drawing(lambda: sample_rng().random())).__getitem__, on_error="skip"))


def test_another_thread_may_draw() -> None:
    begun, done = threading.Event(), threading.Event()

    def draw() -> None:
        while not done.is_set():
            random.random()
            np.random.rand()
            begun.set()

    thread = threading.Thread(target=draw)
    thread.start()
    begun.wait()
    try:
        kept = cached(range(20))
        assert [kept[index] for index in range(20)] == list(range(20))
        with pytest.raises(CacheMismatch, match="draws random numbers"):
            cached(Drawing(random.random))[0]
    finally:
        done.set()
        thread.join()


RANKS = """
    class Still(Dataset):
        def __getitem__(self, index):
            with open(f"{folder}/fetched", "a") as file:
                file.write(f"{index}\\n")
            return {"index": index}
    photos = cached(Still(), budget="10MB")
    with SwiftLoader(dataset=photos, batch_size=8, worker_per_consumer=2, seed=5, validate=False) as loader:
        seen = [int(index) for batch in loader for index in batch["index"]]
    dist.barrier()
    report([seen, num_fetched(), sum(photos[index]["index"] for index in range(96)), repr(photos)])
    dist.barrier()  # the other rank has counted, too
    other = cached(Still(length=5 + rank), budget="1MB")  # not the same on all ranks, so each has its own
    report([other[4 + rank]["index"], repr(other)])
    finish()
"""

OTHER_RANKS = """
    from swift_loader.metrics.machine import available_memory
    class Still:
        def __len__(self):
            return 3
        def __getitem__(self, index):
            return index
    class Part(Still):
        def __getitem__(self, index):
            return 100 * rank + index
    warnings.simplefilter("always")
    with warnings.catch_warnings(record=True) as warned:
        parts = cached(Part(), version="1", budget="1MB")
        named = [cached(Still(), name=name, budget="1MB") for name in ("a", "b")[:: 1 - 2 * rank]]
        same = [cached(Still(), name="c", budget="1MB") for _ in range(2)]
    try:
        in_file = [cached(Part(), where=f"{folder}/parts", budget="1MB")[index] for index in range(3)]
    except CacheMismatch as error:
        in_file = str(error)
    report([str(one.message) for one in warned if "doesn't share" in str(one.message)])
    report([parts[2], in_file, [one._store.memory.address.inode for one in (*named, *same)]])
    dist.barrier()
    both = [cached([0]) for _ in range(2)]
    dist.barrier()
    report([[one._store.memory.address.inode, one._store.end] for one in both] + [available_memory()])
    dist.barrier()
    finish()
"""


def test_the_ranks_of_a_machine_share_one_copy(tmp_path: Path) -> None:
    first, second = run_ranks(RANKS, 2, tmp_path)
    assert sorted(first[0][0] + second[0][0]) == list(range(96))
    assert first[0][1:] == second[0][1:]
    assert first[0][1:3] == [96 + 8, sum(range(96))]  # each rank has made eight to compare
    assert "96 of them kept in memory" in first[0][3]
    assert first[1][0] == 4
    assert second[1][0] == 5
    assert "5 of them kept" in first[1][1]
    assert "6 of them kept" in second[1][1]


@pytest.mark.slow
def test_a_cache_of_two_ranks_is_that_of_a_name_or_the_order_and_of_equal_samples(tmp_path: Path) -> None:
    first, second = run_ranks(OTHER_RANKS, 2, tmp_path)
    (text,) = first[0] + second[0]
    assert re.search(r"doesn't share cache '' 0 .* another sample \d+ .* \d+ there, and \d+ here.*name=", text)
    assert [first[1][0], second[1][0]] == [2, 102]
    of_file, refused = sorted((first[1][1], second[1][1]), key=lambda found: isinstance(found, str))
    assert of_file in ([0, 1, 2], [100, 101, 102])
    assert "has another sample" in refused
    a, b, c, d = first[1][2]
    assert second[1][2] == [b, a, c, d]
    assert len({a, b, c, d}) == 4
    ends: dict[int, int] = dict((*first[2][:2], *second[2][:2]))
    assert sum(ends.values()) <= 0.8 * first[2][2]


def test_a_new_file_that_can_not_be_compared_between_ranks_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr("swift_loader.cache.place_of_ranks", lambda: (None, ""))
    monkeypatch.setattr("swift_loader.cache._make_apart", fail)
    with pytest.warns(SwiftLoaderWarning, match=r"can't be compared with .* other ranks.*planted"):
        assert cached(range(20), where=tmp_path / "kept")[3] == 3
