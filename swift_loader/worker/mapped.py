"""Reads samples apart from transforming them: several at a time, and for a worker's next tasks while it transforms.

    keys ──► calls, of one key or several ──► threads, or coroutines of one event loop ──► raw samples ──transform──►

mapped           what users call
MappedDataset    the dataset. Anything may index it
Ahead            stands for a dataset of these in one worker, and begins reads before their samples are asked for

A call reads, so it may draw no random numbers: when it runs depends on the other calls. `transform` runs where samples
are fetched, one by one, and is seeded there as the dataset would be. So batches are the same with any number of reads.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from swift_loader.batch.digests import leaves_of
from swift_loader.batch.tree import type_name
from swift_loader.checks import check_callable, check_integer, check_optional_integer
from swift_loader.errors import LoaderClosed, NoProcessesLeft, SamplesDraw, counted, noted
from swift_loader.runtime import Answer, LoaderThread
from swift_loader.sampling.mixture import Mixture
from swift_loader.transport.segments import CounterWriter
from swift_loader.worker.process import stack_of
from swift_loader.worker.seeding import snapshot_generators, watched_draws

if TYPE_CHECKING:
    import asyncio  # takes 20 ms, and most workers don't need it
    from concurrent.futures import Future

_Result = TypeVar("_Result")

_AHEAD = 8
"""For how many calls a worker should have tasks, in multiples of `reads`. Measured with waits that are exponential, and
two workers: 4 bring 0.77 of the ideal rate, 6 bring 0.90, 8 bring 0.97."""

_MOST_NBYTES = 1 << 28
"""How many bytes a worker reads ahead at most, as far as the sizes of the samples before tell."""

_WAIT_S = 0.1
"""Before a call is repeated for the first time. Then twice as long each time, up to the next one."""

_LONGEST_WAIT_S = 60.0

_MEASURED = 16
"""One of so many samples is measured."""

_FIRST, _MOST_READS = 8, 256
"""How many reads run at a time with `"auto"`, at first and at most."""

_WINDOW, _WAITS, _HELPS = 4, 0.1, 1.2
"""They are twice as many after so many samples each, if samples were waited for in so much of the time, and there are
so many times as many samples per second as before the last time."""

_TOGETHER = 32
"""Samples of a pipeline's source that are read together, or of a batch if a sampler chooses how many."""

_CHECK_S = 1.0
"""How long the reads of a worker's first task may take to be looked at, before the first of them is transformed."""


def mapped(
    dataset: Any,
    transform: Callable[[Any], Any] | None = None,
    *,
    reads: int | Literal["auto"] | None = None,
    retries: int = 2,
) -> MappedDataset:
    """Return a dataset whose samples are read by `dataset` and then transformed, so that many are read at a time.

    A worker of any loader of this package reads for its next batches while it transforms. Use it as any dataset, also
    as a source of a `Mixture`, in a `Subset`, and with torch's DataLoader, which reads for one batch at a time.

        photos = mapped(Photos("s3://photos"), transform=random_crop, reads=32)
        loader = SwiftLoader(dataset=photos, batch_size=64)

    Put what waits into `dataset`: a file, a request. Put what computes or draws random numbers into `transform`.
    The bytes of batches are the same with any `reads`, and with any number of workers.

    Args:
        dataset: Map-style. It is read by its method `fetch(indices) -> list`, if it has one, which may be `async def`;
            else by `__getitems__(indices) -> list`; else by `__getitem__(index)`. It may draw no random numbers.
        transform: Gets what was read for one index, and returns the sample. It may change it in place.
        reads: How many calls run at a time in each worker: in threads, or as coroutines of one event loop. Only what
            may be called by several threads at once can have more than one. None: one, so never two at once. `"auto"`:
            8, and twice as many as long as that brings a worker more, up to 256. `fetch` and `__getitems__` get the
            indices of a batch in so many parts, `__getitem__` gets one.
        retries: How often a call that raises is repeated, after 0.1 s, 0.2 s, 0.4 s and so on up to 60 s, each half to
            one and a half times as long. Then `on_error` holds for the sample. The error's notes list the attempts. An
            IndexError isn't repeated.

    A call for several indices that fails is repeated for each of them alone, so that the one that fails is known.
    A worker reads for all tasks that it has, but at most 256 MiB ahead. Loaders have so many batches in flight that a
    worker can make `8 * reads` calls ahead, unless you give `data_queue_size` or `prefetch_factor`. If few reads take
    very much longer than the others, more batches in flight help.

    Raises:
        SamplesDraw: In the loop: `dataset` draws random numbers. A worker looks at the reads of its first batch, if
            the process has no threads of others, and at each call of `sample_rng`.
        TypeError, ValueError: An argument is wrong.
    """
    check_callable("transform", transform)
    if reads != "auto":
        check_optional_integer("reads", reads, 1)
    check_integer("retries", retries, 0)
    if isinstance(dataset, Mixture):
        raise TypeError("a Mixture can't be mapped, only its sources: Mixture({'web': mapped(web, ...), ...})")
    if not any(hasattr(dataset, name) for name in ("fetch", "__getitems__", "__getitem__")):
        raise TypeError(f"mapped() got a {type_name(dataset)}; give a map-style dataset, which has __getitem__(index)")
    return MappedDataset(dataset, transform, _FIRST if reads == "auto" else reads or 1, retries, grows=reads == "auto")


