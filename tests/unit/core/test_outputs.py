"""`jdp.value_and_grad(..., has_aux=True)`: what a loss returns beside its value, as on one device.

The reference is `jax.value_and_grad` of the same loss on the whole batch; float32 sums run in another order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import assert_close, plan_of

import jdp

ROWS, WIDTH, CLASSES, KEY = 16, 8, 4, jax.random.key(0)
PLAN = plan_of("zero2", 4, min_shard_size=0)


def init(rng):
    return {"layers": jax.random.normal(rng, (2, WIDTH, WIDTH)) / 3, "out": jnp.ones((WIDTH, CLASSES)) / 9}


def batch_of():
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(ROWS, WIDTH)).astype("float32"), "y": random.integers(0, CLASSES, ROWS)}


def loss_fn(params, batch, rng):
    """A layer loop, noise for each row, and outputs of several shapes and dtypes."""
    x = batch["x"] + 0.1 * jax.random.normal(rng, batch["x"].shape)
    hidden = jdp.scan_layers(lambda layer, x: jnp.tanh(x @ layer), params["layers"], x)
    logits = hidden @ params["out"]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    outputs = {"logits": logits, "answer": logits.argmax(-1), "wrong": logits.argmax(-1) != batch["y"]}
    aux = outputs, [None], hidden.reshape(-1, 2, 4)
    return jdp.Loss(nll.sum(), jnp.float32(len(nll))), aux


@functools.cache
def expected():
    def objective(params, batch):
        loss, aux = loss_fn(params, batch, KEY)
        return loss.total / loss.weight, aux

    params = jax.jit(init)(KEY)
    return params, jax.jit(jax.value_and_grad(objective, has_aux=True))(params, batch_of())


@pytest.mark.parametrize(
    ("strategy", "partitioning", "accumulate"),
    [("ddp", "auto", 1), ("zero1", "manual", 2), ("zero2", "auto", 2), ("zero3", "manual", 1), ("zero3", "manual", 2)],
)
@pytest.mark.default_ids("ddp-auto-1")
def test_outputs_keep_the_order_of_rows(strategy, partitioning, accumulate):
    params, ((loss, aux), wanted) = expected()
    plan = plan_of(strategy, 4, min_shard_size=0)
    settings = {"partitioning": partitioning, "accumulate": accumulate}
    gradient = jdp.value_and_grad(loss_fn, plan, has_aux=True, **settings)
    (metrics, found), grads = gradient(jdp.place(params, plan), batch_of(), KEY)
    assert_close((metrics["loss"], found, grads), (loss, aux, wanted))
    assert found[0]["logits"].sharding.is_equivalent_to(plan.batch_sharding, 2)
    assert found[0]["wrong"].dtype == bool and found[0]["answer"].dtype == aux[0]["answer"].dtype


def of(aux):
    """A loss with these outputs."""
    return lambda params, batch, rng: (loss_fn(params, batch, rng)[0], aux(params, batch, rng))


REFUSED = {
    "a sum": (of(lambda p, b, rng: {"sum": b["x"].sum()}), r"has the rows as its first .*aux\['sum'\], \[\] for 2"),
    "means of a call": (of(lambda p, b, rng: b["x"] - b["x"].mean(0)), "rows of aux depend on the other rows"),
    "text": (of(lambda p, b, rng: {"a": "text"}), r"aux is a pytree of arrays; \['a'\] is 'text'"),
    "no pair": (lambda *given: loss_fn(*given)[0], r"returns a pair \(loss, aux\); given Loss"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_outputs_that_would_differ_between_parts_are_refused(case):
    loss, message = REFUSED[case]
    gradient = jdp.value_and_grad(loss, PLAN, has_aux=True, partitioning="manual", accumulate=2)
    with pytest.raises(ValueError, match=message):
        gradient(jdp.init(init, PLAN, rng=KEY), batch_of(), KEY)


def test_one_call_returns_any_array():
    """Also where the loss would be called on parts but for its aux."""
    aux = of(lambda p, b, rng: [b["x"].sum(), b["x"].T, b["x"] - b["x"].mean(0), jnp.arange(len(b["x"]))])
    gradient = jdp.value_and_grad(aux, PLAN, has_aux=True)
    (_, found), _ = gradient(jdp.init(init, PLAN, rng=KEY), batch_of(), KEY)
    x = batch_of()["x"]
    assert_close(found, [x.sum(), x.T, x - x.mean(0), np.arange(ROWS)])
    assert gradient.partitioning == "auto" and "each array of aux" in gradient.why
