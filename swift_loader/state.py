"""Says in words what the saved states of loaders in a checkpoint are: the command `swift-loader state FILE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift_loader.__main__ import CommandError
from swift_loader.dataloader.state import LoaderPosition
from swift_loader.errors import SwiftLoaderError, counted
from swift_loader.pipeline.epochs import PipelineState
from swift_loader.replay import dicts, read_file
from swift_loader.samplers.base import FORMS, VERSION
from swift_loader.sampling.integers import TEXT, check_state, field_of, shown, state_kind
from swift_loader.sampling.run import Checkpoint

_MAX_ROWS = 8
"""So many rows of each exclusion are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `swift-loader state`."""
    parser.add_argument("file", type=Path, help="a torch checkpoint or a .json file that has states at any depth")
    parser.add_argument("--unpickle", action="store_true", help="load a checkpoint that you trust and that has objects")


def run(arguments: argparse.Namespace) -> int:
    """Describe each state in the file."""
    found, errors = list[tuple[str, ...]](), list[str]()
    try:
        for place, node in dicts(read_file(arguments.file, unpickle=arguments.unpickle)):
            kind, name = state_kind(node), ".".join(place)
            if kind and not any(place[: len(outer)] == outer for outer in found):  # a sampler's is inside
                found.append(place)
                try:
                    lines = [f"  {fact:<10}{text or 'nothing'}\n" for fact, text in _DESCRIBED[kind](node).items()]
                    sys.stdout.writelines([f"{name or arguments.file}: the state of a {kind}\n", *lines])
                except (TypeError, ValueError, SwiftLoaderError) as error:
                    errors.append(f"{name or arguments.file}: {error}")
    except (OSError, ValueError) as error:
        errors.append(str(error))
    if errors or not found:
        errors = errors or [f"{arguments.file} has no state of a loader, as state_dict() returns it"]
        raise CommandError(" ".join("; ".join(errors).split()))
    return 0


def _of_swift_loader(state: Mapping[str, Any]) -> dict[str, str]:
    saved = Checkpoint.from_dict(state)
    total, window = "the" if saved.num_samples is None else f"{saved.num_samples:,}", saved.order.window
    skipped = [f"samples {one.begin} to {one.end - 1} of epoch {one.epoch}" for one in saved.skips.ranges]
    excluded, mix = [("", saved.skips)], saved.order.mix
    if mix is not None:
        excluded = [(f"{mix.names[source]}: ", skips) for source, skips in mix.excluded]
    rows = [
        f"{source}{counted(one.num_rows, 'row')} from sample {one.since.num_samples:,} of epoch {one.since.epoch} on: "
        f"{', '.join(map(str, one.rows[:_MAX_ROWS].tolist()))}{', …' * (one.num_rows > _MAX_ROWS)}"
        for source, skips in excluded
        for one in skips.exclusions
    ]
    facts = {
        "epoch": f"{saved.position.epoch}",
        "position": f"after {saved.position.num_samples:,} of {total} samples",
        "seed": f"{saved.order.seed}",
        "order": f"shuffled, in windows of {window or 'all'} samples" if saved.order.shuffle else "the dataset's",
        "skipped": ", ".join(skipped),
        "excluded": "; ".join(rows),
    }
    return facts if mix is None else facts | {"mixture": mix.shown(mix.position(saved.position))}


def _of_dataloader(state: Mapping[str, Any]) -> dict[str, str]:
    saved = LoaderPosition.from_dict(state)
    batching = saved.batching or {}
    has_place = saved.draws.sampler_state is not None and not saved.draws.draws_again
    return {
        "epoch": f"{saved.draws.epoch}{', which is over' if saved.draws.is_over else ''}",
        "position": f"after {counted(saved.num_yielded, 'batch')}; batch_size={batching.get('batch_size')}",
        "seed": f"{batching.get('seed')}",
        "order": "by the sampler's own state" if has_place else "drawn again from the beginning",
        "skipped": ", ".join(f"batch {step}, which came early" for step in saved.ahead),
        "workers": f"{saved.num_workers}, {sum(one.has_state for one in saved.workers)} with a state of the dataset",
    }


def _of_pipeline(state: Mapping[str, Any]) -> dict[str, str]:
    saved = PipelineState.from_dict(state)
    return {
        "epoch": f"{saved.epoch}",
        "position": "" if saved.place is None else f"after {state['place']}: items, from the source on",
        "seed": f"{saved.seed}",
        "order": ", ".join(saved.parameters) or "the source's",
        "left out": f"{counted(sum(saved.failures), 'item')}; only an integer max_errors counts them",
        "sources": f"{len(saved.sources)}, {len(saved.sources) - saved.sources.count(None)} with a state of their own",
    }


def _of_sampler(state: Mapping[str, Any]) -> dict[str, str]:
    check_state(state, "sampler", VERSION)
    fields = {name: field_of(state, name, form) for name, form in {"sampler": TEXT, **FORMS}.items()}
    of_inner = "inner", "inner_position"  # of `distributed`: the state of the sampler that it splits
    facts = [f"{name}={shown(value)}" for name, value in state.items() if name not in {*FORMS, "version", *of_inner}]
    units = {"WeightedBatchSampler": "samples", "StratifiedBatchSampler": "samples", "distributed": "items"}
    return {
        "epoch": f"{fields['epoch']}{', which is over' * fields['finished']}",
        "position": f"after {fields['position']:,} {units.get(fields['sampler'], 'batches')} of all ranks",
        "seed": f"{fields['seed']}",
        "order": ", ".join(facts),
    }


_DESCRIBED = {
    "sampler": _of_sampler,
    "SwiftLoader": _of_swift_loader,
    "DataLoader": _of_dataloader,
    "Pipeline": _of_pipeline,
}
