"""The subcommand `swift-loader replay`: rebuilds a batch of a past run and writes it to a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from swift_loader.cli.errors import CommandError
from swift_loader.cli.target import find_target
from swift_loader.errors import SwiftLoaderError
from swift_loader.replay.leaves import checksum, leaves_of
from swift_loader.replay.past_batch import PastBatch, Rebuilt
from swift_loader.replay.states import read_state

__all__ = ["add_arguments", "run"]

_MAX_SHOWN = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source",
        metavar="MODULE:NAME",
        help="the run's dataset or SwiftLoader, or a function or class that returns it, such as train:make_loader",
    )
    parser.add_argument("--state", required=True, type=Path, help="a torch checkpoint or a .json file with the state")
    parser.add_argument("--key", help="where in the file the state is, such as loader; default: the only state in it")
    parser.add_argument("--unpickle", action="store_true", help="load a checkpoint that you trust and that has objects")
    parser.add_argument("--step", type=int, help="step of the epoch, from 0; default: the last one before the state")
    parser.add_argument("--position", type=int, help="instead of --step: samples of the epoch before the batch")
    parser.add_argument("--epoch", type=int, help="default: the state's")
    parser.add_argument("--batch-size", type=int, help="per rank; default: the loader's")
    parser.add_argument("--rank", type=int, default=0, help="default: 0")
    parser.add_argument("--world-size", type=int, help="number of ranks; default: the loader's nb_consumer, or 1")
    parser.add_argument("--out", type=Path, help="the file to write; default: batch-epoch{e}-step{s}.pt")


def run(arguments: argparse.Namespace) -> int:
    """Rebuild the batch, describe it and write it. Errors of building it keep their traceback."""
    source = find_target(arguments.source)
    try:
        found = PastBatch.find(
            source,
            read_state(arguments.state, arguments.key, unpickle=arguments.unpickle),
            arguments.step,
            epoch=arguments.epoch,
            position=arguments.position,
            batch_size=arguments.batch_size,
            rank=arguments.rank,
            world_size=arguments.world_size,
        )
    except (OSError, TypeError, ValueError, SwiftLoaderError) as error:
        raise CommandError(" ".join(str(error).split())) from error
    except Exception as error:  # of the user's function
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise CommandError(f"{arguments.source} raised {text}") from error
    rebuilt = found.rebuild()
    out = arguments.out or Path(_file_name(rebuilt))
    sys.stdout.write("".join(f"{line}\n" for line in _described(rebuilt)))
    _write(rebuilt, out)
    sys.stdout.write(f"written to {out}\n")
    return 0


def _file_name(rebuilt: Rebuilt) -> str:
    place = f"position{rebuilt.position}" if rebuilt.step is None else f"step{rebuilt.step}"
    rank = f"-rank{rebuilt.rank}" if rebuilt.world_size > 1 else ""
    return f"batch-epoch{rebuilt.epoch}-{place}{rank}.pt"


def _write(rebuilt: Rebuilt, out: Path) -> None:
    import torch

    content = {
        "batch": rebuilt.batch,
        "epoch": rebuilt.epoch,
        "step": rebuilt.step,
        "position": rebuilt.position,
        "rank": rebuilt.rank,
        "world_size": rebuilt.world_size,
        "indices": rebuilt.indices.tolist(),
        "num_padding": rebuilt.num_padding,
    }
    try:
        torch.save(content, out)
    except (OSError, RuntimeError) as error:  # torch raises a RuntimeError where there is no such folder
        raise CommandError(f"can't write {out}: {' '.join(str(error).split())}") from error


def _described(rebuilt: Rebuilt) -> list[str]:
    step = "" if rebuilt.step is None else f", step {rebuilt.step}"
    lines = [
        f"epoch {rebuilt.epoch}{step}, position {rebuilt.position}, rank {rebuilt.rank} of {rebuilt.world_size}",
        f"dataset indices: {_shown(rebuilt.indices.tolist())}",
    ]
    if rebuilt.num_padding:
        lines.append(f"padding: the last {rebuilt.num_padding}")
    lines += [f"failed: dataset index {failure.index} ({failure.reason})" for failure in rebuilt.failures]
    indices = rebuilt.indices.tolist()
    for leaf in leaves_of(rebuilt.batch):
        lines.append(f"batch{leaf.path}: {leaf.kind}, checksum {leaf.checksum}")
        if leaf.not_finite and leaf.not_finite[-1] < len(indices):
            bad = [indices[position] for position in leaf.not_finite]
            lines.append(f"  NaN or infinity at dataset indices {_shown(bad)}")
        elif leaf.not_finite:
            lines.append(f"  NaN or infinity at positions {_shown(list(leaf.not_finite))}")
    return [*lines, f"checksum of the batch: {checksum(rebuilt.batch)}"]


def _shown(numbers: list[int]) -> str:
    more = f", … ({len(numbers)} in all)" if len(numbers) > _MAX_SHOWN else ""
    return ", ".join(map(str, numbers[:_MAX_SHOWN])) + more
