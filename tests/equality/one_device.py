"""Training on one device, by hand: the reference for `test_training_properties`. Nothing of jdp is imported here.

The rules are those that jdp documents, written once more: the objective of a step is Σtotal / Σweight over its batch;
`init` gets `rng`, and the key of the batch after `n` others is `fold_in(fold_in(rng, 0x6A6470), n)`; a step whose
gradient is not finite changes nothing. Where a model keeps statistics of the batch, microbatch k of K is the rows
k, k + K, ..., one after the other.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclass
class Run:
    """What training leaves: a dict of floats for each step, and arrays by path."""

    metrics: list[dict[str, float]]
    params: dict[str, Any]
    state: dict[str, Any]
    opt_state: dict[str, Any]
    evaluated: dict[str, float]


def by_path(tree):
    """path -> leaf, paths as text."""
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in jax.tree.leaves_with_path(tree)}


def loop(block, layers, x):
    """A plain Python loop over layers: a list of them, or a tree whose leaves have a leading layer dimension."""
    if isinstance(layers, list | nnx.List):
        for layer in layers:
            x = block(layer, x)
        return x
    nodes = layers if type(layers) is tuple else (layers,)
    split = [nnx.split(node) if isinstance(node, nnx.Module) else (None, node) for node in nodes]
    after = []
    for i in range(jax.tree.leaves([tree for _, tree in split])[0].shape[0]):
        one = [(graph, jax.tree.map(lambda leaf, i=i: leaf[i], tree)) for graph, tree in split]
        layer = [tree if graph is None else nnx.merge(graph, tree) for graph, tree in one]
        x = block(tuple(layer) if type(layers) is tuple else layer[0], x)
        after.append([nnx.state(node) if isinstance(node, nnx.Module) else None for node in layer])
    for node, *states in zip(nodes, *after, strict=True):
        if isinstance(node, nnx.Module):
            nnx.update(node, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
    return x


class Whole:
    """A pytree of parameters, as a model: no state beside them."""

    def __init__(self, params):
        self.params, self.state = params, {}

    def model(self, params, state, key):
        return params

    def changed(self, model):
        return {}


class Parted:
    """An NNX module, as parameters (nested dicts), other variables by path, and how to put it together."""

    def __init__(self, module):
        self.graph, variables = nnx.split(module)
        self.flat = dict(nnx.to_flat_state(variables))
        self.params = {}
        for path, leaf in self.flat.items():
            if isinstance(leaf, nnx.Param):
                *parents, last = map(str, path)
                node = self.params
                for name in parents:
                    node = node.setdefault(name, {})
                node[last] = leaf.get_value()
        self.state = self._others(self.flat)

    def model(self, params, state, key):
        values = {**by_path(params), **state}
        filled = {}
        for index, (path, leaf) in enumerate(self.flat.items()):
            name = "/".join(map(str, path))
            value = values[name] if name in values else seeded(leaf.get_value(), key, index)
            filled[path] = leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
        module = nnx.merge(self.graph, nnx.from_flat_state(filled))
        (module.eval if key is None else module.train)()
        return module

    def changed(self, module):
        return self._others(dict(nnx.to_flat_state(nnx.split(module)[1])))

    def _others(self, flat):
        kept = {path: leaf for path, leaf in flat.items() if not isinstance(leaf, nnx.Param | nnx.RngState)}
        values = {path: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf for path, leaf in kept.items()}
        return {"/".join(map(str, path)): jnp.asarray(value) for path, value in values.items()}


def seeded(value, key, index):
    """A module's own random keys come from the step's, by their place in the module; its counters start at 0."""
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jnp.zeros_like(value)
    key = jax.random.fold_in(jax.random.key(0) if key is None else key, index)
    if not value.shape:
        return key
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(value.size)).reshape(value.shape)


def as_computed(leaf):
    """Frozen weights may rest in another dtype than is computed in."""
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def as_sums(value, batch):
    """(total, weight, metrics as pairs) of what a loss returns: those three, or the mean over the rows."""
    if not isinstance(value, tuple):
        rows = jnp.float32(jax.tree.leaves(batch)[0].shape[0])
        return value * rows, rows, {}
    total, weight, metrics = value
    pairs = {name: entry if isinstance(entry, tuple) else (entry, weight) for name, entry in metrics.items()}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (total, weight, pairs))


def initial(init, seed):
    """What `init` makes of the key: its kind (`Whole` or `Parted`), parameters and other variables."""
    kind = []

    def make(key):
        model = init(key)
        kind[:] = [Parted(model) if isinstance(model, nnx.Module) else Whole(model)]
        strong = lambda leaf: jnp.asarray(leaf, leaf.dtype)  # noqa: E731  a weak type would compile `step` twice
        return jax.tree.map(strong, (kind[0].params, kind[0].state))

    params, state = jax.jit(make)(jax.random.key(seed))
    return kind[0], params, state


class Loop:
    """What is trained, and how: `step` is a step of one device, `start` what the optimizer begins with.

    `split`: a sharding of the rows, by which XLA itself spreads the step over devices."""

    def __init__(self, initial, loss, tx, *, clip_norm=None, is_trained=lambda path: True, microbatches=1, split=None):
        self.kind, self.params, self.state = initial
        self.loss, self.tx, self.clip_norm = loss, tx, clip_norm
        self.microbatches, self.split = microbatches, split
        self.trained = [is_trained(path) for path in by_path(self.params)]
        self.step = jax.jit(self._step)

    def start(self):
        return jax.tree.map(jnp.asarray, jax.jit(self.tx.init)(self.part(self.params)))

    def part(self, tree):
        """The tree with None for what is frozen."""
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten([leaf if kept else None for leaf, kept in zip(leaves, self.trained, strict=True)])

    def together(self, tree, some):
        leaves, treedef = jax.tree.flatten(tree)
        new = iter(jax.tree.leaves(some))
        return treedef.unflatten([next(new) if kept else leaf for leaf, kept in zip(leaves, self.trained, strict=True)])

    def sums(self, some, params, state, batch, key):
        whole = jax.tree.map(as_computed, self.together(params, some))
        model = self.kind.model(whole, state, key)
        total, weight, metrics = as_sums(self.loss(model, batch, key), batch)
        return total, ((total, weight, metrics), self.kind.changed(model))

    def _step(self, params, opt_state, state, batch, key):
        """((params, opt_state, state) afterwards, metrics, the sums that they are of)."""
        grads, found, now = None, None, state
        for k in range(self.microbatches):
            numbers = jnp.arange(len(jax.tree.leaves(batch)[0])).reshape(-1, self.microbatches)[:, k]
            rows = jax.tree.map(lambda x, numbers=numbers: x[numbers.ravel()], batch)
            if self.split is not None:
                rows = jax.lax.with_sharding_constraint(rows, self.split)
            gradient = jax.value_and_grad(self.sums, has_aux=True)
            (_, (more, now)), grad = gradient(self.part(params), params, now, rows, key)
            grads = grad if grads is None else jax.tree.map(jnp.add, grads, grad)
            found = more if found is None else jax.tree.map(jnp.add, found, more)
        total, weight, _ = found
        grads = jax.tree.map(lambda g: g / weight, grads)
        norm = optax.tree.norm(grads)
        used = grads
        if self.clip_norm is not None:
            used = jax.tree.map(lambda g: g * jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-30)), grads)
        update = optax.with_extra_args_support(self.tx).update
        updates, new_opt = update(used, opt_state, self.part(params), value=total / weight)
        new_params = self.together(params, optax.apply_updates(self.part(params), updates))
        good = jnp.isfinite(norm) & jnp.isfinite(total)
        old, new = (params, opt_state, state), (new_params, new_opt, now)
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        return kept, {**means(found), "grad_norm": norm, "skipped": 1 - good}, found


def means(sums):
    total, weight, metrics = sums
    return {**{name: a / b for name, (a, b) in metrics.items()}, "loss": total / weight, "weight": weight}


def train(initial, loss, tx, batches, *, seed, evaluates=True, **settings):
    """Train what `initial` made on `batches`, and evaluate on the last. `loss(model, batch, key)`: as for `as_sums`.

    `settings`: those of `Loop`."""
    loop, batches = Loop(initial, loss, tx, **settings), list(batches)
    rows, params, opt_state, state = steps(loop, batches, seed)
    evaluated = evaluation(loop, params, state, batches[-1]) if evaluates else {}
    return Run(rows, *map(jax.device_get, (by_path(params), state, by_path(opt_state))), evaluated)


def steps(loop, batches, seed):
    """Take a step with each batch: (metrics of each, params, opt_state, state)."""
    params, opt_state, state = loop.params, loop.start(), loop.state
    rows, skipped = [], 0
    for number, batch in enumerate(batches):
        (params, opt_state, state), row, _ = loop.step(params, opt_state, state, batch, key_of(seed, number))
        skipped += int(row["skipped"])
        rows.append({**floats(row), "skipped": skipped})
    return rows, params, opt_state, state


def key_of(seed, number):
    """The key of the batch after `number` others."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0x6A6470), number)


