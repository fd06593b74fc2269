"""Flax NNX modules as plain trees: split once, merged while a step is traced, batch statistics and dropout included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jdp
from jdp.base import notices
from jdp.core import flax_nnx

FEATURES, ROWS = 8, 16


class Model(nnx.Module):
    """BatchNorm keeps state; Dropout draws from keys of its own; layers sit in a list."""

    def __init__(self, *, rngs, rate=0.5, norm=True):
        self.layers = nnx.List([nnx.Linear(FEATURES, FEATURES, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        x = self.layers[0](x)
        x = x if self.norm is None else self.norm(x)
        return self.layers[1](self.dropout(x))


def make(rng, **settings):
    return Model(rngs=nnx.Rngs(rng), **settings)


without_norm = functools.partial(make, norm=False)


def loss_fn(model, batch, rng):
    y = model(batch["x"])
    return jdp.Loss((y**2).sum(), jnp.float32(y.shape[0]))


def data(rows=ROWS, seed=0):
    return {"x": np.random.default_rng(seed).normal(2.0, 3.0, (rows, FEATURES)).astype(np.float32)}


@functools.cache
def plan_of(strategy="ddp", devices=8):
    return jdp.Plan(jdp.make_mesh(devices=jax.devices()[:devices]), strategy, min_shard_size=16)


TX = optax.sgd(0.1)  # an optimizer is part of what a step is traced for


def state_of(plan, init=make):
    return jdp.init_state(init, TX, plan, rng=jax.random.key(3))


@pytest.fixture
def reported(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level("INFO", "jdp")
    return lambda: caplog.messages


# Split and merge.


def test_a_module_is_split_into_nested_dicts_and_merged_back():
    module = make(jax.random.key(0))
    params, model_state, adapter = flax_nnx.split(module)
    assert jax.tree.map(jnp.shape, params) == {
        "layers": {i: {"kernel": (8, 8), "bias": (8,)} for i in ("0", "1")},
        "norm": {"scale": (8,), "bias": (8,)},
    }
    assert jax.tree.map(jnp.shape, model_state) == {"norm": {"mean": (8,), "var": (8,)}}
    merged = adapter.merge(params, model_state, rng=None)
    module.eval()
    x = data()["x"]
    np.testing.assert_array_equal(merged(x), module(x))
    assert merged.layers[1].kernel.get_value() is params["layers"]["1"]["kernel"]


def test_a_merge_is_in_training_mode_with_a_key_and_in_evaluation_mode_without():
    params, model_state, adapter = flax_nnx.split(make(jax.random.key(0)))
    x = data()["x"]
    training, again, other = (adapter.merge(params, model_state, rng=jax.random.key(k)) for k in (1, 1, 2))
    y = training(x)
    np.testing.assert_array_equal(y, again(x))  # masks are the key's
    assert not np.array_equal(y, other(x))
    changed = adapter.changed(training)["norm"]
    np.testing.assert_allclose(changed["mean"], 0.1 * (x @ params["layers"]["0"]["kernel"]).mean(0), rtol=1e-4)
    evaluating = adapter.merge(params, model_state, rng=None)
    np.testing.assert_array_equal(evaluating(x), evaluating(x))
    np.testing.assert_array_equal(adapter.changed(evaluating)["norm"]["mean"], np.zeros(FEATURES))


@dataclasses.dataclass
class Config:
    """Not frozen, so it has no hash."""

    width: int
    ranks: dict[str, int]


def test_modules_with_equal_configurations_have_equal_adapters():
    """Also inside of a linen module, as openpi has them: a second state compiles nothing again."""

    class Configured(nnx.Module):
        def __init__(self, width, rank=4):
            self.config = Config(width, {"attention": rank})
            self.bridge = nnx.bridge.ToNNX(LinenConfigured(configs=[self.config]))
            self.w = nnx.Param(jnp.ones(3))

    one, two, wider, ranked = (flax_nnx.split(Configured(*of))[2] for of in ((8,), (8,), (9,), (8, 5)))
    assert one == two and hash(one) == hash(two) and not one.structure.may_differ
    assert one != wider and one != ranked


class LinenConfigured(linen.Module):
    configs: list[Config]

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.configs[0].width)(x)


class Odd(nnx.Module):
    """Besides weights, a table that is a plain attribute; and calls leave a variable behind."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.table = nnx.data(jnp.arange(FEATURES, dtype=jnp.float32))

    def __call__(self, x):
        self.seen = nnx.Intermediate(x)
        return self.linear(x) + self.table


def make_odd(rng):
    return Odd(nnx.Rngs(rng))


