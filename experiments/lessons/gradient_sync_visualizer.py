"""Gradient synchronisation made visible: what each device has before and after, in which order, in which buckets, when.

The claim: "gradients are synchronised bucket by bucket, last layers first, while the backward pass goes on". The order
is that of the jaxpr's equations. The clock counts FLOPs: a bucket is ready when the matrix products up to its last
equation are done (XLA may choose another order); its collective can start when the one before it has ended, too. How
many FLOPs a device does while it sends a byte is given. The gathers of zero3 are left out.

    python experiments/lessons/gradient_sync_visualizer.py [--bucket-bytes 65536] [--accumulate 2]
        [--flops-per-byte 32] [--picture FILE.svg] [--page FILE.html]

Counted 2026-11 (8 virtual devices, Python 3.11.7, jax 0.10.2): layer3's is made at 36 % of the FLOPs, layer0's at 100.
With three buckets the last all-reduce of ddp ends 0.75 microbatches after the backward pass, with one bucket 1.28. A
device's gradients have 0.2 to 0.4 of the norm of their sum; after it 1 (ddp), or 0.25 to 0.44 in each shard (zero1-3).
`Plan(mesh, strategy)` says where gradients rest; `jdp plan` has the compiled step's timeline. Li et al. 2020,
arXiv:2006.15704, section 3.2.3 (25 MB a bucket).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from devices import use_eight_devices
from jax import NamedSharding, P
from matplotlib.axes import Axes
from narration import keep, parser, positive, show, tell, write_page
from readiness import Bucket, buckets, readiness
from toy import ROWS, init, make_batch, total_loss

import jdp
from jdp.base.tree_paths import path_of
from jdp.core.sharding.strategy import STRATEGIES
from jdp.foresight.traffic.theory import ring_bytes
from jdp.report.charts import SERIES, chart

WIDTHS = (64, 256, 128, 128, 10)
TITLES = {"before": "Before: of each device's rows", "ddp": "After, ddp", "zero3": "After, zero1 to zero3"}
DESCRIBED = "Norms of gradients on each device before and after synchronisation, and a timeline of the buckets"

# 1. When. `readiness.py` reads the order from the jaxpr and fills the buckets. Strategies that reduce once a step wait
# for the last microbatch; zero2 and zero3 reduce in each.


@dataclass(frozen=True)
class Sync:
    """A bucket's collective in one microbatch; the times in FLOPs."""

    bucket: int
    kind: str
    ready: float
    start: float
    end: float


def timeline(strategy: str, filled: Sequence[Bucket], total: int, k: int, pace: float, devices: int) -> list[Sync]:
    """Return the collectives of a step of k microbatches of `total` FLOPs each; `pace`: FLOPs while a byte is sent."""
    row, free, syncs = STRATEGIES[strategy], 0.0, list[Sync]()
    kind = "reduce-scatter" if row.shard_state else "all-reduce"
    for microbatch in range(0 if row.reduce_each_microbatch else k - 1, k):
        for i, bucket in enumerate(filled):
            ready = microbatch * total + bucket.flops
            start = max(free, ready)
            free = start + pace * ring_bytes(kind, bucket.size, devices)
            syncs.append(Sync(i, kind, ready, start, free))
    return syncs


# 2. What each device has: the norm of its piece of each gradient, over the norm of the whole one.


