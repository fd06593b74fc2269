"""Loss functions in which a row's term depends on other rows, written as their users write them."""

import jax
import jax.numpy as jnp
import optax
from loss_entries import batch_of, below, entry, floats, mlp, uneven, unit, weights_of

import jdp

MIXES = []
WIDTH = 8
CLASSIFIER = weights_of(up=(6, WIDTH), down=(WIDTH, 4))
SCORER = weights_of(up=(6, WIDTH), down=(WIDTH, 1))
LABELLED = batch_of(x=floats(6), label=below(4), weight=uneven)
VIEWS = batch_of(a=floats(6), b=floats(6))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels

# Every row against every row.


@entry(MIXES, weights_of(image=(6, WIDTH), text=(5, WIDTH), scale=()), batch_of(image=floats(6), text=floats(5)))
def clip(params, batch, rng):
    image, text = (unit(batch[name] @ params[name]) for name in ("image", "text"))
    logits = jnp.exp(params["scale"]) * image @ text.T
    own = jnp.arange(logits.shape[0])
    return (cross_entropy(logits, own).mean() + cross_entropy(logits.T, own).mean()) / 2


@entry(MIXES, CLASSIFIER, LABELLED)
def hardest_triplets(params, batch, rng):
    z, label = mlp(params, batch["x"]), batch["label"]
    distance = jnp.sum((z[:, None] - z[None, :]) ** 2, axis=-1)
    same = label[:, None] == label[None, :]
    positive = jnp.max(jnp.where(same, distance, 0.0), axis=1)
    negative = jnp.min(jnp.where(same, 1e6, distance), axis=1)
    return jax.nn.relu(positive - negative + 0.2).mean()


# Statistics of the batch.


@entry(MIXES, weights_of(up=(6, WIDTH), down=(WIDTH, 4), predict=(4, 4)), VIEWS)
def byol(params, batch, rng):
    def project(x):
        h = x @ params["up"]
        h = (h - h.mean(axis=0)) / jnp.sqrt(h.var(axis=0) + 1e-5)
        return jax.nn.relu(h) @ params["down"]

    online, target = project(batch["a"]) @ params["predict"], jax.lax.stop_gradient(project(batch["b"]))
    return (2 - 2 * optax.losses.cosine_similarity(online, target, epsilon=1e-6)).mean()


ACTED = batch_of(x=floats(6), action=below(4), logp=floats(), advantage=floats(), reward=floats())


@entry(MIXES, CLASSIFIER, ACTED)
def ppo_with_normalised_advantages(params, batch, rng):
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    logp = jax.nn.log_softmax(mlp(params, batch["x"]))[jnp.arange(advantage.shape[0]), batch["action"]]
    ratio = jnp.exp(logp - batch["logp"])
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()


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


@entry(MIXES, SCORER, batch_of(x=floats(6), time=floats(), died=below(2)))
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


@entry(MIXES, weights_of(cell=(WIDTH, WIDTH), into=(6, WIDTH), out=(WIDTH, 4)), LABELLED)
def state_from_row_to_row(params, batch, rng):
    def step(h, row):
        h = jnp.tanh(h @ params["cell"] + row["x"] @ params["into"])
        return h, cross_entropy(h @ params["out"], row["label"])

    _, nll = jax.lax.scan(step, jnp.zeros(WIDTH), batch)
    return jdp.Loss((nll * batch["weight"]).sum(), batch["weight"].sum())


EXPERTS = weights_of(gate=(6, 3), up=(3, 6, WIDTH), down=(3, WIDTH, 4))
TOKENS = batch_of(x=floats(5, 6), y=floats(5, 4))


@entry(MIXES, EXPERTS, TOKENS)
def experts_with_capacity(params, batch, rng):
    """Each expert takes as many of the batch's tokens as there are rows, and drops the others (arXiv:2006.16668)."""
    x = batch["x"].reshape(-1, 6)
    gates = jax.nn.softmax(x @ params["gate"])
    chosen = jax.nn.one_hot(gates.argmax(-1), 3)
    chosen = chosen * (jnp.cumsum(chosen, axis=0) <= batch["x"].shape[0])
    hidden = jax.nn.relu(jnp.einsum("td,edh->teh", x, params["up"]))
    y = jnp.einsum("te,teh,eho->to", gates * chosen, hidden, params["down"])
    return jdp.Loss(jnp.sum((y - batch["y"].reshape(-1, 4)) ** 2), jnp.float32(len(x)))


@entry(MIXES, EXPERTS, TOKENS)
def load_balancing(params, batch, rng):
    """Switch Transformer's (arXiv:2101.03961)."""
    gates = jax.nn.softmax(batch["x"] @ params["gate"])
    hidden = jax.nn.relu(jnp.einsum("btd,edh->bteh", batch["x"], params["up"]))
    y = jnp.einsum("bte,bteh,eho->bto", gates, hidden, params["down"])
    fraction = jax.nn.one_hot(gates.argmax(-1), 3).mean(axis=(0, 1))
    balance = 3 * jnp.sum(fraction * gates.mean(axis=(0, 1)))
    return jnp.mean((y - batch["y"]) ** 2) + 0.01 * balance
