from __future__ import annotations

import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import SwiftLoader, SwiftLoaderWarning
from swift_loader.options import DeliveryOptions, Options, ReportOptions, SamplingOptions
from swift_loader.worker.spec import WorkerOptions
from tests.support.helpers import exhaustive, run_script

DATASET = list(range(10))


def options_of(**options: Any) -> Options:
    return SwiftLoader(dataset=DATASET, **options)._options


def seed_of(**options: Any) -> int:
    return int(SwiftLoader(dataset=DATASET, **options).state_dict()["seed"])


def decode_nothing(data: bytes) -> Any:
    return data


def encode_nothing(batch: Any) -> bytes:
    return bytes(batch)


COUNTS = {
    "batch_size": 1,
    "nb_consumer": 1,
    "worker_per_consumer": 0,
    "seed": 0,
    "data_queue_size": 1,
    "message_queue_size": 1,
    "max_buffer_size": 1,
    "nearby_shuffle": 0,
    "max_nb_batch_on_device": 1,
}
FLAGS = [
    "shuffle", "drop_last", "in_order", "benchmark", "validate", "multithread", "dataset_per_worker", "shared"
]  # fmt: skip


MISSPELT = {
    "bach_size": "batch_size",
    "workers_per_consumer": "worker_per_consumer",
    "nb_consumers": "nb_consumer",
    "suffle": "shuffle",
    "seeds": "seed",
    "collate": "collate_fn",
    "time_out": "timeout",
    "start_methode": "start_method",
}
OF_TORCH = {
    "sampler": "torch.utils.data.Subset",
    "batch_sampler": r"collate_fn that returns samples\[0\]",
    "num_workers": "worker_per_consumer",
    "generator": "give seed",
    "worker_init_fn": "constructor of dataset_class",
    "persistent_workers": "workers stay",
    "prefetch_factor": "data_queue_size",
    "pin_memory_device": "pin_memory=True",
    "multiprocessing_context": "start_method",
    "num_replicas": "nb_consumer",
    "rank": r"loader.start\(rank\)",
    "device": r"loader.start\(device=...\)",
}
CHOICES: list[tuple[str, Any, str]] = [
    ("uneven", "padd", "'pad', 'drop', 'exact'"),
    ("uneven", None, "'pad', 'drop', 'exact'"),
    ("uneven", [], "'pad', 'drop', 'exact'"),
    ("on_error", "ignore", "'raise', 'skip', 'replace'"),
    ("start_method", "thread", "'template'"),
    ("start_method", 3, "'spawn'"),
    ("worker_type", "fibre", "'process', 'thread'"),
]
NUMBERS = [
    *(("max_errors", value, ValueError) for value in (0.0, 1.0, -0.5, 1.5, float("nan"), float("inf"), -1)),
    *(("timeout", value, ValueError) for value in (-1, -0.5, float("nan"), float("-inf"))),
    *((name, value, TypeError) for name in ("max_errors", "timeout") for value in ("5", True, [5])),
    ("benchmark_file", 3, TypeError),
]
HUGE = [4097, 10**9, 2**31, 2**62, 2**63, 2**64, sys.maxsize, 10**30, 10**400]
OTHERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_errors": 5}, ValueError, r"max_errors=5 .* on_error='raise' .* give on_error='skip'"),
    ({"batch_encoder": encode_nothing}, ValueError, "batch_encoder and batch_decoder"),
    ({"batch_decoder": decode_nothing}, ValueError, "batch_encoder and batch_decoder"),
    ({"dataset": None}, TypeError, "neither dataset_class nor dataset was given"),
    ({"dataset_class": list}, TypeError, "both dataset_class and dataset were given"),
    ({"dataset_kwargs": {}}, TypeError, "dataset_kwargs was given with dataset"),
    ({"dataset": list}, TypeError, "dataset=list is a class"),
    ({"dataset": None, "dataset_class": "text"}, TypeError, "dataset_class is a str"),
    (
        {"dataset": None, "dataset_class": list, "dataset_kwargs": [("a", 1)]},
        TypeError,
        "dataset_kwargs is a list",
    ),
    ({"logger": 5}, TypeError, "logger is a int"),
    ({"logger": {"file": "x"}}, ValueError, "logger has the unknown key 'file'.*path, stdout, level"),
    ({"logger": {"level": "LOUD"}}, ValueError, "logger's level 'LOUD'.*DEBUG"),
    ({"logger": {"stdout": 1}}, TypeError, r"logger\['stdout'\]=1"),
    ({"logger": {"path": 3}}, TypeError, r"logger.*path.*3"),
]

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({name: 4}, TypeError, f"no option '{name}'.*{meant}") for name, meant in MISSPELT.items()),
    *(
        ({name: None}, TypeError, rf"^SwiftLoader has no option '{name}'; (?!did you mean).*{text}")
        for name, text in OF_TORCH.items()
    ),
    *(({name: value}, ValueError, f"{name}={re.escape(repr(value))} .*{allowed}") for name, value, allowed in CHOICES),
    *(({name: value, "on_error": "skip"}, error, f"{name}={re.escape(repr(value))}") for name, value, error in NUMBERS),
    *(
        ({name: value}, TypeError, f"{name}={value!r} .*{type(value).__name__}")
        for name, value in itertools.product(FLAGS, (1, "yes", None))
    ),
    *(
        ({"worker_per_consumer": value}, ValueError, f"worker_per_consumer={value} is too large; .* at most 4096")
        for value in HUGE
    ),
    *(({name: "text"}, TypeError, f"{name} is a str") for name in ("collate_fn", "batch_encoder", "batch_decoder")),
    *OTHERS,
]
"""Arguments, the error, and what it says: the name, the value and what to do."""


