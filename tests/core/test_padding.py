"""Parameters of which no dimension divides by the number of devices rest flat and padded: bytes, values, what is seen.

The reference is one device. Bounds as in `test_equivalence.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp.base import notices
from jdp.core.sharding.padded import Flat
from jdp.foresight.targets.resolve import target
from jdp.models import build
from jdp.models.configs.sizes import SIZES

LOSS_BOUND, WEIGHT_BOUND = 5e-6, 3e-5
IN, HIDDEN, OUT, STEPS = 13, 101, 11, 3
FLAT = 3 * 4  # all but `down/b`: the weights, two moments, the average


def drawn(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def init(rng):
    return {
        "up": {"w": 0.3 * jnp.asarray(drawn(IN, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "down": {"w": 0.1 * jnp.asarray(drawn(HIDDEN, OUT)), "b": jnp.zeros(OUT)},
    }


def loss(params, batch, rng):
    x = jnp.tanh(batch["x"] @ params["up"]["w"] + params["up"]["b"])
    y = x @ params["down"]["w"] + params["down"]["b"]
    return jdp.Loss((((y - batch["y"]) ** 2).mean(1) * batch["weight"]).sum(), batch["weight"].sum())


def batches(rows):
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        x, weight = random.normal(size=(rows, IN)).astype("float32"), random.random(rows).astype("float32")
        yield {"x": x, "y": np.sin(x[:, :OUT]), "weight": weight}


def plan_of(devices, strategy="zero3", **settings):
    mesh = jdp.make_mesh(devices=jax.devices()[: np.prod(devices)], **(settings.pop("mesh", None) or {"data": -1}))
    return jdp.Plan(mesh, strategy, min_shard_size=16, **settings)


def decayed():
    """AdamW with weight decay on matrices, told by their rank, and averaged weights."""
    matrices = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    return jdp.with_ema(optax.adamw(3e-3, eps=1e-6, weight_decay=0.1, mask=matrices), decay=0.9)


def train(plan, tx, wrt=None, rows=210, **settings):
    state = jdp.init_state(init, tx, plan, rng=jax.random.key(7), wrt=wrt)
    step = jdp.make_train_step(loss, plan, **settings)
    metrics = []
    for batch in batches(rows):
        state, found = step(state, jax.device_put(batch, plan.batch_sharding))
        metrics.append([float(found["loss"]), float(found["grad_norm"])])
    return state, np.array(metrics)


@functools.cache
def reference(make_tx, wrt=None):
    state, metrics = train(plan_of(1, "ddp"), make_tx(), wrt, clip_norm=1.0)
    return jax.device_get(state), metrics


def assert_equals_one_device(plan, make_tx, flat, wrt=None, **settings):
    state, metrics = train(plan, make_tx(), wrt, clip_norm=1.0, **settings)
    one, expected = reference(make_tx, wrt)
    assert len(state.static.flat) == flat
    np.testing.assert_allclose(metrics, expected, rtol=LOSS_BOUND, atol=LOSS_BOUND)
    own = state.unpadded()
    assert jax.tree.structure((own.params, own.opt_state)) == jax.tree.structure((one.params, one.opt_state))
    for got, wanted in zip(*map(jax.tree.leaves, (own, one)), strict=True):
        if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(got, wanted, atol=WEIGHT_BOUND)
    return state


def padding(state):
    """What is behind the own elements of the leaves that rest flat."""
    leaves = jax.tree.leaves_with_path({"params": state.params, "opt_state": state.opt_state})
    by_path = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return [np.asarray(by_path[path])[..., flat.row :] for path, flat in state.static.flat]


@pytest.mark.parametrize("shape", ["1x3", "1x5", "1x6", "1x7", "64x8"])
def test_gpt2_rests_within_two_percent_on_any_number_of_devices(shape):
    devices = target(f"h100:{shape}").devices
    plan = jdp.Plan(jdp.make_mesh(devices=devices), "zero1")
    config = dataclasses.replace(SIZES["gpt2-124m"], vocab_size=50257)
    model = lambda rng: build(config, rngs=nnx.Rngs(rng))  # noqa: E731
    state = jdp.abstract_state(model, optax.adamw(1e-3), plan, rng=jax.random.key(0))
    placed = [p for p in plan.placements(state) if p.path.startswith(("params", "opt_state"))]
    whole = sum(int(np.prod(p.own_shape)) * jnp.dtype(p.dtype).itemsize for p in placed)
    held = sum(p.bytes_per_device for p in placed)
    leaves = jax.tree.leaves((state.params, state.opt_state))
    assert held == sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)
    assert held * len(devices) <= 1.007 * whole
    embedding = state.unpadded().params["embed"]["tokens"]
    assert embedding.shape == (50257, 768)


@pytest.mark.parametrize(
    ("strategy", "devices", "settings"),
    [
        ("ddp", 5, {}),
        ("zero1", 5, {"accumulate": 2}),
        ("zero2", 7, {}),
        ("zero2", 3, {"accumulate": 2, "partitioning": "auto"}),
        ("zero3", 7, {"accumulate": 2}),
        ("zero3", 3, {}),
    ],
)
def test_padded_training_equals_one_device(strategy, devices, settings):
    """Clipped by the global norm, decayed by rank, averaged; and what is padded stays zero."""
    state = assert_equals_one_device(plan_of(devices, strategy), decayed, 0 if strategy == "ddp" else FLAT, **settings)
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        whole = leaf.size if leaf.size < 16 or strategy == "ddp" else leaf.size // devices
        assert {shard.data.size for shard in leaf.addressable_shards} == {whole}
    assert not any(behind.any() for behind in padding(state))
    averages = [jdp.ema_params(each).unpadded().params["up"]["w"] for each in (state, reference(decayed)[0])]
    np.testing.assert_allclose(*averages, atol=WEIGHT_BOUND)


def test_frozen_parameters_are_padded_too():
    state = assert_equals_one_device(plan_of(5), decayed, 6, "down/*")  # up stays; 2 frozen, 1 trained, its moments
    assert state.params["up"]["w"].ndim == len(Flat.of((IN, HIDDEN), 5).at_rest)


def test_what_a_user_sees_has_its_own_shape(capfd, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    plan = plan_of(5)
    state = jdp.init_state(init, optax.sgd(0.1), plan, rng=jax.random.key(7))
    said = " ".join(capfd.readouterr().err.split())
    assert "up/w [13, 101] and 2 more, of which no dimension divides by data=5, rest flat and padded" in said
    one = jdp.init_state(init, optax.sgd(0.1), plan_of(1), rng=jax.random.key(7))
    assert jax.tree.map(np.shape, state.model) == jax.tree.map(np.shape, one.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, state.model, one.params))
    placed = {p.path: p for p in plan.placements(state)}
    assert placed["params/up/w"].reason == "sharded flat: [13, 101] padded to [1315] over data=5"
    assert placed["params/up/w"].own_shape == (13, 101)
    evaluate = jdp.make_eval_step(loss, plan)
    batch = next(batches(10))
    assert float(evaluate(state, batch)["loss"]) == pytest.approx(
        float(jdp.make_eval_step(loss, plan_of(1))(one, batch)["loss"])
    )
    unpadded = jdp.init_state(init, optax.sgd(0.1), dataclasses.replace(plan, pad=False), rng=jax.random.key(7))
    assert unpadded.static.flat == ()
    again = jdp.place(state.unpadded(), plan)
    assert again.static == state.static
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, state.params))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_padded_step_keeps_the_contract(strategy):
    plan = jdp.Plan(jdp.make_mesh(devices=target("h100:1x5").devices), strategy)
    wide = {"w1": (1023, 67), "w2": (67, 1023)}
    model = lambda rng: {name: jnp.ones(shape) for name, shape in wide.items()}  # noqa: E731

    def of_wide(params, batch, rng):
        y = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"]
        return jdp.Loss((y**2).sum(), jnp.float32(y.shape[0]))

    state = jdp.abstract_state(model, optax.adamw(1e-3), plan, rng=jax.random.key(0))
    step = jdp.make_train_step(of_wide, plan, precision="bf16")
    report = jdp.verify(step, state, {"x": jax.ShapeDtypeStruct((20, 1023), "float32")}, "h100:1x5")
    assert report.kept, report
    assert report.ratio <= 1.02


def test_checkpoints_fit_any_number_of_devices(tmp_path):
    tx = decayed()
    first, _ = train(plan_of(5), tx)
    expected, state = jax.device_get(first.unpadded()), first
    for number, (devices, strategy) in enumerate([(8, "zero1"), (1, "ddp"), (3, "zero3")]):
        jdp.save(tmp_path / str(number), state)
        plan = plan_of(devices, strategy)
        abstract = jdp.abstract_state(init, tx, plan, rng=jax.random.key(0))
        state = jdp.restore(tmp_path / str(number), abstract)
        assert state.static == abstract.static
        read = jdp.restore_params(tmp_path / str(number), abstract)
        for got, wanted in zip(*map(jax.tree.leaves, (state.unpadded(), expected)), strict=True):
            if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
                assert np.array_equal(got, wanted)
        assert jax.tree.all(jax.tree.map(np.array_equal, read.model, expected.params))
    jdp.export.export_safetensors(tmp_path / "model.safetensors", state)
    fresh = jdp.init_state(init, tx, plan_of(3), rng=jax.random.key(0))
    taken = jdp.export.import_safetensors(tmp_path / "model.safetensors", fresh)
    assert jax.tree.all(jax.tree.map(np.array_equal, taken.model, expected.params))
    with pytest.raises(ValueError, match=r"padded to \[1115\], which does not divide by data=3"):
        plan_of(3).placements(first)
