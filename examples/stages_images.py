"""Go through a folder of JPEGs with StageLoader, and resume in the middle of an epoch.

    python examples/stages_images.py [FOLDER]
    python examples/stages_images.py --save place.json --stop-after 5
    python examples/stages_images.py --resume place.json

Without a folder, it makes one from photos that come with scikit-image. Pillow decodes in threads. The result is the
mean colour of all images of the epoch: a stopped and resumed run has the same one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.progress import Progress
from skimage import data

from swift_loader.pipeline import StageLoader

SIZE = 224
BATCH_SIZE = 16


def make_folder(folder: Path) -> None:
    """Write crops of photos as JPEGs."""
    draws = np.random.default_rng(0)
    for name in ("astronaut", "chelsea", "coffee", "rocket"):
        photo = Image.fromarray(getattr(data, name)())
        target = folder / name
        target.mkdir()
        for number in range(80):
            left, top = (int(draws.integers(extent - 200)) for extent in photo.size)
            photo.crop((left, top, left + 200, top + 200)).save(target / f"{number:03}.jpg", quality=90)


def decode(path: Path) -> NDArray[np.uint8]:
    """Return an image, `(224, 224, 3) uint8`."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((SIZE, SIZE)))


def batchify(images: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
    """Return a batch, `(B, 3, 224, 224) float32` from 0 to 1."""
    batch: NDArray[np.float32] = np.stack(images).transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    return batch


def main() -> None:
    """Make the images, unless a folder was given, and go through them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a folder of JPEGs; default: one that is made")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the place there at the end")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after so many batches")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue a saved run")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        run(arguments, arguments.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        run(arguments, Path(folder))


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Go through the images, and print their mean colour."""
    paths = sorted(folder.rglob("*.jpg"))
    loader = StageLoader(
        paths,
        preprocessor=decode,
        batch_size=BATCH_SIZE,
        aggregator=batchify,
        num_threads=arguments.threads,
        output_order="input",
    )
    total, num_images = np.zeros(3), 0
    if arguments.resume:
        saved: dict[str, Any] = json.loads(arguments.resume.read_text(encoding="utf-8"))
        loader.load_state_dict(saved["loader"])
        loader.set_epoch(saved["loader"]["epoch"])  # even if nothing is left of it
        total, num_images = np.array(saved["total"]), saved["num_images"]
    with Progress() as progress:
        bar = progress.add_task("images", total=len(paths), completed=num_images)
        for number, batch in enumerate(loader, 1):
            total += batch.astype(np.float64).mean((2, 3)).sum(0)
            num_images += len(batch)
            progress.advance(bar, len(batch))
            if number == arguments.stop_after:
                break
    if arguments.save:
        place = {"loader": loader.state_dict(), "total": total.tolist(), "num_images": num_images}
        arguments.save.write_text(json.dumps(place), encoding="utf-8")
    red, green, blue = total / num_images
    print(f"mean colour of {num_images} images: {red:.9f} {green:.9f} {blue:.9f}")


if __name__ == "__main__":
    main()