def test_arguments_that_make_no_sense_are_refused_by_name_and_value() -> None:
    for given, error, text in REFUSED:
        arguments: dict[str, Any] = {"dataset": DATASET, **given}
        with pytest.raises(error, match=text):
            SwiftLoader(**{name: value for name, value in arguments.items() if (name, value) != ("dataset", None)})


def test_a_count_that_is_too_small_is_refused_by_name_and_value() -> None:
    for name, lowest in COUNTS.items():
        for value in (lowest - 1, -100):
            with pytest.raises(ValueError, match=rf"{name}={value} .*at least {lowest}"):
                options_of(**{name: value})
        options_of(**{name: lowest})


@pytest.mark.parametrize("value", ["8", 2.0, True, [1], np.array([1, 2]), torch.tensor(1.5)], ids=repr)
def test_a_count_that_is_no_integer_is_refused_by_name_and_value(value: object) -> None:
    for name in COUNTS:
        with pytest.raises(TypeError, match=f"{name}={re.escape(repr(value))}.*{type(value).__name__}"):
            options_of(**{name: value})


@pytest.mark.parametrize("name", ["timeout", "stall_warning"])
def test_no_duration_or_one_beyond_what_can_be_waited_is_none(name: str) -> None:
    for value in (1e300, 2**62, 10**400, float("inf"), np.float64(1e300), None, 0):
        options = options_of(**{name: value}).delivery
        assert (options.timeout_s if name == "timeout" else options.stall_warning_s) is None
    for value in (2, np.int64(2), np.float32(2)):
        options = options_of(**{name: value}).delivery
        assert (options.timeout_s if name == "timeout" else options.stall_warning_s) == 2.0


def test_a_limit_of_errors_needs_a_policy_that_goes_on() -> None:
    for value in (0, 5, np.int64(5), 0.5, np.float64(0.5), None):
        given = options_of(on_error="replace", max_errors=value).report.max_errors
        assert given == value
        assert type(given) in (int, float, type(None))


