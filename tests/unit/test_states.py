"""What is no state: each loader and sampler refuses it in the same words, and nothing has changed then."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from swift_loader import DataLoader, Mixture, StateMismatch, SwiftLoader
from swift_loader.pipeline import Pipeline
from tests.support.samplers import MAKERS


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


NUMBERS: Any = list(range(40))
MIXTURE = Mixture({"a": NUMBERS, "b": NUMBERS})

MAKE: dict[str, Callable[[], Any]] = {
    "SwiftLoader": lambda: SwiftLoader(dataset=NUMBERS, batch_size=4, worker_per_consumer=0, seed=1),
    "SwiftLoader, mixture": lambda: SwiftLoader(dataset=MIXTURE, batch_size=4, worker_per_consumer=0, seed=1),
    "DataLoader": lambda: DataLoader(NUMBERS, 4, shuffle=True),
    "DataLoader, stream": lambda: DataLoader(Stream(), 2),
    "Pipeline": lambda: Pipeline(NUMBERS, seed=1).shuffle(5),
    **{name: functools.partial(make, 2, 1) for name, make in MAKERS.items()},
}
KINDS = {
    "sampler": ("buckets", "finished"),
    "SwiftLoader": ("SwiftLoader", "run_length"),
    "DataLoader": ("DataLoader", "_snapshot"),
    "Pipeline": ("Pipeline", "place"),
}
"""Of states: what has one, and a field of these only."""
LATER = {"num_samples", "skipped", "excluded", "mixture", "told", "failures", "lengths", "shards", "inner", "of"}
"""Fields that states of earlier versions lack. A DataLoader's lack two more."""
WRONG: Any = (-1.5, "x", [-(2**70)], {"x": 1}, 10**5000, np.array([1, 2]), object())
RIGHT = {"of": WRONG[1], "batching": WRONG[3], "inner": WRONG[5]}
RIGHT |= dict.fromkeys(("_index_sampler_state", "_sampler_iter_state"), WRONG[2])
"""Which of them may be right."""


def begun(name: str) -> tuple[Any, Iterator[Any]]:
    torch.manual_seed(1)
    loader = MAKE[name]()
    iterator = iter(loader)
    list(itertools.islice(iterator, 2))
    return loader, iterator


def paths_of(state: dict[str, Any], *folders: str) -> Iterator[tuple[str, ...]]:
    for name, value in state.items():
        yield (*folders, name)
        if isinstance(value, dict) and name not in ("batching", "mixture"):
            yield from paths_of(value, *folders, name)


@pytest.mark.parametrize("name", MAKE)
def test_what_is_no_state_is_refused_by_name_and_changes_nothing(name: str) -> None:
    loader, iterator = begun(name)
    state = loader.state_dict()
    kind = next(kind for kind, (_, key) in KINDS.items() if key in state)

    def refuses(broken: Any, words: str, error: type[Exception] = StateMismatch) -> None:
        with pytest.raises(error, match=words):
            loader.load_state_dict(broken)

    for value in (None, [1], "x", 7):
        refuses(value, f"the state is a {type(value).__name__}; pass the dict", TypeError)
    refuses({"model": {}, "loader": state}, r"the keys 'loader', 'model'; .* checkpoint\['loader'\]")
    refuses(state | {"x": 1}, "the unknown fields x;")
    for version in (None, 0, 99, "1"):
        refuses(state | {"version": version}, f"version is {version!r}")
    for other in KINDS.keys() - {kind}:
        refuses(begun(KINDS[other][0])[0].state_dict(), f"the state is of a {other}; pass what .* of a {kind} returned")
    later = LATER | ({"epoch", "batching"} if kind == "DataLoader" else set())
    for *folders, field in [path for path in paths_of(state) if path != ("version",)]:
        for value in (None, *WRONG):
            broken = copy.deepcopy(state)
            inner = functools.reduce(dict.__getitem__, folders, broken)
            if value is not None and value is not RIGHT.get(field):
                inner[field] = value
                refuses(broken, re.escape(field))
            elif value is None and (folders or field not in later):
                del inner[field]
                refuses(broken, f"no field '{re.escape('.'.join((*folders, field)))}")
    assert json.dumps(loader.state_dict()) == json.dumps(state)
    assert str(list(iterator)) == str(list(begun(name)[1]))
