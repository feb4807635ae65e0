"""Trains in a plain loop. The tests change its import and nothing else."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES = 22


def main() -> None:
    """Train for two epochs, and print what was seen."""
    torch.manual_seed(7)
    numbers = torch.arange(NUM_SAMPLES)
    training = DataLoader(TensorDataset(numbers / 100, numbers), 4, shuffle=True, num_workers=int(sys.argv[1]))
    held_out = DataLoader(TensorDataset(numbers / 100, numbers), 8)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(2):
        for inputs, targets in training:
            optimizer.zero_grad()
            loss = ((model(inputs[:, None]).squeeze(1) - targets) ** 2).mean()
            loss.backward()
            optimizer.step()
            print(targets.tolist(), float(loss.detach()))  # noqa: T201
        print([targets.tolist() for _, targets in held_out])  # noqa: T201


if __name__ == "__main__":
    main()
