"""The trial accepts losses that are sums over rows and refuses losses that mix rows.

The losses are written as their users write them. More of both kinds are in `test_loss_check.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import plan_of

import jdp

ROWS, WIDTH, LENGTH = 8, 8, 6
RANDOM = np.random.default_rng(7)
PLAN = plan_of("ddp", 2)
ALPHAS = np.cumprod(1 - np.linspace(1e-4, 0.2, 10, dtype=np.float32))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def weights_of(**shapes):
    """An `init`: normal matrices by name, scaled by their number of inputs."""

    def init(rng):
        keys = dict(zip(shapes, jax.random.split(rng, len(shapes)), strict=True))
        return {name: jax.random.normal(keys[name], shape) / np.sqrt(shape[-2]) for name, shape in shapes.items()}

    return init


def floats(*shape):
    return RANDOM.normal(size=(ROWS, *shape)).astype(np.float32)


def below(limit, *shape):
    """Integers from 0 to `limit` - 1: tokens, labels, hashes."""
    return RANDOM.integers(0, limit, (ROWS, *shape), dtype=np.int32)


def mlp(params, x):
    """Two layers: `up` and `down`."""
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


# Sums over rows.


def diffusion(params, batch, rng):
    """A time and noise of each row's own (arXiv:2006.11239)."""
    x, (for_time, for_noise) = batch["x"], jax.random.split(rng)
    t = jax.random.randint(for_time, (x.shape[0],), 0, 10)
    noise, kept = jax.random.normal(for_noise, x.shape), jnp.asarray(ALPHAS)[t][:, None]
    noisy = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
    return jnp.mean((mlp(params, jnp.concatenate([noisy, t[:, None] / 10], axis=-1)) - noise) ** 2)


def ctc(params, batch, rng):
    logits, silent = batch["x"] @ params["out"], 1 - batch["spoken"].at[:, 0].set(1)
    each = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), 1 + batch["labels"], silent)
    return jdp.Loss(each.sum(), jnp.float32(len(each)))


def criteo(params, batch, rng):
    """Rows of one table, taken by hashed index; the logit by an index of rows."""
    rows = params["table"][(batch["ids"].reshape(-1) % 16)].reshape(len(batch["ids"]), -1)
    hidden = jnp.concatenate([jax.nn.relu(batch["x"] @ params["up"])[:, :3], rows], axis=1)
    logits = (hidden @ params["down"])[jnp.arange(len(hidden)), 0]
    each = optax.sigmoid_binary_cross_entropy(logits, (batch["x"][:, 0] > 0).astype(jnp.float32))
    return jdp.Loss((each * batch["weights"]).sum(), batch["weights"].sum())


# In these a row's term depends on other rows.


def perplexity(params, batch, rng):
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    return jnp.exp(nll.mean())


def cox_survival(params, batch, rng):
    """Each row against the rows that lived at least as long; rows are sorted by time."""
    risk = mlp(params, batch["x"])[:, 0]
    each = (jax.lax.cumlogsumexp(risk, reverse=True) - risk) * batch["died"]
    return jdp.Loss(each.sum(), batch["died"].sum())


def mixup_by_a_permutation(params, batch, rng):
    order = jax.random.permutation(rng, batch["x"].shape[0])
    x, labels = batch["x"], jax.nn.one_hot(batch["label"], 4)
    x, labels = (0.6 * leaf + 0.4 * leaf[order] for leaf in (x, labels))
    return optax.softmax_cross_entropy(mlp(params, x), labels).mean()


def siblings_are_alike(params, batch, rng):
    z = mlp(params, batch["x"])
    pairs = jnp.square(z[0::2] - z[1::2]).sum(axis=-1)
    return jdp.Loss(pairs.sum(), jnp.float32(pairs.shape[0]))


def load_balancing(params, batch, rng):
    """Switch Transformer's (arXiv:2101.03961)."""
    gates = jax.nn.softmax(batch["x"] @ params["gate"])
    hidden = jax.nn.relu(jnp.einsum("btd,edh->bteh", batch["x"], params["up"]))
    y = jnp.einsum("bte,bteh,eho->bto", gates, hidden, params["down"])
    fraction = jax.nn.one_hot(gates.argmax(-1), 3).mean(axis=(0, 1))
    balance = 3 * jnp.sum(fraction * gates.mean(axis=(0, 1)))
    return jnp.mean((y - batch["y"]) ** 2) + 0.01 * balance


SPOKEN = (np.arange(2) < RANDOM.integers(1, 3, (ROWS, 1))).astype(np.float32)  # where a label counts
CLASSIFIED = weights_of(up=(6, WIDTH), down=(WIDTH, 4)), {"x": floats(6), "label": below(4)}
HASHED = {"x": floats(5), "ids": below(99, 2), "weights": RANDOM.permutation(np.arange(ROWS) % 4).astype(np.float32)}
SURVIVED = {"x": floats(6), "time": floats(), "died": below(2)}
EXPERTS = weights_of(gate=(6, 3), up=(3, 6, WIDTH), down=(3, WIDTH, 4))
SUMS = {
    diffusion: (weights_of(up=(7, WIDTH), down=(WIDTH, 6)), {"x": floats(6)}),
    ctc: (weights_of(out=(3, 4)), {"x": floats(LENGTH, 3), "labels": below(3, 2), "spoken": SPOKEN}),
    criteo: (weights_of(table=(16, 3), up=(5, 4), down=(9, 1)), HASHED),
}
MIXES = {
    **dict.fromkeys((perplexity, mixup_by_a_permutation, siblings_are_alike), CLASSIFIED),
    cox_survival: (weights_of(up=(6, WIDTH), down=(WIDTH, 1)), SURVIVED),
    load_balancing: (EXPERTS, {"x": floats(5, 6), "y": floats(5, 4)}),
}


def tried(loss, init, batch):
    """The step after the trial of the loss, which returns `jdp.Loss`, as several microbatches ask for."""

    def as_sum(model, batch, rng):
        rows, value = len(jax.tree.leaves(batch)[0]), loss(model, batch, rng)
        return value if isinstance(value, jdp.Loss) else jdp.Loss(value * rows, rows)

    state = jdp.init_state(init, optax.sgd(0.1), PLAN, rng=jax.random.key(0))
    step = jdp.make_train_step(as_sum, PLAN, accumulate=2)
    with jax.transfer_guard("disallow"):
        step.loss.check_first(state, batch)
    return step


@pytest.mark.parametrize("loss", SUMS, ids=lambda loss: loss.__name__)
@pytest.mark.default_ids("ctc", "diffusion")
def test_the_trial_accepts_a_sum(loss):
    assert tried(loss, *SUMS[loss]).partitioning == "manual"


@pytest.mark.parametrize("loss", MIXES, ids=lambda loss: loss.__name__)
@pytest.mark.default_ids("load_balancing", "siblings_are_alike", "cox_survival")
def test_the_trial_refuses_a_loss_that_mixes_rows(loss):
    with pytest.raises(ValueError, match=r"must be a sum over rows.*(change the part of rows|Loss)"):
        tried(loss, *MIXES[loss])
