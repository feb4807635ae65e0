from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from swift_loader import StateMismatch, SwiftLoader, SwiftLoaderWarning
from swift_loader.vision import ImageStage, PrefetchLoader, RandomErasing
from tests.support.pictures import Pictures
from tests.unit.vision.conftest import assert_same_batches, seed_everything


def make_swift(workers: int = 0, **options: Any) -> SwiftLoader:
    options = {"collate_fn": default_collate, "seed": 5, **options}
    return SwiftLoader(dataset=Pictures(), batch_size=4, worker_per_consumer=workers, **options)


def make_torch(**options: Any) -> DataLoader[Any]:
    return DataLoader(Pictures(), batch_size=4, collate_fn=default_collate, **options)  # type: ignore[arg-type]


def erased_by_timm(timm_data: Any, batches: Any, keys: list[int], **options: Any) -> list[Any]:
    """Return what timm's PrefetchLoader makes of the batches, each after seeding with its key."""
    moved = []
    for batch, key in zip(batches, keys, strict=True):
        seed_everything(key)
        moved += timm_data.loader.PrefetchLoader([batch], device=torch.device("cpu"), **options)
    return moved


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)},
        {"mean": 0.5, "std": 0.5, "channels": 3},
        {"img_dtype": torch.bfloat16},
        {"img_dtype": torch.float16},
        {"fp16": True, "img_dtype": torch.float32},
    ],
    ids=str,
)
def test_another_loader_gives_what_timm_makes_of_it(timm_data: Any, options: dict[str, Any]) -> None:
    theirs = list(timm_data.loader.PrefetchLoader(make_torch(), device=torch.device("cpu"), **options))
    loader = PrefetchLoader(make_torch(), device="cpu", **options)
    assert_same_batches(list(loader), theirs)
    assert_same_batches(list(loader), theirs)  # and so again


@pytest.mark.parametrize("re_mode", ["const", "rand", "pixel"])
@pytest.mark.parametrize(("re_count", "re_num_splits", "img_dtype"), [(1, 0, None), (3, 2, torch.float16)])
def test_erasing_is_timms_under_the_keys_of_the_batches(
    timm_data: Any, keys: list[int], re_mode: str, re_count: int, re_num_splits: int, img_dtype: Any
) -> None:
    options: dict[str, Any] = {"re_prob": 0.7, "re_mode": re_mode, "re_count": re_count, "img_dtype": img_dtype}
    options["re_num_splits"] = re_num_splits
    ours = list(PrefetchLoader(make_torch(), device="cpu", **options))
    assert len(set(keys)) == len(ours)
    assert_same_batches(ours, erased_by_timm(timm_data, make_torch(), keys, **options))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_a_swift_loader_gives_the_same_images(workers: int) -> None:
    expected = list(PrefetchLoader(make_torch(), device="cpu"))
    with PrefetchLoader(make_swift(workers, shuffle=False), device="cpu") as loader:
        assert len(loader) == len(expected)
        assert_same_batches(list(loader), expected)
        assert loader.report()


def test_a_resumed_swift_loader_goes_on_with_the_same_bits_if_it_has_the_stage_itself() -> None:
    stage = ImageStage(erasing=RandomErasing(0.6, mode="pixel", max_count=2))

    def started() -> SwiftLoader:
        loader = make_swift()
        loader.start(device="cpu", to_device=stage)
        return loader

    with started() as loader:
        expected = [*loader, *loader]
    with started() as loader:
        batches = iter(loader)
        begun = [next(batches), next(batches)]
        state = loader.state_dict()
    with make_swift() as loader:
        loader.load_state_dict(state)
        loader.start(device="cpu", to_device=stage)
        assert_same_batches([*begun, *loader, *loader], expected)


def test_the_epoch_can_be_chosen() -> None:
    with PrefetchLoader(make_swift(), device="cpu") as loader:
        epochs = [[targets.tolist() for _, targets in loader] for _ in range(2)]
        loader.sampler.set_epoch(0)
        assert [targets.tolist() for _, targets in loader] == epochs[0]
        loader.set_epoch(1)
        assert [targets.tolist() for _, targets in loader] == epochs[1]


def test_what_training_loops_ask_for_is_the_loaders() -> None:
    source = make_torch()
    loader = PrefetchLoader(source, device="cpu")
    assert loader.loader is source
    assert loader.dataset is source.dataset
    assert loader.sampler is source.sampler
    assert loader.batch_sampler is source.batch_sampler
    assert (loader.batch_size, loader.collate_fn, loader.mixup_enabled) == (4, default_collate, False)
    assert loader.report() == {}
    swift = PrefetchLoader(make_swift(), device="cpu")
    assert (swift.batch_size, swift.batch_sampler, swift.collate_fn) == (4, None, default_collate)
    assert isinstance(swift.dataset, Pictures)
    swift.close()


def test_a_generator_goes_on_and_has_no_state() -> None:
    def generate() -> Iterator[Any]:
        yield from make_torch()

    with PrefetchLoader(generate(), device="cpu") as loader:
        assert len([next(iter(loader)) for _ in range(2)]) == 2
        assert len(list(loader)) == 3
        with pytest.raises(TypeError, match="no len"):
            len(loader)
        with pytest.raises(StateMismatch, match="has no load_state_dict"):
            loader.load_state_dict({"epoch": 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_becomes_the_cpu_where_there_is_none_with_one_warning() -> None:
    with pytest.warns(SwiftLoaderWarning, match=r"torch finds no CUDA device: images stay on the CPU") as caught:
        loader = PrefetchLoader(make_torch(), device=torch.device("cuda"))
    images, _ = next(iter(loader))  # a second warning would be an error
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert images.device.type == loader.device.type == "cpu"


def make_mixup(timm_data: Any, **options: Any) -> Any:
    return timm_data.FastCollateMixup(mixup_alpha=1.0, label_smoothing=0.0, num_classes=5, **options)


def is_mixed(batch: Any) -> bool:
    return bool((batch[1].max(dim=1).values < 1).any())


def test_a_swift_loader_whose_workers_would_go_on_mixing_is_refused(timm_data: Any) -> None:
    with PrefetchLoader(make_swift(collate_fn=make_mixup(timm_data)), device="cpu") as loader:
        loader.mixup_enabled = True
        with pytest.raises(TypeError, match=r"a SwiftLoader, whose workers keep their collate_fn; .*with_collate_fn"):
            loader.mixup_enabled = False
        assert loader.mixup_enabled


def test_the_collate_function_of_a_data_loader_is_told(timm_data: Any) -> None:
    collate_fn = make_mixup(timm_data)
    source: DataLoader[Any] = DataLoader(Pictures(), batch_size=4, collate_fn=collate_fn)  # type: ignore[arg-type]
    loader = PrefetchLoader(source, device="cpu")
    assert loader.mixup_enabled
    assert any(map(is_mixed, list(loader)))
    loader.mixup_enabled = False
    assert not loader.mixup_enabled
    assert not any(map(is_mixed, list(loader)))


def test_a_collate_function_that_cannot_mix_can_only_be_told_not_to() -> None:
    loader = PrefetchLoader(make_torch(), device="cpu")
    loader.mixup_enabled = False
    with pytest.warns(SwiftLoaderWarning, match="has no effect: the collate_fn can't mix"):
        loader.mixup_enabled = True
