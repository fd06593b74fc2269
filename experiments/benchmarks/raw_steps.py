"""The contender of `step_time.py`: a training step written by hand in JAX, Flax and optax, which uses only jdp's model.

It is written in two forms, for each of `ddp`, `zero1` and `zero3` on a mesh with one axis, `data`:

- `"shard_map"`: the complete step per device, with explicit `psum`, `psum_scatter` and `all_gather`;
- `"jit"`: global arrays and sharding constraints, for which XLA inserts the collectives.

Under `zero3` both gather a layer inside the layer loop, and keep everything for the backward pass except gathered
weights. The step computes the gradient of (summed nats / tokens), clips it by its global norm, and applies the
optimizer. With `guard`, a step whose gradient is not finite changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.models import GPT, GPTConfig, next_token_loss

REPLICATED = -1
SMALL = 1024


@dataclass(frozen=True)
class RawStep:
    """A donating step, (params, opt_state, batch) -> (params, opt_state, loss, norm), and its first arguments."""

    step: Callable[..., Any]
    params: Any
    opt_state: Any


def make(
    config: GPTConfig, tx: Any, mesh: Mesh, strategy: str, *, view: str, clip_norm: float, guard: bool, seed: jax.Array
) -> RawStep:
    """Return the step, not yet compiled, with parameters and optimizer state, which are sharded from the start."""
    graphdef, abstract = nnx.split(jax.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(seed))))
    dims = jax.tree.map(partial(_shard_dim, strategy, mesh.size), abstract)
    specs = jax.tree.map(_spec, dims)
    opt_specs = optax.tree_map_params(
        tx, lambda _, spec: spec, jax.eval_shape(tx.init, abstract), specs, transform_non_params=lambda _: P()
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, opt_specs))

    def init() -> tuple[Any, Any]:
        params = nnx.state(GPT(config, rngs=nnx.Rngs(seed)))
        return params, tx.init(params)

    params, opt_state = jax.jit(init, out_shardings=shardings)()
    moves = VIEWS[view](mesh)
    step = partial(_step, moves, _loss(graphdef, dims, moves, strategy), dims, tx, strategy, clip_norm, guard)
    if view == "shard_map":
        in_specs, out_specs = (specs, opt_specs, P("data")), (specs, opt_specs, P(), P())
        step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return RawStep(jax.jit(step, donate_argnums=(0, 1)), params, opt_state)
    whole = NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, whole, whole))
    return RawStep(jitted, params, opt_state)


@dataclass(frozen=True)
class Moves:
    """Collectives: `gather(shard, dim)`; `scatter(gradient, dim)` to a shard of the sum; `total(tree)` to sums."""

    gather: Callable[[jax.Array, int], jax.Array]
    scatter: Callable[[jax.Array, int], jax.Array]
    total: Callable[[Any], Any]


def _by_hand(mesh: Mesh) -> Moves:
    def scatter(gradient: jax.Array, dim: int) -> jax.Array:
        if dim == REPLICATED:
            return jax.lax.psum(gradient, "data")
        return jax.lax.psum_scatter(gradient, "data", scatter_dimension=dim, tiled=True)

    return Moves(
        gather=lambda x, dim: jax.lax.all_gather(x, "data", axis=dim, tiled=True),
        scatter=scatter,
        total=lambda tree: jax.lax.psum(tree, "data"),
    )


def _by_constraints(mesh: Mesh) -> Moves:
    def lay(x: jax.Array, dim: int) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _spec(dim)))

    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def gather(x: jax.Array, dim: int) -> jax.Array:
        return lay(x, REPLICATED)

    gather.defvjp(lambda x, dim: (lay(x, REPLICATED), None), lambda dim, _, gradient: (lay(gradient, dim),))
    return Moves(gather=gather, scatter=lay, total=lambda tree: tree)


VIEWS = {"shard_map": _by_hand, "jit": _by_constraints}


def _step(
    moves: Moves, loss: Any, dims: Any, tx: Any, strategy: str, clip_norm: float, guard: bool, *state_and_batch: Any
) -> tuple[Any, Any, jax.Array, jax.Array]:
    params, opt_state, batch = state_and_batch
    operand = params
    if strategy == "zero1":
        operand = jax.tree.map(lambda x, dim: x if dim == REPLICATED else moves.gather(x, dim), params, dims)
    (total, weight), grads = jax.value_and_grad(loss, has_aux=True)(operand, batch)
    done = strategy == "zero3"  # the transpose of the gather has summed the sharded gradients
    grads = jax.tree.map(lambda g, dim: g if done and dim != REPLICATED else moves.scatter(g, dim), grads, dims)
    total, weight = moves.total((total, weight))

    grads = jax.tree.map(lambda g: g / weight, grads)
    norm = jnp.sqrt(_squares(moves, grads, dims))
    scale = jnp.minimum(1.0, clip_norm / norm)
    updates, new_opt_state = tx.update(jax.tree.map(lambda g: g * scale, grads), opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    if guard:
        finite = jnp.isfinite(norm) & jnp.isfinite(total)
        new = jax.tree.map(partial(jnp.where, finite), new, (params, opt_state))
    return *new, total / weight, norm


def _squares(moves: Moves, grads: Any, dims: Any) -> jax.Array:
    """Return Σ g², with each shard counted once; one scalar is sent."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(dims), strict=True)
    squares = [(jnp.sum(jnp.square(g)), dim) for g, dim in pairs]
    whole = sum((s for s, dim in squares if dim == REPLICATED), jnp.float32(0))
    shards = [s for s, dim in squares if dim != REPLICATED]
    return whole + moves.total(sum(shards, jnp.float32(0))) if shards else whole


def _loss(graphdef: Any, dims: Any, moves: Moves, strategy: str) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    """Return a function (parameters, batch) -> (summed nats, tokens), for the given rows."""
    module_dims = nnx.merge(graphdef, dims)

    def whole(module: Any, dims: Any, sliced: int = 0) -> Any:
        return jax.tree.map(lambda x, d: x if d == REPLICATED else moves.gather(x, d - sliced), module, dims)

    def layerwise(model: GPT, tokens: jax.Array) -> jax.Array:
        @partial(jax.checkpoint, policy=_all_but_gathered, prevent_cse=False)
        def layer(x: jax.Array, shards: Any) -> tuple[jax.Array, None]:
            return whole(shards, module_dims.layers, sliced=1)(x, None), None

        model.embed = whole(model.embed, module_dims.embed)  # tied: gathered once, for the lookup and the logits
        x, _ = jax.lax.scan(layer, model.embed(tokens), model.layers)
        return model.logits(model.final_norm(x))

    def loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params)
        logits = layerwise(model, batch["tokens"]) if strategy == "zero3" else model(batch["tokens"])
        return next_token_loss(logits, batch["targets"], batch["weights"])

    return loss


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in ("all_gather", "sharding_constraint")


def _shard_dim(strategy: str, devices: int, leaf: Any) -> int:
    """Return the largest dimension that divides, not the stack of layers; no dimension for small leaves and ddp."""
    if strategy == "ddp" or leaf.size < SMALL:
        return REPLICATED
    candidates = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % devices == 0 and (dim or leaf.ndim < 3)]
    return max(candidates, key=lambda dim: (leaf.shape[dim], -dim), default=REPLICATED)


def _spec(dim: int) -> P:
    return P() if dim == REPLICATED else P(*[None] * dim, "data")
