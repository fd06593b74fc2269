"""What a model's calls change: through `scan_layers` and by the step, everywhere as in a plain loop on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp

LAYERS, WIDTH, ROWS = 2, 8, 8
TX = optax.sgd(0.1)


class Block(nnx.Module):
    """Everything that a layer can change: statistics, a counter, a plain array, a shared stream, a new variable."""

    def __init__(self, rngs, shared=None):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rngs, self.again = shared, shared  # in two places, and yet one stream
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.table = nnx.data(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        self.table = self.table + 0.5
        x = self.dropout(x + jnp.tanh(self.norm(self.linear(x))))
        if self.rngs is not None:
            x = x + jax.random.normal(self.rngs(), x.shape) - jax.random.normal(self.again(), x.shape)
        self.seen = nnx.Intermediate(x.mean())
        return x


class Model(nnx.Module):
    """Layers in a list or stacked; and what the block closes over: another Dropout and a counter."""

    def __init__(self, rngs, stacked=False, closing=False, loop=jdp.scan_layers, **settings):
        layers = [Block(nnx.Rngs(key), None if stacked else rngs) for key in jax.random.split(rngs(), LAYERS)]
        self.layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if stacked else nnx.List(layers)
        self.outer = nnx.Dropout(0.5, rngs=rngs) if closing else None
        self.total = nnx.Variable(jnp.zeros((), jnp.int32))
        self.loop, self.settings = loop, tuple(settings.items())

    def __call__(self, x):
        def block(layer, x):
            if self.outer is not None:
                x = self.outer(x)
                self.total[...] += 1
            return layer(x)

        return self.loop(block, self.layers, x, **dict(self.settings))


def plain(block, layers, x):
    """The loop that `scan_layers` stands for. Of a stack, over its slices, which are stacked again afterwards."""
    each = layers
    if not isinstance(layers, nnx.List):
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(LAYERS)]
    for layer in each:
        x = block(layer, x)
    if each is not layers:
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        layers.seen = together.seen
        nnx.update(layers, nnx.state(together))
    return x


def data(seed=0):
    return np.random.default_rng(seed).normal(1.0, 2.0, (ROWS, WIDTH)).astype(np.float32)


def leaves(tree):
    """Arrays by path, keys as numbers."""
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return {jax.tree_util.keystr(p): np.asarray(plain(x)) for p, x in jax.tree.leaves_with_path(tree)}


def assert_same(got, wanted, tolerance=1e-5):
    """float32 in another order of sums: 1e-5; counters are equal at any tolerance below a half."""
    got, wanted = leaves(got), leaves(wanted)
    assert got.keys() == wanted.keys()
    for path, leaf in got.items():
        np.testing.assert_allclose(leaf, wanted[path], rtol=tolerance, atol=tolerance, err_msg=path)


@functools.cache
def after_one_call(loop, stacked, closing, **settings):
    """Activations and state after a call, traced: the loop's own program is what is looked at, not its speed."""

    @jax.jit
    def run(key, x):
        model = Model(nnx.Rngs(key), stacked, closing, loop, **settings)
        return model(x), nnx.state(model)

    return run(jax.random.key(0), data())


@pytest.mark.parametrize(
    ("stacked", "remat", "closing"),
    [(False, None, True), (False, "full", True), (True, None, True), (True, "dots", False)],
)
def test_what_a_block_changes_stays_changed_as_in_a_plain_loop(stacked, remat, closing):
    """Statistics, counters, streams, arrays and new variables, with no plan at work."""
    got = after_one_call(jdp.scan_layers, stacked, closing, remat=remat)
    assert_same(got, after_one_call(plain, stacked, closing))


def loss_fn(model, batch, rng):
    y = model(batch["x"])
    nnx.pop(model, nnx.Intermediate)
    return jdp.Loss((y**2).sum(), jnp.float32(y.shape[0]))


@functools.cache
def after_two_steps(strategy, devices, stacked, closing, remat, partitioning="auto", loop=jdp.scan_layers):
    settings = {"remat": remat} if remat else {}
    init = lambda rng: Model(nnx.Rngs(rng), stacked, closing, loop, **settings)  # noqa: E731
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:devices]), strategy, min_shard_size=16)
    state = jdp.init_state(init, TX, plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss_fn, plan, partitioning=partitioning)
    for seed in range(2):
        state, metrics = step(state, {"x": data(seed)})
    return jax.device_get((state.params, state.model_state, metrics["loss"]))


