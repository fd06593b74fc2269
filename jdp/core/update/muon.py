"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) with the matrices divided among the devices.

All matrices of one shape, over layers and leaves, form one stack [n, a, b], padded to a multiple of the N devices along
`data`, with tall matrices transposed. The stack is sharded on n (an all-to-all; under ddp nothing is sent), and each
device orthogonalizes its n / N matrices as `optax.contrib.scale_by_muon` does. The results, like the momentum, are
sharded like the parameters (an all-to-all; under ddp an all-gather).

In addition to its strategy's row a step sends 2·r·Ψ/N, or r·Ψ under ddp, for padded stacks of Ψ elements of r bytes.
Liu et al. 2025, arXiv:2502.16982, gather the momentum instead, and every device computes all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState

from jdp.base.errors import UserError, public
from jdp.base.tree_paths import path_of
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import is_traced_by_shard, set_while, traced_mesh, tracing_on
from jdp.core.state import TrainState, trained_part
from jdp.core.types import PyTree
from jdp.core.update.optimizer import apply

Rate = float | jax.Array | Callable[[Any], Any]
OPEN = PartitionSpec.UNCONSTRAINED
"""The entry for a dimension that XLA shards as it likes."""


@dataclass(frozen=True)
class Stack:
    """Matrices that are orthogonalized together: the paths of their leaves, and their bytes including padding."""

    paths: tuple[str, ...]
    nbytes: int


_STACKS: ContextVar[list[Stack] | None] = ContextVar("jdp_muon_stacks", default=None)


@public()
def muon(
    learning_rate: Rate,
    *,
    ns_coeffs: str | Sequence[Any] = "standard",
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Literal["frobenius", "spectral", "aol", "schatten"] = "frobenius",
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: Rate | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: float | None = None,
) -> optax.GradientTransformation:
    """Make `optax.contrib.muon`, with the matrices divided among the devices along `data`.

        >>> state = jdp.init_state(init, jdp.muon(0.02), plan, rng=jax.random.key(0))
        >>> state, metrics = jdp.make_train_step(loss_fn, plan)(state, batch)
        >>> int(state.step)
        1

    Updates and state are those of optax, under every strategy and on any mesh, also in a jitted function of your own.

    Args:
        learning_rate: a number, or a schedule: step -> number. AdamW uses it too, if `adam_learning_rate` is None.
        ns_coeffs: "standard" or "dion"; or three coefficients of a Newton-Schulz step, or three for each step.
        ns_steps: number of Newton-Schulz steps.
        beta: decay of the momentum.
        eps: added to denominators.
        weight_decay, weight_decay_mask: of matrices, as for `optax.adamw`.
        mu_dtype: dtype of the momentum; None: the parameter's.
        nesterov, adaptive, preconditioning: as for `optax.contrib.muon`.
        adam_b1, adam_b2, adam_eps_root, adam_weight_decay, adam_learning_rate: of AdamW, which trains all other leaves.
        muon_weight_dimension_numbers: a tree like the parameters, of `optax.contrib.MuonDimensionNumbers` for matrices
            and None for AdamW's leaves; or a function that makes it from the parameters. Dimensions that are neither
            rows nor columns are layers. None: parameters of two dimensions are matrices, and AdamW trains all others.
        consistent_rms: scale updates to this root mean square (0.2 is AdamW's) by sqrt(max(m, n)); None: by
            sqrt(max(1, n / m)).

    Returns:
        An optax optimizer.
    """
    if isinstance(ns_coeffs, str):  # a name, which optax looks up
        state = optax.contrib.muon(0.0, ns_coeffs, ns_steps).init(jnp.zeros((1, 1)))
        ns_coeffs = optax.tree.get(state, "ns_coeffs")
    numbers = partial(_numbers, muon_weight_dimension_numbers)
    by_size = lambda updates, _: jax.tree.map(partial(scaled, consistent_rms), updates, numbers(updates))  # noqa: E731
    common: Any = {"eps": eps, "mu_dtype": mu_dtype, "nesterov": nesterov}
    hidden = optax.chain(
        scale_by_muon(
            ns_coeffs=ns_coeffs,
            ns_steps=ns_steps,
            beta=beta,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=numbers,
            **common,
        ),
        optax.stateless(by_size),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    others = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        **common,
    )
    labels = lambda params: jax.tree.map(lambda _, dims: "adam" if dims is None else "muon", params, numbers(params))  # noqa: E731
    return optax.partition({"muon": hidden, "adam": others}, labels)