def test_tables_are_kept_and_what_a_call_adds_is_dropped_and_reported(reported):
    plan = plan_of()
    step = jdp.make_train_step(loss_fn, plan, accumulate=2)
    state = state_of(plan, make_odd)
    assert set(state.params) == {"linear"} and set(state.model_state) == {"table"}
    state, _ = step(state, data())
    np.testing.assert_array_equal(state.model_state["table"], np.arange(FEATURES))
    assert step.partitioning == "manual"  # a table is no statistic of the batch
    assert [m for m in reported() if "not kept" in m] == [
        "seen was added to the model by its call, and is not kept between steps"
    ]


# In a step.


@functools.cache
def after_one_step(devices, accumulate=1, init=make, partitioning="auto"):
    plan = plan_of(devices=devices)
    step = jdp.make_train_step(loss_fn, plan, accumulate=accumulate, partitioning=partitioning)
    state, metrics = step(state_of(plan, init), data())
    return jax.device_get((state.params, state.model_state)), float(metrics["loss"])


def test_batch_statistics_are_global_and_masks_independent_of_the_mesh():
    (params, model_state), loss = after_one_step(devices=8)
    (params_alone, model_state_alone), loss_alone = after_one_step(devices=1)
    np.testing.assert_allclose(loss, loss_alone, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), params, params_alone)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), model_state, model_state_alone)
    first = jax.device_get(state_of(plan_of(devices=1)).params)["layers"]["0"]
    hidden = data()["x"] @ first["kernel"] + first["bias"]
    np.testing.assert_allclose(model_state["norm"]["mean"], 0.1 * hidden.mean(0), rtol=1e-4)
    np.testing.assert_allclose(model_state["norm"]["var"], 0.9 + 0.1 * hidden.var(0), rtol=1e-4)


@pytest.mark.parametrize(("accumulate", "partitioning"), [(4, "auto"), (2, "manual")])
def test_masks_of_an_internal_dropout_are_those_of_the_whole_batch(accumulate, partitioning):
    """Microbatches on two devices, in both views: the loss of one device and one microbatch."""
    (params, _), loss = after_one_step(2, accumulate, without_norm, partitioning)
    (expected, _), loss_alone = after_one_step(1, 1, without_norm)
    np.testing.assert_allclose(loss, loss_alone, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), params, expected)


def test_accumulation_carries_batch_statistics_from_one_microbatch_to_the_next():
    """Twice 0.9: the statistics moved once a microbatch, each time by the microbatch's own."""
    (_, model_state), _ = after_one_step(devices=8, accumulate=2)
    first = jax.device_get(state_of(plan_of(devices=1)).params)["layers"]["0"]
    hidden = data()["x"] @ first["kernel"] + first["bias"]
    mean, var = 0.0, 1.0
    for microbatch in (hidden[0::2], hidden[1::2]):
        mean, var = 0.9 * mean + 0.1 * microbatch.mean(0), 0.9 * var + 0.1 * microbatch.var(0)
    np.testing.assert_allclose(model_state["norm"]["mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(model_state["norm"]["var"], var, rtol=1e-4)


class Watching(nnx.Module):
    """State beyond parameters and batch norms: a counter of calls, and a running mean of the activations."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.seen = nnx.Variable(jnp.zeros(FEATURES))

    def __call__(self, x):
        y = self.linear(x)
        self.calls[...] += 1
        self.seen[...] = 0.9 * self.seen[...] + 0.1 * jax.lax.stop_gradient(y.mean(0))
        return y


def make_watching(rng):
    return Watching(nnx.Rngs(rng))


@pytest.mark.parametrize("partitioning", ["auto", "manual"])
def test_state_that_calls_change_is_carried_on_in_both_partitionings(partitioning):
    """A mean over a device's rows, averaged over the devices, is the mean over all; a count is the same on each."""
    (_, state), _ = after_one_step(8, 2, make_watching, partitioning)
    first = jax.device_get(state_of(plan_of(devices=1), make_watching).params)["linear"]
    y = data()["x"] @ first["kernel"] + first["bias"]
    mean = 0.0
    for microbatch in (y[0::2], y[1::2]):
        mean = 0.9 * mean + 0.1 * microbatch.mean(0)
    np.testing.assert_allclose(state["seen"], mean, rtol=1e-4)
    assert state["calls"] == 2


def test_a_statistic_that_jdp_does_not_know_keeps_auto_and_says_why():
    plan = plan_of()
    step = jdp.make_train_step(loss_fn, plan, accumulate=2)
    abstract = jdp.abstract_state(make_watching, optax.sgd(0.1), plan, rng=jax.random.key(0))
    jax.eval_shape(step, abstract, data())
    assert step.partitioning == "auto"
    assert step.why == "seen may be a statistic of rows, so each call sees a whole microbatch"


def test_a_step_that_is_not_finite_leaves_the_statistics_alone():
    plan = plan_of("zero3")
    step = jdp.make_train_step(loss_fn, plan)
    state, _ = step(state_of(plan), data())
    before = jax.device_get((state.params, state.model_state))
    bad = data()
    bad["x"][3, 3] = np.inf
    state, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.model_state)), before)


