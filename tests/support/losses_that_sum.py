"""Loss functions that are sums over rows, or quotients of two such sums, written as their users write them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from loss_entries import (
    LENGTH,
    LLAMA,
    WIDTH,
    WORDS,
    batch_of,
    below,
    entry,
    floats,
    init_block,
    lengths,
    llama,
    mlp,
    quotient,
    uneven,
    weights_of,
)

import jdp

SUMS = []
TEXT = {"tokens": below(WORDS, LENGTH), "targets": below(WORDS, LENGTH), "mask": lengths(LENGTH)}
LABELLED = {"x": floats(6), "label": below(4), "weight": uneven}
CLASSIFIER = weights_of(up=(6, WIDTH), down=(WIDTH, 4))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels

# Language models.


@entry(SUMS, init_block, batch_of(**TEXT))
def gpt_with_padding(model, batch, rng):
    nll = cross_entropy(model(batch["tokens"]), batch["targets"])
    hits = (model(batch["tokens"]).argmax(-1) == batch["targets"]) * batch["mask"]
    return jdp.Loss((nll * batch["mask"]).sum(), batch["mask"].sum(), {"accuracy": hits.sum()})


def llama_terms(params, batch, rng):
    return cross_entropy(llama(params, batch["tokens"]), batch["targets"]), batch["mask"]


@entry(SUMS, LLAMA, batch_of(**TEXT), quotient(llama_terms))
def llama_in_a_scan_over_layers(params, batch, rng):
    nll, mask = llama_terms(params, batch, rng)
    return jnp.where(mask > 0, nll, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@entry(SUMS, weights_of(embed=(WORDS, WIDTH), out=(WIDTH, WORDS)), batch_of(**TEXT))
def in_chunks_of_a_row(params, batch, rng):
    """The logits of two tokens of each row at a time."""
    x = params["embed"][batch["tokens"]]
    chunks = (x.reshape(-1, 3, 2, WIDTH), batch["targets"].reshape(-1, 3, 2), batch["mask"].reshape(-1, 3, 2))
    chunks = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), chunks)

    @jax.checkpoint
    def of_chunk(chunk):
        x, targets, mask = chunk
        return (cross_entropy(x @ params["out"], targets) * mask).sum()

    return jdp.Loss(jax.lax.map(of_chunk, chunks).sum(), batch["mask"].sum())


PAIRS = {"chosen": below(WORDS, LENGTH), "rejected": below(WORDS, LENGTH), "mask": lengths(LENGTH)}
FROZEN = np.random.default_rng(3).normal(size=(WORDS, WORDS)).astype("f")


@entry(SUMS, weights_of(logits=(WORDS, WORDS)), batch_of(**PAIRS))
def dpo(params, batch, rng):
    """A pair in each row (arXiv:2305.18290)."""

    def score(table, tokens):
        logp = jnp.take_along_axis(jax.nn.log_softmax(table[tokens[:, :-1]]), tokens[:, 1:, None], axis=-1)
        return (logp.squeeze(-1) * batch["mask"][:, 1:]).sum(-1)

    margins = [
        score(params["logits"], batch[name]) - score(jnp.asarray(FROZEN), batch[name])
        for name in ("chosen", "rejected")
    ]
    return -jax.nn.log_sigmoid(0.1 * (margins[0] - margins[1])).mean()


# Classifiers and regressions.


def binary_terms(params, batch, rng):
    return optax.sigmoid_binary_cross_entropy(mlp(params, batch["x"]), batch["labels"]), batch["known"]


@entry(SUMS, CLASSIFIER, batch_of(x=floats(6), labels=below(2, 4), known=lengths(4, bool)), quotient(binary_terms))
def many_labels_some_unknown(params, batch, rng):
    nll, known = binary_terms(params, batch, rng)
    return nll.mean(where=known)


@entry(SUMS, CLASSIFIER, batch_of(**LABELLED))
def added_row_by_row(params, batch, rng):
    def add(sums, row):
        nll = cross_entropy(mlp(params, row["x"]), row["label"])
        return (sums[0] + row["weight"] * nll, sums[1] + row["weight"]), None

    (total, weight), _ = jax.lax.scan(add, (0.0, 0.0), batch)
    return jdp.Loss(total, weight)


# Generative models.

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


@entry(SUMS, TIMED, batch_of(x=floats(6), weight=uneven))
def flow_matching(params, batch, rng):
    def one(key, x):
        start, t = jax.random.normal(key, x.shape), jax.random.uniform(key)
        velocity = mlp(params, jnp.append(t * x + (1 - t) * start, t))
        return jnp.mean(optax.l2_loss(velocity, x - start))

    each = jax.vmap(one)(jax.random.split(rng, len(batch["x"])), batch["x"])
    return jdp.Loss(jnp.sum(each * batch["weight"]), batch["weight"].sum())


# Sounds and tables.


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
