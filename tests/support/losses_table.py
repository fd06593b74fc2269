"""The table of losses, written as their users write them: sums over rows, and losses in which rows meet.

An entry has short ways to say its parameters and batches. Nothing here knows how `jdp` decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp


@dataclass(frozen=True)
class Entry:
    """A loss function, and what it is called with.

    Attributes:
        init: (rng) -> parameters.
        batch: (rows) -> arrays whose leading dimension is the row.
        loss: (model, batch, rng) -> `jdp.Loss`, or the mean over the rows.
    """

    init: Callable[[Any], Any]
    batch: Callable[[int], dict[str, np.ndarray]]
    loss: Callable[[Any, Any, Any], Any]

    def __repr__(self) -> str:
        return self.loss.__name__


def entry(table, init, batch):
    """Put the function below into `table`."""

    def put(loss):
        table.append(Entry(init, batch, loss))
        return loss

    return put


def weights_of(**shapes):
    """An `init`: normal matrices by name, scaled by their number of inputs."""

    def init(rng):
        keys = jax.random.split(rng, len(shapes))
        pairs = zip(keys, shapes.items(), strict=True)
        return {
            name: jax.random.normal(key, shape) / np.sqrt(max(shape[-2:-1] or (1,))) for key, (name, shape) in pairs
        }

    return init


def batch_of(**leaves):
    """A `batch`: each leaf is drawn as `floats`, `below`, `lengths` or `uneven` say."""

    def batch(rows):
        random = np.random.default_rng(7)
        return {name: leaf(random, rows) for name, leaf in leaves.items()}

    return batch


def floats(*shape):
    return lambda random, rows: random.normal(size=(rows, *shape)).astype(np.float32)


def below(limit, *shape):
    """Integers from 0 to `limit` - 1: tokens, labels, actions."""
    return lambda random, rows: random.integers(0, limit, (rows, *shape), dtype=np.int32)


def lengths(length):
    """A mask of padding: 1 where a token counts, of rows of 1 to `length` tokens."""
    return lambda random, rows: (np.arange(length) < random.integers(1, length + 1, (rows, 1))).astype(np.float32)


def uneven(random, rows):
    """Weights of rows, zeros among them."""
    return random.permutation(np.arange(rows) % 4).astype(np.float32)


def mlp(params, x):
    """Two layers: `up` and `down`."""
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def unit(x):
    """Scale the last dimension to length 1."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


WIDTH, LENGTH = 8, 6
SUMS, MIXES = [], []
LABELLED = batch_of(x=floats(6), label=below(4), weight=uneven)
CLASSIFIER = weights_of(up=(6, WIDTH), down=(WIDTH, 4))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


TIMED = weights_of(up=(7, WIDTH), down=(WIDTH, 6))
ALPHAS = np.cumprod(1 - np.linspace(1e-4, 0.2, 10, dtype=np.float32))


@entry(SUMS, TIMED, batch_of(x=floats(6)))
def diffusion(params, batch, rng):
    """A time and noise of each row's own (arXiv:2006.11239)."""
    x, (for_time, for_noise) = batch["x"], jax.random.split(rng)
    t = jax.random.randint(for_time, (x.shape[0],), 0, 10)
    noise, kept = jax.random.normal(for_noise, x.shape), jnp.asarray(ALPHAS)[t][:, None]
    noisy = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
    return jnp.mean((mlp(params, jnp.concatenate([noisy, t[:, None] / 10], axis=-1)) - noise) ** 2)


SOUND = {"x": floats(LENGTH, 3), "padded": lengths(LENGTH), "labels": below(3, 2), "spoken": lengths(2)}


@entry(SUMS, weights_of(out=(3, 4)), batch_of(**SOUND))
def ctc(params, batch, rng):
    logits, silent = batch["x"] @ params["out"], 1 - batch["spoken"].at[:, 0].set(1)
    each = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), 1 + batch["labels"], silent)
    return jdp.Loss(each.sum(), jnp.float32(len(each)))


