"""The layer loop of a deep model: it gathers each layer, sums its gradient, and chooses rematerialisation.

A step passes the loss function complete parameters, gathered at the start, so that any code is correct. `scan_layers`
looks its leaves up in the `GatherTable` and loops over their shards (`layer_loop.py`); the gather at the start is then
dead code. A leaf that was cast or reshaped before is not in the table: it is gathered for the whole step, and reported.

If XLA inserts the collectives ("auto"), for a list of layers, and under `vmap` or `jvp`, nothing is sent ahead. Under
ZeRO-3 the call of a block, which is rematerialised, then gathers the layer.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from typing import Any, Literal, TypeVar

import jax
from jax._src.core import trace_ctx  # nothing public says which transformations are under way
from jax._src.interpreters.ad import JVPTrace
from jax._src.interpreters.batching import BatchTrace

from jdp.base.errors import UserError, public
from jdp.base.notices import notice
from jdp.base.toml import described
from jdp.base.tree_paths import path_of
from jdp.core import flax_nnx
from jdp.core.flax_nnx import changes
from jdp.core.gradients.boundary import GatherTable, gather_table
from jdp.core.layer_loop import LayerLoop
from jdp.core.rematerialisation import EXCEPT_MLP, Remat, check_marks, remat_policy
from jdp.core.sharding.mesh import traced_device, traced_model_axes
from jdp.core.sharding.placement import Placement
from jdp.core.types import PyTree

Block = Callable[[Any, Any], Any]
Activations = TypeVar("Activations")

_SMALL = 2**16
"""Norms and biases of at most this many bytes a layer are gathered for all layers at once. Gathered alone, each would
take a slice, a cast and a collective in every layer."""
_MOST_UNROLLED = {"cpu": 8, "gpu": 128}
"""Platform -> the most layers that are compiled one by one. Each takes half a second to compile for a GPU, but a loop
copies its stacks. 80 layers of Llama 3 8B's width (zero3, h100:8x8, 4096 tokens a GPU, simulated) take 1,090 ms as a
loop and 991 one by one; with 8192 tokens, when memory is short, 2,762 and 2,115."""


@public()
def scan_layers(block: Block, stacked: PyTree, x: Activations, *, remat: Remat = None) -> Activations:
    """Run `x = block(layer, x)` over all layers.

        >>> blocks = nnx.List(nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3))
        >>> x = jdp.scan_layers(lambda layer, x: nnx.relu(layer(x)), blocks, jnp.ones((4, 8)), remat="full")
        >>> x.shape
        (4, 8)

    Under zero3 each layer's weights are gathered inside the loop, and again in the backward pass. On several devices a
    step gathers one layer ahead and sums gradients one layer behind, while it computes (not under
    partitioning="auto", `jax.vmap` or `jax.jvp`). Outside of a step this is a plain scan (or loop) over the layers. In
    equinox: `model = eqx.combine(...)` first. In linen:

            x = jdp.scan_layers(lambda layer, x: Block().apply({"params": layer}, x), params["layers"], x)

    jdp does not see the loop of a linen model (`nn.scan` or Python's), and gathers its weights at the start of the
    step. Inside such a model write `Block(parent=None)`; the layers' parameters are in `self.variables["params"]`.

    Changes that a block makes in an NNX module (batch statistics, counters, random streams) are kept, as in a Python
    loop: in the elements of a list, or in the stacked variables. Variables that the layers share, and variables in the
    block's closure, are carried from each layer to the next.

    Args:
        block: `block(layer, x)` -> x of the same structure, shapes and dtypes. It may close over anything but
            parameters.
        stacked: a pytree (an NNX module, or a tuple of a module and per-layer keys) whose arrays all have shape
            [layers, ...]. The loop is a `jax.lax.scan`; many layers are compiled once. Or a list (`nnx.List`) of
            per-layer pytrees, for layers that differ. Leaves that are not arrays are passed on unchanged.
        x: the activations that enter the first layer: a pytree of arrays.
        remat: the values that are kept for the backward pass; set it if activations do not fit into memory. None: all
            activations. "dots": the results of matrix products without batch dimensions and of fused attention, so no
            array of [length, length]. "dots_except_mlp": only those of attention and its projections, which the block
            marks by `jax.ad_checkpoint.checkpoint_name(x, "attention")`, as jdp's models do. "full": each layer's
            input. Or a policy of `jax.checkpoint_policies`. Gathered weights are not kept; None keeps their narrowing
            casts.

    Returns:
        The activations that leave the last layer, like `x`.

    Raises:
        ValueError: a leaf of `stacked` has no leading dimension, or leaves have different numbers of layers. The block
            returns activations of another structure, or changes a module that is neither among the layers nor in its
            closure. `remat` is unknown, or "dots_except_mlp" for a block without marks.
    """
    return looped(block, stacked, x, remat=remat)[0]


def looped(
    block: Block,
    stacked: PyTree,
    x: Activations,
    *,
    remat: Remat = None,
    scan: bool | Literal["auto"] | None = None,
    after: jax.Array | None = None,
) -> tuple[Activations, jax.Array | None]:
    """Run `scan_layers`; return its result and `after`, a parameter that is only used after the layers.

    Stacked layers are a loop if `scan` is True. "auto" chooses as None does, and reports it. The result is to be used
    in place of `after`: it is gathered while the last layer computes, and so is its gradient reduced.
    """
    gathers = gather_table()
    _check_call(block, x)
    if isinstance(stacked, list | MutableSequence):
        for layer in stacked:
            x = _unrolled(block, layer, x, gathers, remat)
        return x, after
    _check_stacked(stacked)
    in_loop = gathers is not None and gathers.boundary.in_loops and not _is_within_map_or_jvp(trace_ctx.trace)
    body = _Body(block, changes.flatten(stacked), gathers, remat, leading=1, in_loop=in_loop, is_loop=scan is True)
    if scan == "auto" and traced_device().platform == "gpu":
        most, how = _MOST_UNROLLED["gpu"], "a loop: with a model axis it hides more"
        if body.unrolls:
            how = "compiled one by one, which copies less than a loop"
        elif body.layers > most:
            how = f"a loop: at most {most} are compiled one by one"
        notice(f'scan = "auto": the {body.layers} layers are {how}')
    return _scanned(body, stacked, x, after)


def _unrolled(block: Block, layer: PyTree, x: PyTree, gathers: GatherTable | None, remat: Remat) -> PyTree:
    body = _Body(block, changes.flatten(layer), gathers, remat)
    if not body.is_traced:
        with changes.explaining_trace_errors():
            return block(layer, x)
    body.check_marks(x)
    x, own, outside = body.checkpointed(x, body.operands, changes.values(body.outside))
    body.layer.write(body.record, own)
    changes.assign([body.outside[i] for i in body.changed], [outside[i] for i in body.changed])
    return x


def _scanned(body: _Body, stacked: PyTree, x: PyTree, after: jax.Array | None) -> tuple[PyTree, jax.Array | None]:
    """Scan over stacked layers. Changes in a layer leave the scan stacked; changes outside are carried along."""
    body.check_marks(x)
    if body.outside:  # only variables that the block changes are carried
        jax.eval_shape(body, x, body.first, changes.values(body.outside))
        body.outside = [body.outside[i] for i in body.changed]

    def layer(carry: Any, operands: list[Any], call: Any = body.checkpointed) -> tuple[Any, list[Any]]:
        x, outside = carry
        new, own, outside = call(x, operands, outside)
        _check_alike(x, new, stacked)
        return (new, outside), own

    carry = x, changes.values(body.outside)
    if body.sends and body.layers:
        (x, outside), own, after = body.loop(layer, carry, after)
    else:
        (x, outside), own = jax.lax.scan(layer, carry, body.operands, unroll=body.unrolls)
    body.layer.write(body.record, own)
    changes.assign(body.outside, outside)
    return x, after


class _Body:
    """The call of one layer as a function of arrays only, which JAX can scan and checkpoint."""

    def __init__(
        self,
        block: Block,
        layer: changes.Flattened,
        gathers: GatherTable | None,
        remat: Remat,
        *,
        leading: int = 0,
        in_loop: bool = False,
        is_loop: bool = False,
    ) -> None:
        leaves = layer.arrays
        # leaves that are no arrays (an equinox module's function) are the same in each layer
        self.fixed = {i: leaf for i, (_, leaf, _) in enumerate(leaves) if not hasattr(leaf, "shape")}
        sources = [
            _operand(name, leaf, None if is_state else gathers, leading, in_loop)
            for i, (name, leaf, is_state) in enumerate(leaves)
            if i not in self.fixed
        ]
        self.block, self.layer, self.leading, self.is_loop = block, layer, leading, is_loop
        self.remat: Remat = remat
        self.gathers, self.boundary = gathers, None if gathers is None else gathers.boundary
        self.operands, self.placements = [leaf for leaf, _ in sources], [placement for _, placement in sources]
        gathers_here = any(placement is not None for placement in self.placements)
        self.sends = in_loop and gathers_here
        self.is_rematerialised = remat is not None or (gathers_here and not in_loop)
        self.is_traced = leading > 0 or self.is_rematerialised
        self.outside = changes.closed_over(block, excluding=layer.nodes) if self.is_traced else []
        self.record: changes.Record = []  # of the last call, like `changed`
        self.changed: list[int] = []  # indices in `outside`

    def __call__(self, x: Any, operands: list[Any], outside: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return the activations, the changes in the layer, and the values of `outside` after the call."""
        boundary, leading = self.boundary, self.leading
        arrays = [
            leaf if boundary is None or placement is None else boundary(leaf, placement, leading)
            for leaf, placement in zip(operands, self.placements, strict=True)
        ]
        return self.run(x, arrays, outside)

    def run(self, x: Any, arrays: list[Any], outside: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return the same, given gathered weights."""
        arrays = [*arrays]
        for i, leaf in self.fixed.items():
            arrays.insert(i, leaf)
        layer = self.layer.unflatten(arrays)
        with changes.substituted(self.outside, outside), changes.explaining_trace_errors():
            x = self.block(layer, x)
            after = changes.values(self.outside)
        self.record, own = self.layer.changes(layer, arrays)
        pairs = zip(outside, after, strict=True)
        self.changed = [i for i, (old, new) in enumerate(pairs) if not changes.is_unchanged(old, new)]
        return x, own, after

    def loop(self, layer: Callable[..., Any], carry: Any, after: jax.Array | None) -> tuple[Any, Any, jax.Array | None]:
        """Run the layers by a `LayerLoop`, which gathers them and `after` ahead, with the results of a scan."""
        gathers = self.gathers
        assert gathers is not None
        weights = [leaf for leaf, placement in zip(self.operands, self.placements, strict=True) if placement]
        others = [leaf for leaf, placement in zip(self.operands, self.placements, strict=True) if not placement]

        def call(gathered: list[Any], others: list[Any], carry: Any) -> tuple[Any, Any]:
            first, second = iter(gathered), iter(others)
            return layer(carry, [next(first if placement else second) for placement in self.placements], self.run)

        placements = [placement for placement in self.placements if placement]
        last = [gathers.table[id(after)][1:]] if id(after) in gathers.table else []
        last = [(weight, placement) for weight, placement in last if gathers.boundary.reduces(placement)]
        places = [placement for _, placement in last]
        loop = LayerLoop(gathers.boundary, placements, places, remat_policy(self.remat), self.unrolls, self.layers)
        carry, outputs, gathered = loop(call, (weights, [weight for weight, _ in last]), others, carry)
        return carry, outputs, gathered[0] if gathered else after

    @property
    def first(self) -> list[Any]:
        return jax.tree.map(lambda leaf: leaf[0], self.operands) if self.leading else self.operands

    def check_marks(self, x: Any) -> None:
        """Check by another trace that the block marks the values that its policy keeps."""
        if self.remat == EXCEPT_MLP:
            check_marks(jax.make_jaxpr(self)(x, self.first, changes.values(self.outside)))

    @property
    def unrolls(self) -> bool:
        """Whether stacked layers are compiled one by one, if they are few: a loop would copy their activations.

        On a CPU rematerialised layers stay a loop, so that XLA does not merge the recomputation with the forward pass.
        On a mesh with a model axis layers stay a loop too, because XLA then hides more of the traffic along that axis
        (tensor_parallel in experiments/LOG.md).
        """
        platform = traced_device().platform
        few = self.layers <= _MOST_UNROLLED.get(platform, 0)
        computes_again = self.is_rematerialised or (self.boundary is not None and self.boundary.again)
        stays = self.is_loop or (platform == "cpu" and computes_again)
        return few and not stays and not traced_model_axes()

    @property
    def layers(self) -> int:
        return jax.tree.leaves(self.operands)[0].shape[0]

    @property
    def checkpointed(self) -> Callable[..., Any]:
        if not self.is_rematerialised:
            return self
        # inside a loop nothing can be merged across iterations: no barriers needed
        in_loop = self.leading > 0 and not self.unrolls
        return jax.checkpoint(self.__call__, policy=remat_policy(self.remat), prevent_cse=not in_loop)


def _operand(
    name: str, leaf: Any, gathers: GatherTable | None, leading: int, in_loop: bool
) -> tuple[Any, Placement | None]:
    """Return the operand of the loop for one leaf: its `Weight` and placement; or the leaf itself and None."""
    if gathers is None:
        return leaf, None
    again = gathers.boundary.again
    if id(leaf) not in gathers.table:
        # keys, tables and numbers of a layer are no parameters
        if again and leaf.ndim > leading and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            notice(
                f"scan_layers: {name} {leaf.shape} is not a parameter itself but a changed copy, so it is gathered for "
                "the whole step; cast or reshape it inside the block"
            )
        return leaf, None
    _, weight, placement = gathers.table[id(leaf)]
    is_small = in_loop and leaf.ndim <= leading + 1 and leaf.nbytes <= leaf.shape[0] * _SMALL
    if is_small or not (in_loop or again) or not (placement.dim is not None or gathers.boundary.with_replicated):
        return leaf, None
    if placement.dim is not None and placement.dim < leading:
        if again:
            notice(
                f"{placement.path} {list(placement.shape)} is sharded over its layer dimension, so it is gathered for "
                "the whole step; pin another one with a rule: "
                f"Plan(..., rules=[({placement.path!r}, PartitionSpec(None, 'data'))])"
            )
        return leaf, None
    return weight, placement


def _is_within_map_or_jvp(trace: Any) -> bool:
    """Return True under `jax.vmap`, where each row's gradient would be sent, and `jax.jvp`, which needs other rules."""
    is_plain = getattr(trace, "is_vjp", not isinstance(trace, BatchTrace | JVPTrace))
    return trace is not None and (not is_plain or _is_within_map_or_jvp(getattr(trace, "parent_trace", None)))


def _check_call(block: Any, x: Any) -> None:
    """Check that the block is a function and the activations are arrays: they are easily exchanged."""
    rule = "scan_layers(block, stacked, x) takes a function block(layer, x), the layers, and the activations x"
    if not callable(block) or flax_nnx.is_module(block):
        raise UserError(f"{rule}; given {described(block)} as the block. Write lambda layer, x: layer(x).")
    if flax_nnx.is_module(x) or flax_nnx.module_inside(x) is not None:
        raise UserError(f"{rule}; given {described(x)} as the activations. Exchange it with the layers.")


_STACK = "Stack the layers, as nnx.vmap does of their constructor (jdp/core/scan_layers.md), or give a list of layers"


def _check_stacked(stacked: PyTree) -> None:
    """Check that every leaf is [layers, ...] with one number of layers."""
    counts: dict[int | None, str] = {}
    for name, shape in _shapes(stacked).items():
        counts.setdefault(shape[0] if shape else None, f"{name} is {list(shape)}")
    if len(counts) != 1 or None in counts:
        given = ", ".join(counts.values()) or f"{described(stacked)} without arrays"
        raise UserError(f"scan_layers takes leaves [layers, ...], as many layers in each; given {given}. {_STACK}.")


def _check_alike(x: PyTree, new: PyTree, stacked: PyTree) -> None:
    """Check that a block returned activations like its argument; they also differ if `stacked` is one layer only."""
    (before, tree), (after, other) = jax.tree.flatten(x), jax.tree.flatten(new)
    pairs = zip(before, after, strict=False)
    differing = [(a, b) for a, b in pairs if _text(a) != _text(b) and not getattr(a, "weak_type", False)]
    if tree == other and not differing:
        return
    old, got = map(_text, differing[0] if tree == other else (x, new))
    layers = ", ".join(f"{name} {list(shape)}" for name, shape in [*_shapes(stacked).items()][:2])
    raise UserError(
        f"A block returns activations like those that it gets; given {old}, it returned {got}. Cast or reshape the "
        f"result; or, if the leaves of `stacked` ({layers}) are one layer's, s{_STACK[1:]}."
    )


def _shapes(stacked: PyTree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(stacked)
    return {path_of(path): leaf.shape for path, leaf in leaves if hasattr(leaf, "shape")}


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else described(leaf)