class MappedDataset:
    """What `mapped` returns."""

    def __init__(
        self, dataset: Any, transform: Callable[[Any], Any] | None, reads: int, retries: int, *, grows: bool
    ) -> None:
        self.dataset = dataset
        """What reads."""
        self.transform = transform
        self.reads = reads
        """How many at a time, in the beginning."""
        self.grows = grows
        """Whether a worker makes more of them, if that helps."""
        self.retries = retries
        self.is_async = inspect.iscoroutinefunction(getattr(dataset, "fetch", None))
        """Whether `fetch` makes coroutines."""
        self.reads_many = hasattr(dataset, "fetch") or hasattr(dataset, "__getitems__")
        """Whether a call reads several samples."""
        self._loops: dict[int, _Loop] = {}
        self._own = threading.local()
        """What reads for a thread that isn't one of our workers, and its process."""

    def __getitem__(self, key: Any) -> Any:
        """Return a sample, transformed."""
        if _read.of is self:
            raw, _read.of, _read.raw = _read.raw, None, None
        elif self.is_async:
            return self.__getitems__([key])[0]
        else:
            call = Call(self, [key])
            call.run()
            (raw,) = call.answer.result()
        return raw if self.transform is None else self.transform(raw)

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        """Return these samples, transformed, which are read at the same time."""
        pid, ahead = getattr(self._own, "ahead", (0, None))
        if ahead is None or pid != os.getpid():
            ahead = Ahead(self, lambda key: (self, key))
            ahead.begins_here, self._own.ahead = True, (os.getpid(), ahead)
        try:
            ahead.begin(None, keys)
            return [ahead[key] for key in keys]
        finally:
            ahead.begin(None, ())

    def __len__(self) -> int:
        return len(self.dataset)

    def __reduce__(self) -> Any:
        how = self.dataset, self.transform, self.reads, self.retries
        return partial(MappedDataset, grows=self.grows), how

    def __repr__(self) -> str:
        return f"<MappedDataset of {type_name(self.dataset)}, {counted(self.reads, 'read')} at a time>"

    # How it reads

    def calls(self, keys: list[Any]) -> Iterator[tuple[Call, int]]:
        """Yield for each key the call that will read it, and its place there."""
        size = -(-len(keys) // self.reads) if self.reads_many else 1
        for begin in range(0, len(keys), size):
            call = Call(self, keys[begin : begin + size])
            yield from ((call, number) for number in range(len(call.keys)))

    def read(self, keys: list[Any]) -> Any:
        """Return what the dataset has for these keys, or a coroutine that does."""
        fetch = getattr(self.dataset, "fetch", None) or getattr(self.dataset, "__getitems__", None)
        return [self.dataset[key] for key in keys] if fetch is None else fetch(keys)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of all coroutines that read in this process. Sessions belong to a loop."""
        pid = os.getpid()
        thread = self._loops[pid] = self._loops.get(pid) or _loops.get(pid) or _loops.setdefault(pid, _Loop())
        return thread.loop


class _Read(threading.local):
    """What was read for the sample that this thread is about to ask for, and the dataset of which it is."""

    of: MappedDataset | None = None
    raw: Any = None


_read = _Read()

# Calls ----------------------------------------------------------------------------------------------------------------


class Call:
    """One call of a dataset, with its repetitions."""

    def __init__(self, source: MappedDataset, keys: list[Any]) -> None:
        self.source = source
        self.keys = keys
        self.failed: list[str] = []
        """How its attempts have failed."""
        self.answer: Answer[list[Any]] = Answer()
        self.raws: list[Any] | None = None
        """What was read, once a worker has waited for it, without the samples that it has taken."""
        self.is_begun = False
        """Whether it was submitted."""
        self.is_given_up = False
        """Whether nobody waits for it any more."""
        self.reading_ns = 0
        """How long it took."""
        self.thread = 0
        """Which carries it out, if a thread does; else a coroutine, with its future."""
        self._has_drawn = False
        self.coroutine: Any = None
        self.future: Future[None] | None = None

    def run(self) -> None:
        """Carry it out in this thread. Nothing in it waits for an event loop."""
        self.thread = threading.get_ident()
        run_now(self.carry_out(sleep_here))

    async def carry_out(self, sleep: Sleep) -> None:
        """Give the answer."""
        raws, error, began_ns = None, None, time.perf_counter_ns()
        try:
            if not self.is_given_up:
                what = f"read index {self.keys[0]!r}"
                raws = self._checked(await retried(self._attempt, self.source.retries, what, sleep, self.failed))
        except BaseException as raised:
            error = raised
        self.reading_ns = time.perf_counter_ns() - began_ns
        if not self.is_given_up:
            self.answer.give(raws, error)
        del raws, error  # which has this frame

    async def _attempt(self) -> Any:
        with watched_draws() as watched:
            raws = self.source.read(self.keys)
            raws = await raws if self.source.is_async else raws
        self._has_drawn |= watched.drew_in_bulk
        return raws

    def _checked(self, raws: Any) -> list[Any]:
        if self._has_drawn:
            raise draws(self.source)
        name, number = type_name(self.source.dataset), len(self.keys)
        if isinstance(raws, (str, bytes, Mapping)) or not hasattr(raws, "__len__"):
            raise TypeError(f"{name} read a {type_name(raws)}; return a list with a sample for each index")
        if len(raws) != number:
            raise ValueError(f"{name} read {counted(len(raws), 'sample')}, and not {number}; return one for each index")
        return list(raws)


Sleep = Callable[[float], Awaitable[None]]


async def sleep_here(seconds: float) -> None:
    """Sleep as `asyncio.sleep` does, in this thread."""
    time.sleep(seconds)


def run_now(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what a coroutine returns that waits for no event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(_Result, end.value)
    raise RuntimeError("a coroutine waits for an event loop, and there is none")


async def retried(
    attempt: Callable[[], Awaitable[_Result]], retries: int, what: str, sleep: Sleep, failed: list[str]
) -> _Result:
    """Return what an attempt returns. If it raises, wait and try again, so many times. `failed` gets the reasons.

    The waits depend on `what` it does, so a replay waits as long.
    """
    while True:
        try:
            return await attempt()
        except Exception as error:
            failed.append(f"{type_name(error)}: {error}")
            number = len(failed)
            if number > retries or isinstance(error, IndexError):  # there is no such sample
                raise noted(error, f"{counted(number, 'attempt')} to {what}: {'; '.join(failed)}")  # noqa: B904 - the user's
        jitter = random.Random(f"{what} {number}").random()  # noqa: S311 - no secret
        await sleep(min(_WAIT_S * (1 << number - 1), _LONGEST_WAIT_S) * (0.5 + jitter))


def draws(source: MappedDataset) -> SamplesDraw:
    """Return the error for a dataset that draws random numbers as it reads."""
    return SamplesDraw(
        f"the dataset of mapped(), a {type_name(source.dataset)}, draws random numbers as it reads, which would depend "
        f"on what is read at the same time. Move what is random to mapped(transform=...); a Hugging Face dataset's "
        f"with_transform, too"
    )


class Pool:
    """Carries out calls at once, in the thread that submits them."""

    reads = 0
    """How many it carries out at a time, while the submitting thread does other things."""

    def submit(self, call: Call) -> None:
        """Have it carried out."""
        call.run()

    def grow(self, more: int) -> None:
        """Carry out more of them at a time."""
        self.reads += more

    def close(self) -> None:
        """Carry out no more. What has begun in a thread goes on."""


class _Threads(Pool):
    """Carries out calls in threads."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._number = 0
        """Of threads."""
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Call) -> None:
        """See `Pool`."""
        self._calls.put(call)
        if self._number < self.reads:
            try:
                LoaderThread(_run_all, "reads", self._calls).start()
            except NoProcessesLeft:
                if not self._number:
                    raise
            self._number += 1

    def close(self) -> None:
        """See `Pool`."""
        self._calls.put(None)