def test_evaluation_is_deterministic_and_by_the_running_statistics():
    plan = plan_of("zero2")
    state = state_of(plan)
    evaluate = jdp.make_eval_step(loss_fn, plan)
    losses = [float(evaluate(state, data())["loss"]) for _ in range(2)]
    assert losses[0] == losses[1]
    model = state.model
    np.testing.assert_allclose(losses[0], (np.asarray(model(data()["x"])) ** 2).sum() / ROWS, rtol=1e-5)
    halves = [float(evaluate(state, {"x": half})["loss"]) for half in np.split(data()["x"], 2)]
    np.testing.assert_allclose(np.mean(halves), losses[0], rtol=1e-5)  # no statistics of the batch at hand


def test_no_call_of_a_compiled_step_walks_the_module(monkeypatch):
    merges, merge = [], flax_nnx.Adapter.merge

    def counted(self, *args, **kwargs):
        merges.append(None)
        return merge(self, *args, **kwargs)

    monkeypatch.setattr(flax_nnx.Adapter, "merge", counted)
    plan = plan_of()
    step = jdp.make_train_step(loss_fn, plan)
    state, _ = step(state_of(plan), data())
    traced = len(merges)
    assert traced > 0
    for seed in range(3):
        state, _ = step(state, data(seed=seed))
    step(state_of(plan), data())  # a state made afresh is of the same structure
    assert len(merges) == traced


# What a module may hold.


class Scanned(nnx.Module):
    """Flax's documented loop: layers made by `vmap` with split streams, whose keys are stacked, and `nnx.scan`."""

    def __init__(self, rngs):
        create = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Model(rngs=rngs), in_axes=(0,), out_axes=0))
        self.blocks = create(rngs)

    def __call__(self, x):
        return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


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


@pytest.mark.parametrize("kind", [Scanned, Held])
def test_stacked_streams_and_variables_that_hold_trees_train_as_on_one_device(kind):
    init = lambda rng: kind(nnx.Rngs(rng))  # noqa: E731
    ends = []
    for strategy, devices, partitioning in (("zero3", 4, "manual"), ("ddp", 1, "auto")):
        plan = plan_of(strategy, devices)
        state, step = state_of(plan, init), jdp.make_train_step(loss_fn, plan, partitioning=partitioning)
        for seed in range(2):
            state, metrics = step(state, data(seed=seed))
        ends.append(jax.device_get((state.params, state.model_state, metrics["loss"])))
    # sums of squares of 16 rows, in another order: 1e-5 of the largest; two steps and a norm's division: 1e-4
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *ends)
    assert jax.tree.structure(ends[0]) == jax.tree.structure(ends[1])


def test_a_parameter_without_elements_is_saved_and_restored(tmp_path):
    init = lambda rng: Held(nnx.Rngs(rng))  # noqa: E731
    state = jdp.init_state(init, optax.adam(0.1), plan_of("zero1"), rng=jax.random.key(0))
    jdp.save(tmp_path / "saved", state)
    again = jdp.restore(tmp_path / "saved", jdp.abstract_state(init, state.static.tx, plan_of(), rng=jax.random.key(0)))
    np.testing.assert_array_equal(again.params["linear"]["w"], state.params["linear"]["w"])
    assert again.params["none"].shape == (0, FEATURES)
    assert again.params["none"].sharding.is_equivalent_to(again.params["linear"]["b"][0].sharding, 2)


def test_a_variable_that_holds_no_arrays_is_refused_by_name():
    class Named(nnx.Module):
        def __init__(self):
            self.w, self.name = nnx.Param(jnp.ones(3)), nnx.Variable("left")

    with pytest.raises(ValueError, match=r"name holds 'left'. Make it a plain attribute"):
        jdp.abstract_state(lambda rng: Named(), TX, plan_of(), rng=jax.random.key(0))


class Functional(nnx.Module):
    """Functions that every instance makes anew."""

    def __init__(self, rngs, scale=2.0, held=None):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.act = lambda x: scale * nnx.relu(x) if held is None else x
        self.clip = functools.partial(jnp.clip, min=0, max=scale)
        self.table = ((scale, lambda x, slope=scale: x * slope),)

    def __call__(self, x):
        return self.table[0][1](self.clip(self.act(self.linear(x))))


def test_what_is_never_the_same_is_reported_once(reported):
    init = lambda rng: Functional(nnx.Rngs(rng), held=object())  # noqa: E731
    for _ in range(2):
        state = jdp.init_state(init, TX, plan_of(devices=1), rng=jax.random.key(0))
    [notice] = [message for message in reported() if "another" in message]
    assert "makes another act of the model" in notice and "outside of init" in notice
    step = jdp.make_train_step(loss_fn, plan_of(devices=1))
    for _ in range(3):
        state, _ = step(state, data())
    assert step.jitted._cache_size() == 1
