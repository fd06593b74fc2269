"""Muon under ZeRO: an update that needs whole matrices. How much is sent if XLA gathers them, and if devices own them?

ZeRO cuts an update anywhere, because Adam's works on each element alone. Muon's does not: five Newton-Schulz steps
multiply a matrix by itself. AdamW sends D for gradients and D for weights. Guess first: how many D does Muon send?

The lesson runs Newton-Schulz on shards: no error is raised, but the numbers are wrong. It counts XLA's bytes to make
them right. Then, by hand, an all-to-all gives each device whole matrices of its own, which it computes. Another returns
the shards. Bytes and losses are compared with those of the naive step, and of jdp's.

    python experiments/lessons/zero_muon.py [--picture FILE.svg]

With Ψ float32 elements in matrices on N devices, and D = 4Ψ(N−1)/N: an all-gather or a reduce-scatter of them sends D,
an all-to-all D/N, because a device has only Ψ/N of them to send. A step with owners, under zero1:

    reduce-scatter    all-to-all              all-to-all               all-gather
    gradients, D      momentum, D/N           updates, D/N             weights, D
    to shards         to whole matrices       to shards                for the next step

Compiled for 8 H100s (`jdp.verify(..., "h100:1x8")`, jax 0.10.2, 2026-11), naive and owned send the same multiples of D.
jdp: `jdp.muon(rate)`; `optax.contrib.muon(rate)` is the naive form.
Liu et al. 2025, arXiv:2502.16982, gather the momentum once, and compute all matrices on each device (exercise 11).
Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from devices import use_eight_devices
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from muon_toy import DECAY, RATE, SIDE, Result, counted, forms, init, total_loss
from narration import keep, parser, show, stacked, tell
from toy import ROWS, make_batch

import jdp
from jdp.report.charts import chart

# 1. The update of one matrix: its singular values all come near 1, its rows are then nearly orthogonal. A device that
# has some of the rows makes them orthogonal to one another, and not to the other devices' rows.


def newton_schulz(x: jax.Array) -> jax.Array:
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(5):
        products = x @ x.T
        x = 3.4445 * x + (-4.775 * products + 2.0315 * products @ products) @ x
    return x


def error_of_shards(update: Callable[[jax.Array], jax.Array], devices: int) -> float:
    """Return |updates of rows' shards − update of all rows| / |update of all rows|."""
    mesh = jdp.make_mesh(data=devices, devices=jax.devices()[:devices])
    x = jax.random.normal(jax.random.key(1), (SIDE, SIDE))
    on_shards = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    right = np.asarray(update(x))
    return float(np.linalg.norm(on_shards(x) - right) / np.linalg.norm(right))


# 2. Owners, by hand. At rest a device has some rows of every matrix. An all-to-all cuts one dimension in N, sends each
# part to its device, and concatenates what arrives along the other. Matrices of zeros fill the stack up to N, 2N, ...


def to_owners(x: jax.Array) -> jax.Array:
    """Take [M, m/N, n], some rows of all matrices; return [M/N, m, n], all rows of some matrices."""
    x = jnp.pad(x, ((0, -len(x) % jax.lax.axis_size("data")), (0, 0), (0, 0)))
    return jax.lax.all_to_all(x, "data", split_axis=0, concat_axis=1, tiled=True)


def owned(shards: jax.Array) -> jax.Array:
    whole = jax.vmap(newton_schulz)(to_owners(shards))
    return jax.lax.all_to_all(whole, "data", split_axis=1, concat_axis=0, tiled=True)[: len(shards)]


def step(layers: jax.Array, momentum: jax.Array, rows: dict[str, Any]) -> tuple[jax.Array, ...]:
    whole = jax.lax.all_gather(layers, "data", axis=1, tiled=True)
    loss, grads = jax.value_and_grad(total_loss)(whole, rows)
    own = jax.lax.psum_scatter(grads, "data", scatter_dimension=1, tiled=True) / ROWS
    momentum = DECAY * momentum + (1 - DECAY) * own  # element by element, so on shards
    return layers - RATE * owned(momentum), momentum, jax.lax.psum(loss, "data") / ROWS


SHARDS = P(None, "data")


