"""One or several models as the arguments of one loss, for a custom loop.

Modules keep their mode (`train()`, `eval()`), and changes that a call makes in them are written back into the loop's
modules, as by NNX' own transformations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import PartitionSpec

from jdp.base.errors import UserError
from jdp.base.formatting import listed
from jdp.base.tree_paths import path_in_model
from jdp.core.flax_nnx.adapter import Adapter, at, is_model_state, nested, value_of, with_value


@dataclass(frozen=True)
class Models:
    """An `Adapter` for several models: parameters, model state and models are tuples with an entry for each."""

    adapters: tuple[Adapter | None, ...]  # None for a plain pytree
    specs: tuple[tuple[tuple[str, PartitionSpec], ...], ...]  # of each model, as `metadata` returns them

    def merge(
        self,
        params: Sequence[Any],
        model_state: Sequence[Any],
        rng: jax.Array | None,
        sync_axes: tuple[str, ...] = (),
        *,
        running_norms: bool = False,
    ) -> tuple[Any, ...]:
        """Build the models: modules in their own mode if there is a key to draw from, else in evaluation mode."""

        def merged(index: int, adapter: Adapter | None) -> Any:
            if adapter is None:
                return params[index]
            key = None if rng is None else jax.random.fold_in(rng, index)
            own = params[index], model_state[index], key, sync_axes
            return adapter.merge(*own, keep_mode=True, running_norms=running_norms)

        return tuple(merged(index, adapter) for index, adapter in enumerate(self.adapters))

    def changed(self, models: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(self.adapters, models, strict=True)
        return tuple({} if adapter is None else adapter.changed(model) for adapter, model in pairs)

    def written(self, params: Sequence[Any], models: Sequence[Any]) -> list[tuple[str, Any, Any]]:
        triples = zip(self.adapters, params, models, strict=True)
        own = [() if adapter is None else adapter.written(tree, model) for adapter, tree, model in triples]
        return [(path_in_model(n, len(own), path), *pair) for n, found in enumerate(own) for path, *pair in found]

    @property
    def named(self) -> frozenset[str]:
        return self._paths("named")

    @property
    def has_statistics(self) -> bool:
        return any(adapter.has_statistics for adapter in filter(None, self.adapters))

    @property
    def synchronised(self) -> frozenset[str]:
        return self._paths("synchronised")

    def _paths(self, name: str) -> frozenset[str]:
        count, own = len(self.adapters), [getattr(adapter, name, ()) for adapter in self.adapters]
        return frozenset(path_in_model(n, count, path) for n, paths in enumerate(own) for path in paths)


def gradient_state(adapter: Adapter, grads: Any) -> nnx.State[Any, Any]:
    """Return gradients as `nnx.grad` does: a state of the module's parameters, which `nnx.Optimizer.update` takes."""
    found = {}
    for path, variable in adapter.variables.items():
        if adapter.is_parameter(path, variable) and (value := at(grads, path)) is not None:
            found[path] = with_value(variable, value)
    return nnx.from_flat_state(found)


def write_back(module: nnx.Module, adapter: Adapter, before: Any, after: Any) -> None:
    changed = {}
    for path, variable in adapter.variables.items():
        if is_model_state(variable) and path not in adapter.others:
            new = at(after, path)
            if new is not at(before, path):
                changed[path] = with_value(variable, new)
    if not changed:
        return
    try:
        nnx.update(module, nnx.from_flat_state(changed))
    except TraceContextError as error:
        names = listed("/".join(map(str, path)) for path in changed)
        raise UserError(
            "A module that a call changes must be an argument of the jitted function; given a module that the function "
            f"closes over, and {names} would change. Pass it: @nnx.jit, def step(model, batch)."
        ) from error


def opened(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return (a pytree of all arrays of a tree, a function that makes the tree from such arrays)."""
    if not _has_variables(tree):
        return tree, lambda arrays: arrays
    graphdef, state = nnx.split(tree)
    return state, lambda arrays: nnx.merge(graphdef, arrays)


def plain(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return (the tree with nested dicts of arrays instead of modules and optimizers, the inverse function)."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=_has_variables)
    split = [nnx.split(node) if _has_variables(node) else None for node in nodes]
    flat = [None if parts is None else dict(nnx.to_flat_state(parts[1])) for parts in split]
    dicts = [
        node if own is None else nested({path: value_of(leaf) for path, leaf in own.items()})
        for node, own in zip(nodes, flat, strict=True)
    ]

    def back(arrays: Any) -> Any:
        def node(parts: Any, own: Any, values: Any) -> Any:
            if parts is None:
                return values
            filled = {path: with_value(leaf, at(values, path)) for path, leaf in own.items()}
            return nnx.merge(parts[0], nnx.from_flat_state(filled))

        return jax.tree.unflatten(treedef, map(node, split, flat, treedef.flatten_up_to(arrays)))

    return jax.tree.unflatten(treedef, dicts), back


def parameters(tree: Any) -> Any:
    """Return the argument of an optimizer's `init`: the `nnx.Param` state of a module, or any other tree itself."""
    return nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree


def map_parameters(opened: Any, parameters: Callable[[Any], Any], others: Callable[[Any], Any]) -> Any:
    """Return a tree like `opened`: `parameters` maps the tree of its parameters, `others` each other leaf."""
    if not isinstance(opened, nnx.State):
        return parameters(opened)
    flat = dict(nnx.to_flat_state(opened))
    params = {path: leaf.get_value() for path, leaf in flat.items() if isinstance(leaf, nnx.Param)}
    new = parameters(nested(params))

    def mapped(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf.replace(at(new, path)) if isinstance(leaf, nnx.Param) else jax.tree.map(others, leaf)

    return nnx.from_flat_state({path: mapped(path, leaf) for path, leaf in flat.items()})


def is_module(tree: Any) -> bool:
    return isinstance(tree, nnx.Module)


def is_optimizer(tree: Any) -> bool:
    return isinstance(tree, nnx.Optimizer)


def module_inside(tree: Any) -> str | None:
    """Return the path of an NNX module or optimizer inside another pytree; None if there is none."""
    nodes = jax.tree.leaves_with_path(tree, is_leaf=_has_variables)
    found = (path for path, node in nodes if path and _has_variables(node))
    return next((jax.tree_util.keystr(path) for path in found), None)


def shared(models: Sequence[Any]) -> str | None:
    """Return the path of a variable that two modules of the sequence share; None if there is none."""
    owners: dict[int, int] = {}
    for number, model in enumerate(models):
        for path, node in nnx.iter_graph(model) if isinstance(model, nnx.Module) else ():
            if isinstance(node, nnx.Variable) and owners.setdefault(id(node), number) != number:
                return "/".join(map(str, path))
    return None


def _has_variables(node: Any) -> bool:
    return isinstance(node, nnx.Module | nnx.Optimizer)
