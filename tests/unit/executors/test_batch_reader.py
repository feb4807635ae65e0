from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from swift_loader.errors import ProtocolError
from swift_loader.executors.batch_reader import BatchReader
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import Encoded, encode, encode_bytes
from swift_loader.transport.messages import Batch

READER = BatchReader(Definitions(), None)


def sent(encoded: Encoded, arena: Arena, *, in_slot: bool) -> tuple[Batch, NDArray[np.uint8]]:
    """Return the message and the slot; the structure is in the slot or in the message."""
    meta = bytes(encoded.meta)
    memory = np.zeros(arena.used + len(meta) * in_slot, np.uint8)
    arena.move_to(memory)
    if in_slot:
        memory[arena.used :] = np.frombuffer(meta, np.uint8)
    batch = Batch(
        generation=0,
        sequence=0,
        slot=0,
        num_blocks=encoded.num_blocks,
        meta=b"" if in_slot else meta,
        meta_offset=arena.used if in_slot else 0,
        meta_nbytes=len(meta) if in_slot else 0,
        num_samples=1,
        fetch_ns=0,
        collate_ns=0,
        encode_ns=0,
    )
    return batch, memory


def arena() -> Arena:
    return Arena(np.empty(1 << 14, np.uint8))


@pytest.mark.parametrize("in_slot", [True, False])
@given(sizes=st.lists(st.integers(0, 900), max_size=4))
def test_a_batch_is_read_wherever_its_structure_is(in_slot: bool, sizes: list[int]) -> None:
    block = arena()
    encoded = encode([np.arange(size) for size in sizes], block, Definitions().number_of)
    arrays = READER.read(*sent(encoded, block, in_slot=in_slot))
    assert [array.tolist() for array in arrays] == [list(range(size)) for size in sizes]


def test_a_large_array_is_a_view_of_the_slot() -> None:
    block = arena()
    batch, memory = sent(encode(np.arange(900), block, Definitions().number_of), block, in_slot=True)
    array = READER.read(batch, memory)
    assert np.shares_memory(array, memory)


@given(num_missing=st.integers(1, 60))
def test_a_structure_outside_its_slot_is_a_protocol_error(num_missing: int) -> None:
    block = arena()
    batch, memory = sent(encode(["text" * 20], block, Definitions().number_of), block, in_slot=True)
    nbytes = len(memory) - num_missing
    text = f"a structure of {batch.meta_nbytes} bytes lies outside a slot of {nbytes} bytes"
    with pytest.raises(ProtocolError, match=text):
        READER.read(batch, memory[:nbytes])


@pytest.mark.parametrize("in_slot", [True, False])
def test_the_users_decoder_gets_a_copy_of_the_bytes_of_the_users_encoder(in_slot: bool) -> None:
    block, given_bytes = arena(), list[Any]()
    batch, memory = sent(encode_bytes(b"user's bytes", block), block, in_slot=in_slot)

    def decode(data: bytes) -> str:
        given_bytes.append(data)
        return "decoded"

    assert BatchReader(Definitions(), decode).read(batch, memory) == "decoded"
    memory[:] = 0
    assert given_bytes == [b"user's bytes"]
