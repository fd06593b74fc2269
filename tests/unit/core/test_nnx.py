"""Flax NNX modules as plain trees: split once, merged while a step is traced, batch statistics and dropout included."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainings import abstract_step, assert_close, plan_of
from trainings import train as _train

import jdp

FEATURES, ROWS = 8, 16


class Model(nnx.Module):
    """BatchNorm keeps state; Dropout draws from keys of its own; layers sit in a list."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(FEATURES, FEATURES, rngs=rngs) for _ in range(2)])
        self.norm, self.dropout = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


def make(rng):
    return Model(nnx.Rngs(rng))


def loss_fn(model, batch, rng):
    y = model(batch["x"])
    return jdp.Loss((y**2).sum(), jnp.float32(y.shape[0]))


def data(seed=0):
    return {"x": np.random.default_rng(seed).normal(2.0, 3.0, (ROWS, FEATURES)).astype(np.float32)}


train = functools.partial(_train, check_loss=True)
TX = optax.sgd(0.1)  # an optimizer is part of what a step is traced for


def state_of(plan, init=make):
    return jdp.init_state(init, TX, plan, rng=jax.random.key(3))


class Odd(nnx.Module):
    """Besides weights, a table that is a plain attribute; and calls leave a variable behind."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.table = nnx.data(jnp.arange(FEATURES, dtype=jnp.float32))
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


def test_statistics_and_masks_ignore_the_mesh():
    ends = []
    for plan in (plan_of(), plan_of(devices=1)):
        _, state, [metrics] = train(loss_fn, make, TX, plan, [data()], seed=3, partitioning="auto")
        ends.append((state.params, state.model_state, metrics["loss"]))
    assert_close(*ends, rtol=1e-4, atol=1e-5)
    first = jax.device_get(state_of(plan_of(devices=1)).params)["layers"]["0"]
    hidden = data()["x"] @ first["kernel"] + first["bias"]
    norm = ends[0][1]["norm"]
    assert_close([norm["mean"], norm["var"]], [0.1 * hidden.mean(0), 0.9 + 0.1 * hidden.var(0)], rtol=1e-4)


def test_batch_norm_is_no_mixing_of_rows():
    """Its statistics are synchronised over the devices, so that each computes its own rows."""
    step, *_ = train(loss_fn, make, TX, plan_of(), [data()])
    assert step.partitioning == "manual" and "norm" not in step.why


@pytest.mark.parametrize("layers", [[jnp.ones(2)], jnp.ones((1, 2))])
def test_changes_that_cannot_leave_are_refused(layers):
    """A dropout out of `scan_layers`' sight: in a plain object in a plain object."""

    def run(x):
        hidden = types.SimpleNamespace(inner=types.SimpleNamespace(dropout=nnx.Dropout(0.5, rngs=nnx.Rngs(0))))
        return jdp.scan_layers(lambda layer, x: hidden.inner.dropout(x * layer), layers, x, remat="full")

    with pytest.raises(ValueError, match=r"Cannot mutate RngCount.*close over the module itself"):
        jax.eval_shape(run, jnp.ones(2))


