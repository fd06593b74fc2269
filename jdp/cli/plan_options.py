"""The options of `jdp plan`, shared by its modules."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Options:
    """Reports what every device will hold, send and wait for, under every strategy, before you launch.

    The real compiler compiles the experiment's real step for the devices of --target, which this machine need not
    have: jdp plan FILE --target h100:8x8. The report compares memory by class with the device's, and bytes sent with
    theory. It has the step time and the share of hidden communication (simulated), and says what fits, what to choose,
    and why.

    Any key of the experiment can be changed: --train.batch_size 512 --model.layers 2. The keys are listed below.

    A program of yours, my_train.py:make_step, is compiled as it is: jdp verify --help says what the function returns.

    Without an experiment, jdp plan --table 70e9:8 prints ZeRO's closed form for a size.
    """

    file: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="FILE")] = None
    """The experiment (TOML), the name of one that jdp ships, such as quickstart, or a program, FILE.py:FUNCTION."""
    table: Annotated[str | None, tyro.conf.arg(metavar="PARAMETERS:DEVICES")] = None
    """Print what each device keeps and sends by ZeRO's closed form, such as 70e9:8, and compile nothing. It takes
    --strategy, --accumulate (one number) and --json."""
    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:HOSTSxPER_HOST")] = None
    """Devices to plan for: h100:8x8, h200:1x8, a100:64x8, b200:2x8, cpu:8, or mycluster.toml:8x8. Default: this
    machine's. Several with commas between, such as h100:1x8,h100:8x8,h100:64x8, are compared: a row each."""
    strategy: Annotated[str, tyro.conf.arg(metavar="NAMES")] = "ddp,zero1,zero2,zero3"
    """Strategies to compile, with commas between."""
    accumulate: Annotated[str | None, tyro.conf.arg(metavar="COUNTS")] = None
    """Microbatches a step to compile, such as 1,4. Default: the experiment's."""
    host_memory: Annotated[float | None, tyro.conf.arg(metavar="GIB")] = None
    """Memory of each host of --target, in GiB, such as 2048: where [guard] keep_in_memory copies the state into it, a
    strategy that needs more does not fit. Default: known of this machine only."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="PAGE")] = None
    """Write a self-contained page on one target: memory, timelines, collectives."""
    no_cache: bool = False
    """Compile again what was compiled before ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""
