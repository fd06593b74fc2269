"""Simulate the shipped GPU experiments on 8, 64 and 512 H100: step times and MFU.

    python experiments/benchmarks/shipped.py [--experiments gpt_1b …] [--targets h100:1x8 …] [--json]

Steps are compiled, not run: this needs no GPU, but `pip install 'jdp[aot]'` and JAX_PLATFORMS=cpu. Each experiment
keeps its strategy, options and rows per GPU. On another number of hosts than its own, `replica` (hsdp) or `data`
(tensor_parallel) is that number. "copies" is the share of computing time in copies (`jdp.foresight.timing.timeline`),
"hidden" the share of the time on the links during which the device computes.
"""

import os
from typing import Any

from measure import Row, finish, parser
from overlap import EXPERIMENTS

from jdp.base.disk_cache import Cache
from jdp.experiment.file import load
from jdp.experiment.plan import candidates_of
from jdp.foresight.foresee import count_batch, estimate
from jdp.foresight.targets.resolve import target
from jdp.foresight.timing.timeline import COPIES

OWN_GPUS = {"gpt2_124m": 8, "gpt_1b": 8, "llama_8b_zero3": 64, "hsdp": 64, "tensor_parallel": 64}
"""Experiment -> the GPUs that its file is written for."""
ROWS, CHANGES = {"gpt2_124m": 128}, {"gpt2_124m": {"model.bias": "true", "model.activation": "gelu"}}
"""The batch and the form (OpenAI's) that results of 2026-11 have."""
HOSTS_ALONG = {"hsdp": "replica", "tensor_parallel": "data"}
TARGETS = ("h100:1x8", "h100:8x8", "h100:64x8")
MOST_COPIES = 0.05


def foreseen(name: str, on: str) -> dict[str, Any]:
    """Compile an experiment's step for a target; return its numbers."""
    devices, path = target(on), str(EXPERIMENTS / f"{name}.toml")
    own, count = load(path), len(devices.devices)
    changes = CHANGES.get(name, {}) | {
        "train.batch_size": str(ROWS.get(name, own.train.batch_size) * count // OWN_GPUS[name])
    }
    if axis := HOSTS_ALONG.get(name):
        changes[f"mesh.{axis}"] = str(count // 8)
    experiment = load(path, changes)
    ways, counts = [own.strategy], [own.train.accumulate]
    [candidate] = candidates_of(experiment, devices, strategies=ways, accumulate=counts)
    made = estimate(
        candidate,
        devices,
        tokens=count_batch(candidate.batch)[0],
        cache=Cache.usual(not os.environ.get("JDP_NO_CACHE")),
    )
    line = made.timeline
    if line is None or made.mfu is None:
        raise SystemExit(f"{name} on {on}: {made.error}")
    return {
        "experiment": name,
        "target": on,
        "mfu": made.mfu,
        "step_ms": 1e3 * line.step_seconds,
        "hidden": 1 - line.exposed_fraction,
        "copies": line.parts.get(COPIES, 0.0) / line.compute_seconds,
        "gib": (made.bytes_per_device or 0) / 2**30,
    }


def row(rows: list[dict[str, Any]]) -> Row:
    """Return the row of the README's table."""
    names = dict.fromkeys(one["experiment"] for one in rows)
    mfu = {name: " / ".join(f"{100 * one['mfu']:.0f}" for one in rows if one["experiment"] == name) for name in names}
    targets = " / ".join(dict.fromkeys(one["target"] for one in rows))
    copies = max(one["copies"] for one in rows)
    return Row(
        f"MFU foreseen of the shipped experiments on {targets}, %; copies' share of computing time",
        f"{', '.join(f'{name} {text}' for name, text in mfu.items())}; ≤ {100 * copies:.1f} %",
        f"–; ≤ {100 * MOST_COPIES:.0f} %",
    )


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--experiments", nargs="*", default=list(OWN_GPUS), choices=list(OWN_GPUS))
    options.add_argument("--targets", nargs="*", default=list(TARGETS))
    given = options.parse_args()
    rows = list[dict[str, Any]]()
    for name in given.experiments:
        for on in given.targets:
            rows.append(one := foreseen(name, on))
            if not given.json:
                print(
                    f"{name:16} {on:9} {one['step_ms']:8.1f} ms  MFU {100 * one['mfu']:5.1f} %  hidden"
                    f" {100 * one['hidden']:5.1f} %  copies {100 * one['copies']:4.1f} %  {one['gib']:5.1f} GiB",
                    flush=True,
                )
    finish({"rows": rows}, given.json, row(rows))


if __name__ == "__main__":
    main()
