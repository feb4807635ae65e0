"""Rebuilds batches of a past run: for a look at the batch where the loss became NaN, or to compare two machines.

A batch comes from the code that worker processes run, in this process. Its bytes are those that the run's loop got, if
the samples depend on their index, the seed and the epoch alone. The loader guarantees that with `rng="sample"`.

`swift-loader replay` is the same as a command: it rebuilds a batch, describes it and writes it to a file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swift_loader.__main__ import CommandError, find_target
from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.checks import check_integer, check_optional_integer
from swift_loader.engine.session import Session
from swift_loader.errors import StateMismatch, SwiftLoaderError, warn
from swift_loader.loader import SwiftLoader
from swift_loader.options import Options
from swift_loader.ranks.ranks import Ranks
from swift_loader.sampling.plan import MAX_EPOCH, Plan, PlanSettings
from swift_loader.sampling.run import Checkpoint, Run
from swift_loader.sampling.skips import Position, Skips
from swift_loader.scheduler.sample_errors import SampleFailure, delivered_batch
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import length_of

_STATE_FIELDS = frozenset({"version", "seed", "epoch", "position", "shuffle"})
"""What only a state of a `SwiftLoader` has."""

_CHECKSUM_DIGITS = 16
_MAX_SHOWN = 64
_MAX_DEPTH = 100

# The batch ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A batch of a past run."""

    batch: Any
    """What the run's loop got, on the host."""
    epoch: int
    step: int | None
    """Number of the batch in its epoch, from 0. None: the batch doesn't begin where such a step begins."""
    position: int
    """How many samples of the epoch's order come before the batch, on all ranks together."""
    rank: int
    world_size: int
    indices: NDArray[np.int64]
    """`(n,)` dataset indices, in the order of the samples."""
    num_padding: int
    """How many samples at the end are padding."""
    failures: tuple[SampleFailure, ...]
    """Samples that `on_error` left out or replaced."""


def rebuild(
    source: Any,
    state: Mapping[str, Any],
    step: int | None = None,
    *,
    epoch: int | None = None,
    position: int | None = None,
    batch_size: int | None = None,
    rank: int = 0,
    world_size: int | None = None,
) -> Rebuilt:
    """Rebuild a batch of a past run, bit for bit. This starts no process, and random generators stay as they are.

    Args:
        source: The run's dataset, its `SwiftLoader`, or a function or class that returns one of them. Of a loader, the
            options count (`collate_fn`, `batch_size`, `on_error`, `rng`, `uneven`, …); it isn't started.
        state: What the run's `state_dict()` returned, at any time.
        step: Which batch: counted from the epoch's first one, as `enumerate(loader)` does in an epoch that begins at
            its start and skips nothing. A skipped step can be rebuilt, too. Default: the last batch before the state.
        epoch: Which epoch. Default: the state's.
        position: Instead of `step`: the samples of the epoch before the batch, on all ranks together. It is what
            `state_dict()["position"]` was before this batch. Needed in an epoch that was resumed with another batch
            size or number of ranks, where steps begin elsewhere.
        batch_size: Samples per batch and rank. Default: the loader's.
        rank: Which rank's batch.
        world_size: Number of ranks of the run. Default: the loader's `nb_consumer`, or 1.

    Raises:
        StateMismatch: The state isn't one of a `SwiftLoader`, or the dataset has another length, or the loader was
            given another seed or order.
        TypeError: An argument has the wrong type.
        ValueError: The run has no such batch.
        Exception: Whatever building the batch raised.
    """
    return _rebuilt(*_find(source, state, step, epoch, position, batch_size, rank, world_size))


def _rebuilt(options: Options, dataset: Any, settings: PlanSettings, checkpoint: Checkpoint) -> Rebuilt:
    """Build one batch. `checkpoint`: the run, stopped before it."""
    begin, run = checkpoint.position, Run(checkpoint.order, frozenset())
    run.load_state_dict(checkpoint.to_dict())
    run.choose(begin.epoch)  # so that the end of it isn't the next one's start
    session = Session(options, run, settings, None, dataset=dataset)
    try:
        session.start()
        delivery = session.begin_pass().take()
    finally:
        session.close()
    if delivery.error is not None:
        raise delivery.error
    assert run.this is not None, "it has begun"
    planned = delivered_batch(session.plan.batch(begin.epoch, run.this.first_step), delivery.failures)
    step, rest = session.plan.step_of(begin.epoch, begin.num_samples)
    return Rebuilt(
        batch=delivery.batch,
        epoch=begin.epoch,
        step=None if rest else step,
        position=begin.num_samples,
        rank=settings.rank,
        world_size=settings.world_size,
        indices=planned.indices,
        num_padding=planned.num_padding,
        failures=delivery.failures,
    )


