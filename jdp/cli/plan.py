"""`jdp plan`: compile an experiment's step under every strategy, for devices of any machine."""

import dataclasses
import json as as_json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jdp.base.toml import brief
from jdp.cli.options import (
    UsageError,
    check_writable,
    choose_target_platform,
    parse_with_overrides,
    stdout_to_stderr,
    words,
    write_file,
)
from jdp.cli.programs import check_only, check_program, forecast_on, is_program
from jdp.experiment.file import load

if TYPE_CHECKING:
    from jdp.foresight.foresee import PlanReport


@dataclass(frozen=True)
class Options:
    """Predicts each device's memory, traffic and step time under every strategy, before you launch.

    XLA compiles the experiment's step for the devices of --target, which this machine need not have: jdp plan FILE
    --target h100:8x8. The report compares memory by class with the device's, and bytes sent with theory. It has the
    step time and the share of hidden communication (both simulated), and recommends a strategy that fits.

    Any key of the experiment can be changed: --train.batch_size 512 --model.layers 2.

    Your own program, my_train.py:make_step, is compiled unchanged: jdp verify --help describes the function.

    Without an experiment, jdp plan --table 70e9:8 prints ZeRO's closed form for a size.
    """

    file: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="FILE")] = None
    """Experiment (TOML file or the name of a shipped one, such as quickstart), or a program, FILE.py:FUNCTION."""
    table: Annotated[str | None, tyro.conf.arg(metavar="PARAMETERS:DEVICES")] = None
    """Print each device's memory and traffic by ZeRO's closed form, such as 70e9:8, without compiling. Works with
    --strategy, --accumulate (one number) and --json."""
    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:HOSTSxPER_HOST")] = None
    """Devices to plan for: h100:8x8, h200:1x8, a100:64x8, b200:2x8, cpu:8, or mycluster.toml:8x8. Default: this
    machine's. An experiment's targets, separated by commas (h100:1x8,h100:8x8,h100:64x8), are compared in one table."""
    strategy: Annotated[str, tyro.conf.arg(metavar="NAMES")] = "ddp,zero1,zero2,zero3"
    """Strategies to compile, separated by commas."""
    accumulate: Annotated[str | None, tyro.conf.arg(metavar="COUNTS")] = None
    """Microbatches per step, such as 1,4. Default: the experiment's."""
    host_memory: Annotated[float | None, tyro.conf.arg(metavar="GIB")] = None
    """Memory of each host of --target in GiB, such as 2048: if [guard] keep_in_memory copies the state into it, a
    strategy that needs more does not fit. Default: known only for this machine."""
    html: Annotated[Path | None, tyro.conf.arg(metavar="PAGE")] = None
    """Write a self-contained page on one target: memory, timelines, collectives."""
    no_cache: bool = False
    """Compile again instead of reading the cache ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    json: bool = False
    """Print one JSON object on stdout, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    options, overrides = parse_with_overrides(Options, "plan", arguments)
    if options.table is not None:
        return _closed_form(options, overrides)
    if options.file is None:
        raise UsageError("jdp plan needs an experiment; given no FILE: jdp plan FILE, or jdp plan --table 70e9:8")
    targets = [None] if options.target is None else words(options.target, "--target")
    if is_program(options.file):
        check_program(options, overrides, TAKEN)
        return _program(options, targets)
    if len(targets) > 1 and options.html is not None:
        raise UsageError(f"--html writes a page on one target; given {len(targets)}: name one --target, or remove it")
    check_writable(options.html)
    with stdout_to_stderr(options.json):
        name, reports, described = _compiled(options, overrides, targets)
        if not options.json:
            _show(reports, name, described[0], options.file.stem)
        if options.html is not None:
            from jdp.report.pages import plan_page

            title = f"{options.file.stem} on {reports[0].target}"
            write_file(options.html, plan_page(reports[0], title=title, described=described[0]))
            print(f"wrote {options.html}")
    if options.json:
        found = [report.to_json() for report in reports]
        print(as_json.dumps(found[0] if len(found) == 1 else {"targets": found}, allow_nan=False), flush=True)
    return 0