def _run_all(calls: SimpleQueue[Call | None]) -> None:
    for call in iter(calls.get, None):
        call.run()
        del call
    calls.put(None)  # for the next thread


class _Coroutines(Pool):
    """Carries out calls as coroutines of an event loop, in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        self._loop = loop
        self._free = asyncio.Semaphore(0)

    def submit(self, call: Call) -> None:
        """See `Pool`."""
        import asyncio

        call.coroutine = _carry_out(call, self._free, asyncio.sleep)
        call.future = asyncio.run_coroutine_threadsafe(call.coroutine, self._loop)

    def grow(self, more: int) -> None:
        """See `Pool`."""
        super().grow(more)
        for _ in range(more):
            self._loop.call_soon_threadsafe(self._free.release)


async def _carry_out(call: Call, free: asyncio.Semaphore, sleep: Sleep) -> None:
    async with free:
        await call.carry_out(sleep)


class _Loop:
    """An event loop in a thread of its own, as long as anybody has this object."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, _end_loop, self.loop)
        LoaderThread(_run_loop, "reads", self.loop).start()


_loops: weakref.WeakValueDictionary[int, _Loop] = weakref.WeakValueDictionary()
"""By process."""


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


def _end_loop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(loop.stop)


_aheads: weakref.WeakSet[Ahead] = weakref.WeakSet()


