"""Buckets: how many all-reduces should synchronise one gradient, and can they hide behind the backward pass?

The claim: PyTorch's DDP groups gradients into buckets of 25 MB, because one collective per tensor is slow. It sends a
bucket as soon as its gradients are ready.

Two real processes exchange gradients over a real socket (Gloo, loopback). All-reduces of many sizes are timed, which
gives the cost of a collective (α) and of a byte (1/β). Then a gradient of 16 layers is synchronised by one all-reduce
per tensor, by buckets, and by one for all; after the backward pass (naive) or during it (overlapped). The same cores
compute and send here, so a separate network is simulated.

    python experiments/lessons/bucketing.py [--picture FILE.svg]

n collectives alone take n·α + bytes/β. Overlapped on a slow network they take backward/n + n·α + bytes/β, least at n =
√(backward/α). XLA's combiner would make one collective of all, which waits for the last gradient, so it is off here;
"in the program" counts the collectives. Li et al. 2020, arXiv:2006.15704, section 3.2. jdp: `buckets=`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from clock import in_turns
from jax import NamedSharding, P
from jax.flatten_util import ravel_pytree
from narration import keep, parser, show, tell
from processes import all_reduce_seconds, fit, in_processes, is_one_of_several, simulate, spread

import jdp
from jdp.foresight.program.collectives import collectives
from jdp.report.charts import chart

SIZES = [2**k for k in (12, 14, 16, 18, 20, 23)]  # bytes of the collectives that α and β are fitted to
LIMITS = {"one a tensor": 0, "1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "one for all": 1}  # as a part of all bytes
KEEP_BUCKETS = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner,gpu-all-reduce-combiner"}
KINDS = ("sync", "naive", "overlapped")  # of programs; `model` and `simulated` are computed


def fill_buckets(sizes: dict[str, int], limit: float) -> list[list[str]]:
    """Return the tensors of each bucket: from the back, because the last layer's gradients come first."""
    buckets: list[list[str]] = [[]]
    for name in reversed(sizes):
        if buckets[-1] and sum(sizes[each] for each in buckets[-1]) + sizes[name] > limit:
            buckets.append([])
        buckets[-1].append(name)
    return buckets


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for layer in range(len(params) // 2):
        x = jnp.tanh(x @ params[f"{layer}/kernel"] + params[f"{layer}/bias"])
    return (x**2).sum()


def reduce(grads):
    """Copy a bucket into one buffer, all-reduce it, and cut it up again."""
    flat, cut = ravel_pytree(grads)
    return cut(jax.lax.psum(flat, "data"))


# DDP's hook: nothing in the forward pass; in the backward pass, `reduce` for what went through it.
hook = jax.custom_vjp(lambda params: params)
hook.defvjp(lambda params: (params, None), lambda _, grads: (reduce(grads),))


def by_bucket(function, tree, buckets):
    parts = [function({name: tree[name] for name in bucket}) for bucket in buckets]
    return {name: part[name] for part in parts for name in part}


def program(kind: str, buckets: list[list[str]], mesh: jax.sharding.Mesh):
    """`backward` alone, `sync` alone, or both: `naive` (one after the other) or `overlapped` (through hooks)."""

    def run(params, x):
        if kind == "sync":
            return by_bucket(reduce, params, buckets)
        through = hook if kind == "overlapped" else lambda part: part
        grads = jax.grad(lambda given: loss(by_bucket(through, given, buckets), x))(params)
        return by_bucket(reduce, jax.lax.optimization_barrier(grads), buckets) if kind == "naive" else grads

    run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    return jax.jit(run, compiler_options=KEEP_BUCKETS)


def measure_here(limits: dict[str, float], layers: int, width: int, rows: int, rounds: int) -> dict:
    """Run in each process. Return seconds of collectives by size, and of each way to synchronise a gradient."""
    jdp.initialize()
    mesh = jdp.make_mesh(data=-1)
    random, shapes = np.random.default_rng(0), {"kernel": (width, width), "bias": (width,)}
    params = {f"{i}/{k}": random.normal(0, width**-0.5, shapes[k]).astype("f") for i in range(layers) for k in shapes}
    sizes = {name: value.nbytes for name, value in params.items()}
    given = (jax.device_put(params, NamedSharding(mesh, P())), spread(np.ones((rows, width), "f"), mesh))
    ways = {way: fill_buckets(sizes, limit * sum(sizes.values())) for way, limit in limits.items()}
    jobs = {(kind, way): (kind, ways[way]) for way in ways for kind in KINDS} | {"backward": ("backward", [[*params]])}
    runs = {job: program(*how, mesh).lower(*given).compile() for job, how in jobs.items()}
    seconds = in_turns({job: lambda run=run: run(*given) for job, run in runs.items()}, rounds)
    least = {job: float(each[:, 2].min()) for job, each in seconds.items()}  # by the clock
    return {
        "links": all_reduce_seconds(SIZES, mesh, rounds),
        "backward": least["backward"],
        "ways": {way: {kind: least[kind, way] for kind in KINDS} for way in ways},
        "bytes": {way: [sum(sizes[name] for name in bucket) for bucket in buckets] for way, buckets in ways.items()},
        "counted": {way: len(collectives(runs["overlapped", way].as_text())) for way in ways},
    }


def main(argv: list[str] | None = None) -> None:
    picture = parser(__file__, __doc__).parse_args(argv).picture
    found = in_processes(__file__, 2, limits=LIMITS, layers=16, width=256, rows=64, rounds=6)
    (alpha, beta), backward, ways = fit(found["links"]), found["backward"], found["ways"]
    rows = [("α: cost of a collective, ms", 1e3 * alpha), ("β: MB per second", beta / 1e6)]
    rows += [("the backward pass alone, ms", 1e3 * backward), ("√(backward / α): buckets", math.sqrt(backward / alpha))]
    said = f"""An all-reduce of {alpha * beta / 1e3:.0f} kB (α·β) spends half its time on latency: smaller tensors
        should be sent together."""
    show("Fitted to all-reduces between two processes", ("what", "number"), rows, said)
    for way, sizes in found["bytes"].items():
        ways[way]["model"] = len(sizes) * alpha + sum(sizes) / beta
        ways[way]["simulated"] = simulate(sizes, backward, alpha, beta)
    kinds, n = (*KINDS, "model", "simulated"), {way: len(sizes) for way, sizes in found["bytes"].items()}
    rows = [(way, n[way], found["counted"][way], *(1e3 * ways[way][kind] for kind in kinds)) for way in ways]
    headers = ("bucket", "buckets", "in the program", *KINDS, "sync by model", "simulated")
    best = {kind: f"{kind}: {min(ways, key=lambda way, kind=kind: ways[way][kind])}" for kind in kinds}
    said = f"""Sync alone is fastest with few buckets, because each costs α. Overlapping gains little or nothing here,
        because the same cores compute and send. On a separate network (simulated) several buckets beat one, which has
        to wait for the last gradient. Fastest: {"; ".join(best.values())}."""
    show("Milliseconds of a step", headers, rows, said)
    figure, (left, right) = chart(columns=2)
    left.loglog(*np.array(found["links"]).T, "o", label="measured")
    left.loglog(SIZES, [alpha + size / beta for size in SIZES], label="α + bytes / β")
    left.set(title="One all-reduce between two processes, seconds", xlabel="bytes")
    for kind in kinds:
        right.loglog([*n.values()], [ways[way][kind] for way in ways], "o-", label=kind)
    right.set(title="One step, seconds", xlabel="buckets")
    left.legend(), right.legend()
    keep(figure, picture, "Left: seconds of an all-reduce by bytes. Right: of a gradient's by number of buckets.")


if __name__ == "__main__" and not is_one_of_several(measure_here):
    tell(main)
