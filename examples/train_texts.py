"""Train a tiny language model on a mixture of Python sources, man pages and licences, and resume it to the last bit.

    python examples/train_texts.py
    python examples/train_texts.py --save texts.pt --stop-after 100
    python examples/train_texts.py --resume texts.pt
    python examples/train_texts.py --prove

Takes about a minute on two cores. The texts are files that Debian and Ubuntu have. Containers often lack man pages;
then apt-get downloads some. Documents are packed into windows without padding. `--prove` trains once unbroken, and once
stopped and resumed with one more worker, and compares the losses and the weights bit for bit.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import sysconfig
import tempfile
from itertools import chain, islice, repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from swift_loader import Mixture, PackCollate, PackedDataset, SwiftLoader

DOWNLOADS = Path(tempfile.gettempdir(), "swift-loader-man-pages")
MAX_TOKENS = 4 << 20
"""Of each source."""

END, NUM_TOKENS = 256, 257
"""A token is a byte, or the end of a document."""
WINDOW, WIDTH, NUM_HEADS, NUM_LAYERS = 128, 128, 4, 3
MAX_LOSS = np.log(NUM_TOKENS)
"""Of a guess. After a sixth of the steps, windows with more are left out: they are hardly text."""


def read(paths: set[Path]) -> list[NDArray[np.int16]]:
    """Return the tokens of some of these files. A list is a map-style dataset."""
    files = sorted({path.resolve() for path in paths if path.exists()})
    texts: list[NDArray[np.int16]] = []
    for number in np.random.default_rng(0).permutation(len(files)):
        content = files[number].read_bytes()
        content = gzip.decompress(content) if files[number].suffix == ".gz" else content
        texts.append(np.append(np.frombuffer(content, np.uint8), [END]).astype(np.int16))
        if sum(map(len, texts)) > MAX_TOKENS:
            break
    return texts


def find_man_pages(folder: Path) -> set[Path]:
    """Return the man pages of this machine, or downloaded ones. Nothing is installed."""
    if found := {*folder.glob("man*/*.gz")} or {*DOWNLOADS.glob("usr/share/man/man*/*.gz")}:
        return found
    DOWNLOADS.mkdir(exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", "manpages", "manpages-dev"], cwd=DOWNLOADS, check=True)  # noqa: S607
        for package in DOWNLOADS.glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, DOWNLOADS], check=True)  # noqa: S603, S607
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"no man pages in {folder}, and no download: {error} Run apt-get update, or give --man-pages FOLDER")
    return {*DOWNLOADS.glob("usr/share/man/man*/*.gz")}


def make_mixture(arguments: argparse.Namespace) -> Mixture:
    """Return a dataset of windows: mostly Python at first, mostly man pages in the second half."""
    library, licences = Path(sysconfig.get_path("stdlib")), Path("/usr/share/common-licenses")
    texts = {
        "python": read({path for path in library.rglob("*.py") if "-packages" not in str(path)}),
        "man": read(find_man_pages(arguments.man_pages)),
        "licences": read({*licences.glob("*"), *Path("/usr/share/doc").glob("*/copyright")}),
    }
    collate = PackCollate(mask_first=True)
    windows = {name: PackedDataset(one, [*map(len, one)], WINDOW, collate=collate) for name, one in texts.items()}
    begin, end = {"python": 8, "man": 1, "licences": 1}, {"python": 3, "man": 6, "licences": 1}
    return Mixture(windows, {0: begin, arguments.steps // 2 * arguments.batch_size: end}, ramp=True)


class Model(nn.Module):
    """A transformer with 680,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(NUM_TOKENS, WIDTH), nn.Embedding(WINDOW, WIDTH)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.dropout = nn.Dropout(0.05)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_TOKENS))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of each window, `(windows,)`, in nats per byte."""
        tokens, positions, labels = (batch[key].view(-1, WINDOW) for key in ("input_ids", "position_ids", "labels"))
        # A token sees what is before it in its document. FlashAttention takes batch["cu_seqlens"] instead of a mask.
        documents = (positions == 0).cumsum(1)
        is_seen = (documents[:, :, None] == documents[:, None, :]).tril().repeat_interleave(NUM_HEADS, 0)
        x = self.layers(self.dropout(self.tokens(tokens.long()) + self.positions(positions)), ~is_seen)
        labels = labels[:, 1:]  # -100 where a document begins: no other document predicts that
        losses = cross_entropy(self.head(x)[:, :-1].transpose(1, 2), labels, reduction="none")
        return losses.sum(1) / (labels >= 0).sum(1).clamp(1)


def train(arguments: argparse.Namespace) -> None:
    """Train, print the losses, and save the run at its end."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # another number adds in another order
    torch.use_deterministic_algorithms(mode=True)
    model, mixture = Model(), make_mixture(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    schedule = OneCycleLR(optimizer, 5e-3, total_steps=arguments.steps + 1)
    history: list[float] = []
    options = {"batch_size": arguments.batch_size, "worker_per_consumer": arguments.workers, "seed": 0}
    with SwiftLoader(dataset=mixture, collate_fn=PackCollate(), **options) as loader:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        if arguments.resume:
            saved = torch.load(arguments.resume)
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            torch.set_rng_state(saved["draws"])  # of dropout
            history = saved["history"]
        loader.start(device="cpu")
        num_left = max(0, min(arguments.steps, arguments.stop_after or arguments.steps) - len(history))
        begin, recent = perf_counter(), dict[int, float]()
        for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), num_left), 1):  # epoch after epoch
            losses = model(batch)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            schedule.step()
            history.append(losses.mean().item())
            recent.update(zip(loader.batch_indices.tolist(), losses.tolist(), strict=True))
            odd = loader.batch_indices[losses.detach().numpy() > MAX_LOSS]
            if len(odd) and len(history) > arguments.steps // 6:
                loader.exclude(odd)
                print(f"step {len(history)}: left out", *map(mixture.locate, odd))
            if len(history) % max(1, arguments.steps // 10) == 0:
                print(f"step {len(history)}: {summary(mixture, recent)}, {step / (perf_counter() - begin):.1f} steps/s")
                recent.clear()
        if arguments.save:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "draws": torch.get_rng_state(), "history": history}, arguments.save)


