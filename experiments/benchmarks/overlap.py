"""How much of a step's communication is hidden behind computing, by simulated time: experiments × targets × strategies.

    python experiments/benchmarks/overlap.py [--cases gpt_1b@h100:8x8:ddp,zero1 …] [--compiler default] [--off] [--json]
    python experiments/benchmarks/overlap.py --forms [--sequences 2 16] [--cases …]

Steps are compiled, not run: no GPU is needed, but `pip install 'jdp[aot]'` and JAX_PLATFORMS=cpu. Each device gets 8192
tokens a microbatch. "hidden" is the share of the time on the links during which the device computes
(`jdp.foresight.timing.timeline`), "traffic" the bytes sent over the contract's, "extra" the temporaries' bytes. `--off`
compiles with `overlap=False`, where a layer's collectives are in the round that computes the layer, and those of ddp,
zero1 and zero2 before and after the loop over the layers. `--forms` compares the step as jdp makes it by default with
both forms under both presets of the compiler, in ms, for `--sequences` a GPU in place of 8192 tokens.
"""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import Row, finish, parser

from jdp.base.disk_cache import Cache
from jdp.experiment.file import load
from jdp.experiment.plan import candidates_of
from jdp.foresight.foresee import estimate
from jdp.foresight.targets.resolve import target

EXPERIMENTS = Path(__file__).parents[1]
TOKENS = 8192
CASES = {
    "gpt2_124m@h100:1x8:ddp,zero1,zero3": 0.90,
    "gpt_1b@h100:8x8:ddp,zero1,zero3": 0.95,
    "llama_8b_zero3@h100:8x8:zero3": 0.97,
    "llama_8b_zero3@h100:64x8:zero3": 0.97,
}
"""Experiment, target and strategies -> the share that is to be hidden."""
FORMS = {
    "default": (None, "auto"),
    **{f"{way}, {preset}": (way == "on", preset) for preset in ("default", "overlap") for way in ("on", "off")},
}
"""Name of a form -> `overlap` and `compiler`."""


def compiled(
    case: str, accumulate: int, compiler: str, overlap: bool | None, sequences: int | None = None
) -> list[dict[str, Any]]:
    """Compile the steps of a case; return their numbers. `sequences` are those of a device's microbatch."""
    name, _, rest = case.partition("@")
    on, _, strategies = rest.rpartition(":")
    devices = target(on)
    path = str(EXPERIMENTS / f"{name}.toml")
    length = load(path).model.context
    rows = len(devices.devices) * accumulate * (sequences or max(1, TOKENS // length))
    experiment = load(path, {"train.batch_size": str(rows), "train.accumulate": str(accumulate), "compiler": compiler})
    found = []
    names, numbers = strategies.split(","), (accumulate,)
    for one in candidates_of(experiment, devices, strategies=names, accumulate=numbers):
        one = replace(one, step=one.step.changed(overlap=overlap))
        began = time.process_time()
        made = estimate(one, devices, tokens=rows * length, cache=Cache.usual(not os.environ.get("JDP_NO_CACHE")))
        if made.timeline is None or made.report is None:
            raise SystemExit(f"{case} {one.name}: {made.error}")
        line = made.timeline
        found.append(
            {
                "experiment": name,
                "target": on,
                "strategy": one.step.plan.strategy,
                "accumulate": accumulate,
                "compiler": compiler,
                "hidden": 1 - line.exposed_fraction,
                "step_ms": 1e3 * line.step_seconds,
                "compute_ms": 1e3 * line.compute_seconds,
                "communication_ms": 1e3 * line.communication_seconds,
                "exposed_ms": 1e3 * line.exposed_seconds,
                "traffic": made.report.ratio,
                "mfu": made.mfu,
                "gib": made.bytes_per_device / 2**30,
                "promised": CASES.get(case),
                "compile_s": time.process_time() - began,
            }
        )
    return found


def row(rows: list[dict[str, Any]]) -> Row:
    """The line of the README's table."""
    hidden = [f"{100 * one['hidden']:.0f} ({one['experiment']} {one['strategy']}, {one['target']})" for one in rows]
    promised = {one["experiment"]: one["promised"] for one in rows if one["promised"] is not None}
    several = {one["accumulate"] for one in rows} - {1}
    per = f" and microbatch, {max(several)} of them" if several else ""
    return Row(
        f"communication hidden behind computing, % of its simulated time, 8192 tokens a device{per}",
        ", ".join(hidden),
        ", ".join(f"≥ {100 * share:.0f} ({name})" for name, share in promised.items()) or "–",
    )


def compare_forms(cases: list[str], accumulate: int, sequences: list[int]) -> None:
    """Print how long a step takes by default and in each form, and what the default loses to the best."""
    print(f"{'case, sequences a GPU':45}", *(f"{name:>13}" for name in FORMS), "   over the best")
    for case, count in ((case, count) for case in cases for count in sequences):
        found = {name: compiled(case, accumulate, preset, way, count) for name, (way, preset) in FORMS.items()}
        for steps in zip(*found.values(), strict=True):
            times = [step["step_ms"] for step in steps]
            name = f"{case.rpartition(':')[0]}:{steps[0]['strategy']}, {count}"
            print(f"{name:45}", *(f"{time:13.2f}" for time in times), f"{100 * (times[0] / min(times) - 1):10.1f} %")


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--cases", nargs="*", default=list(CASES), help="EXPERIMENT@TARGET:STRATEGY,STRATEGY")
    options.add_argument("--accumulate", type=int, default=1, help="microbatches a step, of 8192 tokens a device each")
    options.add_argument("--compiler", default="overlap", help="options of XLA's compiler")
    options.add_argument("--off", action="store_true", help="with overlap=False")
    options.add_argument("--forms", action="store_true", help="the default beside both forms and presets")
    options.add_argument("--sequences", type=int, nargs="*", default=[2], help="a GPU, with --forms")
    given = options.parse_args()
    if given.forms:
        compare_forms(given.cases, given.accumulate, given.sequences)
        return
    rows = list[dict[str, Any]]()
    for case in given.cases:
        found = compiled(case, given.accumulate, given.compiler, False if given.off else None)
        rows += found
        for one in () if given.json else found:
            print(
                f"{one['experiment']:15} {one['target']:9} {one['strategy']:5} K={one['accumulate']}"
                f"  hidden {100 * one['hidden']:5.1f} %  step {one['step_ms']:8.2f} ms = {one['compute_ms']:.2f} +"
                f" {one['exposed_ms']:.2f} of {one['communication_ms']:.2f}  traffic {one['traffic']:.3f}"
                f"  MFU {100 * one['mfu']:.1f} %  {one['gib']:.2f} GiB  {one['compile_s']:.0f} s",
                flush=True,
            )
    finish({"rows": rows}, given.json, row(rows))


if __name__ == "__main__":
    main()