def _find(
    source: Any,
    state: Mapping[str, Any],
    step: int | None,
    epoch: int | None,
    position: int | None,
    batch_size: int | None,
    rank: int,
    world_size: int | None,
) -> tuple[Options, Any, PlanSettings, Checkpoint]:
    """Return what `_rebuilt` takes. Raises what `rebuild` raises before the batch is built."""
    if isinstance(state, Mapping) and "_snapshot" in state:
        raise StateMismatch(
            "the state is that of a DataLoader, whose batches follow from its sampler; only those of a SwiftLoader can "
            "be rebuilt"
        )
    saved = Checkpoint.from_dict(state)
    for name, number in (("batch_size", batch_size), ("world_size", world_size)):
        check_optional_integer(name, number, 1)
    loader, is_of_run = _loader_of(source)
    num_samples = length_of(loader.dataset)
    if batch_size is None and not is_of_run:
        raise ValueError(
            "a dataset doesn't say the batch size of the run; give batch_size, or a function that returns the run's "
            "SwiftLoader"
        )
    options = _options_for_one_batch(loader, batch_size, world_size)
    if is_of_run and loader is not source:
        loader.close()  # the user's function may have started it
    _check_run(options, saved, num_samples, options.sampling.fixed if is_of_run else frozenset())
    world_size = options.sampling.world_size or 1
    ranks = Ranks(check_integer("rank", rank, 0, world_size - 1), world_size, "the past run")
    plan = Plan.of(num_samples, replace(options.sampling.plan_settings(saved.order, ranks), skips=saved.skips))
    at_epoch = saved.position.epoch if epoch is None else check_integer("epoch", epoch, 0, MAX_EPOCH)
    if position is None:
        found = _last_step(plan, saved.position, at_epoch) if step is None else check_integer("step", step, 0)
        begin, skips = _begin_of(plan, at_epoch, found)
    elif step is None:
        begin, skips = Position(at_epoch, check_integer("position", position, 0, num_samples)), saved.skips
    else:
        raise ValueError(f"step={step} and position={position} are both given; give the one that you know")
    settings = replace(plan.settings, skips=skips)
    resumed, first_step = Plan.of(num_samples, settings).resumed_at(begin)
    if first_step >= resumed.num_batches(begin.epoch):
        raise ValueError(f"rank {settings.rank} has no batch at position {begin.num_samples} of epoch {begin.epoch}")
    if position is None and resumed.settings.shift.num_samples and plan.whole.gaps(at_epoch).num_positions:
        raise ValueError(
            f"the steps of epoch {at_epoch} don't say where a batch began, because rows of skipped steps were "
            f"excluded; give the position"
        )
    return options, loader.dataset, settings, replace(saved, position=begin, skips=skips)


def _loader_of(source: Any) -> tuple[SwiftLoader, bool]:
    """Return the source's loader, and whether it has the options of the run. For a dataset, it is a new one.

    A function is called with the generators seeded as a loader does for `dataset_class`.
    """
    if isinstance(source, SwiftLoader):
        return source, True
    if not isinstance(source, type) and hasattr(source, "__getitem__"):
        return SwiftLoader(dataset=source, worker_per_consumer=0), False
    if not callable(source):
        raise TypeError(
            f"the source is a {type(source).__name__}; give a map-style dataset, a SwiftLoader, or a function that "
            f"returns one of them"
        )
    loader = SwiftLoader(source, worker_per_consumer=0)
    made = loader.dataset
    return (made, True) if isinstance(made, SwiftLoader) else (loader, False)


def _options_for_one_batch(loader: SwiftLoader, batch_size: int | None, world_size: int | None) -> Options:
    """Return the options of a loader, without workers, log and benchmark."""
    options = loader._options  # noqa: SLF001 - of this package
    given = options.sampling
    batch_size = given.batch_size if batch_size is None else batch_size
    world_size = (given.world_size or 1) if world_size is None else world_size
    return replace(
        options,
        sampling=replace(given, batch_size=batch_size, world_size=world_size),
        delivery=replace(options.delivery, num_workers=0, in_order=True, pin_memory=False),
        report=replace(options.report, log=None, benchmark=False, benchmark_file=None),
    )


def _check_run(options: Options, saved: Checkpoint, num_samples: int, fixed: frozenset[str]) -> None:
    """Raise or warn if this can't be the dataset or the loader of the run."""
    run = Run(options.order_settings(), fixed)
    run.load_state_dict(saved.to_dict())
    run.note_length(num_samples)
    if options.workers.rng is not Rng.SAMPLE:
        warn(
            f"with rng={options.workers.rng.value!r}, what samples draw at random depends on the worker, so the batch "
            f"is another one than that of the run if its samples draw"
        )