@pytest.mark.parametrize(
    ("strategy", "partitioning", "remat", "stacked"),
    [("zero3", "auto", None, False), ("zero3", "manual", "full", True), ("zero2", "auto", None, True)],
)
def test_the_one_word_changes_nothing_of_it(strategy, partitioning, remat, stacked):
    """Under zero3 each layer is traced apart, to be gathered again; its state is that of a loop on one device."""
    got = after_two_steps(strategy, 4, stacked, True, remat, partitioning)
    assert_same(got, after_two_steps("ddp", 1, stacked, True, None, loop=plain), tolerance=2e-4)
    calls = got[1]["layers"]["calls"] if stacked else [got[1]["layers"][str(i)]["calls"] for i in range(LAYERS)]
    assert [int(count) for count in calls] == [2] * LAYERS
    assert int(got[1]["total"]) == 2 * LAYERS


class Hidden:
    """Out of `scan_layers`' sight: a plain object in a plain object."""

    def __init__(self):
        self.inner = type("Inner", (), {})()
        self.inner.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("layers", [[jnp.ones(2)], jnp.ones((1, 2))])
def test_a_change_that_cannot_leave_the_block_is_refused_with_the_reason(layers):
    def run(x):
        hidden = Hidden()
        return jdp.scan_layers(lambda layer, x: hidden.inner.dropout(x * layer), layers, x, remat="full")

    with pytest.raises(ValueError, match=r"Cannot mutate RngCount.*close over the module itself"):
        jax.eval_shape(run, jnp.ones(2))


# What the step makes of it.


class Poisoned(nnx.Module):
    """A statistic that the loss does not depend on."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.seen[...] = jax.lax.stop_gradient(jnp.where(x[:, 0].max() > 1e6, jnp.nan, self.seen[...] + 1.0))
        return self.linear(x)


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
def test_a_statistic_that_is_not_finite_skips_the_step(partitioning):
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:2]))
    state = jdp.init_state(lambda rng: Poisoned(nnx.Rngs(rng)), TX, plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss_fn, plan, partitioning=partitioning)
    skipped = []
    for largest in (1.0, 2e6, 1.0):
        x = data()
        x[0, 0] = largest
        state, metrics = step(state, {"x": x})
        skipped.append(int(metrics["skipped"]))
    assert skipped == [0, 1, 1]
    assert float(state.model_state["seen"]) == 2.0


class Counting(nnx.Module):
    """Counts calls, and one thing more; `seen` is a float that the other may be made of."""

    def __init__(self, rngs, what):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scales = nnx.Param(jnp.ones((LAYERS, 1)))
        self.calls, self.each = nnx.Variable(jnp.zeros((), jnp.int32)), nnx.Variable(jnp.zeros(LAYERS, jnp.int32))
        self.seen = nnx.Variable(jnp.zeros(()))
        self.other = nnx.Variable(jnp.zeros((), jnp.bool_ if what == "flag" else jnp.int32))
        self.what = what

    def __call__(self, x):
        y = jdp.scan_layers(lambda layer, x: self.block(*layer, x), (self.scales, self.each), self.linear(x))
        if self.what == "count":
            self.other[...] += (x > 0).sum(dtype=jnp.int32)
        elif self.what == "flag":
            self.other[...] = jax.lax.cond(x[0, 0] > 0, lambda: True, lambda: False)
        elif self.what == "through seen":
            self.other[...] = (self.seen[...] > 0).astype(jnp.int32)
        self.seen[...] += jax.lax.stop_gradient(x.mean())
        return y

    def block(self, scale, each, x):
        each[...] += 1
        self.calls[...] += 1
        return x * scale[...]


def step_of(what, partitioning, accumulate, devices=4, make=jdp.abstract_state):
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:devices]), "zero3")
    state = make(lambda rng: Counting(nnx.Rngs(rng), what), TX, plan, rng=jax.random.key(0))
    return jdp.make_train_step(loss_fn, plan, partitioning=partitioning, accumulate=accumulate), state


@pytest.mark.parametrize(("what", "accumulate"), [("count", 1), ("count", 2), ("flag", 1), ("through seen", 2)])
def test_manual_refuses_counts_of_the_batch(what, accumulate):
    step, state = step_of(what, "manual", accumulate)
    kind = "bool" if what == "flag" else "int32"
    with pytest.raises(ValueError, match=rf"other \({kind}\), which depends on them.*Use partitioning='auto'"):
        jax.eval_shape(step, state, {"x": data()})
    for devices, view in ((4, None), (4, "auto"), (1, "manual")):  # alone, or seeing the whole batch
        step, state = step_of(what, view, accumulate, devices)
        jax.eval_shape(step, state, {"x": data()})
