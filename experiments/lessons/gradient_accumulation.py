"""Gradient accumulation: a large batch in small parts, reduced once a step or once a microbatch.

The claim: "accumulation gives the large batch's result in less memory, for free". The result is right if sums are added
and divided once. Memory falls until most of it is the accumulated gradient. Bytes depend on where the loop reduces:
after the last microbatch or in each.

Three loops by hand: reduce once, all-reduce each microbatch (a loop that forgot PyTorch's `no_sync`), reduce-scatter
each, which keeps 1/N of the sum. Bytes and memory are those of the compiled programs. Then jdp's strategies do the
same. Last, microbatches with unequal numbers of rows.

    python experiments/lessons/gradient_accumulation.py [--picture FILE.svg]

With K microbatches, N devices, and D = 4Ψ(N−1)/N bytes for a reduce-scatter of Ψ float32:

    way                              sends         keeps for the sum
    all-reduce once                  2D            4Ψ
    all-reduce each                  K·2D          4Ψ
    reduce-scatter each, one gather  K·D + D       4Ψ/N

jdp: `accumulate=K`; `ddp` and `zero1` reduce once, `zero2` and `zero3` in each microbatch. Rajbhandari et al. 2019,
arXiv:1910.02054, section 5. Unequal parts: huggingface.co/blog/gradient_accumulation (2024).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from devices import use_eight_devices
from jax import P
from jax.flatten_util import ravel_pytree
from narration import curves, keep, parser, show, tell
from toy import init, make_batch, total_loss

import jdp
from jdp.foresight.program.collectives import collectives, total_wire_bytes

WIDTHS, ROWS, MICROBATCHES = (64, *[128] * 4, 16), 2048, (1, 2, 8)
WAYS = {"once": "all-reduce once", "each": "all-reduce each", "scattered": "reduce-scatter each"}
HOWS = {"sums": "sums, divided once", "means": "mean of means"}
STRATEGIES, STEPS, RATE = ("ddp", "zero1", "zero2"), 4, 0.1


def in_parts(rows: Any, k: int) -> Any:  # [rows, ...] -> [k, rows / k, ...]
    return jax.tree.map(lambda leaf: leaf.reshape(k, -1, *leaf.shape[1:]), rows)


# 1. By hand: one flat gradient, added up over microbatches. Only `reduce` and its place differ.


def gradient(params: Any, rows: Any, way: str, k: int) -> Any:
    """Return, on each device, the gradient of the mean over all devices' rows."""
    flat, back = ravel_pytree(params)  # its size divides by the devices
    reduce = {
        "once": lambda part: part,
        "each": lambda part: jax.lax.psum(part, "data"),
        "scattered": lambda part: jax.lax.psum_scatter(part, "data", tiled=True),
    }[way]

    def add(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        return total + reduce(ravel_pytree(jax.grad(total_loss)(params, part))[0]), None

    kept = jnp.zeros(flat.size // (jax.lax.axis_size("data") if way == "scattered" else 1))
    total, _ = jax.lax.scan(add, kept, in_parts(rows, k))
    if way != "each":
        total = jax.lax.psum(total, "data") if way == "once" else jax.lax.all_gather(total, "data", tiled=True)
    return back(total / ROWS)


def by_hand(mesh: jax.sharding.Mesh, way: str, k: int) -> Any:
    """Return the compiled program (params, rows) -> gradient."""
    run = partial(gradient, way=way, k=k)
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False))
    return run.lower(init(jax.random.key(0), WIDTHS), make_batch(0, ROWS)).compile()


def sent_and_held(program: Any) -> tuple[int, int]:
    """Return the bytes that a device sends per step, and its temporary memory."""
    return int(total_wire_bytes(collectives(program.as_text()))), program.memory_analysis().temp_size_in_bytes


def apart(a: Any, b: Any) -> float:  # |a − b| / |b|
    return float(optax.tree.norm(jax.tree.map(np.subtract, a, b)) / optax.tree.norm(b))


# 2. With jdp: a strategy and a number.


def loss(params: Any, rows: Any, rng: jax.Array) -> jdp.Loss:
    return jdp.Loss(total_loss(params, rows), rows["weight"].sum())


