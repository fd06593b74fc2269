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
from jax.sharding import PartitionSpec as P

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


@pytest.mark.parametrize("shape", [(7,), (13, 101), (3, 5, 7), (3, 101, 13), (2, 3, 101, 13), (101, 4)])
@pytest.mark.parametrize("count", [5, 8, 64])
def test_a_flat_leaf_has_its_elements_in_order_and_zeros_behind_them(shape, count):
    flat = Flat.of(shape, count)
    assert flat is not None
    stacked = len(flat.at_rest) == 2  # a loop over layers slices the leading dimension off

    @jax.jit
    def made(x, more):
        rest, layer = flat.to_rest(x), x[0] if stacked else x
        return {
            "rest": rest,
            "there and back": (flat.from_rest(rest), flat.from_rest(flat.to_rest(more))),
            "masked": (flat.masked(rest + 1), flat.to_rest(x + 1)),
            "layer": (flat.to_rest(layer), flat.from_rest(flat.to_rest(layer))),
        }

    x = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    more = np.stack([x, -x])  # as the replicas' optimizer states are
    found = jax.device_get(made(x, more))
    rest = found["rest"]
    assert rest.shape == flat.at_rest
    assert rest.shape[-1] % count == 0
    assert np.array_equal(rest[..., : flat.row], x.reshape(*rest.shape[:-1], -1))
    assert not rest[..., flat.row :].any()
    assert all(map(np.array_equal, found["there and back"], (x, more)))
    assert np.array_equal(*found["masked"])
    if stacked:
        assert all(map(np.array_equal, found["layer"], (rest[0], x[0])))


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


def by_blocks():
    """Root mean squares of each parameter, updates every other step, and one part frozen by path."""
    tx = optax.chain(optax.clip_by_block_rms(0.01), optax.scale_by_trust_ratio(), optax.sgd(0.1, momentum=0.9))
    return optax.MultiSteps(tx, 2)


def without_eps():
    return optax.adam(1e-3, eps=0.0)


def test_norms_of_a_parameter_leave_the_padding_out():
    state = assert_equals_one_device(plan_of(5), by_blocks, 9)
    assert not any(behind.any() for behind in padding(state))


def test_padding_is_zero_again_where_the_update_divides_by_zero():
    state, _ = train(plan_of(7), without_eps())
    assert not any(behind.any() for behind in padding(state))


def test_frozen_parameters_are_padded_too():
    state = assert_equals_one_device(plan_of(5), decayed, 6, "down/*")  # up stays; 2 frozen, 1 trained, its moments
    assert state.params["up"]["w"].ndim == len(Flat.of((IN, HIDDEN), 5).at_rest)


def factored():
    return optax.adafactor(1e-2, min_dim_size_to_factor=8)


def muon():
    return optax.contrib.muon(1e-2)


def cover():
    return optax.sm3(1e-2)


@pytest.mark.parametrize(("make_tx", "flat"), [(factored, 2), (muon, 3), (cover, 3)])
def test_an_update_that_mixes_elements_keeps_its_parameters_replicated(make_tx, flat):
    state = assert_equals_one_device(dataclasses.replace(plan_of(5), whole_matrices=False), make_tx, flat)
    assert state.params["up"]["w"].shape == (IN, HIDDEN)
    assert state.params["up"]["b"].shape == (105,)  # of a vector nothing is mixed


@pytest.mark.parametrize(("make_tx", "flat"), [(factored, 4), (muon, 7)])
def test_an_update_that_takes_matrices_whole_leaves_them_padded(make_tx, flat):
    state = assert_equals_one_device(plan_of(5), make_tx, flat)
    assert state.params["up"]["w"].shape == Flat.of((IN, HIDDEN), 5).at_rest
    assert "up/w" in state.static.whole


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


def test_padded_gradients_are_encoded_as_they_are_replicated():
    """The same bound for both: encoding is not exact, but padding adds nothing to what it loses."""
    plan, tx = plan_of(5, "zero2"), optax.sgd(0.1)
    _, padded = train(plan, tx, wire="int8")
    _, plain = train(dataclasses.replace(plan, pad=False), tx, wire="int8")
    np.testing.assert_allclose(padded, plain, rtol=2e-3)


def by_norms():
    """Optimizers that take norms of a parameter, and an inner product of two trees."""
    each = {
        "lamb": optax.lamb(1e-2),
        "lars": optax.lars(0.1, momentum=0.9),
        "fromage": optax.fromage(1e-2),
        "prodigy": optax.contrib.prodigy(estim_lr0=1e-2),
    }
    return optax.multi_transform(each, {"up": {"w": "lamb", "b": "prodigy"}, "down": {"w": "lars", "b": "fromage"}})


def test_beside_a_rule_or_a_model_axis_parameters_stay_replicated():
    ruled = plan_of(5, rules=[("up/w", P())])
    state = jdp.abstract_state(init, optax.sgd(0.1), ruled, rng=jax.random.key(0))
    assert state.params["up"]["w"].shape == (IN, HIDDEN)
    assert state.params["down"]["w"].ndim == 1
    beside = plan_of(6, mesh={"data": 3, "model": 2})
    assert jdp.abstract_state(init, optax.sgd(0.1), beside, rng=jax.random.key(0)).static.flat == ()


def init_layers(rng):
    layers = {"up": 0.2 * drawn(3, 13, 31), "down": 0.2 * drawn(3, 31, 13), "bias": np.zeros((3, 13), np.float32)}
    return jax.tree.map(jnp.asarray, {"layers": layers, "head": 0.2 * drawn(13, 11)})


def layers_loss(params, batch, rng):
    layer = lambda each, x: x + jnp.tanh(x @ each["up"]) @ each["down"] + each["bias"]  # noqa: E731
    y = jdp.scan_layers(layer, params["layers"], batch["x"]) @ params["head"]
    return jdp.Loss((((y - batch["y"]) ** 2).mean(1) * batch["weight"]).sum(), batch["weight"].sum())


def train_layers(plan, **settings):
    state = jdp.init_state(init_layers, optax.sgd(0.3, momentum=0.9), plan, rng=jax.random.key(7))
    step = jdp.make_train_step(layers_loss, plan, **settings)
    losses = []
    for batch in batches(10):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state, step


@pytest.fixture(scope="module")
def layers_alone():
    return train_layers(plan_of(1))[0]


@pytest.mark.parametrize(
    ("strategy", "overlap", "accumulate"), [("zero3", False, 1), ("zero3", True, 2), ("zero1", True, 2)]
)
def test_layers_are_gathered_one_at_a_time(strategy, overlap, accumulate, layers_alone):
    """Stacked layers keep their leading dimension: zero3 gathers them in the loop, also one ahead."""
    losses, state, step = train_layers(plan_of(5, strategy), overlap=overlap, accumulate=accumulate)
    assert step.partitioning == "manual"
    assert state.params["layers"]["down"].shape == (3, 405)
    np.testing.assert_allclose(losses, layers_alone, rtol=LOSS_BOUND)


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