def _compiled(
    options: Options, overrides: dict[str, str], targets: Sequence[str | None]
) -> "tuple[str, list[PlanReport], list[str]]":
    """Return the experiment's name, and for each target the report of all candidates and a line on the experiment."""
    assert options.file is not None
    strategies = words(options.strategy, "--strategy")
    experiment = load(options.file, overrides)
    choose_target_platform(targets, experiment.devices)

    from jdp.cli.terminal import Progress
    from jdp.experiment.plan import candidates_of, described_batch, with_hosts
    from jdp.foresight.foresee import make_plan_report
    from jdp.foresight.targets.resolve import target_of

    accumulate = _counts(options) or [experiment.train.accumulate]
    hosts = None if options.host_memory is None else round(options.host_memory * 2**30)
    resolved = [target_of(name) for name in targets]
    candidates = [
        candidates_of(experiment, target, strategies=strategies, accumulate=accumulate) for target in resolved
    ]
    reports = list["PlanReport"]()
    for target, tried in zip(resolved, candidates, strict=True):
        with Progress() as progress:
            report = make_plan_report(tried, target, cache=not options.no_cache, progress=progress.compiling)
        reports.append(with_hosts(report, experiment, tried, target, hosts))
    if all(estimate.error is not None for report in reports for estimate in report.estimates):
        raise UsageError("\n".join(dict.fromkeys(note for report in reports for note in report.notes)))
    model = f"{experiment.model.name or experiment.model.make}, {experiment.precision}"
    described = [f"{model}, batches of {described_batch(tried[0].batch)}" for tried in candidates]
    return experiment.name, reports, described


def _counts(options: Options) -> list[int]:
    """Return the numbers of --accumulate; none if it is not given."""
    listed = [] if options.accumulate is None else words(options.accumulate, "--accumulate")
    if not all(re.fullmatch(r"[1-9]\d{0,8}", word) for word in listed):
        rule = "--accumulate takes positive whole numbers below 10^9 with commas between"
        raise UsageError(f"{rule}; given {brief(options.accumulate)}: write 1,4")
    return [int(word) for word in listed]


def _show(reports: "Sequence[PlanReport]", name: str, described: str, stem: str) -> None:
    from jdp.cli.terminal import show_plan, show_table

    if len(reports) == 1:
        show_plan(reports[0], name, described)
        return
    unit = reports[0].unit
    headings = ("target", "devices", "take", "fits", f"{unit} a step", "hidden", "waits", "step", "MFU", f"{unit}/s")
    title = f"{name} on {len(reports)} targets (simulated)"
    show_table(title, headings, [_target_row(report) for report in reports])
    on = dict[str, list[str]]()
    for report in reports:
        for note in report.notes:
            on.setdefault(note, []).append(report.target)
    print()
    for note, names in on.items():
        print(f"Note: {note}" if len(names) == len(reports) else f"Note: {', '.join(names)}: {note}")
    print(f"Why, and every candidate: jdp plan {stem}.toml with one --target.")


def _target_row(report: "PlanReport") -> tuple[str, ...]:
    shown = report.choice or report.estimates[0]
    none = "no" if any(estimate.error is None for estimate in report.estimates) else "did not compile"
    name, fits = ("–", none) if report.choice is None else (shown.name, shown.fits_in_words)
    return (report.target, f"{report.devices:,}", name, fits, f"{shown.tokens:,}", *shown.speed_cells)


# --table: ZeRO's closed form, without an experiment.


