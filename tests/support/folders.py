"""A dataset as libraries have them: in a module that can be imported, to be subclassed in a script."""

from __future__ import annotations

from torch.utils.data import Dataset


class FolderDataset(Dataset[tuple[str, int]]):
    """Names and numbers, found by a method that subclasses can replace, as torchvision's ImageFolder does."""

    def __init__(self, count: int) -> None:
        self.samples = self.find(count)
        self.classes = sorted({name for name, _ in self.samples})

    @staticmethod
    def find(count: int) -> list[tuple[str, int]]:
        return [(f"name {number % 2}", number) for number in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.samples[index]