def _numbers(chosen: Any, params: PyTree) -> PyTree:
    """Return a tree like the parameters with their dimension numbers, None for AdamW's leaves."""
    if chosen is None:
        return jax.tree.map(lambda x: MuonDimensionNumbers() if x.ndim == 2 else None, params)
    chosen = chosen(params) if callable(chosen) else chosen
    return jax.tree.broadcast(chosen, params, lambda x: x is None or isinstance(x, MuonDimensionNumbers))


def scaled(rms: float | None, x: jax.Array, dims: MuonDimensionNumbers) -> jax.Array:
    """Return an update scaled by the sizes of its matrices, to this root mean square if it is given."""
    _, rows, columns = Form.of(x.shape, dims).sizes
    return x * (sqrt(max(1, columns / rows)) if rms is None else rms * sqrt(max(rows, columns)))


def scale_by_muon(
    *,
    beta: float = 0.95,
    mu_dtype: Any = None,
    nesterov: bool = True,
    adaptive: bool = False,
    weight_dimension_numbers: Any = None,
    **settings: Any,
) -> optax.GradientTransformation:
    """Make `optax.contrib.scale_by_muon`, with the matrices divided among the devices along `data`."""
    by_optax = optax.contrib.scale_by_muon(beta=beta, mu_dtype=mu_dtype, **settings)
    # For a stack of gradients without momentum, optax' update is their orthogonalization alone.
    numbers = [MuonDimensionNumbers(1, 2)]
    alone = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=numbers, **settings)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        del params
        dims = weight_dimension_numbers(updates) if callable(weight_dimension_numbers) else weight_dimension_numbers
        mu, count = optax.tree.update_moment(updates, state.mu, beta, 1), optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count) if nesterov else count)
        if nesterov:
            ahead = optax.tree.update_moment(optax.tree.bias_correction(updates, beta, count), ahead, beta, 1)

        def orthogonalized(stack: jax.Array) -> jax.Array:
            first = MuonState(jnp.zeros((), jnp.int32), [jnp.zeros_like(stack)], state.ns_coeffs)
            new: Any = alone.update([stack], first)[0]
            return new[0]

        new = _divided(ahead, dims, orthogonalized)
        if adaptive:
            new = jax.tree.map(lambda x, y: jnp.sum(x.conj() * y) * y, ahead, new)
        return new, MuonState(count, optax.tree.cast_like(mu, state.mu), state.ns_coeffs)

    return optax.GradientTransformation(by_optax.init, update)