def _closed_form(options: Options, overrides: dict[str, str]) -> int:
    rule = "--table needs no experiment and compiles nothing; given {} too: remove it"
    check_only(options, overrides, ("table", "strategy", "accumulate", "json"), rule)
    parameters, devices = _size(options.table or "")
    names, accumulate = words(options.strategy, "--strategy"), _counts(options) or [1]
    if len(accumulate) > 1:
        raise UsageError(f"--table takes one --accumulate; given {options.accumulate}: --accumulate {accumulate[0]}")
    from jdp.cli.terminal import show_table
    from jdp.foresight.traffic.theory import jdp_bytes, sent_bytes, zero_bytes

    k = accumulate[0]
    rows: dict[str, dict[str, dict[str, int]]] = {"paper": {}, "jdp": {}}
    for name in names:
        for key, of, grads in (("paper", zero_bytes, 2), ("jdp", jdp_bytes, 4)):
            held = of(parameters, devices, name)
            sent = sent_bytes(parameters, devices, name, grads=grads, accumulate=k)
            rows[key][name] = {**dataclasses.asdict(held), "total": held.total, "sent": sent}
    if options.json:
        print(as_json.dumps({"parameters": parameters, "devices": devices, "accumulate": k, **rows}), flush=True)
        return 0
    unit, size = next(((name, size) for name, size in _UNITS if 16 * parameters >= size), ("bytes", 1))
    print(
        f"{parameters:,} parameters on {devices:,} devices, accumulate = {k}; {unit} that a device keeps, and sends\n"
    )
    for key, (title, headers) in _ZERO_TABLES.items():
        print(title)
        show_table("", headers, [[name, *(_number(x / size) for x in row.values())] for name, row in rows[key].items()])
        print()
    totals = {name: zero_bytes(parameters, devices, name, optimizer=8).total / size for name in names}
    short = ", ".join(f"{name} {_number(total)}" for name, total in totals.items())
    print(f"Tables of 2 + 2 + 8 bytes a parameter leave out the fp32 master weights; their totals: {short} {unit}.")
    print("Model state only: activations, temporaries and the batch come on top; jdp plan FILE has them.")
    return 0


_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))  # decimal, as in the paper
_ZERO_TABLES = {
    "paper": (
        "Rajbhandari et al. 2019, 2 + 2 + 12 bytes a parameter: 16-bit weights and gradients; fp32 master weights and "
        "Adam's two moments",
        ("strategy", "weights", "gradients", "optimizer", "total", "sent"),
    ),
    "jdp": (
        'jdp with precision = "bf16": at rest fp32 master weights and Adam\'s two moments; within a step gradients '
        "summed in fp32,\nand a bf16 working copy (zero3: one layer at a time), not counted here",
        ("strategy", "master weights", "moments", "gradients", "working copy", "total", "sent"),
    ),
}
"""Key in the JSON -> title and headers."""


def _size(text: str) -> tuple[int, int]:
    """Return the parameters and devices of "70e9:8". Raises UsageError."""
    number = r"(\d{1,15}(?:\.\d{1,15})?(?:[eE]\+?\d{1,2})?)"
    match = re.fullmatch(rf"{number}:(\d{{1,7}})", text)
    size = float(match[1]) if match else 0.0
    if match is None or not 1 <= size <= 1e18 or not size.is_integer() or int(match[2]) < 1:
        raise UsageError(
            "--table takes PARAMETERS:DEVICES, whole numbers of 1 or more (at most 10^18 parameters, 10^7 devices); "
            f"given {brief(text)}: write 70e9:8"
        )
    return int(size), int(match[2])


def _number(value: float) -> str:
    """Return a number in three digits, or all digits before the point."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


# A user's program: any step.


TAKEN = ("file", "target", "no_cache", "json")


def _program(options: Options, targets: Sequence[str | None]) -> int:
    assert options.file is not None
    if len(targets) > 1:
        raise UsageError(f"a program is compiled for one --target; given {options.target}: run jdp plan for each")
    with stdout_to_stderr():  # the user's file may print
        _, report = forecast_on(options.file, targets[0], cache=not options.no_cache)
    print(as_json.dumps(report.to_json(), allow_nan=False) if options.json else report)
    return 0
