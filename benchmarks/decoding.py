"""Compares `swift_loader.vision.ImageDecoder` with Pillow: time, pixels, and the accuracy of a classifier.

    python benchmarks/decoding.py [--rounds 7] [--only SECTION ...] [--json FILE]

Section `time`: CPU time to decode a JPEG and resize its shorter side, on one core. Six photos are of 500 by 375 pixels.
One of 2000 by 1500 is composed of such, so it has more details than a camera's photo of that size. Systems take turns.
The reference for pixels is Pillow's `open`, `convert("RGB")` and `resize`, bilinear. Each colour of a pixel counts.

Section `accuracy`: 3,240 JPEGs of 200 by 150 pixels, each a part of one of the six photos, turned, in other colours. A
small CNN learns at 64 by 64 pixels from which of 54 regions a part is. It is trained once with each way to decode, with
five seeds, and tested with each way to decode.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from common.datasets import load_photos
from common.report import Result, format_table
from common.turns import begin, end, make_parser, measure_in_turns, parse
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import cross_entropy

from swift_loader.vision import ImageDecoder

Decode = Callable[[bytes], NDArray[np.uint8]]

PHOTO_SIZE, NUM_TILES = (500, 375), 4
"""Width and height; tiles per side of the large photo."""
NUM_SEEDS, NUM_EPOCHS, NUM_TRAINED, NUM_TESTED = 5, 10, 2160, 1080
SCENE_SIZE, INPUT_SIZE = (200, 150), (64, 64)


def main() -> None:
    arguments = parse(make_parser(__doc__, ["time", "accuracy"], rounds=7, seconds=None))
    torch.set_num_threads(1)
    begun = begin(arguments, num_seeds=NUM_SEEDS)
    sections = arguments.only or ["time", "accuracy"]
    results = measure_times(arguments.rounds) if "time" in sections else []
    if "accuracy" in sections:
        print(compare_accuracies(), flush=True)
    if results:
        end(arguments, begun, results, "Pillow")


def ways(size: int | tuple[int, int] | None) -> dict[str, Decode]:
    return {
        "Pillow": partial(decode_with_pillow, size=size),
        "Pillow, draft": partial(decode_with_pillow, size=size, draft=True),
        "ImageDecoder": ImageDecoder(size),
        "ImageDecoder, dct_scaling": ImageDecoder(size, dct_scaling=True),
    }


def decode_with_pillow(data: bytes, size: int | tuple[int, int] | None, draft: bool = False) -> NDArray[np.uint8]:
    image = Image.open(io.BytesIO(data))
    if size is None:
        return np.array(image.convert("RGB"))
    shorter = min(image.size)
    sides = size[::-1] if isinstance(size, tuple) else tuple(int(size * side / shorter) for side in image.size)
    if draft:
        image.draft("RGB", sides)
    return np.array(image.convert("RGB").resize(sides, Image.Resampling.BILINEAR))


def encode(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


# Time and pixels ------------------------------------------------------------------------------------------------------


def measure_times(rounds: int) -> list[Result]:
    width, height = PHOTO_SIZE
    photos = [Image.fromarray(photo).resize(PHOTO_SIZE, Image.Resampling.BICUBIC) for photo in load_photos()]
    large = Image.new("RGB", (NUM_TILES * width, NUM_TILES * height))
    for number in range(NUM_TILES**2):
        row, column = divmod(number, NUM_TILES)
        large.paste(photos[(number + row) % len(photos)], (column * width, row * height))
    results, rows = [], []
    for title, files in (("500x375", list(map(encode, photos))), ("2000x1500", [encode(large)])):
        for size in (None, 256, 224):
            case, decoders = f"{title} to {size}" if size else title, ways(size)
            if size is None:  # nothing is scaled
                decoders = {name: decoders[name] for name in ("Pillow", "ImageDecoder")}
            turns = {name: partial(cpu_ms, decode, files) for name, decode in decoders.items()}
            results += measure_in_turns(case, "CPU ms", turns, rounds)
            for name, decode in decoders.items():
                rows.append([case, name, *differences(decode, decoders["Pillow"], files)])
            rows.append([])
    print(format_table(["case", "system", "mean difference", "max", "differ by > 2"], rows) + "\n", flush=True)
    return results


def cpu_ms(decode: Decode, files: list[bytes]) -> float:
    """Return the CPU time per image."""
    start = time.thread_time()
    for _ in range(12 // len(files)):
        for data in files:
            decode(data)
    return (time.thread_time() - start) * 1e3 / 12


def differences(decode: Decode, reference: Decode, files: list[bytes]) -> list[str]:
    found = np.concatenate([np.abs(decode(data).astype(int) - reference(data)).ravel() for data in files])
    return [f"{found.mean():.3f}", f"{found.max()}", f"{(found > 2).mean():.2%}"]


# Accuracy -------------------------------------------------------------------------------------------------------------


def compare_accuracies() -> str:
    files, targets = cut_scenes()
    decoders = ways(INPUT_SIZE)
    del decoders["Pillow, draft"]  # the same pixels as with dct_scaling, but for the last step
    inputs = {name: torch.from_numpy(np.stack(list(map(decode, files)))) for name, decode in decoders.items()}
    accuracies: dict[tuple[str, str], list[float]] = {}
    for seed in range(NUM_SEEDS):
        for trained in inputs:
            network = train(inputs[trained][:NUM_TRAINED], targets[:NUM_TRAINED], seed)
            for tested in inputs:
                right = classify(network, inputs[tested][NUM_TRAINED:]) == targets[NUM_TRAINED:]
                accuracies.setdefault((trained, tested), []).append(right.float().mean().item() * 100)
    shown = {pair: f"{statistics.mean(all_):.1f} ± {statistics.stdev(all_):.1f} %" for pair, all_ in accuracies.items()}
    rows = [[f"trained with {trained}", *(shown[trained, tested] for tested in inputs)] for trained in inputs]
    headers = ["accuracy", *(f"tested with {tested}" for tested in inputs)]
    return format_table(headers, rows, num_left=1) + "\n"


def cut_scenes() -> tuple[list[bytes], torch.Tensor]:
    """Return JPEGs, and from which of nine regions of which photo each is."""
    rng, files, targets = np.random.default_rng(0), [], []
    regions = [one for photo in load_photos() for row in np.array_split(photo, 3) for one in np.array_split(row, 3, 1)]
    for number in range(NUM_TRAINED + NUM_TESTED):
        region = regions[number % len(regions)]
        height, width = (int(side * rng.uniform(0.4, 0.8)) for side in region.shape[:2])
        top, left = (rng.integers(most) for most in np.subtract(region.shape[:2], (height, width)))
        scene = region[top : top + height, left : left + width] * rng.uniform(0.4, 1.6, 3)
        scene = Image.fromarray(scene.clip(0, 255).astype(np.uint8)).rotate(rng.uniform(-30, 30))
        files.append(encode(scene.resize(SCENE_SIZE, Image.Resampling.BICUBIC)))
        targets.append(number % len(regions))
    return files, torch.tensor(targets)


def train(images: torch.Tensor, targets: torch.Tensor, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [torch.nn.Conv2d(inputs, outputs, 3, 2, 1), torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(1024, 54))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS)
    for _ in range(NUM_EPOCHS):
        for chosen in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            cross_entropy(network(normalized(images[chosen])), targets[chosen]).backward()
            optimizer.step()
        schedule.step()
    return network.eval()


@torch.inference_mode()
def classify(network: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    return network(normalized(images)).argmax(1)


def normalized(images: torch.Tensor) -> torch.Tensor:
    return (images.permute(0, 3, 1, 2).float() - 120) / 70


if __name__ == "__main__":
    main()
