"""A loss that is no sum over examples: made right, or refused, wherever a step calls it on parts of the batch.

The reference is the same loss on the whole batch at once, by plain jax. Tolerance 1e-5: float32 sums in another order.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdp
from jdp.base import notices
from jdp.models.resnet import BatchNorm

ROWS, WIDTH = 32, 8
MESH = jdp.make_mesh(devices=jax.devices()[:4])
RATE = 0.5


def init(rng):
    values = np.random.default_rng(0).normal(size=(WIDTH, WIDTH))  # drawing them by `rng` is a program of its own
    return {"w": jnp.asarray(values, jnp.float32), "scale": jnp.ones(WIDTH)}


def batch_of(rows=ROWS):
    random = np.random.default_rng(1)
    weight = random.integers(0, 4, rows).astype(np.float32)
    return {"x": random.normal(size=(rows, WIDTH)).astype(np.float32), "weight": weight}


def outputs(params, batch):
    return (batch["x"] @ params["w"]) * params["scale"]


def squares(params, batch):
    return (jnp.square(outputs(params, batch)).mean(axis=1) * batch["weight"]).sum()


def penalty(params):
    return 0.1 * jnp.square(params["w"]).sum()  # penalised


def one_step(loss, settings, init=init, batch=None, strategy="zero1", mesh=MESH):
    """The step, the parameters before and after it, and its metrics."""
    plan = jdp.Plan(mesh, strategy, min_shard_size=8)
    step = jdp.make_train_step(loss, plan, **settings)
    state = jdp.init_state(init, optax.sgd(RATE), plan, rng=jax.random.key(3))
    before = jax.device_get(state.params)
    state, metrics = step(state, batch_of() if batch is None else batch)
    return step, before, jax.device_get(state.params), metrics


def check_equals_whole_batch(loss, settings):
    """A step's loss and update are those of Σtotal / Σweight on the whole batch."""
    _, before, after, metrics = one_step(loss, settings)

    def objective(params):
        value = loss(params, batch_of(), jax.random.key(0))
        return value.total / value.weight if isinstance(value, jdp.Loss) else value

    expected, gradient = jax.jit(jax.value_and_grad(objective))(before)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    for name in before:
        np.testing.assert_allclose(after[name], before[name] - RATE * gradient[name], rtol=1e-5, atol=1e-5)


def source_line(mark):
    """ "this file:line" of the line that ends in `# mark`."""
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    lines = [number for number, line in enumerate(text, 1) if line.endswith(f"# {mark}")]
    return f"{__file__}:{lines[0]}"


# Terms that are no sum over examples.


def with_penalty(params, batch, rng):
    return jdp.Loss(squares(params, batch) + penalty(params), batch["weight"].sum())


@jax.jit
def within(params, batch):
    return 0.5 * (squares(params, batch) - 3.0 * penalty(params) / 2)  # within


def with_penalty_inside(params, batch, rng):
    return jdp.Loss(within(params, batch), batch["weight"].sum())


PARTS = [
    ({"accumulate": 2}, "data=4 × accumulate=2"),
    ({"partitioning": "manual"}, "data=4"),
    ({"partitioning": "auto", "accumulate": 4}, "accumulate=4"),
]


@pytest.mark.parametrize(("settings", "parts"), PARTS, ids=[parts for _, parts in PARTS])
def test_a_weight_penalty_that_would_be_counted_several_times_is_refused(settings, parts):
    plan = jdp.Plan(MESH)
    abstract = jdp.abstract_state(init, optax.sgd(RATE), plan, rng=jax.random.key(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of())
    for loss, mark in ((with_penalty, "penalised"), (with_penalty_inside, "within")):
        at = f"its term at {source_line(mark)} \\(\\w+\\)"
        message = f"{at} does not depend on the batch.*{parts} parts.*penalty \\* weight"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(jdp.make_train_step(loss, plan, **settings), abstract, shapes)


def weighed(params, batch, rng):
    weight = batch["weight"].sum()
    return jdp.Loss(squares(params, batch) + penalty(params) * weight, weight)


def by_rows(params, batch, rng):
    rows = batch["x"].shape[0]
    return jdp.Loss(squares(params, batch) + penalty(params) * rows, jnp.float32(rows))


def mean_with_weight_one(params, batch, rng):
    return jdp.Loss(jnp.square(outputs(params, batch)).mean() + penalty(params), 1.0)


def plain_mean(params, batch, rng):
    return jnp.square(outputs(params, batch)).mean() + penalty(params)


@pytest.mark.parametrize("loss", [weighed, by_rows, mean_with_weight_one, plain_mean], ids=lambda loss: loss.__name__)
def test_the_right_forms_of_a_penalty_are_the_whole_batch_s(loss):
    check_equals_whole_batch(loss, {"accumulate": 2, "partitioning": "manual"})


# Losses that mix examples.


def contrastive(params, batch, rng):
    """Each row against all others of the batch (InfoNCE, arXiv:1807.03748)."""
    z = outputs(params, batch)
    return jdp.Loss(-jnp.diag(jax.nn.log_softmax(z @ batch["x"].T)).sum(), jnp.float32(z.shape[0]))


def normalised(params, batch, rng):
    z = outputs(params, batch)
    z = (z - z.mean(axis=0)) / (z.std(axis=0) + 1e-3)
    return jdp.Loss((jnp.square(z - 1).sum(axis=1) * batch["weight"]).sum(), batch["weight"].sum())


def pairs(params, batch, rng):
    z = outputs(params, batch)
    return jdp.Loss(jnp.square(z[0::2] - z[1::2]).sum(), jnp.float32(z.shape[0]))


def weighted_mean(params, batch, rng):
    return squares(params, batch) / batch["weight"].sum()


def weight_is_a_constant(params, batch, rng):
    return jdp.Loss(squares(params, batch), 100.0)


def on_the_whole_batch(loss, params, rows=ROWS):
    value = jax.jit(loss)(jax.device_get(params), batch_of(rows), jax.random.key(0))
    return value.total / value.weight


MIXING = [contrastive, normalised, pairs]


@pytest.mark.parametrize("loss", MIXING, ids=lambda loss: loss.__name__)
def test_a_loss_that_mixes_examples_gets_auto_where_that_is_right(loss):
    precision = jdp.Precision(reduce="bf16")  # a reason for manual
    step, before, _, metrics = one_step(loss, {"precision": precision})
    assert step.partitioning == "auto" and "mixes examples" in step.why and "reduce gradients" in step.why
    np.testing.assert_allclose(metrics["loss"], on_the_whole_batch(loss, before), rtol=1e-5)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"partitioning": "manual"}], ids=str)
