"""`jdp why`: the diagnosis from the logs of events of a run's processes."""

import json as as_json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jdp.base.formatting import for_stream
from jdp.cli.options import parse


@dataclass(frozen=True)
class Options:
    """Explains why a run is slow, hung or dead, and which process caused it.

    Each process of a run writes a log of events in RUN_DIR/NAME/events/, which outlives it. For a run that ended, jdp
    why names the process that failed first, was killed, did not answer or got a signal. For a run that continues, it
    reports whether steps finish, and which process delays the others. If the run is slow, the first line names the
    largest cause, such as input. Then follow the time of a step by part, the end of each earlier visit, and the
    goodput: the useful share of all time since the run began.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or its name in --run-dir."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder of the runs."""
    json: bool = False
    """Print one JSON object: state, began (the process that caused it, or null), words, slow (the largest cause, or
    null), steps, goodput."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "why", arguments)
    from jdp.guard.diagnosis import ERRORS, diagnose
    from jdp.run.read_folder import find_run

    folder = find_run(options.run, options.run_dir, begun=False)
    found = diagnose(folder)
    if options.json:
        values = {"run": str(folder), "state": found.state, "began": found.began, "words": found.words}
        more = {"slow": found.slow, "steps": found.pace, "goodput": found.goodput.as_summary()}
        print(as_json.dumps({**values, **more}))
    else:
        broken = found.state in ("failed", "killed", "deadline", "hung")  # this comes first, however slow it was
        first = f"{folder}: {found.state}{'' if broken or found.slow is None else f'; {found.slow}'}"
        print(for_stream("\n".join([first, *found.words, *[ERRORS] * broken]), sys.stdout))
    return 0
