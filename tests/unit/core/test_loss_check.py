"""A loss that is no sum over rows sees the whole batch, or is refused where a step calls it on parts.

The reference is the same loss on the whole batch at once, by plain jax. Tolerance 1e-5: float32 sums in another order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from plain_layers import keeping
from trainings import assert_close, plan_of, train

import jdp
from jdp.core.gradients.loss_check import moved_rows

ROWS, WIDTH = 32, 8
PLAN = plan_of("zero1", 4)
RATE = 0.5


def init(rng):
    values = np.random.default_rng(0).normal(size=(WIDTH, WIDTH))  # drawing them by `rng` is a program of its own
    return {"w": jnp.asarray(values, jnp.float32), "scale": jnp.ones(WIDTH)}


def batch_of():
    random = np.random.default_rng(1)
    weight = random.integers(0, 4, ROWS).astype(np.float32)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "weight": weight, "group": random.permutation(ROWS) // 2}


def outputs(params, batch):
    return (batch["x"] @ params["w"]) * params["scale"]


def squares(params, batch):
    return (jnp.square(outputs(params, batch)).mean(axis=1) * batch["weight"]).sum()


def penalty(params):
    return 0.1 * jnp.square(params["w"]).sum()


def one_step(loss, settings, init=init, plan=PLAN, batch=None):
    """The step, after it was tried and taken, its parameters, and its metrics."""
    batches = [batch_of() if batch is None else batch]
    step, state, [metrics] = train(loss, init, optax.sgd(RATE), plan, batches, check_loss=True, **settings)
    return step, jax.device_get(state.params), metrics


def check_equals_whole_batch(loss, settings):
    """A step's loss and update are those of Σtotal / Σweight on the whole batch."""
    step, after, metrics = one_step(loss, settings)
    before = init(None)

    def objective(params):
        value = loss(params, batch_of(), jax.random.key(0))
        return value.total / value.weight if isinstance(value, jdp.Loss) else value

    expected, gradient = jax.jit(jax.value_and_grad(objective))(before)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert_close(after, jax.tree.map(lambda p, g: p - RATE * g, before, gradient), atol=1e-5)
    return step


COUNTED = r"without rows Loss.total is [\d.]+, not 0: multiply a penalty by the weight"


@pytest.mark.parametrize(
    ("factor", "needs_rows", "partitioning", "words"),
    [
        (1, False, None, rf"\(data=4 × accumulate=2\).*{COUNTED}"),
        (1, False, "auto", rf"\(accumulate=2\).*{COUNTED}"),
        (1e-6, False, None, "without rows"),
        (1e-3, True, None, "of the same rows twice"),
    ],
)
def test_a_penalty_counted_several_times_is_refused(factor, needs_rows, partitioning, words):
    """However small: without rows it is all that is left. If the loss takes no zero rows, above 1e-4 of the loss."""

    def loss(params, batch, rng):
        least = batch["x"].max() if needs_rows else 0.0  # of no rows there is no largest
        return jdp.Loss(squares(params, batch) + factor * penalty(params) + 0 * least, batch["weight"].sum())

    with pytest.raises(ValueError, match=words):
        one_step(loss, {"accumulate": 2, "partitioning": partitioning})


def weighed(params, batch, rng):
    return jdp.Loss(squares(params, batch) + penalty(params) * batch["weight"].sum(), batch["weight"].sum())


def contrastive(params, batch, rng):
    """Each row against all others of the batch (InfoNCE, arXiv:1807.03748)."""
    z = outputs(params, batch)
    return jdp.Loss(-jnp.diag(jax.nn.log_softmax(z @ batch["x"].T)).sum(), jnp.float32(z.shape[0]))


def at_least_one(params, batch, rng):
    """LibriSpeech's in AlgoPerf: of a part that is padding alone the weight is 1."""
    return jdp.Loss(squares(params, batch), jnp.maximum(batch["weight"].sum(), 1))


def zero_block(params, batch, rng):
    """A masked batch norm behind a gate, a last scale and a head of zeros, as in residual networks."""
    z, mask = outputs(params, batch), jnp.minimum(batch["weight"], 1)[:, None]
    mean = (z * mask).sum(axis=0) / jnp.maximum(mask.sum(), 1)
    z = (z - mean) * jax.lax.rsqrt((jnp.square(z - mean) * mask).sum(axis=0) / jnp.maximum(mask.sum(), 1) + 1e-3)
    z = (batch["x"] + params["gate"] * (z * params["last"])) @ params["head"]
    return jdp.Loss((jnp.square(z - 1) * batch["weight"]).sum(), batch["weight"].sum())


