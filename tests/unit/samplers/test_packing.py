"""Packed batches, and documents that are cut into windows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import default_collate

from swift_loader import DataLoader, PackCollate, PackedDataset, SwiftLoader, TokenBudgetBatchSampler


def documents(lengths: list[int], tensors: bool = False) -> list[dict[str, Any]]:
    """Document i has tokens from 100 * i on."""
    made = [
        {"input_ids": 100 * i + np.arange(n), "mask": np.full((n, 2), i, np.float32)} for i, n in enumerate(lengths)
    ]
    return [{key: torch.from_numpy(one) if tensors else one for key, one in each.items()} for each in made]


def split(batch: dict[str, Any], field: str = "input_ids") -> list[list[Any]]:
    """Return the documents of a batch, empty ones included."""
    bounds = batch["cu_seqlens"].tolist()
    return [batch[field][a:b].tolist() for a, b in pairwise(bounds)]


@pytest.mark.parametrize("tensors", [False, True])
def test_a_batch_is_what_flash_attention_takes(tensors: bool) -> None:
    samples = [{**one, "name": f"d{i}"} for i, one in enumerate(documents([3, 0, 2], tensors))]
    batch = PackCollate()(samples)
    assert list(batch) == ["input_ids", "mask", "name", "position_ids", "cu_seqlens", "max_seqlen"]
    assert batch["input_ids"].tolist() == [0, 1, 2, 200, 201]
    assert batch["mask"].tolist() == [[0, 0]] * 3 + [[2, 2]] * 2
    assert batch["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert batch["cu_seqlens"].tolist() == [0, 3, 3, 5]
    assert (batch["max_seqlen"], type(batch["max_seqlen"])) == (3, int)
    assert batch["name"] == ["d0", "d1", "d2"]
    kinds = {key: batch[key].dtype for key in ("input_ids", "position_ids", "cu_seqlens")}
    library: Any = torch if tensors else np
    assert kinds == {"input_ids": library.int64, "position_ids": library.int64, "cu_seqlens": library.int32}
    assert isinstance(batch["mask"], torch.Tensor) == tensors
    single = PackCollate()([one["input_ids"] for one in samples])
    assert single["input_ids"].tolist() == batch["input_ids"].tolist()


@pytest.mark.parametrize("tensors", [False, True])
def test_a_padded_batch_has_a_fixed_shape(tensors: bool) -> None:
    samples = [{**one, "labels": one["input_ids"] + 1} for one in documents([3, 2], tensors)]
    collate = PackCollate(pad_to=8, pad_value=7, max_documents=5, mask_first=True, ignore_index=-1)
    batch = pickle.loads(pickle.dumps(collate))(samples)
    assert batch["input_ids"].tolist() == [0, 1, 2, 100, 101, 7, 7, 7]
    assert batch["labels"].tolist() == [-1, 2, 3, -1, 102, -1, -1, -1]
    assert batch["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 8, 8, 8]
    assert batch["max_seqlen"] == 3
    for collate in (PackCollate(pad_to=4), PackCollate(pad_to=8, max_documents=2), PackCollate(max_documents=1)):
        with pytest.raises(ValueError, match=r"the batch has 5 tokens in [23] documents"):
            collate(samples)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_labels_are_made_of_tokens(dtype: str) -> None:
    tokens = np.array([5, 6, 7], dtype)
    for sample in (tokens, *([torch.from_numpy(tokens)] if dtype != "uint16" else [])):
        batch = PackCollate(mask_first=True, pad_to=7)([sample, sample])
        assert batch["labels"].tolist() == [-100, 6, 7, -100, 6, 7, -100]
        assert str(batch["labels"].dtype).endswith("int64")
        assert str(batch["input_ids"].dtype).endswith(dtype)


def test_labels_are_made_of_the_tokens_wherever_they_may_be_padded() -> None:
    sample = {"attention_mask": np.ones(2, int), "input_ids": np.array([7, 8])}
    assert PackCollate(mask_first=True)([sample])["labels"].tolist() == [-100, 8]
    assert PackCollate(pad_to=3)([sample])["labels"].tolist() == [7, 8, -100]
    assert "labels" not in PackCollate()([sample]).keys() | PackCollate(pad_to=3)([np.ones(2)]).keys()
    windows = PackedDataset([sample, sample], [2, 2], 3, drop_last=False)
    batch = PackCollate(mask_first=True)([windows[0], windows[1]])
    assert batch["labels"].tolist() == [-100, 8, -100, -100, -100, -100]
    assert "labels" not in PackedDataset([sample, sample], [2, 2], 3)[0]


@pytest.mark.parametrize(
    ("samples", "options", "words"),
    [
        ([], {}, "nothing to pack"),
        ([{"text": "a"}], {}, "nothing to pack"),
        ([{"a": np.ones(2), "b": np.ones(3)}], {}, r"sample 0 can't be packed.*'a': 2, 'b': 3"),
        ([{"a": np.ones(2), "b": 1}], {"fields": ["a", "b"]}, "'b': None"),
        ([{"a": np.ones(2), "b": 1}, {"a": np.ones(2)}], {}, "another one has"),
        ([np.ones(2)], {"pad_to": 0}, "pad_to=0"),
        ([{"input_ids": np.ones(2), "labels": [1, 2]}], {"mask_first": True}, "can't mask 'labels'"),
        ([{"a": np.ones(2), "labels": np.ones(2)}], {"mask_first": True, "fields": ["a"]}, "can't mask 'labels'"),
        (
            [{"a": np.ones(n), "mask": np.ones((n, n), bool)} for n in (2, 3)],
            {},
            r"'mask' can't be joined: sample 1 has bool of the shape \(3, 3\), and sample 0 bool of \(2, 2\)",
        ),
        ([{"a": np.ones(2), "mask": np.array(["x", "y"])}], {}, "'mask' can't be joined: sample 0 has <U1"),
        ([{"a": np.ones(2, int), "mask": np.ones(2, bool)}], {"pad_to": 3, "pad_value": 7}, "'mask' is bool.*no 7"),
        ([np.ones(2, np.uint8)], {"pad_to": 3, "pad_value": 50256}, "'input_ids' is uint8, which has no 50256"),
        ([[1, 2], ["a"]], {}, "sample 1 can't be packed"),
    ],
)
def test_samples_that_do_not_fit_are_named(samples: list[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PackCollate(**options)(samples)
    with pytest.raises(TypeError, match="a list of names"):
        PackCollate(fields="tokens")
    with pytest.raises(TypeError, match="a list of input_ids has something else than numbers"):
        PackCollate()([[1, "a"]])
    with pytest.raises(TypeError, match=r"'a' of sample 1 can't become .* BFloat16"):
        PackCollate()([{"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.bfloat16)}])


@pytest.mark.parametrize("bare", [False, True])
def test_lists_of_numbers_are_packed_as_tensors(bare: bool) -> None:
    lists: list[Any] = [{"input_ids": list(range(n)), "weight": [0.5] * n, "tags": ["a"]} for n in (3, 0, 2)]
    tensors: list[Any] = [
        {**one, "input_ids": torch.tensor(one["input_ids"], dtype=torch.int64), "weight": torch.tensor(one["weight"])}
        for one in lists
    ]
    if bare:
        lists, tensors = ([one["input_ids"] for one in each] for each in (lists, tensors))
    for collate in (PackCollate(pad_to=8, mask_first=True), PackCollate(fields=["input_ids"])):
        found, expected = collate(lists), collate(tensors)
        assert found.keys() == expected.keys()
        assert found["input_ids"].dtype == torch.int64
        for name, value in expected.items():
            is_equal = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
            assert is_equal or (name == "weight" and collate.fields), name
    windows = PackedDataset(lists, [3, 0, 2], 2, shuffle=False)
    assert [window["input_ids"].tolist() for window in windows] == [[0, 1], [2, 0]]  # type: ignore[attr-defined]
    spans = [{"input_ids": np.arange(4), "span": [1, 3]}]
    assert PackCollate()(spans)["span"] == [[1, 3]], "a list beside an array stays what it is"


@pytest.mark.parametrize("drop_last", [True, False])
def test_windows_with_more_documents_than_max_documents_are_named_at_once(drop_last: bool) -> None:
    lengths = [3, 0, 1, 4, 1, 1, 1]  # windows of 4: 3 + 1, 4, 1 + 1 + 1 and padding
    data, most = documents(lengths), 2 if drop_last else 4
    with pytest.raises(ValueError, match=f"max_documents={most - 1} is too small: a window has {most} documents"):
        PackedDataset(data, lengths, 4, shuffle=False, drop_last=drop_last, collate=PackCollate(max_documents=most - 1))
    windows = PackedDataset(
        data, lengths, 4, shuffle=False, drop_last=drop_last, collate=PackCollate(max_documents=most)
    )
    assert [len(windows[number]["cu_seqlens"]) for number in range(len(windows))] == [most + 1] * len(windows)


def test_attention_and_loss_of_a_packed_batch_are_those_of_its_documents() -> None:
    torch.manual_seed(0)
    embedding, head = torch.randn(600, 8, dtype=torch.float64), torch.randn(8, 600, dtype=torch.float64)
    samples = [one["input_ids"] for one in documents([5, 1, 7, 3], tensors=True)]
    batch = PackCollate(mask_first=True, pad_to=20, max_documents=6)(samples)

    def losses(tokens: torch.Tensor, labels: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        x = embedding[tokens]
        logits = scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=seen)[0] @ head
        return cross_entropy(logits[:-1], labels[1:], reduction="sum")

    of = torch.bucketize(torch.arange(20), batch["cu_seqlens"][1:], right=True)
    seen = (of[:, None] == of[None]) & torch.ones(20, 20).tril().bool()
    packed = losses(batch["input_ids"], batch["labels"], seen)
    alone = sum(losses(one, one, torch.ones(len(one), len(one)).tril().bool()) for one in samples)
    torch.testing.assert_close(packed, alone)


@given(
    lengths=st.lists(st.integers(0, 30), max_size=30),
    max_tokens=st.integers(1, 40),
    shuffle=st.booleans(),
    tensors=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_windows_have_each_token_once_and_are_full(
    lengths: list[int], max_tokens: int, shuffle: bool, tensors: bool
) -> None:
    whole = documents(lengths, tensors)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 5}
    dropped = PackedDataset(whole, lengths, max_tokens, **options)
    windows = PackedDataset(whole, lengths, max_tokens, drop_last=False, **options)
    num_full, rest = divmod(sum(lengths), max_tokens)
    assert (len(dropped), len(windows)) == (num_full, num_full + (rest > 0))
    row: list[int] = []
    for number in range(len(windows)):
        window = windows[number]
        assert len(window["input_ids"]) == max_tokens
        pieces = split(window)[: None if number < num_full else -1]
        for piece in pieces:
            assert piece == list(range(piece[0], piece[0] + len(piece)))  # of one document
        row += [token for piece in pieces for token in piece]
        if number < num_full:
            assert split(dropped[number - num_full]) == pieces
    assert sorted(row) == sorted(token for one in whole for token in one["input_ids"].tolist())
    order = list(dict.fromkeys(token // 100 for token in row))
    assert order == [number for number in order if lengths[number]]
    assert (order == sorted(order)) or shuffle
    if len(windows) > 1:
        both = PackCollate()([windows[0], windows[1]])
        assert split(both) == split(windows[0]) + split(windows[1])
        assert both["max_seqlen"] == max(windows[0]["max_seqlen"], windows[1]["max_seqlen"])
    with pytest.raises(IndexError, match="out of range"):
        windows[len(windows)]


def test_a_seed_gives_another_order_and_documents_keep_their_fields() -> None:
    lengths = [4, 9, 2, 7, 5, 3]
    named = [{**one, "name": str(i)} for i, one in enumerate(documents(lengths))]
    first, second = (PackedDataset(named, lengths, 30, seed=seed)[0] for seed in (1, 2))
    assert first["name"] != second["name"]
    assert [str(piece[0] // 100) for piece in split(first)] == first["name"]
    halves = PackedDataset(named, lengths, 20, seed=1, drop_last=False)
    empty = PackCollate(mask_first=True)([{**documents([0])[0], "name": "empty"}])
    names = halves[0]["name"] + ["empty"] + halves[1]["name"]
    both = PackCollate(max_documents=12)([halves[0], empty, halves[1]])
    assert both["name"] == names + [None] * (12 - len(names))
    assert split(both)[: len(names)] == [*split(halves[0]), [], *split(halves[1])]


def test_lengths_that_are_not_those_of_the_documents_are_named() -> None:
    whole = documents([3, 4])
    with pytest.raises(ValueError, match="lengths has 1 documents, but the dataset has 2"):
        PackedDataset(whole, [3], 2)
    with pytest.raises(ValueError, match=r"document 1 has 4 tokens, but lengths\[1\]=5"):
        PackedDataset(whole, [3, 5], 8, shuffle=False)[0]


def test_workers_need_no_torch() -> None:
    program = (
        "import sys, pickle, numpy as np\n"
        "from swift_loader import PackCollate, PackedDataset\n"
        "windows = pickle.loads(pickle.dumps(PackedDataset([np.arange(9)] * 9, [9] * 9, 20)))\n"
        "assert len(PackCollate()([windows[0], windows[1]])['input_ids']) == 40\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.processes
def test_loaders_take_packed_batches_and_windows() -> None:
    lengths = [1 + 7 * i % 23 for i in range(60)]
    whole = documents(lengths, tensors=True)
    sampler = TokenBudgetBatchSampler(lengths, 64, padded=False, fit="best", num_replicas=1, rank=0, seed=0)
    expected = [PackCollate(pad_to=64)([whole[index] for index in batch]) for batch in sampler]
    sampler.set_epoch(0)
    loader: Any = DataLoader(whole, batch_sampler=sampler, collate_fn=PackCollate(pad_to=64), num_workers=2)  # type: ignore[arg-type]
    for batch, same in zip(loader, expected, strict=True):
        assert batch["max_seqlen"] == same["max_seqlen"]
        assert batch["cu_seqlens"].dtype == torch.int32
        assert all(torch.equal(batch[key], same[key]) for key in ("input_ids", "position_ids", "cu_seqlens", "mask"))

    windows = PackedDataset(documents(lengths), lengths, 64)
    seen: list[int] = []
    with SwiftLoader(dataset=windows, batch_size=2, seed=0, worker_per_consumer=2, collate_fn=PackCollate()) as packed:
        for batch in packed:
            assert len(batch["input_ids"]) == int(batch["cu_seqlens"][-1])
            seen += batch["input_ids"].tolist()
    assert len(set(seen)) == len(seen) == 64 * len(windows)
    one = next(iter(DataLoader(windows, batch_size=None)))  # type: ignore[arg-type]
    assert torch.equal(one["input_ids"], default_collate([windows[0]["input_ids"]])[0])