class Poisoned(nnx.Module):
    """A statistic that the loss does not depend on."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.seen[...] = jax.lax.stop_gradient(jnp.where(x[:, 0].max() > 1e6, jnp.nan, self.seen[...] + 1.0))
        return self.linear(x)


def test_a_nonfinite_statistic_skips_the_step():
    batches = [data(), data(), data()]
    batches[1]["x"][0, 0] = 2e6
    make = lambda rng: Poisoned(nnx.Rngs(rng))  # noqa: E731
    _, state, measured = train(loss_fn, make, TX, plan_of(devices=2), batches, partitioning="manual")
    assert [int(metrics["skipped"]) for metrics in measured] == [0, 1, 1]
    assert float(state.model_state["seen"]) == 2.0


class Counting(nnx.Module):
    """Counts what depends on the rows, directly or by the float `seen`; other counts do not."""

    def __init__(self, rngs, through_seen):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.calls, self.other = (nnx.Variable(jnp.zeros((), jnp.int32)) for _ in range(2))
        self.seen = nnx.Variable(jnp.zeros(()))
        self.through_seen = through_seen

    def __call__(self, x):
        self.calls[...] += 1
        self.other[...] += ((self.seen[...] if self.through_seen else x) > 0).sum(dtype=jnp.int32)
        self.seen[...] += jax.lax.stop_gradient(x.mean())
        return self.linear(x)


@pytest.mark.parametrize(("through_seen", "accumulate"), [(False, 1), (True, 2)])
def test_manual_refuses_counts_of_the_batch(through_seen, accumulate):
    def trace(partitioning, devices):
        plan = plan_of("zero3", devices)
        init = lambda rng: Counting(nnx.Rngs(rng), through_seen)  # noqa: E731
        step, state = abstract_step(loss_fn, init, TX, plan, partitioning=partitioning, accumulate=accumulate)
        jax.eval_shape(step, state, data())

    with pytest.raises(
        ValueError, match=r"other \(int32\) would depend on each device's rows.*Use partitioning='auto'"
    ):
        trace("manual", 4)
    for partitioning, devices in ((None, 4), ("auto", 4), ("manual", 1)):  # alone, or seeing the whole batch
        trace(partitioning, devices)


class CountingNorm(nnx.BatchNorm):
    """A batch norm with a count of its own."""

    def __call__(self, x):
        self.tracked[...] += len(x)
        return super().__call__(x)


class Tally(nnx.Module):
    """Counts rows: in a variable of a batch norm, or in an array that is a plain attribute."""

    def __init__(self, rngs, in_norm):
        self.norm, self.seen = CountingNorm(FEATURES, rngs=rngs), nnx.data(jnp.zeros((), jnp.int32))
        self.norm.tracked, self.in_norm = nnx.BatchStat(jnp.zeros((), jnp.int32)), in_norm

    def __call__(self, x):
        self.seen = self.seen if self.in_norm else self.seen + len(x)
        return self.norm(x) if self.in_norm else x * self.norm.scale[...]


@pytest.mark.parametrize("in_norm", [True, False], ids=["norm", "attribute"])
def test_rows_are_counted_on_all_devices(in_norm):
    """Two batches of 16 rows are 32, in a step and in a custom loop."""
    plan, init = plan_of(devices=4), lambda rng: Tally(nnx.Rngs(rng), in_norm)
    step, state, _ = train(loss_fn, init, TX, plan, [data(), data()])
    gradient, module = jdp.value_and_grad(loss_fn, plan), jdp.init(init, plan, rng=jax.random.key(3))
    for seed in (0, 1):
        gradient(module, data(), jax.random.key(seed))
    assert step.partitioning == "auto"
    seen = state.model_state["norm"]["tracked"] if in_norm else state.model_state["seen"]
    assert int(seen) == int(module.norm.tracked[...] if in_norm else module.seen) == 2 * ROWS


class Writing(nnx.Module):
    """Writes the normalised kernel, as nnx.SpectralNorm does, or hands its parameters through nnx.remat."""

    def __init__(self, rngs, does_write):
        self.linear, self.does_write = nnx.Linear(FEATURES, FEATURES, rngs=rngs), does_write

    def __call__(self, x):
        def run(linear, x):
            if self.does_write:
                linear.kernel[...] = linear.kernel[...] / jnp.linalg.norm(linear.kernel[...])
            return linear(x)

        return nnx.remat(run)(self.linear, x)


scan = functools.partial(nnx.scan, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
HANDED_ON = {
    "cond": lambda block, x: nnx.cond(x.sum() > 0, nnx.remat(lambda b, x: b(x)), lambda b, x: x, block, x),
    "scan": lambda blocks, x: scan(nnx.remat(lambda b, x: b(x)))(blocks, x),
    "jit in scan": lambda blocks, x: scan(nnx.jit(lambda b, x: b(x)))(blocks, x),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_loops_and_branches_write_no_parameter(name):
    """They return the parameters of a block that `nnx.remat` or `nnx.jit` hands on, unchanged."""

    class Handing(nnx.Module):
        def __init__(self, rngs):
            make = lambda rngs: nnx.Linear(FEATURES, FEATURES, rngs=rngs)  # noqa: E731
            self.block = nnx.vmap(make)(rngs.split(2)) if "scan" in name else make(rngs)

        def __call__(self, x):
            return HANDED_ON[name](self.block, x)

    plan = plan_of("zero3", 2)
    step, state = abstract_step(loss_fn, lambda rng: Handing(nnx.Rngs(rng)), TX, plan)
    jax.eval_shape(step, state, data())
    assert step.partitioning == "manual"


@pytest.mark.parametrize("partitioning", [None, "auto"])
def test_a_call_that_writes_a_parameter_is_refused(partitioning):
    """Its path is named; parameters that leave nnx.remat as they were are no write."""

    def trace(does_write):
        init = lambda rng: Writing(nnx.Rngs(rng), does_write)  # noqa: E731
        step, state = abstract_step(loss_fn, init, TX, plan_of("zero3"), partitioning=partitioning, check_loss=True)
        jax.eval_shape(step, state, data())

    trace(does_write=False)
    with pytest.raises(ValueError, match=r"the optimizer alone; .* writes linear/kernel, an nnx.Param.*set_value"):
        trace(does_write=True)


class Remembering(nnx.Module):
    """A hidden state with a row for each of the batch."""

    def __init__(self, rngs):
        self.linear, self.hidden = nnx.Linear(FEATURES, FEATURES, rngs=rngs), nnx.Variable(jnp.zeros((ROWS, FEATURES)))

    def __call__(self, x):
        self.hidden[...] = jnp.tanh(self.linear(x) + self.hidden[...])
        return self.hidden[...]


def test_state_of_rows_is_refused_with_microbatches():
    make = lambda rng: Remembering(nnx.Rngs(rng))  # noqa: E731
    step, state = abstract_step(loss_fn, make, TX, plan_of("zero2"), check_loss=True)
    jax.eval_shape(step, state, data())
    with pytest.raises(ValueError, match=r"hidden, \[16, 8\], with a batch of 16 rows, and .* fails on 8 of them"):
        jax.eval_shape(step.changed(accumulate=2), state, data())
    step, state = abstract_step(lambda m, b, r: b["missing"], make, TX, plan_of("zero2"), accumulate=2)
    with pytest.raises(KeyError, match="missing"):  # of any number of rows
        jax.eval_shape(step, state, data())


class Temperature(nnx.Variable):
    """A variable type of a user's."""


