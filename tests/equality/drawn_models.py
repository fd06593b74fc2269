"""The models, losses, optimizers and batches that `test_training_properties` draws. Nothing of jdp is imported here.

A `Case` says what there is; whoever trains brings the loop over the layers. Activations pass through tanh and no
optimizer looks at a gradient's sign alone, so that rounding stays rounding.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY, FEATURES, CLASSES, LENGTH, STEPS = 12, 6, 4, 3, 3


@dataclass(frozen=True)
class Case:
    """One draw. The first option of each field is the simplest."""

    seed: int = 0
    rows: int = 8
    model: str = "tree"  # a pytree of arrays, or an NNX module
    inputs: str = "floats"  # float32 [rows, 6], or int tokens [rows, 3]
    width: int = 8
    layers: int = 1  # of the loop
    stacked: bool = False  # one tree with a leading layer dimension, or a list
    walk: str = "once"  # through the layers; twice; in the model's own loop; with a tree of activations
    remat: str | None = None  # as of `jdp.scan_layers`
    tied: bool = False  # the first weight is the last one, too
    shared: bool = False  # one dense layer is used before and after the loop
    state: str | None = None  # of the module, beside parameters
    inner: str | None = None  # state of each layer of the loop
    noise: str | None = None  # how randomness is drawn; in evaluation there is none
    batch: str = "flat"  # its structure
    weights: str = "ones"  # of the examples
    bad: str | None = None  # what is wrong with the second batch of three
    loss: str = "sum"  # sums and a weight; the plain mean over the rows; a weight that depends on a parameter
    term: str | None = None  # added to the total
    metrics: str | None = None  # none, one with the loss's weight, one with its own
    optimizer: str = "sgd"
    clip_norm: float | None = None
    frozen: str | None = None  # the first weight is not trained; rests in float16; is there beside a table of integers

    def __repr__(self) -> str:
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return f"Case({', '.join(f'{name}={value!r}' for name, value, default in fields if value != default)})"

    @property
    def keeps(self) -> bool:
        """Whether calls change state, so that the microbatches show in it."""
        changing = ("norm", "masked_norm", "calls", "layer_calls", "seen", "counted")
        return self.state in changing or self.inner in changing

    @property
    def draws(self) -> bool:
        return self.noise is not None or self.inner in ("dropout", "one_rngs")


# Models.


def init(case, key):
    return Net(case, nnx.Rngs(key)) if case.model == "nnx" else init_tree(case, key)


def sizes(case):
    """(inputs, outputs) of the model."""
    given = VOCABULARY if case.inputs == "tokens" else FEATURES
    return given, given if case.tied else CLASSES


def init_tree(case, key):
    """Parameters as nested dicts and lists; `scale` is a scalar."""
    given, wanted = sizes(case)

    def normal(index, *shape):
        return jax.random.normal(jax.random.fold_in(key, index), shape) / 2

    def dense(index, *layers):
        w = case.width
        return {"kernel": normal(index, *layers, w, w), "bias": jnp.full((*layers, w), 0.1)}

    params = {"enter": normal(0, given, case.width), "scale": jnp.float32(1.5)}
    params["layers"] = dense(1, case.layers) if case.stacked else [dense(10 + i) for i in range(case.layers)]
    params |= {"mix": dense(2)} if case.shared else {}
    params |= {} if case.tied else {"leave": normal(3, case.width, wanted)}
    params["enter"] = params["enter"].astype(jnp.float16) if case.frozen == "half" else params["enter"]
    params |= {"e_table": jnp.arange(case.width)} if case.frozen == "integers" else {}
    return params


def apply_dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def tree_logits(case, params, x, rng, loop):
    h = params["enter"][x] if case.inputs == "tokens" else x @ params["enter"]
    h = noisy(case, h, rng)
    h = h + 0.1 * params["e_table"] if case.frozen == "integers" else h
    h = jnp.tanh(apply_dense(params["mix"], h)) if case.shared else h
    h = walked(case, lambda layer, h: h + 0.5 * jnp.tanh(apply_dense(layer, h)), params["layers"], h, rng, loop)
    h = jnp.tanh(apply_dense(params["mix"], h)) if case.shared else h
    return params["scale"] * (h @ (params["enter"].T if case.tied else params["leave"]))


def walked(case, block, layers, h, rng, loop):
    """Through the layers, the way the case has it."""
    if not case.layers:
        return h
    if rng is not None and case.noise in ("layer_split", "layer_fold"):
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        count = jnp.arange(case.layers)
        keys = jax.random.split(rng, case.layers) if case.noise == "layer_split" else fold(rng, count)
        beside = (layers, keys) if case.stacked else list(zip(layers, keys, strict=True))
        return loop(lambda both, h: block(both[0], h) + 0.2 * jax.random.normal(both[1], h.shape), beside, h)
    if rng is not None and case.noise == "inside":
        return loop(lambda layer, h: block(layer, h) * jax.random.bernoulli(rng, 0.8, h.shape), layers, h)
    match case.walk:
        case "once":
            return loop(block, layers, h)
        case "twice":
            return loop(block, layers, loop(block, layers, h))
        case "own":
            for layer in layers:
                h = block(layer, h)
            return h
        case "tree":
            start = {"h": h, "means": [h.mean(-1), jnp.zeros((), jnp.int32)]}

            def both(layer, all):
                after, (mean, count) = block(layer, all["h"]), all["means"]
                return {"h": after, "means": [mean + after.mean(-1), count + 1]}

            end = loop(both, layers, start)
            return end["h"] + 0.1 * end["means"][0][..., None] * end["means"][1]
    raise ValueError(case.walk)


class Block(nnx.Module):
    """A layer of the loop: x + tanh(dense x) / 2, and what `inner` adds."""

    def __init__(self, case, rngs):
        self.inner = case.inner
        self.dense = nnx.Linear(case.width, case.width, rngs=rngs)
        self.norm = nnx.BatchNorm(case.width, momentum=0.5, rngs=rngs) if case.inner == "norm" else None
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32)) if case.inner == "calls" else None
        self.dropout = nnx.Dropout(0.3, rngs=rngs) if case.inner == "dropout" else None
        self.rngs = rngs if case.inner == "one_rngs" else None
        self.deterministic = False  # `eval()` sets it

    def __call__(self, x):
        h = x if self.norm is None else self.norm(x)
        if self.calls is not None:
            self.calls[...] += 1
        h = jnp.tanh(self.dense(h))
        if self.dropout is not None:
            h = self.dropout(h)
        if self.rngs is not None and not self.deterministic:
            h = nnx.Dropout(0.3, deterministic=False)(h, rngs=self.rngs)
        return x + 0.5 * h


class Net(nnx.Module):
    def __init__(self, case, rngs):
        given, wanted = sizes(case)
        self.case = case
        width = case.width
        if case.inputs == "tokens":
            self.enter = nnx.Embed(given, width, rngs=rngs)
        else:
            self.enter = nnx.Linear(given, width, use_bias=False, rngs=rngs)
        if case.frozen == "half":
            weight = self.enter.embedding if case.inputs == "tokens" else self.enter.kernel
            weight.set_value(weight.get_value().astype(jnp.float16))
        self.mix = nnx.Linear(width, width, rngs=rngs) if case.shared else None
        if case.stacked:
            make = nnx.split_rngs(splits=case.layers)(nnx.vmap(lambda rngs: Block(case, rngs)))
            self.layers = make(rngs)
        else:
            self.layers = nnx.List([Block(case, rngs) for _ in range(case.layers)])
        self.leave = None if case.tied else nnx.Linear(width, wanted, use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(1.5))
        self.dropout = nnx.Dropout(0.3, rngs=rngs) if case.noise in ("held", "parents") else None
        norms = case.state in ("norm", "masked_norm")
        self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs) if norms else None
        self.kept = first_state(case, width)

    def __call__(self, x, rng, loop, counts):
        """`counts`: bool, like x without its last dimension; the rows or tokens that weigh anything."""
        case = self.case
        h = self.with_state(noisy(case, self.enter(x), rng), counts)
        h = self.dropout(h) if case.noise == "held" else h
        h = h if self.mix is None else jnp.tanh(self.mix(h))
        h = walked(case, self.one_layer, self.layers, h, rng, loop)
        h = h if self.mix is None else jnp.tanh(self.mix(h))
        return self.scale * (h @ self.first.T if self.leave is None else self.leave(h))

    def one_layer(self, block, h):
        """What the loop calls; it may use and change what the parent has."""
        if self.case.state == "layer_calls":
            self.kept[...] += 1
        h = block(h)
        return self.dropout(h) if self.case.noise == "parents" else h

    @property
    def first(self):
        return (self.enter.embedding if self.case.inputs == "tokens" else self.enter.kernel).get_value()

    def with_state(self, h, counts):
        """Use the state and, where it is one that calls change, change it."""
        match self.case.state:
            case "norm":
                return self.norm(h)
            case "masked_norm":
                return self.norm(h, mask=counts[..., None])
            case "half_table":
                return jnp.where(self.kept.get_value() < -1, 0.1, h)
            case "plain_table":
                return h + self.kept
            case "calls":
                self.kept[...] += 1
            case "seen":
                mean = jax.lax.stop_gradient(h.mean(tuple(range(h.ndim - 1))))
                self.kept[...] = 0.5 * self.kept[...] + 0.5 * mean
            case "counted":
                self.kept[...] += (h > 0).sum(dtype=jnp.int32)
        return h


def first_state(case, width):
    match case.state:
        case "half_table":
            return nnx.Variable(jnp.where(jnp.arange(width) % 3 == 0, jnp.float16(-30000), jnp.float16(0)))
        case "plain_table":
            return nnx.data(jnp.arange(width, dtype=jnp.float32) / 10)
        case "calls" | "layer_calls" | "counted":
            return nnx.Variable(jnp.zeros((), jnp.int32))
        case "seen":
            return nnx.Variable(jnp.zeros(width))
    return None


def noisy(case, h, rng):
    """Multiply the activations [rows, ..., width] by a mask; test_row_keys has the other ways to draw."""
    if rng is None or case.noise not in ("mask", "dropout"):
        return h
    if case.noise == "dropout":
        return nnx.Dropout(0.3, deterministic=False)(h, rngs=nnx.Rngs(rng))
    return h * jax.random.bernoulli(rng, 0.8, h.shape)


# Losses.


def loss(case, loop, model, batch, rng):
    """(total, weight, metrics), or where the case says so the plain mean over the rows."""
    x, y, weight = unpacked(case, batch)
    logits = model(x, rng, loop, weight > 0) if case.model == "nnx" else tree_logits(case, model, x, rng, loop)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, y) * weight
    if case.loss == "mean":
        return nll.mean() + added(case, model, logits, 1.0)
    squares = jnp.square(logits).mean(-1)
    metrics = {} if case.metrics is None else {"size": (squares * weight).sum()}
    learned = 1 + jnp.tanh(scale(case, model)) if case.loss == "learned_weight" else 1
    metrics |= {"unweighted": (squares.sum(), squares.size)} if case.metrics == "own" else {}
    return nll.sum() + added(case, model, logits, weight.sum()), weight.sum() * learned, metrics


def added(case, model, logits, weight):
    """What is added to the total: a sum over examples; one over pairs of neighbours; and what is neither."""
    match case.term:
        case None:
            return 0.0
        case "decay":
            return 0.02 * weight * jnp.square(scale(case, model))
        case "bare_decay":
            return 0.3 * jnp.square(scale(case, model))
        case "negatives":
            flat = logits.reshape(logits.shape[0], -1)
            return optax.softmax_cross_entropy_with_integer_labels(flat @ flat.T, jnp.arange(len(flat))).sum()
        case "pairs":
            return 0.02 * jnp.square(logits[0::2] - logits[1::2]).sum()
    raise ValueError(case.term)


def scale(case, model):
    return model.scale[...] if case.model == "nnx" else model["scale"]


# Batches.


def batches(case):
    """Three batches in numpy, their structure as the case has it."""
    random = np.random.default_rng(case.seed)
    _, wanted = sizes(case)
    places = (case.rows, LENGTH) if case.inputs == "tokens" else (case.rows,)
    for number in range(STEPS):
        bad = case.bad if number == 1 else None
        if case.inputs == "tokens":
            x = random.integers(0, VOCABULARY, places).astype(np.int32)
        else:
            x = random.normal(size=(*places, FEATURES)).astype(np.float32)
        y = random.integers(0, wanted, places).astype(np.int32)
        weight = weights(case, random, places)
        if bad == "empty":
            weight = np.zeros_like(weight)
        if bad == "infinite" and case.inputs == "floats":
            x[case.rows // 2] = np.inf
        yield packed(case, x, y, weight)


def weights(case, random, places):
    """Of each example: 1; random with whole rows of zero; zero for the first half; counts."""
    if case.weights == "ones":
        return np.ones(places, np.float32)
    if case.weights == "half":
        later = np.arange(places[0]) >= places[0] // 2
        return np.broadcast_to(later.reshape(-1, *[1] * (len(places) - 1)), places).astype(np.float32)
    if case.weights == "counts":
        return random.integers(0, 3, places).astype(np.int32)
    drawn = random.random(places) + 0.1
    drawn[random.random(places[0]) < 0.3] = 0
    return drawn.astype(np.float32)


def packed(case, x, y, weight):
    if case.batch == "nested":
        y = (y.astype(np.uint8), weight)
        return {"in": {"x": x, "id": np.arange(len(x), dtype=np.int8)}, "out": {"y": y, "more": [x[..., :1]]}}
    return {"x": x, "y": y, "weight": weight}


def unpacked(case, batch):
    if case.batch == "nested":
        y, weight = batch["out"]["y"]
        return batch["in"]["x"], y.astype(jnp.int32), weight
    return batch["x"], batch["y"], batch["weight"]


# Optimizers whose states differ in kind; test_optimizers has all of optax'. Denominators are kept far from zero: what
# divides by a gradient's size makes noise of rounding.

RATE = 0.05
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(RATE, eps=1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.2), optax.adam(RATE, eps=1e-2)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(RATE, eps=1e-2), every_k_schedule=2),
    "plateau": lambda: optax.chain(optax.sgd(RATE), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)),
    "frozen_moment": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE, eps=1e-2, weight_decay=0.1),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
        optax.sgd(RATE),
    ),
}