def stacks_of_reads() -> str:
    """Return where the reads are that workers of this process wait for, as the fault handler writes stacks."""
    return "".join(ahead.stack() for ahead in list(_aheads))


# Ahead ----------------------------------------------------------------------------------------------------------------


class _Growth:
    """Says when a worker should read more at a time."""

    def __init__(self) -> None:
        self._since_s = self._rate = 0.0
        self._num_taken = self._waited_ns = 0

    def is_due(self, num_taken: int, waited_ns: int, reads: int) -> bool:
        """Return whether to read twice as many at a time: samples are waited for, and the last time it has helped."""
        now_s, self._waited_ns = time.perf_counter(), self._waited_ns + waited_ns
        if not self._since_s or num_taken - self._num_taken < _WINDOW * reads or reads >= _MOST_READS:
            self._since_s = self._since_s or now_s
            return False
        elapsed_s, rate = now_s - self._since_s, (num_taken - self._num_taken) / (now_s - self._since_s)
        waits, helped = self._waited_ns / 1e9 > _WAITS * elapsed_s, rate > _HELPS * self._rate
        self._since_s, self._num_taken, self._waited_ns = now_s, num_taken, 0
        if waits and helped:
            self._rate = rate
        return waits and helped


class _Part(NamedTuple):
    """A sample's place in a call."""

    key: Any
    call: Call
    number: int


