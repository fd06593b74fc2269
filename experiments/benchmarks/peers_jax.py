"""The JAX contenders of `peers.py`: jdp as in the quickstart, and the same step written and optimised by hand.

    echo 20 | python peers_jax.py jdp zero1 4
    echo 20 | python peers_jax.py hand ddp 4

By hand, parameters have the fastest shapes: query, key and value in one matrix, gate and up in another, layers apart.
There are products of matrices only, one layout of attention throughout, a plain loop over the layers, and one `jit` of
`shard_map` with one all-reduce of the gradients (ddp), or a reduce-scatter and an all-gather of one flat vector
(zero1). Both keep their freed memory (`jdp.keep_memory`), unless JDP_FRESH_MEMORY=1.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from workers import serve

WORDS, LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN = 256, 4, 128, 4, 2, 384
ROWS, LENGTH = 16, 128
HEAD, GROUP = WIDTH // HEADS, HEADS // KV_HEADS


def batch() -> dict[str, np.ndarray]:
    """Return random tokens and targets with weight 1."""
    tokens, targets = np.random.default_rng(0).integers(0, WORDS, (2, ROWS, LENGTH), np.int32)
    return {"tokens": tokens, "targets": targets, "weights": np.ones((ROWS, LENGTH), np.float32)}


def by_jdp(strategy: str, devices: int) -> Callable[[], float]:
    """Return a step of the quickstart's model, as in `jdp train`."""
    import jax

    import jdp
    from jdp.experiment.assembly import Assembly
    from jdp.experiment.file import load

    file = Path(jdp.__file__).parents[1] / "experiments" / "quickstart.toml"
    values = {"model.name": "gpt-nano", "data.length": f"{LENGTH}", "train.batch_size": f"{ROWS}"}
    assembly = Assembly.on_devices(load(file, {**values, "strategy": strategy, "devices": f"{devices}"}))
    state, data = assembly.training.state(), jax.device_put(batch(), assembly.training.plan.batch_sharding)

    def step() -> float:
        nonlocal state
        state, metrics = assembly.training.step(state, data)
        return float(metrics["loss"])

    return step


def initial(key: Any) -> dict[str, Any]:
    """Return the 820,352 initial parameters."""
    import jax
    import jax.numpy as jnp

    normal = lambda n, *shape: 0.02 * jax.random.normal(jax.random.fold_in(key, n), shape)  # noqa: E731
    writes = 1 / math.sqrt(2 * LAYERS)
    layers = [
        {
            "norm1": jnp.ones(WIDTH),
            "qkv": normal(4 * i, WIDTH, (HEADS + 2 * KV_HEADS) * HEAD),
            "out": writes * normal(4 * i + 1, WIDTH, WIDTH),
            "norm2": jnp.ones(WIDTH),
            "gate_up": normal(4 * i + 2, WIDTH, 2 * HIDDEN),
            "down": writes * normal(4 * i + 3, HIDDEN, WIDTH),
        }
        for i in range(LAYERS)
    ]
    return {"tokens": normal(999, WORDS, WIDTH), "layers": layers, "norm": jnp.ones(WIDTH)}


