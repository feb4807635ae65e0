"""Train on clips streamed from tar archives of an HTTP server, and resume a stopped run.

    python examples/stages_speech.py
    python examples/stages_speech.py --save speech.pt --stop-after 40
    python examples/stages_speech.py --resume speech.pt

It makes 1,600 short clips, each one of eight vowel-like sounds, packs them into 16 tar archives, and serves them on a
free local port. The stages: fetch an archive (a coroutine on fsspec), take it apart (tarfile), decode a clip (wave) and
compute its spectrum (NumPy), collect batches. Needs fsspec and aiohttp, which come with `datasets`.
"""

from __future__ import annotations

import argparse
import functools
import io
import tarfile
import tempfile
import threading
import wave
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from rich.progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy

from swift_loader.pipeline import Pipeline

NUM_ARCHIVES, CLIPS_PER_ARCHIVE = 16, 100
RATE_HZ, SECONDS = 8000, 0.25
FORMANTS_HZ = [(270, 2290), (390, 1990), (530, 1840), (660, 1720), (730, 1090), (570, 840), (440, 1020), (300, 870)]
"""Of eight American English vowels (Peterson and Barney, "Control methods used in a study of the vowels", 1952)."""
BATCH_SIZE = 16


class Server:
    """Serves a folder on a free local port."""

    def __init__(self, folder: Path) -> None:
        handler = functools.partial(QuietHandler, directory=str(folder))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def url(self, name: str) -> str:
        """Return the URL of a file."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}"

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's signature
        """Print nothing."""


def make_archives(folder: Path) -> list[str]:
    """Write the archives. Return their names."""
    names = []
    draws = np.random.default_rng(0)
    for number in range(NUM_ARCHIVES):
        names.append(f"clips-{number:03}.tar")
        with tarfile.open(folder / names[-1], "w") as archive:
            for clip in range(CLIPS_PER_ARCHIVE):
                vowel = int(draws.integers(len(FORMANTS_HZ)))
                content = make_clip(vowel, draws)
                entry = tarfile.TarInfo(f"{number:03}-{clip:03}-{vowel}.wav")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return names


def make_clip(vowel: int, draws: np.random.Generator) -> bytes:
    """Return a WAV file: a vowel's two formants, each speaker a little different, with noise."""
    time_s = np.arange(int(RATE_HZ * SECONDS)) / RATE_HZ
    speaker = draws.uniform(0.93, 1.07)
    sound = sum(np.sin(2 * np.pi * speaker * formant * time_s) for formant in FORMANTS_HZ[vowel])
    sound = sound + draws.normal(0, 0.5, len(time_s))
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(RATE_HZ)
        clip.writeframes((sound / np.abs(sound).max() * 32000).astype("<i2").tobytes())
    return file.getvalue()


async def fetch(url: str) -> bytes:
    """Return the content of a URL."""
    files = fsspec.filesystem("http", asynchronous=True, skip_instance_cache=True)
    session = await files.set_session()
    try:
        content: bytes = await files._cat_file(url)  # noqa: SLF001 - fsspec's way to call it from a coroutine
    finally:
        await session.close()
    return content


def clips_of(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of an archive's files."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for entry in files:
            file = files.extractfile(entry)
            if file is not None:
                yield entry.name, file.read()


def decode(clip: tuple[str, bytes]) -> tuple[np.ndarray[Any, Any], int]:
    """Return the log spectrum of a clip, `(64,) float32`, and its vowel."""
    name, content = clip
    with wave.open(io.BytesIO(content)) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))[: 64 * 15].reshape(64, 15).mean(1)
    return np.log(spectrum + 1e-3).astype(np.float32), int(Path(name).stem[-1])


def to_tensors(samples: list[tuple[np.ndarray[Any, Any], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return spectra, `(B, 64) float32`, and vowels, `(B,) int64`."""
    spectra, vowels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(spectra)), torch.tensor(vowels)


def make_pipeline(urls: list[str]) -> Pipeline[tuple[torch.Tensor, torch.Tensor]]:
    """Return the stages from URLs of archives to batches."""
    return (
        Pipeline(urls, seed=1)
        .shuffle(NUM_ARCHIVES)
        .map(fetch, concurrency=4)
        .map(clips_of, concurrency=2)
        .map(decode, concurrency=4)
        .batch(BATCH_SIZE)
        .map(to_tensors)
        .prefetch(4)
    )


def main() -> None:
    """Make the archives, serve them, and train."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", type=Path, metavar="FILE", help="save model, optimizer and place there at the end")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after so many steps")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue a saved run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = make_archives(Path(folder))
        server = Server(Path(folder))
        try:
            train(arguments, make_pipeline([server.url(name) for name in names]))
        finally:
            server.close()


def train(arguments: argparse.Namespace, pipeline: Pipeline[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Train, and print the accuracy of the last 50 batches."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(FORMANTS_HZ)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    recent: list[float] = []
    if arguments.resume:
        saved = torch.load(arguments.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        recent = saved["recent"]
        pipeline.load_state_dict(saved["pipeline"])
    num_steps = 0
    with Progress() as progress:
        steps_per_epoch = NUM_ARCHIVES * CLIPS_PER_ARCHIVE // BATCH_SIZE
        bar = progress.add_task("training", total=arguments.epochs * steps_per_epoch)
        for epoch in range(pipeline.state_dict()["epoch"], arguments.epochs):
            pipeline.set_epoch(epoch)
            for spectra, vowels in pipeline:
                logits = model(spectra)
                optimizer.zero_grad()
                cross_entropy(logits, vowels).backward()
                optimizer.step()
                recent = [*recent[-49:], float((logits.argmax(1) == vowels).float().mean())]
                progress.advance(bar)
                num_steps += 1
                if num_steps == arguments.stop_after:
                    break
            if num_steps == arguments.stop_after:
                break
    if arguments.save:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "recent": recent}
        torch.save({**states, "pipeline": pipeline.state_dict()}, arguments.save)
    checksum = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    print(f"accuracy {np.mean(recent):.1%} over the last {len(recent)} batches, checksum of the model {checksum:.9f}")


if __name__ == "__main__":
    main()
