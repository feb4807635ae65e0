"""The examples run as a newcomer would run them: as scripts, in a process of their own."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.helpers import ROOT, exhaustive, program_environment

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 180

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

TINY = "--epochs 2 --batch-size 128 --workers 1"
SECOND_SAVED = "epoch-1-sample-256"
"""After 14 of 24 steps, in the middle of the second epoch."""

RESULT = re.compile(r"^test accuracy .*$", re.MULTILINE)


DRIVER = """
import runpy, sys
folder, *runs = sys.argv[1:]
for run in runs:
    name, *arguments = run.split()
    sys.argv = [f"{folder}/{name}", *arguments]
    sys.path[0] = folder
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs several examples one after the other in one process: importing a framework takes longer than any of them."""


PLOTTING = ("matplotlib", "PIL")


def run_example(
    folder: Path, name: str, *arguments: str, needs: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return run_python(folder, str(EXAMPLES / name), *arguments, needs=needs)


def run_on_train_digits(
    folder: Path, code: str, *arguments: str, needs: tuple[str, ...] = (), stream: str = "stdout"
) -> str:
    """Return what code prints that uses the module `train_digits`; it finds the arguments in `sys.argv`."""
    head = f"import json, sys; sys.path.insert(0, {str(EXAMPLES)!r}); import train_digits\n"
    run = run_python(folder, "-c", head + textwrap.dedent(code), *arguments, needs=needs)
    assert run.returncode == 0, run.stderr
    return str(getattr(run, stream))


def run_examples(folder: Path, *runs: str, needs: tuple[str, ...]) -> list[str]:
    """Run examples, each given as `name.py arguments`; return the results that they print."""
    run = run_python(folder, "-c", DRIVER, str(EXAMPLES), *runs, needs=needs)
    assert run.returncode == 0, run.stderr
    return RESULT.findall(run.stdout)


def run_python(folder: Path, *arguments: str, needs: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    missing = [module for module in ("sklearn", *needs) if find_spec(module) is None]
    if missing:
        pytest.skip(f"the examples need {', '.join(missing)}: pip install -r requirements.txt")
    command, environment = [sys.executable, *arguments], program_environment(folder)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_the_digits_example_needs_versions_that_all_tests_have() -> None:
    all_requirements = (ROOT / "requirements.txt").read_text().splitlines()
    requirements = (EXAMPLES / "requirements.txt").read_text().splitlines()

    assert set(requirements[1:]) <= set(all_requirements)


@pytest.mark.slow
def test_digits_are_learned_and_drawn_and_the_limit_is_named(tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"

    arguments = ["--epochs", "6", "--required-accuracy", "0.9", "--plot", str(plot)]
    run = run_example(tmp_path, "train_digits.py", *arguments, needs=PLOTTING)

    assert run.returncode == 0, run.stderr
    assert "2 workers" in run.stdout
    epoch_line = re.compile(r"^epoch +(\d+): loss \d+\.\d+, held-out accuracy \d+\.\d+%$", re.MULTILINE)
    assert epoch_line.findall(run.stdout) == ["1", "2", "3", "4", "5", "6"]
    verdict = rf"\d+\.\d+% right, see {plot}; (data-bound|balanced|model-bound): the loop waits for data .+"
    assert re.fullmatch(verdict, run.stdout.splitlines()[-1])
    pixels = np.asarray(pytest.importorskip("PIL.Image").open(plot).convert("RGB")).reshape(-1, 3)
    for curve in ((0x1F, 0x6F, 0xB4), (0xD1, 0x60, 0x3D)):
        assert (pixels == curve).all(axis=1).sum() > 500


@pytest.mark.exhaustive
def test_digits_without_workers_end_with_status_1_if_the_accuracy_is_too_low(tmp_path: Path) -> None:
    plot = tmp_path / "curves.svg"

    arguments = f"--workers 0 --threads 2 --epochs 1 --required-accuracy 1.01 --plot {plot}"
    run = run_example(tmp_path, "train_digits.py", *arguments.split(), needs=PLOTTING)

    assert run.returncode == 1
    assert "0 workers" in run.stdout
    last_line = run.stderr.splitlines()[-1]
    assert re.fullmatch(r"held-out accuracy is \d+\.\d+%, below the 101\.00% that are required", last_line)
    assert "<svg" in plot.read_text(encoding="utf-8")


@pytest.mark.slow
def test_bad_arguments_end_at_once_with_a_line_that_says_what_to_change(tmp_path: Path) -> None:
    code = """
    for options in json.loads(sys.argv[1]):
        if options == "without matplotlib":
            sys.modules["matplotlib"] = None
            options = ["--plot", "curves.png"]
        sys.argv[1:] = options
        try:
            train_digits.main()
        except SystemExit as error:
            print(error.code, file=sys.stderr)
    """
    missing, folder = tmp_path / "missing" / "curves.png", tmp_path / "folder.png"
    folder.mkdir()
    messages = {
        ("--epochs", "0"): "--epochs is 0; it must be at least 1",
        ("--batch-size", "0"): "--batch-size is 0; it must be at least 1",
        ("--workers", "-1"): "--workers is -1; it must be at least 0",
        ("--threads", "0"): "--threads is 0; it must be at least 1",
        ("--plot", "curves.jpg"): "--plot is curves.jpg; the name must end in one of .png, .svg, .pdf",
        ("--plot", str(folder)): f"--plot is {folder}, which is a folder; name a file",
        ("--plot", str(missing)): f"--plot is {missing}; there is no folder {missing.parent}: create it first",
        ("--plot", "/proc/curves.png"): "--plot is /proc/curves.png; can't create a file in /proc: ",
        "without matplotlib": "--plot needs matplotlib, which can't be imported",
    }

    errors = run_on_train_digits(tmp_path, code, json.dumps(list(messages)), needs=PLOTTING, stream="stderr")

    lines = errors.splitlines()
    said = [line for line, status in pairwise(lines) if status == "2"]
    assert len(said) == len(messages), errors
    for message, line in zip(messages.values(), said, strict=True):
        assert message in line
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.slow
def test_frameworks_that_are_stopped_and_resumed_train_the_model_of_an_uninterrupted_plain_loop(tmp_path: Path) -> None:
    stopped = f"{TINY} --save-every 7 --stop-after 16 --save {tmp_path}"

    results = run_examples(
        tmp_path,
        f"torchrun_example.py {TINY}",
        f"torchrun_example.py {stopped}/torchrun",
        f"torchrun_example.py {TINY} --resume {tmp_path}/torchrun/{SECOND_SAVED}",
        f"fabric_example.py {stopped}/fabric",
        f"fabric_example.py {TINY} --resume {tmp_path}/fabric/{SECOND_SAVED}",
        f"accelerate_example.py {stopped}/accelerate",
        f"accelerate_example.py {TINY} --resume {tmp_path}/accelerate/{SECOND_SAVED}",
        f"lightning_example.py {stopped}/lightning",
        f"lightning_example.py {TINY} --resume {tmp_path}/lightning/epoch=1-step=14.ckpt",
        needs=("lightning", "accelerate"),
    )

    assert results == results[:1] * 5


@pytest.mark.exhaustive
def test_a_hugging_face_trainer_that_is_stopped_and_resumed_trains_the_same_model(tmp_path: Path) -> None:
    results = run_examples(
        tmp_path,
        f"huggingface_example.py {TINY}",
        f"huggingface_example.py {TINY} --save-every 7 --stop-after 16 --save {tmp_path}/saved",
        f"huggingface_example.py {TINY} --resume {tmp_path}/saved/checkpoint-14",
        needs=("transformers", "accelerate"),
    )

    assert results == results[:1] * 2


@pytest.mark.slow
def test_a_timm_run_that_is_stopped_and_resumed_trains_the_model_of_an_uninterrupted_one(
    tmp_path: Path, photos: Path
) -> None:
    tiny = "--epochs 1 --batch-size 128"
    for part in ("train", "val"):
        (tmp_path / part).symlink_to(photos)

    results = run_examples(
        tmp_path,
        f"timm_example.py {tiny} --workers 0",
        f"timm_example.py {tiny} --workers 1 --save-every 4 --stop-after 6 --save {tmp_path}/saved",
        f"timm_example.py {tiny} --workers 0 --resume {tmp_path}/saved/epoch-0-sample-512",
        f"timm_example.py --epochs 1 --batch-size 4 --workers 0 --root {tmp_path}",
        needs=("timm", "torchvision", "PIL"),
    )

    assert len(results) == 3
    assert results[0] == results[1]
    assert "of 359 digits" in results[0]
    assert "of 14 photos" in results[2]


@pytest.mark.exhaustive
def test_two_ranks_evaluate_each_held_out_digit_once(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    run = run_python(tmp_path, *torchrun, str(EXAMPLES / "torchrun_example.py"), *TINY.split())

    assert run.returncode == 0, run.stderr
    (result,) = RESULT.findall(run.stdout)
    assert "of 359 digits" in result


@pytest.mark.exhaustive
def test_mnist_is_read_from_the_files_that_torchvision_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for prefix, num_images in (("train", 65), ("t10k", 33)):
        images = random.integers(0, 256, (num_images, 28, 28), np.uint8)
        header = b"\0\0\x08\x03" + np.array(images.shape, ">i4").tobytes()
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = b"\0\0\x08\x01" + np.array([num_images], ">i4").tobytes()
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(header + bytes(index % 10 for index in range(num_images)))

    (result,) = run_examples(tmp_path, f"fabric_example.py --epochs 1 --mnist {tmp_path}", needs=("lightning",))

    assert "of 33 digits" in result


@pytest.mark.slow
def test_a_language_model_on_a_mixture_of_packed_texts_resumes_to_the_last_bit(tmp_path: Path) -> None:
    pages = tmp_path / "man" / "man1"
    pages.mkdir(parents=True)
    for name, text in ("page.1.gz", b".TH PAGE 1\n" * 1500), ("noise.1.gz", np.random.default_rng(0).bytes(8000)):
        (pages / name).write_bytes(gzip.compress(text))

    run = run_example(tmp_path, "train_texts.py", "--prove", "--steps", "6", "--man-pages", str(pages.parent))

    assert run.returncode == 0, run.stderr
    losses = re.findall(r"^step (\d): (loss .+ python .+ man .+), [\d.]+ steps/s$", run.stdout, re.MULTILINE)
    left_out = re.findall(r"^step (\d): left out Row\(source='man'", run.stdout, re.MULTILINE)
    assert [step for step, _ in losses] == [*"123456", *"123", *"456"]
    assert losses[:6] == losses[6:]
    assert left_out[: len(left_out) // 2] == left_out[len(left_out) // 2 :] != []
    assert run.stdout.splitlines()[-1].endswith("the same 6 losses and weights, to the last bit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs", "stop", "begins"),
    [
        ("stages_images.py", ("PIL", "skimage"), "5", "mean colour of 320 images"),
        exhaustive("stages_parquet.py", ("pyarrow",), "200", "price = 3.0"),
        exhaustive("stages_speech.py", ("fsspec", "aiohttp"), "77", "accuracy 9"),
    ],
)
def test_stages_that_are_stopped_and_resumed_give_the_same_result(
    name: str, needs: tuple[str, ...], stop: str, begins: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    whole = run_example(tmp_path, name, needs=needs)
    first = run_example(tmp_path, name, "--save", saved, "--stop-after", stop, needs=needs)
    rest = run_example(tmp_path, name, "--resume", saved, needs=needs)
    for run in (whole, first, rest):
        assert run.returncode == 0, run.stderr
    result = whole.stdout.splitlines()[-1]
    assert result.startswith(begins)
    assert rest.stdout.splitlines()[-1] == result
    assert first.stdout.splitlines()[-1] != result