def loss_of(params: dict[str, Any], tokens: Any, targets: Any) -> Any:
    """Return the mean cross-entropy of these rows."""
    import jax
    import jax.numpy as jnp

    rows, length = tokens.shape
    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    cos, sin = (np.float32(f(angles))[:, None] for f in (np.cos, np.sin))

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale

    def heads(x: Any, count: int, *, turned: bool) -> Any:
        x = x.reshape(rows, length, count, HEAD)
        if turned:
            first, second = jnp.split(x, 2, axis=-1)
            x = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return x.transpose(0, 2, 1, 3)

    def attention(x: Any, layer: Any) -> Any:
        q, k, v = jnp.split(x @ layer["qkv"], [HEADS * HEAD, (HEADS + KV_HEADS) * HEAD], axis=-1)
        q, k, v = heads(q, HEADS, turned=True), heads(k, KV_HEADS, turned=True), heads(v, KV_HEADS, turned=False)
        q = q.reshape(rows, KV_HEADS, GROUP * length, HEAD) / math.sqrt(HEAD)
        scores = jnp.einsum("bkqd,bksd->bkqs", q, k)
        seen = np.tile(np.arange(length), GROUP)[:, None] >= np.arange(length)
        mixed = jnp.einsum("bkqs,bksd->bkqd", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)
        mixed = mixed.reshape(rows, HEADS, length, HEAD).transpose(0, 2, 1, 3)
        return mixed.reshape(rows * length, WIDTH) @ layer["out"]

    x = params["tokens"][tokens.reshape(-1)]
    for layer in params["layers"]:
        x = x + attention(norm(x, layer["norm1"]), layer)
        gate, up = jnp.split(norm(x, layer["norm2"]) @ layer["gate_up"], 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"]
    logits = norm(x, params["norm"]) @ params["tokens"].T
    picked = jnp.sum(jnp.where(np.arange(WORDS) == targets.reshape(-1, 1), logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def by_hand(strategy: str, devices: int) -> Callable[[], float]:
    """Return the hand-written step: clipped AdamW of each parameter (ddp), or of a shard of all of them (zero1)."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax.adamw(3e-3, b2=0.99, weight_decay=0.1)
    params = initial(jax.random.key(0))
    flat, unravel = ravel_pytree(params)
    assert flat.size == 820_352
    split = P("data") if strategy == "zero1" else P()

    def clipped(grads: Any, total: Any) -> Any:
        scale = jnp.minimum(1.0, jax.lax.rsqrt(total))
        return jax.tree.map(lambda g: g * scale, grads)

    def ddp(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        loss, grads = jax.lax.pmean((loss, grads), "data")
        updates, state = tx.update(clipped(grads, optax.tree.norm(grads, squared=True)), state, params)
        return optax.apply_updates(params, updates), state, loss

    def zero1(shard: Any, state: Any, tokens: Any, targets: Any) -> Any:
        params = unravel(jax.lax.all_gather(shard, "data", tiled=True))
        loss, grads = jax.value_and_grad(loss_of)(params, tokens, targets)
        grad = jax.lax.psum_scatter(ravel_pytree(grads)[0], "data", tiled=True) / devices
        total, loss = jax.lax.psum(jnp.sum(grad * grad), "data"), jax.lax.pmean(loss, "data")
        updates, state = tx.update(clipped(grad, total), state, shard)
        return optax.apply_updates(shard, updates), state, loss

    held = flat if strategy == "zero1" else params
    state = tx.init(held)
    of_state = jax.tree.map(lambda leaf: split if leaf.ndim else P(), state)
    specs = (split, of_state, P("data"), P("data"))
    step = jax.shard_map(
        zero1 if strategy == "zero1" else ddp,
        mesh=mesh,
        in_specs=specs,
        out_specs=(split, of_state, P()),
        check_vma=False,
    )
    run = jax.jit(step, donate_argnums=(0, 1))
    place = partial(jax.tree.map, lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)))
    held, state = jax.device_put(held, NamedSharding(mesh, split)), place(state, of_state)
    data = jax.device_put(batch(), NamedSharding(mesh, P("data")))

    def advance() -> float:
        nonlocal held, state
        held, state, loss = run(held, state, data["tokens"], data["targets"])
        return float(loss)

    return advance


def products() -> Callable[[], float]:
    """Return a product of two matrices of 1024 × 1024."""
    import jax
    import jax.numpy as jnp

    x, product = jnp.ones((1024, 1024)), jax.jit(lambda x: x @ x)
    return lambda: float(product(x)[0, 0])


def main() -> None:
    if sys.argv[1] == "products":
        serve(products())
        return
    writer, strategy, devices = sys.argv[1], sys.argv[2], int(sys.argv[3])
    import jdp

    if hasattr(jdp, "keep_memory"):
        jdp.keep_memory()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    serve({"jdp": by_jdp, "hand": by_hand}[writer](strategy, devices))


if __name__ == "__main__":
    main()
