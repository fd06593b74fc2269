"""Host memory: the leaves of a state in their host's pinned memory, and the functions that move them.

`Plan(..., offload="optimizer")` chooses the leaves (`Placement.memory`). Described devices list no memories, and JAX
drops the memory kind of their shardings: `mark_host_leaves` writes it into the lowered program.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jaxlib.mlir import ir

from jdp.base.errors import UserError
from jdp.core.types import PyTree

PINNED = "pinned_host"
"""JAX's name for host memory that devices access without the processor."""


def check_offload(offload: str | None, mesh: Mesh) -> None:
    """Check that `offload` is known, and that the mesh's devices can reach pinned host memory."""
    if offload is None:
        return
    if offload != "optimizer":
        raise UserError(f'offload is "optimizer" (its state in host memory) or None; given {offload!r}. Leave it out.')
    for device in mesh.devices.flat:
        ours = device.process_index == jax.process_index()
        kinds = [memory.kind for memory in device.addressable_memories()] if ours else []
        if kinds and PINNED not in kinds:  # a described device lists none
            given = f"{device.platform} devices with {', '.join(kinds)}"
            rule = f'offload="optimizer" needs devices that reach pinned host memory ({PINNED!r})'
            raise UserError(f"{rule}; given {given}. Leave offload out.")


def is_described(mesh: Mesh) -> bool:
    """Return True for a mesh of described devices, which list no memories."""
    device = mesh.devices.flat[0]
    return device.process_index == jax.process_index() and not device.addressable_memories()


def to_device(x: jax.Array) -> jax.Array:
    """Return an array in device memory with the same sharding, also inside a traced function."""
    return jax.device_put(x, jax.memory.Space.Device)


def to_host(x: jax.Array) -> jax.Array:
    """Return an array in pinned host memory with the same sharding, also inside a traced function."""
    return jax.device_put(x, jax.memory.Space.Host)


def is_on_host(x: Any) -> bool:
    """Return True for an array, a tracer or a `jax.ShapeDtypeStruct` that is in pinned host memory."""
    if isinstance(x, Tracer):
        return getattr(x.aval, "memory_space", None) == jax.memory.Space.Host
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == PINNED


def on_device(tree: PyTree) -> PyTree:
    """Return a tree whose leaves are in device memory: copies of those in host memory, and the others unchanged."""

    def moved(leaf: Any) -> Any:
        if not is_on_host(leaf):
            return leaf
        if isinstance(leaf, Tracer):
            return to_device(leaf)
        sharding = NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(moved, tree) if any(map(is_on_host, jax.tree.leaves(tree))) else tree


_PLACEMENT = "annotate_device_placement"  # JAX's custom call that tells XLA an array's memory


def mark_host_leaves(lowered: jax.stages.Lowered) -> None:
    """Add the memory kinds of arguments and results to a program that was lowered for described devices.

    An argument is marked if a direct use of it declares host memory, as `fetched` does. A result is marked if the
    program's last operation on it moves it there.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        block = main.regions[0].blocks[0]
        returned = list(block.operations)[-1]
        hosts = [any(_is_host(use.owner) for use in argument.uses) for argument in block.arguments]
        results = [_is_host(value.owner) for value in returned.operands]
        kind: dict[str, Any] = {"mhlo.memory_kind": ir.StringAttr.get(PINNED)}
        for name, marks in (("arg_attrs", hosts), ("res_attrs", results)):
            own: list[dict[str, Any]] = [{each.name: each.attr for each in old} for old in main.attributes[name]]
            marked = [ir.DictAttr.get(old | kind if mark else old) for old, mark in zip(own, marks, strict=True)]
            main.attributes[name] = ir.ArrayAttr.get(marked)


def _is_host(owner: Any) -> bool:
    operation = getattr(owner, "operation", owner)
    if not hasattr(operation, "attributes") or "call_target_name" not in operation.attributes:
        return False
    called = operation.attributes["call_target_name"].value == _PLACEMENT
    return called and PINNED in str(operation.attributes["mhlo.frontend_attributes"])