@pytest.mark.parametrize(
    ("given", "number", "expected"),
    [
        (None, 1, None),
        ("a/times.json", 0, "a/times.json"),
        ("a/times.json", 3, "a/times_rank3.json"),
        (Path("times"), 1, "times_rank1"),
        (os.devnull, 1, os.devnull),
    ],
)
def test_each_rank_writes_its_measurements_to_a_file_of_its_own(
    given: Any, number: int, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    path = options_of(benchmark_file=given).report.benchmark_path(number)
    assert path == (None if expected is None else Path(expected))


def test_each_option_of_the_signature_is_a_field_of_exactly_one_group() -> None:
    groups = (SamplingOptions, WorkerOptions, DeliveryOptions, ReportOptions)
    declared = [field.metadata["option"] for group in groups for field in fields(group) if field.metadata]
    arguments = set(inspect.signature(SwiftLoader.__init__).parameters) - {"self", "unknown"}

    assert sorted([*declared, "message_queue_size"]) == sorted(arguments)  # it has no effect


def test_a_seed_is_drawn_unless_given() -> None:
    assert "seed" in options_of(seed=3).sampling.fixed
    assert seed_of(seed=2**70) == 2**70
    assert "seed" not in options_of().sampling.fixed
    assert seed_of() == torch.initial_seed()


@pytest.fixture
def torch_generator() -> Iterator[torch.Generator]:
    """torch's default generator, which gets its state back."""
    state = torch.get_rng_state()
    yield torch.default_generator
    torch.set_rng_state(state)


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_where_torch_was_seeded_its_seed_is_taken_and_its_generator_left_alone(
    seed: int, torch_generator: torch.Generator
) -> None:
    torch_generator.manual_seed(seed)
    torch.rand(3)
    before = torch.get_rng_state()
    with SwiftLoader(dataset=DATASET, worker_per_consumer=0) as loader:
        list(loader)
        assert loader.state_dict()["seed"] == seed
    assert "seed" not in loader._options.sampling.fixed
    assert torch.equal(torch.get_rng_state(), before)
    assert seed_of() == seed
    assert seed_of(seed=3) == 3
    torch_generator.seed()
    assert seed_of() == torch.initial_seed() != seed


@pytest.mark.slow
@pytest.mark.parametrize("first", ["pass", exhaustive("import torch; torch.rand(3)")])
def test_where_torch_was_not_seeded_the_seed_is_another_one_in_each_process(first: str, tmp_path: Path) -> None:
    code = f"""
{first}
import sys
from swift_loader import SwiftLoader
had_torch = "torch" in sys.modules
loader = SwiftLoader(dataset=[1])
loader.sampler.set_epoch(1)
print(loader.state_dict()["seed"])
assert ("torch" in sys.modules) == had_torch and "swift_loader.integrations.lightning" not in sys.modules
"""
    assert run_script(code, folder=tmp_path) != run_script(code, folder=tmp_path)


def test_every_option_of_torch_s_loader_is_taken_or_explained() -> None:
    for name in inspect.signature(torch.utils.data.DataLoader.__init__).parameters:
        if name not in ("self", *inspect.signature(SwiftLoader.__init__).parameters):
            with pytest.raises(TypeError, match=rf"no option '{name}'; (?!did you mean|the options are)"):
                options_of(**{name: None})


@pytest.mark.parametrize(("rank", "error"), [(-1, ValueError), ("0", TypeError), (True, TypeError)])
def test_a_rank_that_is_none_is_refused_by_name_and_value(rank: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"consumer_index={rank!r}"):
        SwiftLoader(dataset=[1], worker_per_consumer=0).start(rank)  # type: ignore[arg-type]


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class NoItems:
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "text"),
    [(NoLength(), "a NoLength, has no length"), (NoItems(), "the dataset is a NoItems without __getitem__")],
)
def test_what_is_no_map_style_dataset_is_named(dataset: Any, text: str) -> None:
    with SwiftLoader(dataset=dataset, worker_per_consumer=0) as loader, pytest.raises(TypeError, match=text):
        loader.start(0)


def test_fewer_batches_than_workers_are_worth_a_warning_that_says_what_to_give() -> None:
    for enough in ({"worker_per_consumer": 8, "data_queue_size": 8}, {"worker_per_consumer": 0, "data_queue_size": 1}):
        options_of(**enough).delivery.warn_of_idle_workers()
    text = (
        "data_queue_size=6 keeps at most 6 of worker_per_consumer=8 workers busy. Leave data_queue_size out to get "
        "24, give at least 8, or start fewer workers"
    )
    few: dict[str, Any] = {"worker_per_consumer": 8, "data_queue_size": 6}
    with pytest.warns(SwiftLoaderWarning, match=re.escape(text)):
        options_of(**few).delivery.warn_of_idle_workers()
    with pytest.warns(SwiftLoaderWarning, match="to get 16"):
        options_of(**few, in_order=False).delivery.warn_of_idle_workers()


@pytest.mark.parametrize(
    ("batch_nbytes", "text"),
    [
        (0, "at most 24 in flight"),
        (1, "at most 24 in flight (24 B)"),
        (9_633_792, "at most 24 in flight (220.5 MiB)"),
        (2**31, "at most 24 in flight (48 GiB)"),
    ],
)
def test_the_batches_in_flight_say_what_memory_they_mean(batch_nbytes: int, text: str) -> None:
    given = options_of(worker_per_consumer=8, data_queue_size=5).delivery
    chosen = options_of(worker_per_consumer=8).delivery
    assert chosen.describe([], [None] * 3, nbytes=batch_nbytes)["ahead"] == text
    assert given.describe([], [None] * 3, nbytes=1024)["ahead"] == "at most 5 in flight (5 KiB)"