def mean_of_weighted_rows(params, batch, rng):
    """A mean over rows as long as every row weighs 1."""
    return jdp.Loss(squares(params, batch) / batch["weight"].mean(), jnp.float32(len(batch["weight"])))


def grouped(params, batch, rng):
    """Two rows of a group, such as a query: few of the rows that are tried share one."""
    y, same = outputs(params, batch).sum(axis=1), batch["group"][:, None] == batch["group"]
    return jdp.Loss((same * jnp.square(y[:, None] - y)).sum(), len(y))


def hardest(params, batch, rng):
    """The 16 hardest rows: all of a few rows, so that the trial sees a sum."""
    nll, count = jnp.square(outputs(params, batch)).sum(axis=1), min(16, len(batch["x"]))
    return jdp.Loss(jax.lax.top_k(nll, count)[0].sum(), jnp.float32(count))


def on_the_whole_batch(loss):
    value = jax.jit(loss)(init(None), batch_of(), jax.random.key(0))
    return value.total / value.weight


FOUND = {
    contrastive: "rows 8, 24 of the batch change the part of rows 0, 16: Loss.total of them is .* and not .*, the sum",
    at_least_one: r"without rows Loss.weight is 1, not 0: return jdp.Loss\(total, mask.sum\(\)\)",
    hardest: r"Loss.weight is \d+ of \d+ rows and 16 of 32",
}


def test_the_last_rows_differ_in_integers_alone():
    rows = jax.tree.map(lambda x: x.reshape(2, ROWS // 2, *x.shape[1:]), batch_of())
    move = jax.jit(moved_rows)
    moved, equal = (move(rows, jnp.float32(amount)) for amount in (1, 2))
    np.testing.assert_array_equal(moved["x"], equal["x"])
    assert len(np.unique(moved["group"])) > 1 == len(np.unique(equal["group"]))
    for x in jax.device_get(move([np.full((2, 4), *ones) for ones in ((1, bool), (1, int), (255, "uint8")) * 20], 1.0)):
        assert any((x[0] - x[1].astype(int)).reshape(2, 2).sum(axis).any() for axis in (0, 1)), "equal sums of halves"


@pytest.mark.parametrize("loss", [grouped, *FOUND], ids=lambda loss: loss.__name__)
def test_mixing_losses_see_all_rows_or_are_refused(loss):
    step, _, metrics = one_step(loss, {})
    assert step.partitioning == "auto" and "the loss returns jdp.Loss, but " in step.why
    np.testing.assert_allclose(metrics["loss"], on_the_whole_batch(loss), rtol=1e-5)
    for settings in ({"accumulate": 2}, {"partitioning": "manual"}):
        with pytest.raises(ValueError, match=f"must be a sum over rows.*{FOUND.get(loss, 'rows')}"):
            one_step(loss, settings)


@pytest.mark.parametrize("is_traced", [False, True], ids=["values", "in jit"])
def test_values_that_hide_what_rows_do_hide_nothing(is_traced):
    """A head of zeros, and weights that are all 1: inside of `jit` weights and rows are drawn."""

    def init_with_head(rng):
        return {**init(rng), "head": jnp.zeros(WIDTH), "last": jnp.zeros(WIDTH), "gate": jnp.zeros(())}

    batch = {**batch_of(), "weight": np.ones(ROWS, np.float32)}
    params = jdp.init(init_with_head, PLAN, rng=jax.random.key(0))
    for loss in (zero_block, mean_of_weighted_rows):
        gradient = jdp.value_and_grad(loss, PLAN, accumulate=2)
        with pytest.raises(ValueError, match=r"must be a sum over rows.*change the part of rows"):
            (jax.jit(gradient) if is_traced else gradient)(params, batch, jax.random.key(0))


def by_place(params, batch, rng):
    each = jnp.square(outputs(params, batch)).mean(axis=1)
    return jdp.Loss((each * jnp.arange(1, len(each) + 1)).sum(), jnp.float32(len(each)))


def test_losses_that_read_row_numbers_mix_rows():
    """No row changes another's part; in another order the sum is another. A program takes float64 as float32."""
    step, _, metrics = one_step(by_place, {}, batch=jax.tree.map(np.float64, batch_of()))
    assert step.partitioning == "auto" and "of the same rows in the opposite order" in step.why
    assert "drawn values" not in step.why
    np.testing.assert_allclose(metrics["loss"], on_the_whole_batch(by_place), rtol=1e-5)


@pytest.mark.rest
def test_a_batch_of_another_form_is_tried_anew():
    """The same shapes under other names, with which the loss mixes rows."""

    def loss(params, batch, rng):
        return (contrastive if "other" in batch else weighed)(params, batch | {"weight": batch["x"][:, 0] ** 2}, rng)

    first = {"x": batch_of()["x"], "one": np.ones(ROWS, np.float32)}
    step, state, _ = train(loss, init, optax.sgd(0.0), PLAN, [first], check_loss=True)
    assert step.partitioning == "manual"
    _, metrics = step(state, {"x": first["x"], "other": first["one"]})
    assert step.partitioning == "auto"
    np.testing.assert_allclose(metrics["loss"], on_the_whole_batch(contrastive), rtol=1e-5)


KEPT = {  # a first value, and what a call makes of it and of its rows
    "rows": (jnp.int32(0), lambda seen, x: seen + len(x)),
    "counts": (jnp.ones(WIDTH), lambda seen, x: 0.9 * seen + 0.1 * jax.nn.one_hot(x.argmax(1), WIDTH).sum(0)),
    "mean": (jnp.ones(WIDTH), lambda seen, x: 0.9 * seen + 0.1 * x.mean(0)),
}


@pytest.mark.parametrize("kind", KEPT)
def test_manual_refuses_state_that_is_no_average(kind):
    """Values of 8 rows and of 16 are compared: those of devices are averaged, which is right for a mean alone."""

    def loss(model, batch, rng):
        y = model(batch["x"])
        return jdp.Loss(jnp.square(y).sum(), len(y))

    run = lambda asked: one_step(loss, {"partitioning": asked}, keeping(WIDTH, *KEPT[kind]))  # noqa: E731
    if kind == "mean":
        assert "each device computes seen over its own rows, and the values are averaged" in run("manual")[0].why
        assert run(None)[0].why == "seen may be a statistic of rows, so each call sees a whole microbatch"
    else:
        with pytest.raises(ValueError, match=r"seen is .* after a call with 8 rows, and .*jdp\.gather_rows.*'auto'"):
            run("manual")


class Centred(nnx.Module):
    """Beside a batch norm it mixes rows of its own, in training alone."""

    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.deterministic = False

    def __call__(self, x):
        x = self.norm(self.dense(x))
        return x if self.deterministic else x + jnp.square(x.mean(axis=0))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x))