def _begin_of(plan: Plan, epoch: int, step: int) -> tuple[Position, Skips]:
    """Return where a step begins, and what is left out beside it. The run may have skipped the step itself."""
    try:
        found = plan.range_of(epoch, step)
    except IndexError as error:
        raise ValueError(f"{error}, with a batch size of {plan.settings.batch_size} on {_ranks(plan)}") from error
    skips = plan.settings.skips
    return Position(epoch, found.begin), replace(skips, ranges=()) if skips.touch(found) else skips


def _last_step(plan: Plan, reached: Position, epoch: int) -> int:
    """Return the step that ended at a state's position."""
    gaps = plan.gaps(epoch)
    place = gaps.place_of(reached.num_samples)
    if epoch != reached.epoch or not place:
        raise ValueError(
            f"the state says which batch was the last before it only in its own epoch, and not at the epoch's start; "
            f"it is at sample {reached.num_samples} of epoch {reached.epoch}. Give the step"
        )
    end = gaps.position_of(place - 1) + 1
    step = min(plan.step_of(epoch, end - 1)[0], plan.whole.num_batches(epoch) - 1)
    following, last = plan.step_of(epoch, end), plan.step_of(epoch, plan.order.num_samples)
    is_end = not following[1] or following == last
    if not is_end or plan.settings.skips.touch(plan.range_of(epoch, step)):  # what was delivered has no skipped samples
        raise ValueError(
            f"no step of {plan.settings.batch_size} samples on {_ranks(plan)} ends at the state's position {end}; give "
            f"the run's batch size and number of ranks. If the epoch was resumed with another one, give the position "
            f"at which the batch began"
        )
    return step


def _ranks(plan: Plan) -> str:
    world_size = plan.settings.world_size
    return "one rank" if world_size == 1 else f"each of {world_size} ranks"


def checksum(batch: Any) -> str:
    """Return 16 hexadecimal digits that are the same for batches with the same structure, dtypes, shapes and bytes.

    A tensor on a device is copied to the host.
    """
    digest = hashlib.blake2b(digest_size=_CHECKSUM_DIGITS // 2)
    for path, leaf in leaves_of(batch):
        digest.update(f"{path} {_kind_of(leaf)} ".encode() + digest_of(leaf))
    return digest.hexdigest()


def _kind_of(leaf: Any) -> str:
    """Return the dtype and the shape of an array or a tensor, and the type of anything else."""
    is_array = isinstance(leaf, (np.ndarray, np.generic, torch.Tensor))
    return f"{leaf.dtype} {tuple(leaf.shape)}" if is_array else type(leaf).__name__


def _not_finite(leaf: Any) -> list[int]:
    """Return the positions along the first axis of an array or a tensor that have a NaN or an infinity."""
    if isinstance(leaf, torch.Tensor):
        tensor = leaf.detach().cpu()
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        if tensor.is_floating_point():
            tensor = tensor.double()  # isfinite doesn't take 8-bit floats
        is_finite = torch.isfinite(tensor).numpy()
    elif isinstance(leaf, (np.ndarray, np.generic)) and np.issubdtype(leaf.dtype, np.inexact):
        is_finite = np.isfinite(leaf)
    else:
        return []
    rows: list[int] = np.unique(np.argwhere(~np.atleast_1d(is_finite))[:, 0]).tolist()
    return rows


# The state ------------------------------------------------------------------------------------------------------------


def read_state(path: str | Path, key: str | None = None, *, unpickle: bool = False) -> Mapping[str, Any]:
    """Return the state of a `SwiftLoader` that a file holds.

    Args:
        path: A file of `torch.save`, or JSON if its name ends in `.json`.
        key: Where in the file the state is: keys and positions, joined by dots, such as `loader` or `loaders.0`.
            Default: wherever there is one, if there is only one.
        unpickle: Whether the file may hold any objects. Loading them can run code that the file brings, so do this
            only with files that you trust.

    Raises:
        OSError: The file can't be read.
        ValueError: It isn't such a file, or has no state there, or several.
    """
    content = read_file(Path(path), unpickle=unpickle)
    has = f"it is a {type(content).__name__}"
    if isinstance(content, Mapping):
        has = f"it has the keys {', '.join(repr(str(name)) for name in content)}"
    if key is not None:
        found = [node for place, node in dicts(content) if ".".join(place) == key]
        if not found:
            raise ValueError(f"{path} has no dict {key!r}; {has}")
        return found[-1]
    states = {".".join(place): node for place, node in dicts(content) if node.keys() >= _STATE_FIELDS}
    if not states:
        raise ValueError(f"{path} has no state of a SwiftLoader; {has}. A state is what loader.state_dict() returned")
    if len(states) > 1:
        places = ", ".join(map(repr, states))
        raise ValueError(f"{path} has several states, at {places}; give the key of one of them")
    return next(iter(states.values()))


def dicts(node: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """Yield each dict that a checkpoint holds, after the keys that lead there: `("loaders", "0")`."""
    if isinstance(node, Mapping):
        yield place, node
    is_list = isinstance(node, (list, tuple))
    for key, value in enumerate(node) if is_list else node.items() if isinstance(node, Mapping) else ():
        if len(place) >= _MAX_DEPTH:
            raise ValueError(f"at {'.'.join(place[:3])}… are more than {_MAX_DEPTH} containers in each other")
        yield from dicts(value, (*place, str(key)))


def read_file(path: Path, *, unpickle: bool) -> Any:
    """Return what a checkpoint holds. Raises as `read_state` does."""
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} isn't JSON: {error}") from error
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # then the weights can be mapped, and aren't read
    try:
        return torch.load(path, map_location="cpu", weights_only=not unpickle, mmap=is_zip)
    except OSError:
        raise
    except Exception as error:  # torch raises nearly any type for a damaged file
        if isinstance(error, pickle.UnpicklingError) and is_zip and not unpickle:
            raise ValueError(
                f"{path} holds objects that aren't tensors or plain types. Loading them can run code that the file "
                f"brings. If you trust it, give unpickle=True (--unpickle)"
            ) from error
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"{path} isn't a file of torch.save, or it is damaged: {first_line}") from error