def by_hand(mesh: jax.sharding.Mesh, steps: int) -> Result:
    specs = {"in_specs": (SHARDS, SHARDS, P("data")), "out_specs": (SHARDS, SHARDS, P())}
    layers = jax.device_put(init(mesh.size)["layers"], NamedSharding(mesh, SHARDS))
    momentum, split, losses = jnp.zeros_like(layers), NamedSharding(mesh, P("data")), list[float]()
    local = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    run = local.lower(layers, momentum, jax.device_put(make_batch(0), split)).compile()
    for i in range(steps):
        layers, momentum, loss = run(layers, momentum, jax.device_put(make_batch(i), split))
        losses.append(float(loss))
    return counted(run, losses)


def sent_by_owners(mesh: jax.sharding.Mesh, matrices: int) -> float:
    """Return the bytes of both all-to-alls, of a stack of any number of matrices."""
    run = jax.jit(jax.shard_map(owned, mesh=mesh, in_specs=SHARDS, out_specs=SHARDS))
    return counted(run.lower(init(matrices)["layers"]).compile()).total


# 3. The same by a step of jdp's (`muon_toy.py`), naive and with owners, beside AdamW, under each strategy.


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__file__, __doc__).parse_args(argv)
    use_eight_devices()
    mesh = jdp.make_mesh(data=-1)
    n, d, kinds = mesh.size, 4 * SIDE**2 * (mesh.size - 1), ("reduce-scatter", "all-gather", "all-to-all")
    wrong = [(f.__name__, k, error_of_shards(f, k)) for f in (jnp.sign, newton_schulz) for k in sorted({2, n})]
    said = """Adam's first update is the gradient's sign, and the sign of a shard is a shard of the sign. Newton-Schulz
        of a shard is another matrix. Neither raises an error."""
    show("An update of shards, put together", ("update", "devices", "error / norm"), wrong, said)
    found = {strategy: forms(mesh, strategy, 20 * (strategy == "zero1")) for strategy in ("ddp", "zero1", "zero3")}
    adamw, naive, by_owners = found["zero1"].values()
    zero1 = {"AdamW": adamw, "naive": naive, "by hand": by_hand(mesh, 20), "by jdp": by_owners}
    apart = lambda losses: float(np.abs(np.subtract(losses, naive.losses)).max()) if losses else "-"  # noqa: E731
    rows = [(name, *(r.sent[k] / d for k in kinds), r.total / d, apart(r.losses)) for name, r in zero1.items()]
    said = f"""Naive, each of five Newton-Schulz steps gathers a matrix three times: {naive.total / d:.0f} D. Owners
        take two all-to-alls, 2D/N. All learn the same."""
    show(f"zero1, {n} devices: sent per step, × D", ("form", *kinds, "sum", "losses apart, 20 steps"), rows, said)
    update = {s: {f: (r.flops - each["AdamW"].flops) / 1e6 for f, r in each.items()} for s, each in found.items()}
    rows = [(s, *(r.total / d for r in each.values()), *[*update[s].values()][1:]) for s, each in found.items()]
    said = """Under ddp the naive step sends nothing more, but each device computes all matrices. With owners each
        computes its part, and an all-gather returns the updates, D. Under zero1 and zero3 XLA divides each product by
        rows: the naive form costs bytes, not FLOPs."""
    headers = ("strategy", "AdamW, × D", "naive, × D", "owned, × D", "naive, MFLOPs", "owned, MFLOPs")
    show("Sent per step, and computed by a device beyond AdamW's step", headers, rows, said)
    stacks = {m: sent_by_owners(mesh, m) / (2 * d / n) * n / m for m in (max(n // 4, 1), n, n + n // 2)}
    said = """Stacks are padded to a multiple of the devices, and padding is sent and computed too. With fewer matrices
        than devices, more devices make the update no faster."""
    rows = [(m, -(-m // n), times) for m, times in stacks.items()]
    show(f"Stacks on {n} devices", ("matrices", "a device", "sent by all-to-alls, × 2D/N"), rows, said)
    figure, (left, right) = chart(2)
    sent = {k: [r.sent[k] / d for r in zero1.values()] for k in kinds}
    stacked(left, "Sent by a device per step, zero1, × D", [*zero1], sent)
    parts = {f"{s}\n{f}": update[s][f] for s in update for f in ("naive", "owned")}
    stacked(right, "Computed by a device, MFLOPs", [*parts], {"beyond AdamW's step": [*parts.values()]})
    keep(figure, options.picture, "Bytes that a step sends by kind, and FLOPs of its update, naive and with owners")


if __name__ == "__main__":
    tell(main)