def weighted(y, batch):
    """Squares of normalised columns have the same sum, whatever the rows are: weights make it depend on them."""
    return jdp.Loss((jnp.square(y - 1) * batch["weight"][:, None]).sum(), batch["weight"].sum())


@pytest.mark.rest
def test_mixing_in_training_alone_sees_whole_microbatches():
    """As one device does, which has microbatches of as many rows. linen's norms in ToNNX: test_other_frameworks."""
    loss = lambda model, batch, rng: weighted(model(batch["x"]), batch)  # noqa: E731
    make = lambda rng: Centred(nnx.Rngs(rng))  # noqa: E731
    plans = PLAN, plan_of("zero1", 1)
    (step, *_, many), (*_, one) = (one_step(loss, {"accumulate": 2}, make, plan) for plan in plans)
    assert step.partitioning == "auto"
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    with pytest.raises(ValueError, match="must be a sum over rows, and draw by row; "):
        one_step(loss, {"partitioning": "manual"}, make)


@pytest.mark.rest
def test_a_refusal_says_how_batch_norms_accumulate():
    """Of linen alone, with statistics in aux, and always in training mode."""
    model = Linen()
    variables = jax.device_get(model.init(jax.random.key(0), jnp.ones((1, WIDTH))))

    def linen(params, batch, rng):
        y, changes = model.apply({**variables, "params": params}, batch["x"], train=True, mutable=["batch_stats"])
        return weighted(y, batch), changes

    def always_training(model, batch, rng):
        return weighted(model(batch["x"], train=True, mutable=["batch_stats"]), batch)

    def of_linen(rng):
        return nnx.bridge.ToNNX(model, rngs=nnx.Rngs(rng)).lazy_init(jnp.ones((1, WIDTH)))

    params = jdp.place(variables["params"], PLAN)
    for loss, settings in ((lambda *given: linen(*given)[0], {}), (linen, {"has_aux": True})):
        for asked in ({"accumulate": 2}, {"partitioning": "manual"}):
            with pytest.raises(ValueError, match=r"wrap the model in nnx\.bridge\.ToNNX"):
                jdp.value_and_grad(loss, PLAN, **settings, **asked)(params, batch_of(), jax.random.key(0))
    with pytest.raises(ValueError, match="train=rng is not None"):
        one_step(always_training, {"accumulate": 2}, of_linen)


def weighted_mean(params, batch, rng):
    return squares(params, batch) / batch["weight"].sum()