@pytest.mark.parametrize("loss", [*MIXING, weight_is_a_constant], ids=lambda loss: loss.__name__)
def test_a_loss_that_mixes_examples_is_refused_where_auto_is_not_allowed(loss, settings):
    with pytest.raises(
        ValueError, match=r"must not mix examples where it is called on parts .*=.*accumulate=1.*\[pairs, 2, "
    ):
        one_step(loss, settings)


def guarded_mean(params, batch, rng):
    return 0.5 * squares(params, batch) / jnp.maximum(batch["weight"].sum(), 100.0)  # of a sum below 100


def offset_mean(params, batch, rng):
    return (squares(params, batch) / (batch["weight"].sum() + 5.0)).astype(jnp.float32)


def mean_and_penalty(params, batch, rng):
    kept = batch["weight"] > 0
    return jnp.mean(jnp.square(outputs(params, batch)).sum(axis=1), where=kept) + penalty(params)


def average(params, batch, rng):
    return jnp.average(jnp.square(outputs(params, batch)).mean(axis=1), weights=batch["weight"])


def mean_over_mean(params, batch, rng):
    return (jnp.square(outputs(params, batch)).mean(axis=1) * batch["weight"]).mean() / batch["weight"].mean()


QUOTIENTS = [weighted_mean, guarded_mean, offset_mean, mean_and_penalty, average, mean_over_mean]
PARTS_OF_A_BATCH = [{}, {"accumulate": 4}, {"partitioning": "manual"}, {"partitioning": "auto", "accumulate": 2}]


@pytest.mark.parametrize("settings", PARTS_OF_A_BATCH, ids=str)
@pytest.mark.parametrize("loss", QUOTIENTS, ids=lambda loss: loss.__name__)
def test_a_quotient_of_sums_is_read_as_total_and_weight(loss, settings):
    """Each part of the batch has another denominator, and some of its rows weigh nothing."""
    check_equals_whole_batch(loss, settings)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_part_of_padding_alone_changes_nothing(strategy):
    batch = batch_of()
    batch["weight"][: ROWS // 2] = 0  # two devices' rows: 0 / 0
    expected = float(weighted_mean(init(None), batch, None))
    for settings in PARTS_OF_A_BATCH:
        *_, after, metrics = one_step(weighted_mean, settings, batch=batch, strategy=strategy)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["weight"], batch["weight"].sum())
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_an_evaluation_over_microbatches_is_checked_too():
    plan = jdp.Plan(MESH)
    state = jdp.init_state(init, optax.sgd(RATE), plan, rng=jax.random.key(3))
    metrics = jdp.make_eval_step(contrastive, plan)(state, batch_of())
    np.testing.assert_allclose(metrics["loss"], on_the_whole_batch(contrastive, state.params), rtol=1e-5)
    with pytest.raises(ValueError, match="must not mix"):
        jdp.make_eval_step(contrastive, plan, accumulate=2)(state, batch_of())


def test_the_check_can_be_turned_off():
    _, before, _, metrics = one_step(contrastive, {"accumulate": 2, "check_loss": False})
    assert abs(metrics["loss"] - on_the_whole_batch(contrastive, before)) > 0.1


# What is no reason for an error.


