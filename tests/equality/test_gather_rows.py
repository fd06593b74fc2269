"""Losses that compare examples: right on every mesh, with the gradient that one device has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import plan_of as _plan_of
from trainings import train

import jdp

MESHES = {1: (1, 1), 4: (1, 4), 8: (2, 4)}


def plan_of(devices, strategy="ddp"):
    replica, data = MESHES[devices]
    return _plan_of(strategy, devices, min_shard_size=0, replica=replica, data=data)


def init(rng):
    image, text = jax.random.split(rng)
    return {"image": jax.random.normal(image, (6, 8)), "text": jax.random.normal(text, (5, 8))}


def clip(params, batch, rng):
    """Contrast each image with all texts (CLIP, Radford et al. 2021, arXiv:2103.00020)."""
    image, text = (batch[name] @ params[name] for name in ("image", "text"))
    texts, own = jdp.gather_rows(text)
    images, _ = jdp.gather_rows(image)
    nll = optax.softmax_cross_entropy_with_integer_labels(image @ texts.T, own)
    nll += optax.softmax_cross_entropy_with_integer_labels(text @ images.T, own)
    return jdp.Loss(total=nll.sum(), weight=len(own) * len(texts))  # a sum over devices, not over calls with more rows


def batch_of():
    random = np.random.default_rng(0)
    return {"image": random.normal(size=(16, 6)).astype("f"), "text": random.normal(size=(16, 5)).astype("f")}


def losses(loss_fn, plan, **settings):
    settings = {"check_loss": True, **settings}
    step, _, measured = train(loss_fn, init, optax.sgd(0.05), plan, [batch_of()] * 3, **settings)
    return step, [float(metrics[name]) for metrics in measured for name in ("loss", "grad_norm")]


@pytest.fixture(scope="module")
def alone():
    return losses(clip, plan_of(1))[1]


@pytest.mark.parametrize(
    ("partitioning", "devices", "strategy"),
    [("manual", 8, "zero1"), ("manual", 8, "zero3"), (None, 4, "ddp"), (None, 8, "zero2")],
)
@pytest.mark.default_ids("manual-8-zero3", "None-4-ddp")
def test_negatives_are_of_the_whole_batch(alone, partitioning, devices, strategy):
    step, found = losses(clip, plan_of(devices, strategy), partitioning=partitioning)
    assert step.partitioning == (partitioning or "auto")
    np.testing.assert_allclose(found, alone, rtol=2e-5)  # sums of 16 rows in another order, three steps long


def test_gathered_rows_refuse_microbatches():
    with pytest.raises(ValueError, match=r"accumulate=2 calls the loss on 2.*calls jdp\.gather_rows"):
        losses(clip, plan_of(4), accumulate=2, check_loss=False)
    rows, own = jdp.gather_rows(jnp.ones((3, 2)))
    assert rows.shape == (3, 2) and own.tolist() == [0, 1, 2]