# The command ----------------------------------------------------------------------------------------------------------

_CHOICES = ("step", "epoch", "position", "batch_size", "rank", "world_size")
"""Arguments of `rebuild` and the command, in the order of `_find`."""

_WRITTEN = ("batch", "epoch", "step", "position", "rank", "world_size", "num_padding")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `swift-loader replay`."""
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
        state = read_state(arguments.state, arguments.key, unpickle=arguments.unpickle)
        found = _find(source, state, *(getattr(arguments, name) for name in _CHOICES))
    except (OSError, TypeError, ValueError, SwiftLoaderError) as error:
        raise CommandError(" ".join(str(error).split())) from error
    except Exception as error:  # of the user's function
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise CommandError(f"{arguments.source} raised {text}") from error
    rebuilt = _rebuilt(*found)
    place = f"position{rebuilt.position}" if rebuilt.step is None else f"step{rebuilt.step}"
    rank = f"-rank{rebuilt.rank}" if rebuilt.world_size > 1 else ""
    out = arguments.out or Path(f"batch-epoch{rebuilt.epoch}-{place}{rank}.pt")
    sys.stdout.writelines(f"{line}\n" for line in _described(rebuilt))
    content = {name: getattr(rebuilt, name) for name in _WRITTEN} | {"indices": rebuilt.indices.tolist()}
    try:
        torch.save(content, out)
    except (OSError, RuntimeError) as error:  # torch raises a RuntimeError where there is no such folder
        raise CommandError(f"can't write {out}: {' '.join(str(error).split())}") from error
    sys.stdout.write(f"written to {out}\n")
    return 0


def _described(rebuilt: Rebuilt) -> Iterator[str]:
    indices = rebuilt.indices.tolist()
    step = "" if rebuilt.step is None else f", step {rebuilt.step}"
    yield f"epoch {rebuilt.epoch}{step}, position {rebuilt.position}, rank {rebuilt.rank} of {rebuilt.world_size}"
    yield f"dataset indices: {_shown(indices)}"
    if rebuilt.num_padding:
        yield f"padding: the last {rebuilt.num_padding}"
    yield from (f"failed: dataset index {failure.index} ({failure.reason})" for failure in rebuilt.failures)
    for path, leaf in leaves_of(rebuilt.batch):
        yield f"batch{path}: {_kind_of(leaf)}, checksum {digest_of(leaf).hex()[:_CHECKSUM_DIGITS]}"
        bad = _not_finite(leaf)
        if bad and bad[-1] < len(indices):
            yield f"  NaN or infinity at dataset indices {_shown([indices[position] for position in bad])}"
        elif bad:
            yield f"  NaN or infinity at positions {_shown(bad)}"
    yield f"checksum of the batch: {checksum(rebuilt.batch)}"


def _shown(numbers: list[int]) -> str:
    more = f", … ({len(numbers)} in all)" if len(numbers) > _MAX_SHOWN else ""
    return ", ".join(map(str, numbers[:_MAX_SHOWN])) + more
