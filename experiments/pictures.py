"""The picture of the README, made from what `jdp plan` reads off compiled programs: memory by strategy.

    python experiments/pictures.py [FOLDER]

Needs `pip install '.[aot]'`, no GPU, and some 60 s of processor time. FOLDER: where the SVG goes, `.github/pictures`
unless given. The file follows the reader's setting, light or dark.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from jdp.report.charts import INK, SERIES, chart, write

ROOT = Path(__file__).parents[1]
EXPERIMENT, TARGET = "experiments/llama_8b_zero3.toml", "h100:8x8"
CLASSES = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "working": "working copy",
    "activations": "activations",
}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def main(folder: Path = ROOT / ".github" / "pictures") -> None:
    memory(planned(), folder / "memory.svg")


def planned() -> list[dict[str, Any]]:
    """Run `jdp plan`: a candidate for each strategy."""
    command = [sys.executable, "-m", "jdp", "plan", EXPERIMENT, "--target", TARGET, "--json"]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    candidates = {entry["strategy"]: entry for entry in json.loads(printed)["strategies"] if entry["mesh"] is None}
    return [candidates[strategy] for strategy in STRATEGIES]


def memory(candidates: list[dict[str, Any]], path: Path) -> None:
    """Draw the memory of a device at its peak, by class, beside what the device has."""
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
    axes.legend(loc="lower right", frameon=False)
    write(figure, path, described(candidates))


def described(candidates: list[dict[str, Any]]) -> str:
    """Return what the picture shows, for those who do not see it."""
    sizes = ", ".join(f"{entry['strategy']} {entry['bytes_per_device'] / 2**30:.0f} GiB" for entry in candidates)
    return f"Memory of each of 64 H100s while Llama 3 8B trains: {sizes}. A GPU has 77 GiB."


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