class Ahead:
    """A dataset that is made of mapped ones, in one worker. One thread uses it."""

    def __init__(self, dataset: Any, find: _Find) -> None:
        self._dataset = dataset
        self._find = find
        self._now: deque[_Part] = deque()
        """Of the present task, from the next sample on."""
        self._tasks: dict[Any, list[_Part]] = {}
        """Of later tasks."""
        self._coming: deque[Call] = deque()
        """Those that aren't begun, in order; some may have been given up."""
        self._begun: set[Call] = set()
        """Those that are begun, and that nobody has waited for yet."""
        self._pools: dict[int, Pool] = {}
        """By the id of the source: what `close` refers to may not refer to this object."""
        self._growing: list[Pool] = []
        self._growth = _Growth()
        self._is_checked = False
        self.begins_here = False
        """Whether nothing is read ahead, in this thread, if one call runs at a time: it is the loop's."""
        self.counters: CounterWriter | None = None
        """Shows which sample is waited for."""
        self._awaited: Call | None = None
        self._size, self._nbytes = 1, 0.0
        """How many samples a call has, and how many bytes each has, about."""
        self._num_taken = 0
        self.waited_ns = self.reading_ns = 0
        """How long the samples since `measured` were waited for, and how long reading them took, in sum."""
        _aheads.add(self)
        self.close = weakref.finalize(self, _close, self._begun, self._pools)
        """Reads no more. Whoever waits for a read gets `LoaderClosed`. Idempotent. Any thread."""

    @classmethod
    def of(cls, dataset: Any) -> Ahead | None:
        """Return what stands for a dataset; None if nothing in it is mapped."""
        find, _ = _finder(dataset)
        return None if find is None else cls(dataset, find)

    def begin(self, task: Any, keys: Sequence[Any]) -> None:
        """Read these samples next. `task` names them, if `follow` had them before."""
        self._forget(self._now)
        parts = self._tasks.pop(task, None)
        if parts is None:
            parts = self._parts(keys)
            self._coming.extendleft(part.call for part in reversed(parts))
        self._now = deque(parts)
        if self._now and not self._is_checked:
            self._is_checked = True
            self._check()
        self._begin_some()

    def _check(self) -> None:
        """Raise if the first reads move the random generators, while nothing else runs that could."""
        before, began_ns = snapshot_generators(), time.perf_counter_ns()
        self._begin(self._now[0].call)
        self._begin_some()
        for call in self._begun:
            call.answer.wait(max(0.0, _CHECK_S - (time.perf_counter_ns() - began_ns) / 1e9))
        self.waited_ns += time.perf_counter_ns() - began_ns
        others = [one for one in threading.enumerate() if not isinstance(one, LoaderThread)]
        is_alone = others == [threading.current_thread()]  # else another thread may have drawn
        if is_alone and snapshot_generators()[: len(before)] != before:
            raise draws(self._now[0].call.source)

    def follow(self, tasks: Iterable[tuple[Any, Callable[[], Sequence[Any]]]]) -> None:
        """Read ahead for these tasks, each with what gives its keys, after the present one. Give up all others."""
        given = dict(tasks)
        for task in [task for task in self._tasks if task not in given]:
            self._forget(self._tasks.pop(task))
        for task, keys_of in given.items():
            if task not in self._tasks:
                self._tasks[task] = self._parts(keys_of())
                self._coming.extend(part.call for part in self._tasks[task])
        self._begin_some()

    def measured(self) -> tuple[int, int]:
        """Return `waited_ns` and `reading_ns`, from the batch that has just been read on. May read more from now on."""
        waited_ns, reading_ns, self.waited_ns, self.reading_ns = self.waited_ns, self.reading_ns, 0, 0
        reads = sum(pool.reads for pool in self._growing)
        if reads and self._growth.is_due(self._num_taken, waited_ns, reads):
            for pool in self._growing:
                pool.grow(pool.reads)
        return waited_ns, reading_ns

    def __getitem__(self, key: Any) -> Any:
        """Return a sample as the dataset does."""
        part, now = None, self._now
        if now and (now[0].key is key or (type(key) is type(now[0].key) is int and now[0].key == key)):
            part = now.popleft()
        elif (place := self._place(key)) is not None:  # it isn't planned: a replacement
            part = _Part(key, Call(place[0], [place[1]]), 0)
        if part is None:
            return self._dataset[key]
        raw, source = self._take(part), part.call.source
        if source is self._dataset:
            return raw if source.transform is None else source.transform(raw)
        _read.raw, _read.of = raw, source
        try:
            return self._dataset[key]
        finally:
            _read.of = _read.raw = None

    def _take(self, part: _Part) -> Any:
        """Wait for a sample, and return what was read."""
        call, number = part.call, part.number
        if call.raws is None:
            try:
                self._wait_for(call)
            except Exception:
                if len(call.keys) == 1 or len(call.failed) <= call.source.retries:  # it is of all of them
                    raise
                call, number = Call(call.source, [call.keys[number]]), 0
                self._wait_for(call)
        raws = cast(list[Any], call.raws)
        raw, raws[number] = raws[number], None
        if not self._num_taken % _MEASURED:
            nbytes = sum(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf) for _, leaf in leaves_of(raw))
            self._nbytes += (nbytes - self._nbytes) / (4 if self._num_taken else 1)
        self._num_taken += 1
        return raw

    def _wait_for(self, call: Call) -> None:
        began_ns, counters = time.perf_counter_ns(), self.counters
        if not self.close.alive:
            raise LoaderClosed("the loader was closed while it read samples")
        self._begin(call)
        self._awaited = call
        try:
            with nullcontext() if counters is None or len(call.keys) == 1 else counters.unknown():
                call.raws = call.answer.result()
        finally:
            self._awaited = None
            if call in self._begun:
                self._begun.discard(call)
                self.reading_ns += call.reading_ns
            self._begin_some()
            self.waited_ns += time.perf_counter_ns() - began_ns

    def stack(self) -> str:
        """Return where the read is that is waited for. Empty: none is. Any thread."""
        call = self._awaited
        if call is None:
            return ""
        lines, coroutine = [stack_of(call.thread)] if call.thread else [], call.coroutine
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            if frame.f_code.co_filename != __file__:
                lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
            coroutine = coroutine.cr_await
        return "\n".join(["The read that is waited for (most recent call last):", *lines, ""])

    def _place(self, key: Any) -> tuple[MappedDataset, Any] | None:
        with suppress(Exception):  # else the dataset will raise it
            return self._find(key)
        return None

    def _parts(self, keys: Sequence[Any]) -> list[_Part]:
        places = [(key, *place) for key in keys if (place := self._place(key)) is not None]
        rows: dict[MappedDataset, list[Any]] = {}
        for _, source, row in places:
            rows.setdefault(source, []).append(row)
        calls = {source: source.calls(of_source) for source, of_source in rows.items()}
        return [_Part(key, *next(calls[source])) for key, source, _ in places]

    def _begin_some(self) -> None:
        """Begin as many of the coming calls as may be ahead."""
        reads = sum(pool.reads for pool in self._pools.values())
        while reads and self._coming:
            number = len(self._begun)
            if number * self._size * self._nbytes >= _MOST_NBYTES or (not self._num_taken and number >= reads):
                return
            call = self._coming.popleft()
            if not call.is_given_up:
                self._begin(call)

    def _begin(self, call: Call) -> None:
        if call.is_begun:
            return
        call.is_begun, source = True, call.source
        self._begun.add(call)
        self._size = len(call.keys)
        pool = self._pools.get(id(source))
        if pool is None:
            pool = _Coroutines(source.loop()) if source.is_async else _Threads()
            if self.begins_here and source.reads == 1 and not source.is_async:
                pool = Pool()
            else:
                pool.grow(source.reads)
            self._pools[id(source)] = pool
            self._growing += [pool] * source.grows
        pool.submit(call)

    def _forget(self, parts: Iterable[_Part]) -> None:
        calls = {part.call for part in parts}
        _give_up(calls)
        self._begun -= calls


