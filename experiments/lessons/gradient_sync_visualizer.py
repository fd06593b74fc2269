"""Gradient synchronisation made visible: gradients before and after on each device, their order, buckets and times.

The claim: "gradients are synchronised bucket by bucket, last layers first, while the backward pass goes on".

The backward pass starts at the loss, so the last layer's gradients come first. Their order is read from the jaxpr,
JAX's list of operations. A bucket is gradients that are sent together, ready when the last is computed. Its collective
starts then, or when the previous one has ended. A clock that counts FLOPs draws this for each strategy (ddp; zero1 to
zero3 shard state, lesson 7), with microbatches: parts of a batch. Heat maps show each device's part of each gradient,
before and after.

    python experiments/lessons/gradient_sync_visualizer.py [--bucket-bytes 65536] [--accumulate 2]
        [--flops-per-byte 32] [--picture FILE.svg] [--page FILE.html]

XLA may choose another order than the jaxpr's. `--flops-per-byte` is how many FLOPs a device does while it sends a byte.
The gathers of zero3 are left out. jdp: `Plan(mesh, strategy)` says where gradients rest; `jdp plan` has the compiled
step's timeline. Li et al. 2020, arXiv:2006.15704, section 3.2.3 (25 MB per bucket).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from devices import use_eight_devices
from drawings import heat, lanes
from jax import NamedSharding, P
from narration import keep, parser, positive, show, tell, write_page
from readiness import Bucket, buckets, readiness
from toy import ROWS, init, make_batch, total_loss

import jdp
from jdp.base.tree_paths import path_of
from jdp.core.sharding.strategy import STRATEGIES
from jdp.foresight.traffic.theory import ring_bytes
from jdp.report.charts import chart

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


# 2. The norm of each device's piece of each gradient, over the norm of the whole gradient.


def norms(mesh: jax.sharding.Mesh, paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Return [parameter, device], "before" (of each device's own rows) and after, by strategy."""

    def own(params: Any, rows: Any) -> Any:
        return jax.tree.map(lambda grad: grad[None], jax.grad(total_loss)(params, rows))

    params, rows = init(jax.random.key(0), WIDTHS), make_batch(0)
    local = jax.shard_map(own, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    grads = {"before": jax.jit(local)(params, rows)}
    for strategy in STRATEGIES:  # the gradient's sharding under jdp
        rest = jax.tree.map(lambda at: NamedSharding(mesh, at.rest), jdp.Plan(mesh, strategy).param_placements(params))
        grads[strategy] = jax.jit(jax.grad(total_loss), out_shardings=rest)(params, rows)
    found = {}
    for name, tree in grads.items():
        leaves = {path_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        found[name] = np.array([[np.linalg.norm(s.data) for s in leaves[path].addressable_shards] for path in paths])
    return {name: values / found["ddp"].max(axis=1, keepdims=True) for name, values in found.items()}


# 3. The picture and the page.


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
    ddp = late[0]
    tables = [
        ("Gradients by backward order", ("gradient", "bytes", "equation", "FLOPs done", "bucket"), order),
        (f"Collectives; time in microbatches, the last of which ends at {k}", ("what", "ready", "start", "end"), sent),
        ("The last collective ends", ("strategy", "collectives", "with buckets", "with one bucket"), late),
    ]
    said = [
        f"""The forward pass comes first. The last layer's gradient is ready after {order[1][3]} of the FLOPs, the first
            layer's at the end.""",
        """A collective starts when its bucket is ready and the previous one has ended. ddp and zero1 add up the
            microbatches' whole gradients and send after the last; zero2 and zero3 reduce in each.""",
        f"""With buckets the last all-reduce of ddp ends at {ddp[2]}, with one bucket at {ddp[3]}: the first buckets are
            sent while the backward pass computes. Nothing hides the last one, because its gradients come at the end. A
            reduce-scatter (zero1 to zero3) sends half as much as an all-reduce.""",
    ]
    for each, shown in zip(tables, said, strict=True):
        show(*each, shown)
    write_page(options.page, "Gradient synchronisation", figure, DESCRIBED, tables)
    keep(figure, options.picture, DESCRIBED)


if __name__ == "__main__":
    tell(main)
