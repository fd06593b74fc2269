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
    """Strategies to compile, with commas between. On several hosts, where the experiment leaves [mesh] free, zero3 is
    compiled for replicas of fewer hosts too (HSDP)."""
    accumulate: Annotated[str | None, tyro.conf.arg(metavar="COUNTS")] = None
    """Microbatches a step to compile, such as 1,4. Default: the experiment's."""
    remat: Annotated[str | None, tyro.conf.arg(metavar="POLICIES")] = None
    """Rematerialisation policies to compile, such as none,dots,dots_except_mlp,full. Default: the
    experiment's."""
    axes: bool = False
    """Search the mesh too: replicas of whole hosts, and other sizes of the model's own axis, where [rules] shard over
    one. Closed forms of bytes exclude most meshes, and the report lists these; those with the shortest sending time are
    compiled. With --tune the search starts from them."""
    tune: bool = False
    """Search for the fastest way that fits, by compiling: strategy and mesh, rematerialisation, microbatches of the
    same batch, overlap, the compiler's options, scanned layers or not; one at a time from the best so far. Keys given
    on the command line stay as they are. Prints what the gains rest on, the flags for jdp train, and options to try on
    the machine that no simulation sees; exits with 1 where nothing fits."""
    tune_minutes: Annotated[float | None, tyro.conf.arg(metavar="MINUTES")] = None
    """For --tune: compile nothing more after so many. Default: 30."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=("-o",), metavar="FILE")] = None
    """For --tune: write the experiment with what was found, for jdp train FILE."""
    max_batch: bool = False
    """Find the largest batch that fits under the chosen strategy, by compiling."""
    smallest: bool = False
    """Compile for the smallest cluster of these GPUs that is foreseen to fit the same batch, and for the size below it;
    without it the smallest is foreseen only, from what was compiled for --target."""
    host_memory: Annotated[float | None, tyro.conf.arg(metavar="GIB")] = None
    """Memory of each host of --target, in GiB, such as 2048: where [guard] keep_in_memory copies the state into it, a
    strategy that needs more does not fit. Default: known of this machine only."""
    tokens: Annotated[float | None, tyro.conf.arg(metavar="COUNT")] = None
    """Say how many days --target takes for so many tokens (examples, where a batch is counted in these), such as 1e12,
    and how far off that may be by the published runs that the times were compared with."""
    price: Annotated[float | None, tyro.conf.arg(metavar="PRICE")] = None
    """For --tokens: what an hour of one device costs, such as 2.5, in any currency: say what they cost."""
    mtbf: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """A device's mean time between failures, such as 50000h, 2000d or 5.7y: expect which share of its time the run
    trains on --target, and how often it should save. 50,676 h is that of the GPUs of Llama 3's training."""
    save_seconds: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """For --mtbf: from the beginning of a save until its checkpoint counts. Default: the state's bytes at 1 GiB/s a
    host."""
    stall_seconds: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """For --mtbf: how long a save in the background stops training. Default: the state's bytes at 16 GiB/s a device."""
    restart_seconds: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """For --mtbf: from a failure until training continues. Default: 3 minutes and the time of a save."""
    measured: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """For --mtbf: folder of a run of this size, whose flight recorder has how long its saves stalled, and resuming
    took."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="PAGE")] = None
    """Write a self-contained page: memory, timelines, collectives."""
    trace: Annotated[Path | None, tyro.conf.arg(metavar="TRACE")] = None
    """Write the simulated timeline of the chosen strategy for chrome://tracing or ui.perfetto.dev."""
    no_cache: bool = False
    """Compile again what was compiled before ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""