def _close(begun: set[Call], pools: dict[int, Pool]) -> None:
    for pool in list(pools.values()):
        pool.close()
    for call in list(begun):
        _give_up([call])
        if not call.answer.is_given:
            call.answer.give(None, LoaderClosed("the loader was closed while it waited for a read"))


def _give_up(calls: Iterable[Call]) -> None:
    """Begin none of them any more. A coroutine ends; what has begun in a thread goes on."""
    for call in calls:
        call.is_given_up = True
        if call.future is not None:
            call.future.cancel()


_Find = Callable[[Any], "tuple[MappedDataset, Any] | None"]


def _finder(dataset: Any) -> tuple[_Find | None, list[MappedDataset]]:
    """Return what tells which mapped dataset has a sample, under which key, and all of these. None: there are none."""
    torch_data: Any = sys.modules.get("torch.utils.data")
    if isinstance(dataset, MappedDataset):
        return lambda key: (dataset, key), [dataset]
    if isinstance(dataset, Mixture):
        inner = {name: _finder(source) for name, source in dataset.sources.items()}

        def find(key: Any) -> tuple[MappedDataset, Any] | None:
            name, row, _ = dataset.locate(key)
            found = inner[name][0]
            return None if found is None else found(row)

    elif torch_data is not None and type(dataset) is torch_data.Subset:
        inner = {"": _finder(dataset.dataset)}

        def find(key: Any) -> tuple[MappedDataset, Any] | None:
            found = inner[""][0]
            return None if found is None else found(dataset.indices[key])

    elif torch_data is not None and type(dataset) is torch_data.ConcatDataset:
        ends = [0, *dataset.cumulative_sizes]
        inner = {end: _finder(one) for end, one in zip(ends[1:], dataset.datasets, strict=True)}

        def find(key: Any) -> tuple[MappedDataset, Any] | None:
            number = bisect_right(ends, key)
            found = inner[ends[number]][0]
            return None if found is None else found(key - ends[number - 1])

    else:
        return None, []
    sources = [source for _, some in inner.values() for source in some]
    return (find if sources else None), sources


