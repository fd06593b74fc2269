"""Flax NNX modules as plain trees: split once, merged while a step is traced, with whatever calls change."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_layers import keeping
from trainings import abstract_step, assert_close, plan_of
from trainings import train as _train

import jdp

FEATURES, ROWS = 8, 16


def loss_fn(model, batch, rng):
    y = model(batch["x"])
    return jdp.Loss((y**2).sum(), jnp.float32(y.shape[0]))


def data(seed=0):
    return {"x": np.random.default_rng(seed).normal(2.0, 3.0, (ROWS, FEATURES)).astype(np.float32)}


train = functools.partial(_train, check_loss=True)
TX = optax.sgd(0.1)  # an optimizer is part of what a step is traced for


class Odd(nnx.Module):
    """Besides weights, a table that is a plain attribute; and calls leave a variable behind."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.table = jnp.arange(FEATURES, dtype=jnp.float32)
        self.frozen = nnx.Dropout(0.5, deterministic=True)

    def __call__(self, x):
        self.seen = nnx.Intermediate(x)
        return self.linear(x) + self.table


def test_dropped_variables_and_modes_are_reported(reported):
    step, state, _ = train(loss_fn, lambda rng: Odd(nnx.Rngs(rng)), TX, plan_of(), [data()], accumulate=2)
    assert set(state.params) == {"linear"} and set(state.model_state) == {"table"}
    np.testing.assert_array_equal(state.model_state["table"], np.arange(FEATURES))
    assert step.partitioning == "manual"  # a table is no statistic of the batch
    assert [m for m in reported() if "not kept" in m or "evaluation mode" in m] == [
        "a train step puts frozen into training mode, although it was made in evaluation mode; to keep it there, call "
        "its .eval() in the loss",
        "a call of the model adds seen, which is not kept between steps",
    ]


@pytest.mark.parametrize("layers", [[jnp.ones(2)], jnp.ones((1, 2))])
def test_changes_that_cannot_leave_are_refused(layers):
    """A dropout out of `scan_layers`' sight: in a plain object in a plain object."""

    def run(x):
        hidden = types.SimpleNamespace(inner=types.SimpleNamespace(dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(0))))
        return jdp.scan_layers(lambda layer, x: hidden.inner.dropout(x * layer), layers, x, remat="full")

    with pytest.raises(ValueError, match=r"Cannot mutate RngCount.*close over the module itself"):
        jax.eval_shape(run, jnp.ones(2))


def test_a_nonfinite_statistic_skips_the_step():
    """The loss does not depend on it. A variable may hold a tree."""
    batches = [data(), data(), data()]
    batches[1]["x"][0, 0] = 2e6
    change = lambda seen, x: {"a": jnp.where(x.max() > 1e6, jnp.nan, seen["a"] + 1)}  # noqa: E731
    init = keeping(FEATURES, {"a": jnp.zeros(())}, change)
    _, state, measured = train(loss_fn, init, TX, plan_of(devices=2), batches, partitioning="manual")
    assert [int(metrics["skipped"]) for metrics in measured] == [0, 1, 1]
    assert float(state.model_state["seen"]["a"]) == 2.0


def positive(x):
    return (x > 0).sum(dtype=jnp.int32)


COUNTS = {  # of rows, and of a mean of the rows of the microbatch before
    1: (jnp.int32(0), lambda seen, x: seen + positive(x)),
    2: ((jnp.float32(0), jnp.int32(0)), lambda seen, x: (seen[0] + x.mean(), seen[1] + positive(seen[0]))),
}


@pytest.mark.parametrize("accumulate", COUNTS)
def test_manual_refuses_counts_of_the_batch(accumulate):
    def trace(partitioning, devices):
        plan, settings = plan_of("zero3", devices), {"partitioning": partitioning, "accumulate": accumulate}
        step, state = abstract_step(loss_fn, keeping(FEATURES, *COUNTS[accumulate]), TX, plan, **settings)
        jax.eval_shape(step, state, data())

    with pytest.raises(ValueError, match=r"seen(/1)? \(int32\) would depend on each device's rows.*'auto'"):
        trace("manual", 4)
    for partitioning, devices in ((None, 4), ("auto", 4), ("manual", 1)):  # alone, or seeing the whole batch
        trace(partitioning, devices)