def test_noise_and_padding_are_no_mixing():
    """Random draws differ between rows and layouts, and a batch may begin with rows that do not count."""

    def noisy(params, batch, rng):
        keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        noise = jax.random.normal(jax.random.fold_in(rng, 1), (WIDTH,))
        return jdp.Loss(squares(params, {**batch, "x": batch["x"] * keep + noise}), batch["weight"].sum())

    batch = batch_of()
    batch["weight"][: ROWS - 8] = 0
    step, *_ = one_step(noisy, {"accumulate": 2}, batch=batch)
    assert step.partitioning == "manual"


@pytest.mark.parametrize("norm", [nnx.BatchNorm, BatchNorm], ids=["flax", "jdp"])
def test_batch_norm_is_no_mixing(norm):
    """Its statistics are taken over all devices, and are known to be those of a microbatch."""

    def module(rng):
        rngs = nnx.Rngs(rng)
        return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), norm(WIDTH, rngs=rngs))

    def loss(model, batch, rng):
        return jdp.Loss(jnp.square(model(batch["x"]) - 1).sum(), jnp.float32(batch["x"].shape[0]))

    step, *_ = one_step(loss, {"precision": "bf16"}, init=module)
    assert step.partitioning == "manual"


def test_every_step_is_checked_once():
    """The second call traces nothing and computes nothing beside the step."""
    calls = []

    def counted(params, batch, rng):
        calls.append(1)
        return weighed(params, batch, rng)

    plan = jdp.Plan(MESH)
    step = jdp.make_train_step(counted, plan, accumulate=2)
    state = jdp.init_state(init, optax.sgd(RATE), plan, rng=jax.random.key(3))
    state, _ = step(state, batch_of())
    first = len(calls)
    step(state, batch_of())
    assert first > 0 and len(calls) == first


# Axes, constraints, dtypes.


def test_a_loss_that_names_the_batch_axes_gets_an_error_that_says_where_they_exist():
    def summed(params, batch, rng):
        return jdp.Loss(jax.lax.psum(squares(params, batch), "data"), batch["weight"].sum())

    for settings in ({}, {"partitioning": "auto"}):
        with pytest.raises(
            ValueError, match="names the mesh axis 'data', which exists under partitioning='manual' only"
        ):
            one_step(summed, settings)


def test_a_constraint_on_the_batch_axes_takes_auto():
    def constrained(params, batch, rng):
        x = jax.lax.with_sharding_constraint(batch["x"], jax.NamedSharding(MESH, jax.P("data")))  # constrained
        return jdp.Loss(squares(params, {**batch, "x": x}), batch["weight"].sum())

    check_equals_whole_batch(constrained, {"accumulate": 2})
    step, *_ = one_step(constrained, {"accumulate": 2})
    assert step.partitioning == "auto" and source_line("constrained") in step.why
    with pytest.raises(ValueError, match=f"cannot shard over data; it does at {source_line('constrained')}"):
        one_step(constrained, {"partitioning": "manual"})


def test_a_float32_batch_that_widens_bf16_products_is_named(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level("INFO", "jdp")

    def narrow(params, batch, rng):
        return weighed(params, {**batch, "x": batch["x"].astype(jnp.bfloat16)}, rng)

    for loss, named in ((narrow, False), (weighed, True)):
        one_step(loss, {"precision": "bf16"})
        messages = [r.getMessage() for r in caplog.records if "computed in float32" in r.getMessage()]
        assert bool(messages) == named
    assert "batch['x'] is float32 and meets bf16 weights at" in messages[0] and "astype" in messages[0]


# Norms and optimizers.


@pytest.mark.parametrize(("clip_norm", "taken"), [(1.0, True), (None, False)])
def test_a_huge_finite_gradient_has_a_finite_norm(clip_norm, taken):
    """Clipped it is taken; unclipped its square would be an optimizer's infinite second moment, for ever."""

    def huge(params, batch, rng):
        return jdp.Loss((params["scale"] * 1e25).sum() * batch["weight"].sum(), batch["weight"].sum())

    _, before, after, metrics = one_step(huge, {"clip_norm": clip_norm})
    np.testing.assert_allclose(metrics["grad_norm"], 1e25 * np.sqrt(WIDTH), rtol=1e-6)
    assert metrics["skipped"] == (0 if taken else 1)
    moved = RATE / np.sqrt(WIDTH) if taken else 0
    np.testing.assert_allclose(before["scale"] - after["scale"], moved, rtol=1e-6)


def test_a_metric_that_is_no_sum_is_reported(capsys):
    def with_metrics(params, batch, rng):
        each = (batch["x"] @ params["w"]) ** 2 if "w" in params else jnp.square(batch["x"]).sum(-1)
        each = each.reshape(len(batch["x"]), -1).sum(-1)
        metrics = {"sum": each.sum(), "largest": each.max(), "pair": (each.sum(), jnp.float32(len(each)))}
        return jdp.Loss(squares(params, batch), batch["weight"].sum(), metrics)

    one_step(with_metrics, {"accumulate": 2})
    said = capsys.readouterr().err
    assert "metric 'largest' is no sum over examples" in said
    assert "metric 'sum'" not in said and "metric 'pair'" not in said