def floats(row):
    return {name: float(value) for name, value in row.items()}


def evaluation(loop, params, state, batch):
    _, (sums, _) = jax.jit(lambda *args: loop.sums(loop.part(args[0]), *args, None))(params, state, batch)
    return floats(means(sums))


def compared(got, want):
    """What two runs have, the second one's names: [(name, distance, got, expected)]."""
    assert len(got.metrics) == len(want.metrics)
    named = [
        (f"step {i}: {name}", row[name], other[name])
        for i, (row, other) in enumerate(zip(got.metrics, want.metrics, strict=True))
        for name in other
    ]
    named += [(f"evaluation: {name}", got.evaluated[name], want.evaluated[name]) for name in want.evaluated]
    for part in ("params", "state", "opt_state"):
        mine, others = getattr(got, part), getattr(want, part)
        assert mine.keys() == others.keys()
        named += [(f"{part}/{path}", mine[path], others[path]) for path in others]
    return [(name, distance(a, b), a, b) for name, a, b in named]


def nudged(params, seed):
    """The parameters, each value of float32 moved by one rounding up or down, or not at all (none for seed 0)."""
    random = np.random.default_rng(seed)

    def moved(leaf):
        if not seed or leaf.dtype != np.float32:
            return leaf
        return leaf * (1 + random.integers(-1, 2, size=leaf.shape) * 2.0**-23).astype(np.float64)

    return jax.tree.map(lambda leaf: jnp.asarray(moved(np.asarray(leaf)), leaf.dtype), params)


def distance(got, want):
    """The largest difference, relative to the largest value, or to 0.1; what is not finite must be alike."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf
    return float(np.abs(got[finite] - want[finite]).max(initial=0) / max(0.1, np.abs(want[finite]).max(initial=0)))
