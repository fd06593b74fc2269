"""`jdp plan FILE.py:FUNCTION`: what any step would hold, send and wait for, on one target or several."""

import json as as_json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from jdp.base.formatting import format_bytes, format_percent, format_seconds
from jdp.cli.options import stdout_to_stderr
from jdp.cli.plan_options import Options
from jdp.cli.programs import check_only, forecast_on

TAKEN = ("file", "target", "no_cache", "json")
_HEADINGS = ("target", "holds", "of its memory", "sends", "computes", "waits", "step")


def run(options: Options, overrides: dict[str, str], targets: Sequence[str | None]) -> int:
    """Compile a program's step for every target, and print a report of one, or a row for each of several."""
    check_only(options, overrides, TAKEN)
    return _one(options, targets[0]) if len(targets) == 1 else _several(options, targets)


def _one(options: Options, target: str | None) -> int:
    assert options.file is not None
    with stdout_to_stderr():  # the user's file may print
        _, report = forecast_on(options.file, target, cache=not options.no_cache)
    print(as_json.dumps(report.to_json(), allow_nan=False) if options.json else report)
    return 0


def _several(options: Options, targets: Sequence[str | None]) -> int:
    """Compile for each target in a process of its own, in which `jax.devices()` are as many as the target's."""
    reports = list[dict[str, Any]]()
    for target in targets:
        command = [sys.executable, "-m", "jdp", "plan", str(options.file), f"--target={target}", "--json"]
        done = subprocess.run(
            [*command, *(["--no-cache"] if options.no_cache else [])], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            return done.returncode  # its error is on stderr
        reports.append(as_json.loads(done.stdout))
    if options.json:
        print(as_json.dumps({"targets": reports}, allow_nan=False))
        return 0
    from jdp.cli.terminal import show_table

    show_table(f"{options.file} on {len(reports)} targets (simulated)", _HEADINGS, [*map(_row, reports)])
    notes = dict.fromkeys(note for report in reports for note in report["notes"])
    print("", *(f"Note: {note}" for note in notes), sep="\n")
    print(f"By argument and source line: jdp plan {options.file} with one --target.")
    return 0


def _row(report: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a target: bytes and times per device and step."""
    memory, schedule = report["memory"], report["schedule"]
    share = "–" if memory["headroom"] is None else format_percent(memory["total"] / memory["headroom"]["available"])
    names = ("compute_seconds", "exposed_seconds", "step_seconds")
    times = ("–",) * 3 if schedule is None else tuple(format_seconds(schedule[name]) for name in names)
    sends = format_bytes(report["wire_bytes_per_device"])
    return report["target"], format_bytes(memory["total"]), share, sends, *times