scan = functools.partial(nnx.scan, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
HANDED_ON = {
    "remat": nnx.remat(lambda block, x: block(x)),
    "cond": lambda block, x: nnx.cond(x.sum() > 0, nnx.remat(lambda b, x: b(x)), lambda b, x: x, block, x),
    "scan": lambda blocks, x: scan(nnx.remat(lambda b, x: b(x)))(blocks, x),
    "jit in scan": lambda blocks, x: scan(nnx.jit(lambda b, x: b(x)))(blocks, x),
}


class Handing(nnx.Module):
    """Hands a block, or two stacked ones, to `call`."""

    def __init__(self, rngs, call, is_stacked=False):
        make = lambda rngs: nnx.Linear(FEATURES, FEATURES, rngs=rngs)  # noqa: E731
        self.block, self.call = nnx.vmap(make)(rngs.split(2)) if is_stacked else make(rngs), call

    def __call__(self, x):
        return self.call(self.block, x)


@pytest.mark.parametrize("name", HANDED_ON)
def test_loops_and_branches_write_no_parameter(name):
    """They return the parameters of a block that `nnx.remat` or `nnx.jit` hands on, unchanged."""
    init = lambda rng: Handing(nnx.Rngs(rng), HANDED_ON[name], "scan" in name)  # noqa: E731
    step, state = abstract_step(loss_fn, init, TX, plan_of("zero3", 2))
    jax.eval_shape(step, state, data())
    assert step.partitioning == "manual"


@pytest.mark.parametrize("partitioning", [None, "auto"])
def test_a_call_that_writes_a_parameter_is_refused(partitioning):
    def write(linear, x):
        linear.kernel[...] = linear.kernel[...] / jnp.linalg.norm(linear.kernel[...])  # as nnx.SpectralNorm does
        return linear(x)

    init = lambda rng: Handing(nnx.Rngs(rng), nnx.remat(write))  # noqa: E731
    step, state = abstract_step(loss_fn, init, TX, plan_of("zero3"), partitioning=partitioning)
    with pytest.raises(ValueError, match=r"the optimizer alone; .* writes block/kernel, .*WeightNorm.*set_value"):
        jax.eval_shape(step, state, data())


def test_state_of_rows_is_refused_with_microbatches():
    init = keeping(FEATURES, jnp.zeros((ROWS, FEATURES)), lambda seen, x: jnp.tanh(x + seen))
    step, state = abstract_step(loss_fn, init, TX, plan_of("zero2"))
    jax.eval_shape(step, state, data())
    with pytest.raises(ValueError, match=r"seen, \[16, 8\], with a batch of 16 rows, and .* fails on 8 of them"):
        jax.eval_shape(step.changed(accumulate=2), state, data())
    step, state = abstract_step(lambda m, b, r: b["missing"], init, TX, plan_of("zero2"), accumulate=2)
    with pytest.raises(KeyError, match="missing"):  # of any number of rows
        jax.eval_shape(step, state, data())


class Temperature(nnx.Variable):
    pass


class Scaled(nnx.Module):
    """A layer, a trainable scale of another type, and a batch norm."""

    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(FEATURES, FEATURES, rngs=rngs), nnx.BatchNorm(FEATURES, rngs=rngs)
        self.scale = Temperature(jnp.full(FEATURES, 2.0))

    def __call__(self, x):
        return self.norm(self.linear(x)) * self.scale[...]


@pytest.mark.parametrize("wrt", [(nnx.Param, Temperature), Temperature], ids=["types", "one"])
@pytest.mark.default_ids("one")
def test_a_filter_trains_variables_of_other_types(wrt):
    """As nnx.Optimizer does on one device, in a step and in a custom loop."""
    init = lambda rng: Scaled(nnx.Rngs(rng))  # noqa: E731
    plan, key, batches = plan_of("zero2", min_shard_size=0), jax.random.key(3), [data(seed=seed) for seed in (0, 1)]
    alone, module = jax.jit(init)(key), jdp.init(init, plan, rng=key)
    _, state, _ = train(loss_fn, init, TX, plan, batches, seed=3, wrt=wrt)
    optimizers = [nnx.Optimizer(model, TX, wrt=wrt) for model in (alone, module)]
    gradient = jdp.value_and_grad(loss_fn, plan, wrt=wrt, check_loss=False)
    objective = lambda model, batch: jnp.square(model(batch["x"])).sum(1).mean()  # noqa: E731
    reference = nnx.jit(nnx.grad(objective, argnums=nnx.DiffState(0, wrt)))
    update = nnx.jit(nnx.Optimizer.update)
    for batch in batches:
        update(optimizers[0], alone, reference(alone, batch))
        update(optimizers[1], module, gradient(module, batch, key)[1])
    trained = lambda model: (model.scale[...], model.linear.kernel[...])  # noqa: E731
    for model in (state.model, module):
        assert_close(trained(model), trained(alone), rtol=1e-4, atol=1e-5)
    assert float(alone.scale[0]) != 2.0


def test_a_filter_of_everything_trains_no_batch_statistics():
    init = lambda rng: Scaled(nnx.Rngs(rng))  # noqa: E731
    state = jdp.init_state(init, TX, plan_of(), rng=jax.random.key(3), wrt=...)
    assert set(state.params) == {"linear", "norm", "scale"} and set(state.params["norm"]) == {"bias", "scale"}
    with pytest.raises(ValueError, match=r"`wrt` selects norm/mean, an nnx.BatchStat. .*wrt=\(nnx.Param, \.\.\.\)"):
        jdp.value_and_grad(loss_fn, plan_of(), wrt=...)(state.model, data(), jax.random.key(3))


class Held(nnx.Module):
    """Variables that hold trees, and one without elements."""

    def __init__(self, rngs):
        self.linear = nnx.Param({"w": jax.random.normal(rngs(), (FEATURES, FEATURES)), "b": (jnp.zeros(FEATURES),)})
        self.frozen = nnx.LoRAParam({"scale": jnp.ones(FEATURES)})
        self.none = nnx.Param(jnp.zeros((0, FEATURES)))

    def __call__(self, x):
        linear = self.linear.get_value()
        return self.frozen.get_value()["scale"] * (x @ linear["w"]) + linear["b"][0] + self.none[...].sum()


def test_variables_of_trees_equal_one_device():
    init, batches, ends = lambda rng: Held(nnx.Rngs(rng)), [data(seed=seed) for seed in range(2)], []
    for plan, partitioning in ((plan_of("zero3", 4), "manual"), (plan_of(devices=1), "auto")):
        _, state, measured = train(loss_fn, init, TX, plan, batches, seed=3, partitioning=partitioning)
        ends.append((state.params, measured[-1]["loss"]))
    # sums of squares of 16 rows, in another order: 1e-5 of the largest; two steps and a norm's division: 1e-4
    assert_close(*ends, rtol=1e-4, atol=1e-4)


def test_a_variable_without_arrays_is_refused():
    class Named(nnx.Module):
        def __init__(self):
            self.w, self.name = nnx.Param(jnp.ones(3)), nnx.Variable("left")

    with pytest.raises(ValueError, match=r"name holds 'left'. Make it a plain attribute"):
        jdp.abstract_state(lambda rng: Named(), TX, plan_of(), rng=jax.random.key(0))


class Functional(nnx.Module):
    """Functions that every instance makes anew, and an array that is no variable, which a call changes."""

    def __init__(self, rngs, scale=2.0):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.act = lambda x: scale * nnx.relu(x)
        self.clip = functools.partial(jnp.clip, min=0, max=scale)
        self.table = ((scale, lambda x, slope=scale: x * slope),)
        self.rows = nnx.data(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.rows = self.rows + len(x)
        return self.table[0][1](self.clip(self.act(self.linear(x))))


def test_functions_made_anew_are_the_same_structure():
    """And what calls change is kept, in a step and in a custom loop."""
    init, plan, key = lambda rng: Functional(nnx.Rngs(rng)), plan_of(devices=4), jax.random.key(3)
    step, gradient = jdp.make_train_step(loss_fn, plan), jdp.value_and_grad(loss_fn, plan)
    module = jdp.init(init, plan, rng=key)
    for _ in range(2):
        state, _ = step(jdp.init_state(init, TX, plan, rng=key), data())
        gradient(module, data(), key)
    assert step.jitted._cache_size() == 1
    assert (int(state.model_state["rows"]), int(module.rows)) == (ROWS, 2 * ROWS)
