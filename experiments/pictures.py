"""Make the README's picture, or pictures of a toy data set for trying recipes on folders of images.

    python experiments/pictures.py [FOLDER]
    python experiments/pictures.py --textures FOLDER

The first draws memory by strategy, from the programs that `jdp plan` compiles. It needs `pip install '.[aot]'`, no GPU,
and some 60 s of processor time. FOLDER: the SVG's folder, by default `.github/pictures`. The file follows the reader's
setting, light or dark.

The second writes FOLDER/train and FOLDER/val, each with a folder for each of four classes of JPEG files: horizontal
stripes, vertical stripes, a chessboard, noise; with random colours, sizes and periods. Train on them as on ImageNet:

    jdp train experiments/imagenet_vit.toml --data.source hf:imagefolder:FOLDER:train \\
        --data.heldout hf:imagefolder:FOLDER:validation --model.classes 4
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "lessons"))

from narration import keep

from jdp.report.charts import INK, SERIES, SETTINGS, chart

ROOT = Path(__file__).parents[1]
EXPERIMENT, TARGET = "experiments/llama_8b_zero3.toml", "h100:8x8"
CLASSES = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "temporaries": "gradients, working copy, activations",
}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def main(folder: Path = ROOT / ".github" / "pictures") -> None:
    memory(planned(), folder / "memory.svg")


def planned() -> list[dict[str, Any]]:
    """Run `jdp plan`; return a candidate for each strategy."""
    command = [sys.executable, "-m", "jdp", "plan", EXPERIMENT, "--target", TARGET, "--json"]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    candidates = {entry["strategy"]: entry for entry in json.loads(printed)["strategies"]}
    return [candidates[strategy] for strategy in STRATEGIES]


@mpl.rc_context(SETTINGS)
def memory(candidates: list[dict[str, Any]], path: Path) -> None:
    """Draw the peak memory of a device by class, beside the device's memory."""
    figure, (axes,) = chart(height=2.9, width=8.5)
    for row, candidate in enumerate(candidates):
        left = 0.0
        for (name, label), colour in zip(CLASSES.items(), SERIES, strict=False):
            size = candidate["memory"][name] / 2**30
            axes.barh(row, size, left=left, height=0.62, color=colour, label=label if row == 0 else None)
            left += size
        axes.text(left + 1, row, f"{candidate['bytes_per_device'] / 2**30:.0f} GiB", va="center", color=INK)
    available = candidates[0]["available_bytes"] / 2**30
    axes.axvline(available, color=INK, linewidth=1, linestyle="--")
    axes.text(available + 1, -0.62, f"an H100 has {available:.0f} GiB", va="center", color=INK)
    axes.set_yticks(range(len(candidates)), [candidate["strategy"] for candidate in candidates])
    axes.set(xlim=(0, 165), ylim=(len(candidates) - 0.5, -0.95), xlabel="GiB a GPU, at the peak of a step")
    axes.legend(loc="lower right")
    keep(figure, path, described(candidates))


def described(candidates: list[dict[str, Any]]) -> str:
    """Return the picture in words, for people who cannot see it."""
    sizes = ", ".join(f"{entry['strategy']} {entry['bytes_per_device'] / 2**30:.0f} GiB" for entry in candidates)
    return f"Memory of each of 64 H100s while Llama 3 8B trains: {sizes}. A GPU has 77 GiB."


def textures(folder: Path, train: int = 400, val: int = 100, side: int = 48) -> None:
    """Write this number of pictures, of four classes together."""
    from PIL import Image

    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for number in range(count):
            name = ("board", "lying", "noise", "standing")[number % 4]
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            height, width = random.integers(side, 2 * side, 2)
            y, x = (np.floor(np.arange(n) / random.uniform(3, 8)) % 2 for n in (height, width))
            grid = np.ones((height, width))
            shape = {
                "board": np.logical_xor(y[:, None], x) * grid,
                "lying": y[:, None] * grid,
                "standing": x * grid,
                "noise": random.integers(0, 2, (height, width)),
            }[name]
            dark, light = random.integers(0, 100, 3), random.integers(150, 256, 3)
            values = np.where(shape[..., None] > 0, light, dark) + random.normal(0, 20, (height, width, 3))
            picture = Image.fromarray(values.clip(0, 255).astype(np.uint8))
            picture.save(folder / part / name / f"{number:04d}.jpg", quality=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER")
    parser.add_argument("--textures", action="store_true", help="write class folders of pictures")
    given = parser.parse_args()
    if given.textures and given.folder is None:
        parser.error("--textures needs a folder to write to: give one")
    if given.textures:
        textures(given.folder)
    else:
        main(*filter(None, [given.folder]))
