"""StageLoader: source, preprocessing, aggregation, transfer, buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift_loader.checks import check_choice, check_integer
from swift_loader.pipeline.functions import Kind, kind_of
from swift_loader.pipeline.maps import MAX_CONCURRENCY, OutputOrder
from swift_loader.pipeline.pipeline import Pipeline


class StageLoader(Pipeline):
    """Batches from any source, through functions that run at the same time.

        loader = StageLoader(paths, preprocessor=decode, batch_size=32, aggregator=batchify, transfer_fn=to_gpu)
        for batch in loader:
            train(batch)

    It is a `Pipeline`. Each iteration is an epoch.
    """

    def __init__(
        self,
        src: Any,
        *,
        preprocessor: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        aggregator: Callable[[list[Any]], Any] | None = None,
        transfer_fn: Callable[[Any], Any] | None = None,
        buffer_size: int = 3,
        num_threads: int = 8,
        timeout: float | None = None,
        output_order: str = "completion",
        on_error: str = "raise",
        max_errors: float | None = None,
        seed: int | None = None,
    ) -> None:
        """Check the arguments. Starts nothing.

        Args:
            src: An iterable or async iterable of what the preprocessor takes, often paths or URLs.
            preprocessor: A function, generator, coroutine function or async generator, called with each item. A result
                that is None is left out.
            batch_size: How many results go into a list. None: no lists are made.
            drop_last: True leaves out the last list if it isn't full.
            aggregator: A function or coroutine function, called with each list.
            transfer_fn: Called with each batch, always by the same thread. It is for moving batches to a device.
            buffer_size: How many batches wait for the loop.
            num_threads: How many calls of the preprocessor, and of the aggregator, run at the same time.
            timeout: Seconds after which a wait for the next batch raises `WorkerStalled`. None: no limit.
            output_order: "completion" hands results on as they come. "input" keeps the order of the source; then the
                loader can be resumed after any batch.
            on_error: "raise" ends the iteration at an item whose function raises. "skip" leaves the item out.
            max_errors: With "skip": how many items of each function may be left out. A float below 1 is a share; see
                `Pipeline.map`. None: any number.
            seed: Of `sample_rng()` in functions that run in threads. Default: torch's, or one from the clock.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A value is out of its range.
        """
        threads = check_integer("num_threads", num_threads, 1, MAX_CONCURRENCY)
        order = check_choice("output_order", output_order, OutputOrder)
        errors: dict[str, Any] = {"on_error": on_error, "max_errors": max_errors}
        pipeline = Pipeline(src, seed=seed)
        if preprocessor is not None:
            pipeline = pipeline.map(preprocessor, concurrency=threads, output_order=order, **errors).drop_none()
        if batch_size is not None:
            pipeline = pipeline.batch(batch_size, drop_last=drop_last)
        if aggregator is not None:
            pipeline = pipeline.map(aggregator, concurrency=threads, output_order=order, **errors).drop_none()
        if transfer_fn is not None:
            if kind_of(transfer_fn) is not Kind.FUNCTION:
                raise TypeError(f"transfer_fn is a {kind_of(transfer_fn).value}; it must be a plain function")
            pipeline = pipeline.map(transfer_fn, buffer_size=0)
        pipeline = pipeline.prefetch(buffer_size, timeout=timeout)
        self._set_up(pipeline._chain, pipeline._seed)  # noqa: SLF001 - of its own class
