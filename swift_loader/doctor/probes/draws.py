"""Which random generators samples draw from, by the generators' states before and after each sample."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from swift_loader.doctor.facts import Draws
from swift_loader.doctor.probes.holdings import generators_of
from swift_loader.doctor.probes.subject import Subject

__all__ = ["watch_draws"]

_RNG = "sample_rng()"


def watch_draws(subject: Subject, indices: Sequence[int], seconds: float) -> Draws:
    """Fetch samples in two epochs each, and say what they draw from. Those that fail are left out."""
    held = generators_of(subject.dataset)
    sources: dict[str, list[int]] = defaultdict(list)
    reseeding: dict[str, list[bool]] = defaultdict(list)
    deadline_s, num_samples = time.perf_counter() + seconds, 0
    for index in indices:
        drawn, after, later = list[str](), dict[str, bytes](), dict[str, bytes]()
        with suppress(Exception, SystemExit):
            drawn, after = _watch(subject, index, 0, held)
            _, later = _watch(subject, index, 1, held)
        if not later:  # the sample failed
            continue
        num_samples += 1
        for name in drawn:
            sources[name].append(index)
        for name in after:  # the seeds of two epochs differ, so the states do, unless the sample seeds
            reseeding[name].append(name in later and after[name] == later[name])
        if time.perf_counter() > deadline_s:
            break
    return Draws(
        num_samples,
        {name: tuple(indices) for name, indices in sources.items()},
        tuple(name for name in sources if name in held),
        tuple(name for name, same in reseeding.items() if all(same)),
    )


def _watch(subject: Subject, index: int, epoch: int, held: dict[str, Any]) -> tuple[list[str], dict[str, bytes]]:
    """Fetch a sample. Return what it drew from, and the states of the global generators afterwards."""
    fetching = subject.prepare(index, epoch)
    before, held_before = _global_states(), _states_of(held)
    try:
        subject.get(index)
        after = _global_states()
    finally:
        subject.leave()
    changed = [name for name, state in after.items() if before.get(name, state) != state]
    changed += [name for name, state in _states_of(held).items() if held_before[name] != state]
    return [*changed, *([_RNG] if fetching.used_rng else [])], after


def _global_states() -> dict[str, bytes]:
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch's default generator"] = torch.default_generator.get_state().numpy().tobytes()
    return {name: _digest(state) for name, state in states.items()}


def _states_of(held: dict[str, Any]) -> dict[str, bytes]:
    return {name: _digest(_state_of(generator)) for name, generator in held.items()}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    state = generator.get_state()
    return state.numpy().tobytes() if hasattr(state, "numpy") else state


def _digest(state: Any) -> bytes:
    return hashlib.blake2b(pickle.dumps(state), digest_size=16).digest()
