"""The cross-entropy computed in chunks: against the whole form, over devices, and what of it a GPU's program holds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.models import linear_next_token_loss, next_token_loss
from jdp.models.losses import _in_one_pass, _within, ranks

BATCH, LENGTH, WIDTH, VOCABULARY = 16, 13, 32, 72
KEYS = jax.random.split(jax.random.key(0), 5)
TARGETS = np.array(jax.random.randint(KEYS[0], (BATCH, LENGTH), 0, VOCABULARY))
WEIGHTS = np.array(jax.random.uniform(KEYS[1], (BATCH, LENGTH)))
WEIGHTS[1], TARGETS[1] = 0, -7  # padding
whole_loss = jax.jit(next_token_loss)
SMALL = 4 * BATCH * 5 * VOCABULARY  # five positions of thirteen: chunks of 5, 5 and 3


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 8e-3)], ids=["fp32", "bf16"])
@pytest.mark.default_ids("fp32-tied", "bf16-untied")
def test_chunks_have_the_wholes_loss_and_gradients(dtype, bound, tied):
    features = jax.random.normal(KEYS[2], (BATCH, LENGTH, WIDTH)).astype(dtype)
    head = jax.random.normal(KEYS[3], (VOCABULARY, WIDTH) if tied else (WIDTH, VOCABULARY)).astype(dtype)

    @jax.jit
    def differentiate(features, head, weights):
        def total(chunk_bytes):
            def of(*operands):
                x, table, weights = operands
                total, weight = linear_next_token_loss(x, table, TARGETS, weights, tied=tied, chunk_bytes=chunk_bytes)
                return 3 * total, weight

            return jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True)(features, head, weights)

        undifferentiated = linear_next_token_loss(features, head, TARGETS, weights, tied=tied, chunk_bytes=SMALL)
        return undifferentiated, [total(chunk_bytes) for chunk_bytes in (2**30, SMALL, 1)]

    undifferentiated, (whole, *chunked) = differentiate(features, head, WEIGHTS)
    np.testing.assert_allclose(3 * undifferentiated[0], whole[0][0], rtol=1e-6)
    products = "btd,vd->btv" if tied else "btd,dv->btv"
    logits = np.einsum(products, np.float32(features), np.float32(head))
    np.testing.assert_allclose(whole[0][0], 3 * whole_loss(logits, TARGETS, WEIGHTS)[0], rtol=1e-5)
    for each in chunked:
        np.testing.assert_allclose(each[0], whole[0], rtol=1e-6)
        for mine, other in zip(each[1], whole[1], strict=True):
            assert mine.dtype == other.dtype
            mine, other = np.float32(mine), np.float32(other)
            np.testing.assert_allclose(mine, other, rtol=0, atol=bound * np.abs(other).max())


def test_one_reduction_is_the_logsumexp():
    rows = [[-300.0, 4.0, 300.0, 299.0], [-1e30, -1e30, -5.0, -1e30], [0.0, 0.0, 0.0, 0.0]]
    logits = np.array(rows, np.float32)
    normaliser, total = jax.jit(lambda logits: _in_one_pass(_within(logits, 3), logits))(logits)
    np.testing.assert_allclose(normaliser, np.logaddexp.reduce(np.float64(logits[:, :3]), axis=-1), rtol=1e-6)
    np.testing.assert_allclose(total, logits.sum(axis=-1), rtol=1e-6)


def init(rng):
    table, head = jax.random.split(rng)
    shapes = {"table": (table, (VOCABULARY, WIDTH)), "head": (head, (WIDTH, VOCABULARY))}
    return {name: jax.random.normal(*drawn) for name, drawn in shapes.items()}


def loss_in_chunks_of(chunk_bytes):
    def loss_fn(params, batch, rng):
        features = jnp.tanh(params["table"].astype(jnp.float32)[batch["x"]]).astype(params["head"].dtype)
        operands = features, params["head"], batch["targets"], batch["weights"]
        return jdp.Loss(*linear_next_token_loss(*operands, chunk_bytes=chunk_bytes))

    return loss_fn


def made(strategy, devices, chunk_bytes, make_state=jdp.init_state, **settings):
    plan = jdp.Plan(jdp.make_mesh(devices=devices), strategy)
    state = make_state(init, optax.sgd(1.0), plan, rng=jax.random.key(0))
    return jdp.make_train_step(loss_in_chunks_of(chunk_bytes), plan, **settings, check_loss=False), state


DATA = {"x": np.abs(TARGETS[:, ::-1]), "targets": TARGETS, "weights": WEIGHTS}


@pytest.mark.rest
def test_over_devices_strategies_and_microbatches_chunks_change_nothing():
    step, state = made("ddp", jax.devices()[:1], 2**30)
    expected, metrics = step(state, DATA)
    for strategy, settings, few in (
        ("ddp", {"partitioning": "auto"}, SMALL // 8),
        ("zero1", {"accumulate": 2}, SMALL // 16),
        ("zero3", {"partitioning": "manual"}, SMALL // 8),
    ):
        step, state = made(strategy, jax.devices(), few, **settings)
        new, found = step(state, DATA)
        np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-6)
        for name, value in expected.params.items():
            np.testing.assert_allclose(new.params[name], value, rtol=1e-5, atol=1e-6, err_msg=f"{strategy} {name}")


@pytest.mark.aot
@pytest.mark.parametrize("partitioning", ["auto", "manual"])
@pytest.mark.default_ids("manual")
def test_compiled_for_h100s_heads_are_sent_once(partitioning):
    step, state = made("zero3", jax.devices(), SMALL // 8, jdp.abstract_state, partitioning=partitioning)
    verdict = jdp.verify(step, state, DATA, "h100:1x8", cache=False)
    assert verdict.kept, verdict.breaches
    assert 0.98 < verdict.ratio < 1.02


# Scores.


def test_ranks_are_places_in_a_stable_order():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (200, 7)).astype(np.float32)  # many are equal
    labels = rng.integers(0, 7, 200)
    order = np.argsort(-logits, axis=1, kind="stable")
    found = np.asarray(ranks(jnp.asarray(logits), jnp.asarray(labels)))
    assert found.tolist() == np.argmax(order == labels[:, None], axis=1).tolist()
    assert ((found == 0) == (np.asarray(jnp.argmax(logits, axis=-1)) == labels)).all()
    among = np.asarray(jax.lax.top_k(logits, 3)[1])
    assert ((found < 3) == (among == labels[:, None]).any(axis=1)).all()
