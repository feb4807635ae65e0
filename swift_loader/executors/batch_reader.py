"""Decodes the contents of a slot into a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import ProtocolError
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode, decode_bytes
from swift_loader.transport.messages import Batch


class BatchReader:
    """Decodes the contents of a slot into a batch."""

    def __init__(self, definitions: Definitions, batch_decoder: Callable[[bytes], Any] | None) -> None:
        self._definitions = definitions
        self._batch_decoder = batch_decoder

    def read(self, batch: Batch, memory: NDArray[np.uint8]) -> Any:
        """Return the batch. Its arrays are views of `memory`, unless the user's `batch_decoder` made it."""
        meta = memoryview(batch.meta)
        if batch.meta_nbytes and not meta:
            meta = memory[batch.meta_offset : batch.meta_offset + batch.meta_nbytes].data
            if len(meta) != batch.meta_nbytes:
                raise ProtocolError(
                    f"a structure of {batch.meta_nbytes} bytes lies outside a slot of {len(memory)} bytes"
                )
        if self._batch_decoder is not None:
            return self._batch_decoder(decode_bytes(meta, memory))
        return decode(meta, batch.num_blocks, memory, self._definitions)
