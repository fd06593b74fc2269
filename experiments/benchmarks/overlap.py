"""Simulate how much of a step's communication is hidden behind computing: experiments × targets × strategies.

    python experiments/benchmarks/overlap.py [--cases gpt_1b@h100:8x8:ddp,zero1 …] [--compiler default] [--json]

Steps are compiled, not run: this needs no GPU, but `pip install 'jdp[aot]'` and JAX_PLATFORMS=cpu. Each device gets
8192 tokens per microbatch. "hidden" is the share of the time on the links during which the device computes
(`jdp.foresight.timing.timeline`), "traffic" the ratio of the bytes sent to those of the contract.
"""

import os
import time
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


def compiled(case: str, accumulate: int, compiler: str) -> list[dict[str, Any]]:
    """Compile the steps of a case; return their numbers."""
    name, _, rest = case.partition("@")
    on, _, strategies = rest.rpartition(":")
    devices = target(on)
    path = str(EXPERIMENTS / f"{name}.toml")
    length = load(path).model.context
    rows = len(devices.devices) * accumulate * max(1, TOKENS // length)
    experiment = load(path, {"train.batch_size": str(rows), "train.accumulate": str(accumulate), "compiler": compiler})
    found = []
    names, numbers = strategies.split(","), (accumulate,)
    for one in candidates_of(experiment, devices, strategies=names, accumulate=numbers):
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
    """Return the row of the README's table."""
    hidden = [f"{100 * one['hidden']:.0f} ({one['experiment']} {one['strategy']}, {one['target']})" for one in rows]
    promised = {one["experiment"]: one["promised"] for one in rows if one["promised"] is not None}
    several = {one["accumulate"] for one in rows} - {1}
    per = f" and microbatch, {max(several)} of them" if several else ""
    return Row(
        f"communication hidden behind computing, % of its simulated time, 8192 tokens a device{per}",
        ", ".join(hidden),
        ", ".join(f"≥ {100 * share:.0f} ({name})" for name, share in promised.items()) or "–",
    )


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--cases", nargs="*", default=list(CASES), help="EXPERIMENT@TARGET:STRATEGY,STRATEGY")
    options.add_argument("--accumulate", type=int, default=1, help="microbatches per step, of 8192 tokens per device")
    options.add_argument("--compiler", default="overlap", help="options of XLA's compiler")
    given = options.parse_args()
    rows = list[dict[str, Any]]()
    for case in given.cases:
        found = compiled(case, given.accumulate, given.compiler)
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
