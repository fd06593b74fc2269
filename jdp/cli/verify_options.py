"""The options of `jdp verify`, shared by its modules."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Options:
    """Compiles a step, counts what it sends: exit 0 if it keeps the strategy's contract, or a baseline; or 1.

    Collectives are counted in the compiled program, loops included, and compared with theory: the README's table of
    strategies; under zero3, what the step's own trace gathers. A breach names the collective, the parameter, the source
    line, and the fix. What is sent besides is listed even if the contract is kept, and so is a zero3 that keeps its
    weights gathered, like zero2. On CPU devices nothing is judged, as XLA:CPU sends what XLA:GPU does not: exit 0.

    Any key of the experiment can be changed: --strategy zero3 --train.accumulate 4. The keys are listed below.

    A program of yours is given as my_train.py:make_step, or package.module:make_step. The function returns a jitted
    step and a tuple of its arguments, real or abstract; if it takes `devices`, it gets those of --target. --save writes
    what the step sends by source line, holds and waits for; --against compares with that.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The experiment (TOML), the name of one that jdp ships, such as quickstart, or a program, FILE.py:FUNCTION."""
    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:HOSTSxPER_HOST")] = None
    """Devices to compile for: h100:8x8, h200:1x8, a100:64x8, b200:2x8, cpu:8, or mycluster.toml:8x8. Default: this
    machine's."""
    save: Annotated[Path | None, tyro.conf.arg(metavar="JSON")] = None
    """For a program: write its numbers, to compare with later."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="JSON")] = None
    """For a program: compare with numbers that --save wrote, and exit with 1 if it sends, holds or waits for more.
    --target defaults to theirs."""
    tolerance: Annotated[str, tyro.conf.arg(metavar="PERCENT")] = "2%"
    """For --against: how much a number may grow."""
    markdown: bool = False
    """For a program: print a table for a pull request."""
    no_cache: bool = False
    """Compile again what was compiled before ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""
