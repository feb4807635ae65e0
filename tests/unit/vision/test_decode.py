"""Decoding is compared with Pillow's, which users know: pixels, sizes and errors, whichever library is installed."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

Image: Any = pytest.importorskip("PIL.Image")

from swift_loader.vision import ImageDecoder, decode  # noqa: E402
from tests.support.helpers import make_loader  # noqa: E402

LIBRARIES: list[Any] = [
    pytest.param(
        "simplejpeg", marks=pytest.mark.skipif(find_spec("simplejpeg") is None, reason="simplejpeg isn't there")
    ),
    "pillow",
]
HEIGHT, WIDTH = 150, 231


def picture(height: int = HEIGHT, width: int = WIDTH) -> Any:
    """Return a smooth picture with noise, as a photo is."""
    y, x = np.mgrid[:height, :width] / 20
    waves = np.stack([np.sin(x + y), np.cos(x * y / 9), np.sin(3 * y) + x / 30], axis=-1) * 90 + 128
    return Image.fromarray((waves + np.random.default_rng(1).normal(0, 8, waves.shape)).clip(0, 255).astype(np.uint8))


def save(image: Any, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return save(picture(), exif=exif)


FILES: dict[str, Callable[[], bytes]] = {
    "4:2:0": lambda: save(picture()),
    "4:4:4": lambda: save(picture(), quality=95, subsampling=0),
    "4:2:2, progressive": lambda: save(picture(), subsampling=1, progressive=True),
    "stored as RGB": lambda: save(picture(), keep_rgb=True),
    "grey": lambda: save(picture().convert("L")),
    "CMYK": lambda: save(picture().convert("CMYK")),
    "to be turned": turned,
    "a pixel": lambda: save(picture(1, 1)),
    "few pixels": lambda: save(picture(7, 5)),
    "followed by other data": lambda: save(picture()) + bytes(99),
    "PNG": lambda: save(picture(), "PNG"),
    "PNG with alpha": lambda: save(picture().convert("RGBA"), "PNG"),
    "GIF": lambda: save(picture(), "GIF"),
    "WebP": lambda: save(picture(), "WEBP"),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", FILES)
def test_pixels_are_those_of_pillow(kind: str, library: Any, tmp_path: Path) -> None:
    data = FILES[kind]()
    path = tmp_path / "image"
    path.write_bytes(data)
    expected = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    decoder = ImageDecoder(library=library)
    sources: list[Any] = [path, f"{path}", data, memoryview(data), np.frombuffer(data, np.uint8)]
    for source in sources:
        pixels = decoder(source)
        assert (pixels.dtype, pixels.flags.c_contiguous, pixels.flags.writeable) == (np.uint8, True, True)
        np.testing.assert_array_equal(pixels, expected)
    np.testing.assert_array_equal(np.array(decoder.image(path)), expected)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(64, 64), (40, 300), (HEIGHT, WIDTH), (1, 1), 36, 75, 151, 400])
@pytest.mark.parametrize("kind", ["4:2:0", "4:4:4", "4:2:2, progressive", "CMYK", "PNG"])
def test_a_size_differs_little_from_pillows_resize(kind: str, size: Any, interpolation: Any) -> None:
    data = FILES[kind]()
    height, width = size if isinstance(size, tuple) else (size, int(size * WIDTH / HEIGHT))
    image = Image.open(io.BytesIO(data)).convert("RGB")
    expected = np.array(image.resize((width, height), getattr(Image.Resampling, interpolation.upper()))).astype(int)
    exact = ImageDecoder(size, interpolation)(data)
    assert np.abs(exact - expected).max() <= 2
    scaled = ImageDecoder(size, interpolation, dct_scaling=True)(data)
    assert np.abs(scaled - expected).mean() < 6  # this picture has more details than a photo
    if kind == "PNG" or 2 * height > HEIGHT or 2 * width > WIDTH:
        np.testing.assert_array_equal(scaled, exact)
    np.testing.assert_array_equal(scaled, ImageDecoder(size, interpolation, True, "pillow")(data))


def outcome(decoder: ImageDecoder, data: bytes) -> Any:
    try:
        return decoder(data).tobytes()
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
@given(st.data())
def test_damaged_files_have_the_same_outcome_whichever_library_is_installed(data: st.DataObject) -> None:
    content = bytearray(FILES[data.draw(st.sampled_from(["4:2:0", "4:2:2, progressive", "grey", "CMYK"]))]())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, 2 * len(content))) :]
    size = data.draw(st.sampled_from([None, 30]))
    ours, pillows = ImageDecoder(size, dct_scaling=True), ImageDecoder(size, dct_scaling=True, library="pillow")
    assert outcome(ours, bytes(content)) == outcome(pillows, bytes(content))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_file_that_is_no_image_is_named(library: Any, tmp_path: Path) -> None:
    decoder = ImageDecoder(library=library)
    for content in (b"", b"\xff\xd8\xff", b"no image", save(picture())[:4000]):
        (tmp_path / "cat.jpg").write_bytes(content)
        with pytest.raises(ValueError, match=r"cat\.jpg can't be decoded: .*; replace the file, or leave it out"):
            decoder(tmp_path / "cat.jpg")
        with pytest.raises(ValueError, match=f"an image of {len(content)} bytes can't be decoded"):
            decoder(content)
    with pytest.raises(FileNotFoundError, match=r"dog\.jpg"):
        decoder(tmp_path / "dog.jpg")
    with pytest.raises(TypeError, match="bytes-like"):
        decoder(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("library", LIBRARIES)
def test_pillows_limit_of_pixels_holds(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match="decompression bomb"):
        ImageDecoder(library=library)(FILES["4:2:0"]())


def test_the_library_is_the_fastest_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "simplejpeg", object())
    decoder = pickle.loads(pickle.dumps(ImageDecoder(64)))
    assert "library='simplejpeg'" in repr(decoder)
    monkeypatch.setattr(decode, "simplejpeg", None)
    assert decoder(FILES["4:2:0"]()).shape == (64, 98, 3)  # as on a node that doesn't have it
    assert ImageDecoder().library == "pillow"
    with pytest.raises(ImportError, match="pip install simplejpeg"):
        ImageDecoder(library="simplejpeg")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": 0}, ValueError, "at least 1"),
        ({"size": (224, 0)}, ValueError, "at least 1"),
        ({"size": (1, 2, 3)}, ValueError, "must be \\(height, width\\)"),
        ({"size": "224"}, TypeError, "must be an integer"),
        ({"interpolation": "nearest"}, ValueError, "bicubic"),
        ({"library": "opencv"}, ValueError, "simplejpeg"),
        ({"dct_scaling": None}, TypeError, "True or False"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ImageDecoder(**options)


@pytest.mark.processes
def test_a_worker_decodes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.jpg" for number in range(16)]
    for number, path in enumerate(paths):
        path.write_bytes(save(picture(100 + number)))
    decoder = ImageDecoder((32, 48))
    with make_loader(partial(Photos, paths, decoder), shuffle=False) as loader:
        np.testing.assert_array_equal(np.concatenate(list(loader)), [decoder(path) for path in paths])


class Photos:
    def __init__(self, paths: list[Path], decoder: ImageDecoder) -> None:
        self.paths, self.decoder = paths, decoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.decoder(self.paths[index])