def test_a_scalar_sees_all_rows():
    why = "the loss returns a scalar, the mean over the rows that it sees, so it sees all rows"
    assert check_equals_whole_batch(weighted_mean, {}).why == why
    with pytest.raises(ValueError, match=r"accumulate=2 calls the loss on 2 .*`return jdp.Loss\(total, weight\)`"):
        one_step(weighted_mean, {"accumulate": 2})


@pytest.mark.rest
def test_losses_over_tracers_cannot_be_tried():
    params = jdp.init(init, PLAN, rng=jax.random.key(0))

    def gradient(params, scale, settings):
        loss = lambda params, batch, rng: jdp.Loss(scale * squares(params, batch), batch["weight"].sum())  # noqa: E731
        return jdp.value_and_grad(loss, PLAN, **settings)(params, batch_of(), jax.random.key(0))

    metrics, _ = jax.jit(lambda p, s: gradient(p, s, {}))(params, 2.0)
    expected = 2 * float(weighted_mean(jax.device_get(params), batch_of(), None))
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    with pytest.raises(ValueError, match="whether it is a sum over rows is not known"):
        jax.jit(lambda p, s: gradient(p, s, {"accumulate": 2}))(params, 2.0)


def test_an_evaluation_over_microbatches_is_checked_too():
    """The check can be turned off: then the loss is another."""
    state = jdp.init_state(init, optax.sgd(RATE), PLAN, rng=jax.random.key(3))
    expected = on_the_whole_batch(contrastive)
    evaluate = lambda **settings: jdp.make_eval_step(contrastive, PLAN, **settings)(state, batch_of())["loss"]  # noqa: E731
    np.testing.assert_allclose(evaluate(), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="must be a sum over rows"):
        evaluate(accumulate=2)
    assert abs(evaluate(accumulate=2, check_loss=False) - expected) > 0.1
    with pytest.raises(TypeError) as caught:
        jdp.make_eval_step(lambda params, batch, rng: jax.random.normal(rng), PLAN)(state, batch_of())
    assert "rng=None in an evaluation" in " ".join(caught.value.__notes__)


def test_every_step_is_checked_once():
    """The second call traces nothing and computes nothing beside the step."""
    calls = []

    def counted(params, batch, rng):
        calls.append(1)
        return weighed(params, batch, rng)

    step, state, _ = train(counted, init, optax.sgd(RATE), PLAN, [batch_of()], accumulate=2, check_loss=True)
    first = len(calls)
    step(state, batch_of())
    assert first > 0 and len(calls) == first


def test_a_constraint_on_the_batch_axes_takes_auto():
    def constrained(params, batch, rng):
        x = jax.lax.with_sharding_constraint(batch["x"], jax.NamedSharding(PLAN.mesh, jax.P("data")))
        return jdp.Loss(squares(params, {**batch, "x": x}), batch["weight"].sum())

    step = check_equals_whole_batch(constrained, {"accumulate": 2})
    assert step.partitioning == "auto" and f"it shards over the axes of the batch at {__file__}" in step.why
    with pytest.raises(ValueError, match="it shards over the axes of the batch"):
        one_step(constrained, {"partitioning": "manual"})


@pytest.mark.parametrize(("clip_norm", "taken"), [(1.0, True), (None, False)])
def test_a_huge_finite_gradient_has_a_finite_norm(clip_norm, taken):
    """Clipped it is taken; unclipped its square would be an optimizer's infinite second moment, for ever."""

    def huge(params, batch, rng):
        return jdp.Loss((params["scale"] * 1e25).sum() * batch["weight"].sum(), batch["weight"].sum())

    _, after, metrics = one_step(huge, {"clip_norm": clip_norm})
    np.testing.assert_allclose(metrics["grad_norm"], 1e25 * np.sqrt(WIDTH), rtol=1e-6)
    assert metrics["skipped"] == (0 if taken else 1)
    moved = RATE / np.sqrt(WIDTH) if taken else 0
    np.testing.assert_allclose(1 - after["scale"], moved, rtol=1e-6)


def test_a_metric_that_is_no_sum_is_reported(capsys):
    def with_metrics(params, batch, rng):
        each = jnp.square(outputs(params, batch)).sum(-1)
        metrics = {"sum": each.sum(), "largest": each.max(), "mean": each.mean()}
        metrics["pair"] = each.sum(), jnp.float32(len(each))
        return jdp.Loss(squares(params, batch), batch["weight"].sum(), metrics)

    one_step(with_metrics, {"accumulate": 2})
    said = capsys.readouterr().err
    assert "metric 'largest' is no sum over rows" in said and "metric 'mean' is no sum over rows" in said
    assert "metric 'sum'" not in said and "metric 'pair'" not in said
