"""Everything jdp knows of Flax NNX: how a module becomes plain trees of arrays, and back.

A module is split once, at initialisation, and put together again only while a step is traced; no call of a compiled
step walks a module. Its parameters become nested dicts with text keys, which JAX flattens natively.

Three kinds of variables:
- `nnx.Param`: trained;
- `nnx.RngState` (the keys and counters inside `nnx.Dropout(rngs=...)`): never carried along. Every merge seeds them
  anew from the step's key, so the masks depend on that key alone;
- all others (BatchNorm statistics), and arrays that are plain attributes (tables): model state, returned changed by the
  step. What a call adds to the module (`sow`) is dropped, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from jdp.notices import notice

Flat = dict[tuple[Any, ...], Any]


@dataclass(frozen=True)
class Adapter:
    """What a module is besides its arrays.

    Attributes:
        graphdef: the module's structure.
        variables: every variable by its path, holding shapes only; a merge fills in the arrays.
    """

    graphdef: nnx.GraphDef[nnx.Module]
    variables: Flat = field(compare=False, repr=False)

    def merge(self, params: Mapping[str, Any], model_state: Mapping[str, Any], rng: jax.Array | None) -> nnx.Module:
        """Put the module together: in training mode with `rng` to draw from, in evaluation mode without one."""
        arrays = {**_flatten(params), **_flatten(model_state)}
        filled: Flat = {}
        for path, variable in self.variables.items():
            value = _seeded(variable, rng, len(filled)) if _is_rng(variable) else arrays[tuple(map(str, path))]
            filled[path] = variable.replace(value) if isinstance(variable, nnx.Variable) else value
        module = nnx.merge(self.graphdef, nnx.from_flat_state(filled))
        (module.eval if rng is None else module.train)()
        return module

    def changed(self, module: nnx.Module) -> dict[str, Any]:
        """The model state after the module was called: of what it had before; what the call added is dropped."""
        after = {path: _value(leaf) for path, leaf in _flat(module).items() if _is_model_state(leaf)}
        if added := [path for path in after if path not in self.variables]:
            notice(f"{'/'.join(map(str, added[0]))} was added to the model by its call, and is not kept between steps")
        return _nest({path: value for path, value in after.items() if path in self.variables})

    @property
    def has_statistics(self) -> bool:
        """Whether calls may change state that depends on the batch, as BatchNorm's do."""
        return any(_is_model_state(v) and isinstance(v, nnx.Variable) for v in self.variables.values())


def split(model: Any) -> tuple[Any, Any, Adapter | None]:
    """Return (params, model_state, adapter); a pytree that is not an NNX module comes back as it is, adapter None."""
    if not isinstance(model, nnx.Module):
        return model, {}, None
    variables = _flat(model)
    params = _nest({path: _value(leaf) for path, leaf in variables.items() if isinstance(leaf, nnx.Param)})
    model_state = _nest({path: jax.numpy.asarray(_value(v)) for path, v in variables.items() if _is_model_state(v)})
    shapes = {path: _shape(leaf) for path, leaf in variables.items()}
    return params, model_state, Adapter(nnx.graphdef(model), shapes)


def _flat(module: nnx.Module) -> Flat:
    return dict(nnx.to_flat_state(nnx.split(module)[1]))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _shape(leaf: Any) -> Any:
    """The leaf with a shape in place of its array."""
    return leaf.replace(jax.typeof(leaf.get_value())) if isinstance(leaf, nnx.Variable) else jax.typeof(leaf)


def _is_rng(variable: Any) -> bool:
    return isinstance(variable, nnx.RngState)


def _is_model_state(variable: Any) -> bool:
    return not isinstance(variable, nnx.RngState | nnx.Param)


def _seeded(variable: Any, rng: jax.Array | None, index: int) -> jax.Array:
    """A fresh key or a zero counter for one RNG variable; in evaluation mode a key that nothing draws from."""
    aval = variable.get_value()
    if not jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    key = jax.random.fold_in(jax.random.key(0) if rng is None else rng, index)
    if not aval.shape:
        return key
    count = int(jax.numpy.prod(jax.numpy.array(aval.shape)))
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jax.numpy.arange(count)).reshape(aval.shape)


def _nest(flat: Flat) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = map(str, path)
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return nested


def _flatten(nested: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    flat: dict[tuple[str, ...], Any] = {}
    for key, value in nested.items():
        flat |= _flatten(value, (*prefix, key)) if isinstance(value, Mapping) else {(*prefix, key): value}
    return flat