def with_jdp(mesh: jax.sharding.Mesh, strategy: Any, k: int, steps: int = STEPS) -> tuple[int, int, float]:
    """Return bytes sent, temporary bytes and the loss of the last of some steps."""
    plan = jdp.Plan(mesh, strategy, min_shard_size=1)
    state = jdp.init_state(partial(init, widths=WIDTHS), optax.sgd(RATE), plan, rng=jax.random.key(0))
    step, metrics = jdp.make_train_step(loss, plan, accumulate=k, partitioning="manual", donate=False), {}
    program = step.compile(state, make_batch(0, ROWS))
    for seed in range(steps):
        state, metrics = jax.block_until_ready(program(state, make_batch(seed, ROWS)))
    return *sent_and_held(program), float(metrics.get("loss", "nan"))


# 3. Unequal microbatches: the mean of means gives tokens of short microbatches more weight.


def error_of_unequal(how: str, shares: tuple[int, ...]) -> float:
    """Return the gradient's error, for microbatches of 32 rows, `shares` of them not padding."""
    weight = (np.arange(32) < np.array(shares)[:, None]).astype(np.float32)
    params, rows = init(jax.random.key(0), WIDTHS), make_batch(0, weight.size) | {"weight": weight.ravel()}
    right = jax.tree.map(lambda grad: grad / weight.sum(), jax.grad(total_loss)(params, rows))
    grads = jax.lax.map(partial(jax.grad(total_loss), params), in_parts(rows, len(shares)))
    shared = 1 / np.broadcast_to(weight.sum() if how == "sums" else weight.sum(1) * len(shares), len(shares))
    return apart(jax.tree.map(lambda grad: np.tensordot(shared, grad, 1), grads), right)


def main(argv: list[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    mesh = jdp.make_mesh(data=-1)
    given = init(jax.random.key(0), WIDTHS), make_batch(0, ROWS)
    right = jax.tree.map(lambda grad: grad / ROWS, jax.grad(total_loss)(*given))
    runs = {(way, k): by_hand(mesh, way, k) for way in WAYS for k in MICROBATCHES}
    found = {job: sent_and_held(run) for job, run in runs.items()}
    rows = [(WAYS[way], k, *found[way, k], apart(run(*given), right)) for (way, k), run in runs.items()]
    most, (least, few), each = (found[job] for job in (("once", 1), ("once", 8), ("each", 8)))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(given[0]))
    said = f"""The gradient is the same, to rounding, however the batch is cut. Eight microbatches take
        {few / most[1]:.0%} of the temporary memory, not an eighth: the gradients ({size / 1e6:.2f} MB) do not shrink.
        Reducing in each sends {each[0] / least:.0f} times as much; a reduce-scatter keeps an eighth of the sum."""
    heads = ("way", "microbatches", "sent, bytes", "temporary, bytes", "error / gradient's norm")
    show(f"One gradient of {ROWS} rows on {mesh.size} devices", heads, rows, said)
    trained = [(name, k, *with_jdp(mesh, name, k)) for name in STRATEGIES for k in (1, 4)]
    said = """The strategy decides where the loop reduces. ddp and zero1 send the same for any number of microbatches;
        zero2 sends more with each, and needs less memory than zero1. The last loss is the same in all six cases."""
    show(f"The same with jdp, {STEPS} steps of SGD", ("strategy", *heads[1:4], "loss"), trained, said)
    table = [(each, *(error_of_unequal(how, each) for how in HOWS)) for each in ((32, 32, 32, 32), (32, 32, 4, 4))]
    said = f"""With equal parts both are right, so a test with full batches finds nothing. With padding the mean of
        means is off by {table[1][-1]:.0%} of the gradient. Add up sums and weights, and divide once."""
    heads = ("real rows", *(f"error, {how}" for how in HOWS.values()))
    show("Gradient of four microbatches", heads, table, said)
    sent = {name: [found[way, k][0] / 1e6 for k in MICROBATCHES] for way, name in WAYS.items()}
    figure = curves("Sent by a device per step", ("microbatches", MICROBATCHES), "MB", sent)
    keep(figure, options.picture, "Bytes that a device sends per step, by number of microbatches, for three loops")


if __name__ == "__main__":
    tell(main)