@dataclass(frozen=True)
class Form:
    """The matrices in a leaf: its dimensions in the order layers, rows, columns, and the product of each kind."""

    order: tuple[int, ...]
    sizes: tuple[int, int, int]

    @staticmethod
    def of(shape: tuple[int, ...], dims: MuonDimensionNumbers) -> Form:
        rows, columns = (tuple(d % len(shape) for d in ((of,) if isinstance(of, int) else of)) for of in dims)
        if {*rows} & {*columns}:
            raise UserError(f"A matrix has different dimensions as rows and columns; given {dims}. Name each once.")
        kinds = tuple(d for d in range(len(shape)) if d not in rows + columns), rows, columns
        layers, *matrix = (prod(shape[d] for d in kind) for kind in kinds)
        return Form(sum(kinds, ()), (layers, matrix[0], matrix[1]))

    @property
    def matrix(self) -> tuple[int, int]:
        """The sizes of a matrix, transposed if it is taller than wide."""
        return min(self.sizes[1:]), max(self.sizes[1:])

    def matrices(self, leaf: jax.Array) -> jax.Array:
        """Return a leaf as matrices [n, a, b], a ≤ b."""
        x = leaf.transpose(self.order).reshape(self.sizes)
        return x if x.shape[1:] == self.matrix else x.swapaxes(1, 2)

    def leaf(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the leaf of this shape that has these matrices: the inverse of `matrices`."""
        x = (x if self.sizes[1:] == self.matrix else x.swapaxes(1, 2)).reshape([shape[d] for d in self.order])
        return x.transpose([self.order.index(d) for d in range(len(shape))])


def _divided(tree: PyTree, dims: PyTree, function: Callable[[jax.Array], jax.Array]) -> PyTree:
    """Apply a function of a stack [n, a, b], a ≤ b, to a tree of matrices; each device computes a part of the stack."""
    named, treedef = jax.tree.flatten_with_path(tree)
    alike, results = dict[Any, list[int]](), [leaf for _, leaf in named]
    forms = [Form.of(leaf.shape, dim) for leaf, dim in zip(results, treedef.flatten_up_to(dims), strict=True)]
    for i, (leaf, form) in enumerate(zip(results, forms, strict=True)):
        alike.setdefault((form.matrix, leaf.dtype), []).append(i)
    # the mesh for which an update is traced, else that of its arrays
    mesh: Any = traced_mesh() or next((jax.typeof(leaf).sharding.mesh for leaf in results), None)
    mesh = None if mesh is None or is_traced_by_shard() or mesh.shape.get(DATA, 1) == 1 else mesh
    for members in alike.values():
        parts = [forms[i].matrices(results[i]) for i in members]
        stack, count = jnp.concatenate(parts), 1 if mesh is None else mesh.shape[DATA]
        stack = jnp.pad(stack, ((0, -len(stack) % count), (0, 0), (0, 0)))
        if (noted := _STACKS.get()) is not None:
            noted.append(Stack(tuple(path_of(named[i][0]) for i in members), stack.nbytes))
        stack, first = _by_devices(function, stack, mesh), 0
        for i, part in zip(members, parts, strict=True):
            results[i] = forms[i].leaf(stack[first : first + len(part)], results[i].shape)
            first += len(part)
    return treedef.unflatten(results)


def _by_devices(function: Callable[[jax.Array], jax.Array], stack: jax.Array, mesh: Any) -> jax.Array:
    """Apply a function to a stack [n, a, b]; each device computes n / N matrices."""
    if mesh is None:
        return function(stack)
    # outside of the function a and b are open, so XLA shards them like the parameters
    at_rest = NamedSharding(mesh, PartitionSpec(None, OPEN, OPEN))
    divided = NamedSharding(mesh, PartitionSpec(DATA))
    stack = jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(stack, at_rest), divided)
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(function(stack), divided), at_rest)


def noting_stacks() -> AbstractContextManager[list[Stack]]:
    """Return a context that yields a list, and adds to it the stacks of updates that are traced."""
    return set_while(_STACKS, list[Stack]())


def exchanged(plan: Plan, state: TrainState) -> dict[tuple[str, int], int]:
    """Return (kind of collective, its devices) -> payload bytes that the state's update sends beside its row."""
    count, params = plan.mesh.shape[DATA], trained_part(state.params, state.static.trained)
    if count == 1:
        return {}
    with tracing_on(plan.mesh), noting_stacks() as stacks:
        update = partial(apply, state.static.tx)
        jax.eval_shape(update, params, state.opt_state, params, jax.ShapeDtypeStruct((), jnp.float32))
    placements = jax.tree.leaves(plan.param_placements(state.params, state.static))
    sharded = {placement.path for placement in placements if placement.dim is not None}
    sent = Counter[tuple[str, int]]()
    for stack in stacks:
        if sharded.isdisjoint(stack.paths):
            sent["all-gather", count] += stack.nbytes
        else:
            sent["all-to-all", count] += 2 * stack.nbytes // count
    return dict(sent)