def norms(mesh: jax.sharding.Mesh, paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Return [parameter, device], "before" (of each device's own rows) and after, by strategy."""

    def own(params: Any, rows: Any) -> Any:
        return jax.tree.map(lambda grad: grad[None], jax.grad(total_loss)(params, rows))

    params, rows = init(jax.random.key(0), WIDTHS), make_batch(0)
    local = jax.shard_map(own, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    grads = {"before": jax.jit(local)(params, rows)}
    for strategy in STRATEGIES:  # where jdp lets the gradient rest
        rest = jax.tree.map(lambda at: NamedSharding(mesh, at.rest), jdp.Plan(mesh, strategy).param_placements(params))
        grads[strategy] = jax.jit(jax.grad(total_loss), out_shardings=rest)(params, rows)
    found = {}
    for name, tree in grads.items():
        leaves = {path_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        found[name] = np.array([[np.linalg.norm(s.data) for s in leaves[path].addressable_shards] for path in paths])
    return {name: values / found["ddp"].max(axis=1, keepdims=True) for name, values in found.items()}


# 3. The picture and the page.


def heat(panel: Axes, title: str, values: np.ndarray, paths: Sequence[str]) -> None:
    panel.pcolormesh(values, cmap="Blues", vmin=0, vmax=1.4)
    for (row, column), value in np.ndenumerate(values):
        panel.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=7, color="black")
    panel.set(title=title, xlabel="device", yticks=np.arange(len(paths)) + 0.5, yticklabels=paths)
    panel.invert_yaxis()


def lanes(panel: Axes, title: str, syncs: dict[str, list[Sync]], total: int, k: int) -> None:
    for microbatch in range(k):
        panel.broken_barh([(microbatch * total, 0.97 * total)], (-0.4, 0.8), color=SERIES[-1])
    for lane, each in enumerate(syncs.values(), 1):
        for sync in each:
            panel.broken_barh([(sync.start, sync.end - sync.start)], (lane - 0.4, 0.8), color=SERIES[sync.bucket % 6])
            panel.plot([sync.ready] * 2, [lane - 0.45, lane + 0.45], color=SERIES[sync.bucket % 6], lw=1)
    panel.set(title=title, xlabel="FLOPs", yticks=range(len(syncs) + 1), yticklabels=["microbatches", *syncs])
    panel.invert_yaxis()


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__file__, __doc__)
    made.add_argument("--bucket-bytes", type=positive, default=65536, metavar="BYTES")
    made.add_argument("--accumulate", type=int, choices=range(1, 17), default=2, metavar="K", help="microbatches")
    made.add_argument("--flops-per-byte", type=positive, default=32, metavar="PACE")
    made.add_argument("--page", type=Path, default=Path("runs/lessons/gradient_sync_visualizer.html"), metavar="FILE")
    options = made.parse_args(argv)
    use_eight_devices()
    mesh, k = jdp.make_mesh(data=-1), options.accumulate
    ready, total = readiness(total_loss, init(jax.random.key(0), WIDTHS), make_batch(0, ROWS // mesh.size))
    filled, whole = (buckets(ready, size) for size in (options.bucket_bytes, float("inf")))
    line = lambda name, some: timeline(name, some, total, k, options.flops_per_byte, mesh.size)  # noqa: E731
    syncs, paths = {name: line(name, filled) for name in STRATEGIES}, [one.path for one in ready]
    bucket_of = {path: str(i) for i, bucket in enumerate(filled) for path in bucket.paths}
    order = [(r.path, str(r.size), str(r.equation), f"{r.flops / total:.0%}", bucket_of[r.path]) for r in ready]
    at = lambda flops: f"{flops / total:.3f}"  # noqa: E731 - in microbatches
    sent = [(f"{name}, bucket {s.bucket}", at(s.ready), at(s.start), at(s.end)) for name in syncs for s in syncs[name]]
    late = [(name, str(len(each)), at(each[-1].end), at(line(name, whole)[-1].end)) for name, each in syncs.items()]
    figure, panels = chart(2, 2, height=3.2)
    found = norms(mesh, paths)
    for panel, (name, title) in zip(panels, TITLES.items(), strict=False):
        heat(panel, title, found[name], paths)
    lanes(panels[3], "Collectives by bucket; lines: when each is ready", syncs, total, k)
    tables = [
        ("Gradients, in the order they are made", ("gradient", "bytes", "equation", "FLOPs done", "bucket"), order),
        (f"Collectives, in microbatches; the last backward pass ends at {k}", ("what", "ready", "start", "end"), sent),
        ("The last collective ends", ("strategy", "collectives", "with buckets", "with one bucket"), late),
    ]
    for each in tables:
        show(*each)
    write_page(options.page, "Gradient synchronisation", figure, DESCRIBED, tables)
    keep(figure, options.picture, DESCRIBED)


if __name__ == "__main__":
    tell(main)