def tasks_ahead(dataset: Any, batch_size: Any) -> int:
    """Return how many tasks a worker should have, to read ahead. 0: nothing in the dataset is mapped."""
    size, sources = batch_size if isinstance(batch_size, int) and batch_size > 0 else _TOGETHER, _finder(dataset)[1]
    return max((1 - -_AHEAD * (size if one.reads_many else one.reads) // size for one in sources), default=0)


def read_in_order(dataset: Any, numbers: range) -> Iterator[Any]:
    """Return the samples with these indices. Those of a mapped dataset are read ahead."""
    ahead = Ahead.of(dataset)
    return (dataset[number] for number in numbers) if ahead is None else _read_parts(ahead, dataset, numbers)


def _read_parts(ahead: Ahead, dataset: Any, numbers: range) -> Iterator[Any]:
    size = _TOGETHER * (1 + tasks_ahead(dataset, _TOGETHER))
    for at in range(0, len(numbers), _TOGETHER):
        part = numbers[at : at + _TOGETHER]
        ahead.begin(at, part)
        later = range(at + _TOGETHER, min(at + size, len(numbers)), _TOGETHER)
        ahead.follow((place, partial(list, numbers[place : place + _TOGETHER])) for place in later)
        yield from map(ahead.__getitem__, part)