@entry(SUMS, weights_of(table=(16, 3), up=(5, 4), down=(9, 1)), batch_of(x=floats(5), ids=below(99, 2), weights=uneven))
def criteo(params, batch, rng):
    """Rows of one table, taken by hashed index; the logit by an index of rows."""
    rows = params["table"][(batch["ids"].reshape(-1) % 16)].reshape(len(batch["ids"]), -1)
    hidden = jnp.concatenate([jax.nn.relu(batch["x"] @ params["up"])[:, :3], rows], axis=1)
    logits = (hidden @ params["down"])[jnp.arange(len(hidden)), 0]
    each = optax.sigmoid_binary_cross_entropy(logits, (batch["x"][:, 0] > 0).astype(jnp.float32))
    return jdp.Loss((each * batch["weights"]).sum(), batch["weights"].sum())


# In all below a row's term depends on other rows.

# Every row against every row.


@entry(MIXES, weights_of(image=(6, WIDTH), text=(5, WIDTH), scale=()), batch_of(image=floats(6), text=floats(5)))
def clip(params, batch, rng):
    image, text = (unit(batch[name] @ params[name]) for name in ("image", "text"))
    logits = jnp.exp(params["scale"]) * image @ text.T
    own = jnp.arange(logits.shape[0])
    return (cross_entropy(logits, own).mean() + cross_entropy(logits.T, own).mean()) / 2


# A mean that is changed afterwards.


@entry(MIXES, CLASSIFIER, LABELLED)
def perplexity(params, batch, rng):
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    return jnp.exp(nll.mean())


# Order of rows.


@entry(MIXES, CLASSIFIER, LABELLED)
def clipped_at_a_quantile(params, batch, rng):
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    limit = jnp.quantile(jax.lax.stop_gradient(nll), 0.75)
    return jnp.where(nll > limit, 0.0, nll).mean()


@entry(MIXES, weights_of(up=(6, WIDTH), down=(WIDTH, 1)), batch_of(x=floats(6), time=floats(), died=below(2)))
def cox_survival(params, batch, rng):
    """Each row against the rows that lived at least as long; rows are sorted by time."""
    risk = mlp(params, batch["x"])[:, 0]
    each = (jax.lax.cumlogsumexp(risk, reverse=True) - risk) * batch["died"]
    return jdp.Loss(each.sum(), batch["died"].sum())


# Rows that meet their neighbours.


@entry(MIXES, CLASSIFIER, LABELLED)
def mixup_by_a_permutation(params, batch, rng):
    order = jax.random.permutation(rng, batch["x"].shape[0])
    x, labels = batch["x"], jax.nn.one_hot(batch["label"], 4)
    x, labels = (0.6 * leaf + 0.4 * leaf[order] for leaf in (x, labels))
    return optax.softmax_cross_entropy(mlp(params, x), labels).mean()


@entry(MIXES, CLASSIFIER, LABELLED)
def siblings_are_alike(params, batch, rng):
    z = mlp(params, batch["x"])
    pairs = jnp.square(z[0::2] - z[1::2]).sum(axis=-1)
    return jdp.Loss(pairs.sum(), jnp.float32(pairs.shape[0]))


# Statistics of the batch.

EXPERTS = weights_of(gate=(6, 3), up=(3, 6, WIDTH), down=(3, WIDTH, 4))
TOKENS = batch_of(x=floats(5, 6), y=floats(5, 4))


@entry(MIXES, EXPERTS, TOKENS)
def load_balancing(params, batch, rng):
    """Switch Transformer's (arXiv:2101.03961)."""
    gates = jax.nn.softmax(batch["x"] @ params["gate"])
    hidden = jax.nn.relu(jnp.einsum("btd,edh->bteh", batch["x"], params["up"]))
    y = jnp.einsum("bte,bteh,eho->bto", gates, hidden, params["down"])
    fraction = jax.nn.one_hot(gates.argmax(-1), 3).mean(axis=(0, 1))
    balance = 3 * jnp.sum(fraction * gates.mean(axis=(0, 1)))
    return jnp.mean((y - batch["y"]) ** 2) + 0.01 * balance
