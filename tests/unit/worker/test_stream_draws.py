from __future__ import annotations

import random

import numpy as np
import torch

from swift_loader.worker.generators import preserved_generators, seed_generators
from swift_loader.worker.stream_draws import StreamDraws


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_a_stream_draws_the_same_whatever_is_drawn_between_its_batches() -> None:
    found = []
    with preserved_generators():
        for num_between in (0, 3):
            seed_generators(1)
            draws = StreamDraws()
            drawn = []
            for batch in range(3):
                draws.enter()
                drawn.append(draw())
                draws.leave(7, 0, batch)
                for _ in range(num_between):
                    draw()
            found.append(drawn)
    assert found[0] == found[1]


def test_what_is_drawn_between_depends_on_the_batch_only() -> None:
    found = []
    with preserved_generators():
        for seed in (1, 2):
            seed_generators(seed)
            draws = StreamDraws()
            for batch in (3, 4):
                draws.leave(7, 0, batch)
                found.append(draw())
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_after_forget_the_stream_begins_with_the_generators_as_they_are() -> None:
    with preserved_generators():
        draws = StreamDraws()
        draws.leave(7, 0, 0)
        draws.forget()
        seed_generators(5)
        draws.enter()
        found = draw()
        seed_generators(5)
        assert found == draw()
