"""`jdp report`: a page on one or several runs."""

import json as as_json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jdp.base.chips import GPUS
from jdp.base.toml import cut, toml_value
from jdp.cli.options import UsageError, check_writable, choose_target_platform, parse, stdout_to_stderr, write_file
from jdp.experiment.file import load
from jdp.experiment.schema.fields import NONE

if TYPE_CHECKING:
    from jdp.foresight.targets.resolve import Target
    from jdp.report.run import CompiledStep, Run

PAGE = "report.html"


@dataclass(frozen=True)
class Options:
    """Writes one self-contained page on runs: curves, speed, memory, events.

    The page needs no network and no other file. It has all metrics of a run, such as the loss and the learning rate. It
    also has throughput, the share of time waiting for data, resumes, stops, skipped steps, and the experiment as run.
    The curves of several runs share their axes, and a table lists how the runs differ.

    For memory and timeline the step is compiled, not run, for the run's devices; this machine needs neither these
    devices nor the run's data. The page of a run that continues, failed or was killed lists the missing information.
    """

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN…")] = ()
    """Folders of runs, or names of runs in --run-dir."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="PAGE", aliases=["-o"])] = None
    """File to write. Default: report.html in the run's folder; for several runs, in the current folder."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder of the runs that are given by name."""
    target: Annotated[str | None, tyro.conf.arg(metavar="KIND:HOSTSxPER_HOST")] = None
    """Devices to compile the step for, such as h100:1x8 or cpu:8. Default: each run's own."""
    plugin: Annotated[str | None, tyro.conf.arg(metavar="PACKAGE")] = None
    """Plug-in of the runs, imported to compile their step."""
    no_compile: bool = False
    """Omit memory and timeline; the page is then ready in seconds."""
    no_cache: bool = False
    """Compile again instead of reading the cache ($JDP_CACHE_DIR, else ~/.cache/jdp)."""
    json: bool = False
    """Print one JSON object on stdout, {"path": …, "runs": […]}, and everything else on stderr."""


def run(arguments: list[str]) -> int:
    options = parse(Options, "report", arguments)
    with stdout_to_stderr(options.json):
        from jdp.report.pages import run_page
        from jdp.run.read_folder import read_run

        folders = _folders(options.runs, options.run_dir)
        path = options.output or (Path(PAGE) if len(folders) > 1 else folders[0] / PAGE)
        check_writable(path)
        names = [folder.resolve().name for folder in folders]
        if len(set(names)) < len(names):
            names = [str(folder) for folder in folders]
        recorded = [*map(read_run, folders, names)]
        write_file(path, run_page(_with_steps(recorded, folders, options)))
    if options.json:
        print(as_json.dumps({"path": str(path), "runs": [*names]}))
    else:
        print(f"wrote {path}: {', '.join(names)}")
    return 0


def _folders(given: Sequence[str], runs: Path) -> list[Path]:
    from jdp.run.read_folder import find_run

    if not given:
        raise UsageError("jdp report takes one or more runs; given none: name their folders, such as runs/quickstart")
    folders = [find_run(each, runs) for each in given]
    seen: dict[Path, Path] = {}
    for folder in folders:
        if (first := seen.setdefault(folder.resolve(), folder)) is not folder:
            raise UsageError(f"jdp report takes different runs; given one twice, {first} and {folder}: name it once")
    return folders


# The steps.


def _with_steps(recorded: Sequence["Run"], folders: Sequence[Path], options: Options) -> list["Run"]:
    """Return each run as recorded, with its compiled step or the reason why there is none."""
    from jdp.cli.terminal import Progress

    if options.no_compile:
        why = "The step was not compiled (--no-compile): memory and timeline are left out."
        return [replace(run, no_step=why) for run in recorded]
    targets = [options.target or target_of_run(run) for run in recorded]
    choose_target_platform([name for name in targets if name])
    if options.target is not None:
        _resolved(options.target)  # raises for a mistake on the command line
    runs = list["Run"]()
    with Progress() as progress:
        for run, folder, target in zip(recorded, folders, targets, strict=True):
            progress.compiling(len(runs), len(recorded), f"the step of {run.name}")
            try:
                runs.append(replace(run, step=_compiled(run, folder, _resolved(target), options)))
            except Exception as error:  # the page has all the rest
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                why = f"The step was not compiled: {kind}{cut(' '.join(str(error).split()), 600)}"
                runs.append(replace(run, no_step=why))
    return runs


def target_of_run(recorded: "Run") -> str | None:
    """Return the target with the devices of a run's last visit, such as "cpu:8"; None if unknown."""
    last: Mapping[str, Any] = next((event for event in reversed(recorded.history) if "devices" in event), {})
    devices = last.get("devices") or recorded.settings.get("devices")
    if last.get("platform", "cpu") == "cpu":
        return f"cpu:{devices}" if str(devices).isdecimal() else None
    kind = next((kind for kind, chip in GPUS.items() if chip.name == last.get("device")), None)
    hosts = last.get("hosts", 1)
    return None if kind is None or not isinstance(devices, int) else f"{kind}:{hosts}x{devices // hosts}"


def _compiled(recorded: "Run", folder: Path, target: "Target", options: Options) -> "CompiledStep":
    """Compile the step of a run's experiment for a target, as `jdp plan` does, with the same errors."""
    from jdp.experiment.plan import candidates_of
    from jdp.foresight.foresee import make_plan_report
    from jdp.report.run import CompiledStep
    from jdp.run.folder import FILE

    has_plugin = recorded.settings.get("plugin") not in (None, toml_value(NONE))
    plugin = {"plugin": options.plugin} if has_plugin and options.plugin else {}
    experiment = load(folder / FILE, plugin)
    candidates = candidates_of(
        experiment, target, strategies=[experiment.strategy], accumulate=[experiment.train.accumulate]
    )
    report = make_plan_report(candidates, target, cache=not options.no_cache)
    placements = candidates[0].step.plan.placements(candidates[0].state)
    return CompiledStep(str(target), report.estimates[0], placements, report.notes)


def _resolved(name: str | None) -> "Target":
    """Return the target with a run's devices. Raises UsageError if they are unknown."""
    from jdp.foresight.targets.resolve import target

    if name is None:
        raise UsageError("the devices of the run are not recorded, or jdp has no description of them; give --target")
    return target(name)
