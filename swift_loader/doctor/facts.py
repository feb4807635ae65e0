"""What the processes that run the dataset report: plain values, without judgement. Pure.

    process        reports
    examine        Construction, Containers, Samples and Failures as they come, then the rest
    compare        OtherBuild: the same samples in another process, in another order
    resume         Resumed: a run that is stopped and resumed

A process that dies or hangs leaves what it has reported, and `Ended` says where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "MIN_RESUMED",
    "Batches",
    "Construction",
    "Container",
    "Contention",
    "Digests",
    "Draws",
    "Ended",
    "Evidence",
    "Failure",
    "FirstFailing",
    "Growth",
    "Habits",
    "Holder",
    "Layout",
    "Leaf",
    "Line",
    "OtherBuild",
    "Resumed",
    "Sample",
    "SlowAgain",
    "Stacks",
    "Unsendable",
]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a sample: what lies at the end of a path through its containers."""

    path: str
    """Such as `['image']` or `[0]`; empty if the sample is a leaf itself."""
    kind: str
    """Qualified name of its type."""
    dtype: str = ""
    """Of an array or a tensor; else empty."""
    shape: tuple[int, ...] | None = None
    """Of an array or a tensor."""
    nbytes: int = 0


Layout = tuple[Leaf, ...]
"""The leaves of a sample, in order."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of code that was running."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


@dataclass(frozen=True, slots=True)
class Holder:
    """An object of the dataset that processes can't share."""

    path: str
    kind: str
    what: str
    """Such as `an open file`."""


@dataclass(frozen=True, slots=True)
class Unsendable:
    """The innermost part of the dataset that can't be serialised."""

    path: str
    kind: str
    error: str


@dataclass(frozen=True, slots=True)
class Construction:
    """How the dataset was built, and what it is."""

    kind: str
    """Qualified name of its type."""
    import_s: float
    build_s: float
    lengths: tuple[int, ...]
    """`len(dataset)`, asked several times; empty if it raised."""
    length_error: str
    hazards: str
    """Descriptors and Python threads that building left behind, in words; empty if there are none."""
    library_threads: tuple[str, ...]
    """Names of threads that libraries have started by themselves, when they were imported or used."""
    holders: tuple[Holder, ...]
    unsendable: Unsendable | None
    error: str = ""
    """What the constructor raised; then nothing else here is known."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container of Python objects that the dataset holds."""

    path: str
    kind: str
    num_objects: int
    nbytes: int
    """Estimated from some of its items; without arrays."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A container that became longer while samples were fetched."""

    path: str
    kind: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The fetch of one sample."""

    index: int
    took_s: float
    cpu_s: float
    """CPU time of the thread that fetched it."""
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Size of its leaves."""
        return sum(leaf.nbytes for leaf in self.layout)


@dataclass(frozen=True, slots=True)
class Contention:
    """How much the machine was in the way while samples were measured."""

    queued_s: float
    """How long the fetching thread was ready to run, and had no core."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that raised."""

    index: int
    error: str
    """Type and message."""
    kind: str
    """Name of the exception's type."""
    line: Line | None
    """The innermost line of the user's code."""


@dataclass(frozen=True, slots=True)
class FirstFailing:
    """The last sample failed as if it were beyond the end, and so do all that were tried from this index on."""

    index: int


@dataclass(frozen=True, slots=True)
class SlowAgain:
    """A slow sample, fetched once more."""

    index: int
    first_s: float
    again_s: float
    """The shortest of some more fetches."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches, fetched and collated as a worker does it."""

    batch_size: int
    """The user's, or fewer if samples take long."""
    took_s: tuple[float, ...]
    """Fetch and collate of each batch."""
    collate_s: tuple[float, ...]
    nbytes: int
    error: str = ""
    """What the collate function raised; then the rest is empty."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """How often each line was found running, while samples were fetched."""

    hits: Mapping[Line, int]
    of_slowest: Mapping[Line, int]
    """Only while one of the slowest samples was fetched."""


@dataclass(frozen=True, slots=True)
class Habits:
    """What fetching samples does beside returning them."""

    num_fetches: int
    """While output was counted."""
    num_lines_printed: int
    printed: str
    """The last line."""
    changed: tuple[str, ...]
    """Settings of the process that changed, such as `the working directory`."""
    views: tuple[tuple[str, int, int], ...]
    """Leaves that are writable views of a large array: path, bytes of the leaf, bytes of the array."""
    requiring_grad: tuple[str, ...]
    """Paths of tensors with `requires_grad`."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Which random sources samples use."""

    num_samples: int
    sources: Mapping[str, tuple[int, ...]]
    """Source -> dataset indices. A source is a global generator, `sample_rng()`, or the path of a generator."""
    held: tuple[str, ...]
    """The sources that the loader doesn't seed: generators that the dataset or its module holds."""
    reseeded: tuple[str, ...]
    """Global generators that samples seed themselves."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of samples that were built twice with the same seeds: index -> path of a leaf -> digest."""

    first: Mapping[int, Mapping[str, bytes]]
    again: Mapping[int, Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class OtherBuild:
    """The same samples in another process, built in another order."""

    num_samples: int
    digests: Mapping[int, Mapping[str, bytes]]
    entropy: Mapping[int, tuple[str, ...]]
    """Index -> what the sample asked for that differs each time, and where: `time.time at data.py:3 in f`."""
    of_constructor: tuple[str, ...]
    """The same for the constructor."""


MIN_RESUMED = 4
"""How many samples a run needs that is stopped and resumed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The result of a run that was stopped and resumed."""

    num_samples: int
    num_workers: int
    error: str
    """Empty: every byte was the same."""
    is_mismatch: bool
    """Whether the error is a difference, and not a failure of the run."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended before it was done, or that had to be killed."""

    doing: str
    """Such as `building the dataset`."""
    index: int | None
    """The sample that was being fetched."""
    how: str
    """Such as `was killed by SIGSEGV` or `did not return within 60 s`."""
    line: Line | None = None
    """The user's line that was running, if the stack could be written."""
    output: str = ""
    """The last that it printed, if there is no stack."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was reported. A part is None if no process came that far."""

    construction: Construction | None = None
    containers: tuple[Container, ...] = ()
    growths: tuple[Growth, ...] = ()
    samples: tuple[Sample, ...] = ()
    failures: tuple[Failure, ...] = ()
    first_failing: FirstFailing | None = None
    slow_again: tuple[SlowAgain, ...] = ()
    contention: Contention | None = None
    batches: Batches | None = None
    stacks: Stacks | None = None
    habits: Habits | None = None
    draws: Draws | None = None
    digests: Digests | None = None
    other_build: OtherBuild | None = None
    resumed: Resumed | None = None
    ended: tuple[Ended, ...] = field(default=())
