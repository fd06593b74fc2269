"""The options of `jdp train`, which `jdp launch` passes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Options:
    """Runs an experiment.

    Writes RUN_DIR/NAME/: the experiment as resolved, metrics.jsonl, TensorBoard events, checkpoints, history.jsonl
    (what happened, visit by visit), and at the end summary.json. Run again, it resumes from the last checkpoint. Ctrl-C
    saves before it leaves.

    Any key of the experiment can be changed: --train.steps 50 --strategy zero3 --mesh.data 4. So --devices 8 computes
    on eight virtual CPU devices. The value "none" clears a key that may be none. The keys are listed below.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML), or the name of one that jdp ships, such as quickstart."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder that holds the runs, each in a folder of its name."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Trace the steps from FIRST to LAST, both included, into RUN_DIR/NAME/profile (process 0's)."""
    fresh_memory: bool = False
    """On CPUs: give memory back to the system between steps, as other programs do. It is kept, on huge pages, without:
    a small model's step takes a quarter less, and the process stays at the most memory that it ever used.
    JDP_FRESH_MEMORY=1 does the same."""
    no_cache: bool = False
    """Compile again what was compiled before ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    verbose: bool = False
    """Print all notices of the start: choices that jdp made, and why. Without, they take three lines at most."""
    json: bool = False
    """Print one JSON object on stdout at the end, and everything else on stderr."""