class Scaled(nnx.Module):
    """A layer, a trainable scale of another type, and a batch norm."""

    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(FEATURES, FEATURES, rngs=rngs), nnx.BatchNorm(FEATURES, rngs=rngs)
        self.scale = Temperature(jnp.full(FEATURES, 2.0))

    def __call__(self, x):
        return self.norm(self.linear(x)) * self.scale[...]


@pytest.mark.parametrize("wrt", [(nnx.Param, Temperature), ..., Temperature], ids=["types", "all", "one"])
@pytest.mark.default_ids("one")
def test_a_filter_trains_variables_of_other_types(wrt):
    """As nnx.Optimizer does on one device, in a step and in a custom loop, which refuses to train batch statistics."""
    init = lambda rng: Scaled(nnx.Rngs(rng))  # noqa: E731
    plan, key, batches = plan_of("zero2", min_shard_size=0), jax.random.key(3), [data(seed=seed) for seed in (0, 1)]
    alone, module = init(jax.random.fold_in(key, 0)), jdp.init(init, plan, rng=key)
    _, state, _ = train(loss_fn, init, TX, plan, batches, seed=3, wrt=wrt)
    optimizers = [nnx.Optimizer(model, TX, wrt=wrt) for model in (alone, module)]
    gradient = jdp.value_and_grad(loss_fn, plan, wrt=wrt)
    if wrt is ...:
        with pytest.raises(ValueError, match=r"`wrt` selects norm/mean, an nnx.BatchStat. .*wrt=\(nnx.Param, \.\.\.\)"):
            gradient(module, data(), key)
    for batch in batches:
        objective = lambda model, batch: jnp.square(model(batch["x"])).sum(1).mean()  # noqa: E731
        optimizers[0].update(alone, nnx.grad(objective, argnums=nnx.DiffState(0, wrt))(alone, batch))
        if wrt is not ...:
            optimizers[1].update(module, gradient(module, batch, key)[1])
    trained = lambda model: (model.scale[...], model.linear.kernel[...])  # noqa: E731
    for model in (state.model, *([] if wrt is ... else [module])):
        assert_close(trained(model), trained(alone), rtol=1e-4, atol=1e-5)
    assert float(alone.scale[0]) != 2.0


class Held(nnx.Module):
    """Variables that hold trees, and one without elements."""

    def __init__(self, rngs):
        self.linear = nnx.Param({"w": jax.random.normal(rngs(), (FEATURES, FEATURES)), "b": (jnp.zeros(FEATURES),)})
        self.frozen = nnx.LoRAParam({"scale": jnp.ones(FEATURES)})
        self.none = nnx.Param(jnp.zeros((0, FEATURES)))
        self.seen = nnx.Variable({"calls": jnp.zeros((), jnp.int32)})

    def __call__(self, x):
        linear = self.linear.get_value()
        self.seen.set_value({"calls": self.seen.get_value()["calls"] + 1})
        return self.frozen.get_value()["scale"] * (x @ linear["w"]) + linear["b"][0] + self.none[...].sum()


def test_variables_of_trees_equal_one_device():
    init, batches, ends = lambda rng: Held(nnx.Rngs(rng)), [data(seed=seed) for seed in range(2)], []
    for plan, partitioning in ((plan_of("zero3", 4), "manual"), (plan_of(devices=1), "auto")):
        _, state, measured = train(loss_fn, init, TX, plan, batches, seed=3, partitioning=partitioning)
        ends.append((state.params, state.model_state, measured[-1]["loss"]))
    # sums of squares of 16 rows, in another order: 1e-5 of the largest; two steps and a norm's division: 1e-4
    assert_close(*ends, rtol=1e-4, atol=1e-4)


def test_a_variable_without_arrays_is_refused():
    class Named(nnx.Module):
        def __init__(self):
            self.w, self.name = nnx.Param(jnp.ones(3)), nnx.Variable("left")

    with pytest.raises(ValueError, match=r"name holds 'left'. Make it a plain attribute"):
        jdp.abstract_state(lambda rng: Named(), TX, plan_of(), rng=jax.random.key(0))


class Functional(nnx.Module):
    """Functions that every instance makes anew."""

    def __init__(self, rngs, scale=2.0):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.act = lambda x: scale * nnx.relu(x)
        self.clip = functools.partial(jnp.clip, min=0, max=scale)
        self.table = ((scale, lambda x, slope=scale: x * slope),)

    def __call__(self, x):
        return self.table[0][1](self.clip(self.act(self.linear(x))))


def test_functions_made_anew_are_the_same_structure():
    step = jdp.make_train_step(loss_fn, plan_of(devices=1))
    for _ in range(2):
        step(state_of(plan_of(devices=1), lambda rng: Functional(nnx.Rngs(rng))), data())
    assert step.jitted._cache_size() == 1