def summary(mixture: Mixture, losses: dict[int, float]) -> str:
    """Return the mean loss of each source and of all."""
    sources: dict[str, list[float]] = {name: [] for name in mixture.sources}
    for index, loss in losses.items():
        sources[mixture.locate(index).source].append(loss)
    shown = ", ".join(f"{name} {np.mean(own):.3f} ({len(own)})" for name, own in sources.items() if own)
    return f"loss {np.mean([*losses.values()]):.3f}, {shown}"


def prove(arguments: argparse.Namespace) -> None:
    """Train unbroken, and stopped and resumed. Ends with status 1 if a loss or a weight differs."""

    def run(name: str, *options: Any) -> Any:
        command = [sys.executable, *sys.argv, "--save", f"{folder}/{name}", *map(str, options)]
        subprocess.run([word for word in command if word != "--prove"], check=True)  # noqa: S603
        return torch.load(f"{folder}/{name}")

    with tempfile.TemporaryDirectory() as folder:
        unbroken = run("unbroken")
        run("stopped", "--stop-after", arguments.steps // 2)
        resumed = run("resumed", "--resume", f"{folder}/stopped", "--workers", arguments.workers + 1)
    is_same = all(map(torch.equal, unbroken["model"].values(), resumed["model"].values()))
    if unbroken["history"] != resumed["history"] or not is_same:
        sys.exit("the resumed run differs")
    print(f"unbroken and resumed: the same {arguments.steps} losses and weights, to the last bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of the whole run; give it again with --resume")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per step")
    parser.add_argument("--workers", type=int, default=2, help="processes that build batches")
    parser.add_argument("--man-pages", type=Path, default=Path("/usr/share/man"), metavar="FOLDER")
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the run at its end")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after step N")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue a saved run")
    parser.add_argument("--prove", action="store_true", help="compare a resumed run with an unbroken one")
    given = parser.parse_args()
    (prove if given.prove else train)(given)
