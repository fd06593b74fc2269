"""Loss functions that are sums over rows, or quotients of two such sums, written as their users write them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from loss_entries import batch_of, below, entry, floats, layer_norm, lengths, mlp, quotient, uneven, unit, weights_of
from loss_models import LENGTH, LLAMA, WIDTH, WORDS, init_block, init_conv, llama

import jdp

SUMS = []
TEXT = {"tokens": below(WORDS, LENGTH), "targets": below(WORDS, LENGTH), "mask": lengths(LENGTH)}
LABELLED = {"x": floats(6), "label": below(4), "weight": uneven}
CLASSIFIER = weights_of(up=(6, WIDTH), down=(WIDTH, 4))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels

# Language models.


@entry(SUMS, init_block, batch_of(**TEXT), draws=True)
def gpt_with_padding(model, batch, rng):
    nll = cross_entropy(model(batch["tokens"]), batch["targets"])
    hits = (model(batch["tokens"]).argmax(-1) == batch["targets"]) * batch["mask"]
    return jdp.Loss((nll * batch["mask"]).sum(), batch["mask"].sum(), {"accuracy": hits.sum()})


def z_terms(params, batch, rng):
    logits = (params["embed"][batch["tokens"]] @ params["out"]).reshape(-1, WORDS)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    nll = log_z - jnp.take_along_axis(logits, batch["targets"].reshape(-1, 1), axis=-1)[:, 0]
    return nll + 1e-4 * log_z**2, batch["mask"].reshape(-1)


@entry(SUMS, weights_of(embed=(WORDS, WIDTH), out=(WIDTH, WORDS)), batch_of(**TEXT), quotient(z_terms))
def flat_tokens_with_z_loss(params, batch, rng):
    values, mask = z_terms(params, batch, rng)
    return (values * mask).sum() / mask.sum()


def llama_terms(params, batch, rng):
    return cross_entropy(llama(params, batch["tokens"]), batch["targets"]), batch["mask"]


@entry(SUMS, LLAMA, batch_of(**TEXT), quotient(llama_terms))
def llama_in_a_scan_over_layers(params, batch, rng):
    nll, mask = llama_terms(params, batch, rng)
    return jnp.where(mask > 0, nll, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@entry(SUMS, weights_of(embed=(WORDS, WIDTH), out=(WIDTH, WORDS)), batch_of(**TEXT, segment=below(3, LENGTH)))
def packed_sequences(params, batch, rng):
    """Each token sees the tokens of its own document in its row."""
    x, segment = params["embed"][batch["tokens"]], jnp.sort(batch["segment"], axis=1)
    sees = (segment[:, :, None] == segment[:, None, :]) & jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]
    scores = jnp.where(sees, x @ x.swapaxes(1, 2), jnp.finfo(x.dtype).min)
    nll = cross_entropy(jax.nn.softmax(scores) @ x @ params["out"], batch["targets"])
    return jdp.Loss(jnp.vdot(nll, batch["mask"]), batch["mask"].sum())


@entry(SUMS, weights_of(embed=(WORDS, WIDTH), out=(WIDTH, WORDS)), batch_of(**TEXT))
def mean_of_each_row_s_tokens(params, batch, rng):
    logp = jax.nn.log_softmax(params["embed"][batch["tokens"]] @ params["out"])
    nll = -jnp.sum(logp * jax.nn.one_hot(batch["targets"], WORDS), axis=-1)
    each = (nll * batch["mask"]).sum(axis=1) / batch["mask"].sum(axis=1)
    return jdp.Loss(each.sum(), jnp.float32(each.shape[0]))


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


@entry(SUMS, weights_of(embed=(WORDS, WIDTH), adapt=(WIDTH, 2), out=(2, WORDS)), batch_of(**TEXT))
def lora(params, batch, rng):
    base = jax.lax.stop_gradient(params["embed"])
    x = jnp.cumsum(base[batch["tokens"]], axis=1) / jnp.arange(1, LENGTH + 1)[:, None]
    logits = x @ base.T + 2.0 * (x @ params["adapt"]) @ params["out"]
    return jdp.Loss((cross_entropy(logits, batch["targets"]) * batch["mask"]).sum(), batch["mask"].sum())


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


@entry(SUMS, weights_of(embed=(WORDS, WIDTH), out=(WIDTH, WORDS), mix=(WIDTH, WIDTH)), batch_of(**TEXT))
def sequence_to_sequence(params, batch, rng):
    """One example at a time, under vmap: the decoder attends to the tokens that are not padding."""

    def one(tokens, targets, mask):
        source, inputs = params["embed"][tokens], params["embed"][jnp.roll(targets, 1).at[0].set(0)]
        scores = inputs @ params["mix"] @ source.T + jnp.where(mask, 0.0, -1e9)
        return cross_entropy((inputs + jax.nn.softmax(scores) @ source) @ params["out"], targets).sum()

    each = jax.vmap(one)(batch["tokens"], batch["targets"], batch["mask"])
    return jdp.Loss(each.sum(), jnp.array(each.size, jnp.float32))


# Classifiers and regressions.


@entry(SUMS, CLASSIFIER, batch_of(x=floats(6), label=below(4)))
def optax_mean(params, batch, rng):
    return optax.softmax_cross_entropy_with_integer_labels(mlp(params, batch["x"]), batch["label"]).mean()


def smooth_terms(params, batch, rng):
    labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], 4), 0.1)
    return optax.softmax_cross_entropy(mlp(params, batch["x"]), labels), batch["weight"]


@entry(SUMS, CLASSIFIER, batch_of(**LABELLED), quotient(smooth_terms))
def label_smoothing(params, batch, rng):
    values, weights = smooth_terms(params, batch, rng)
    return (values * weights).sum() / (weights.sum() + 1e-8)


RANDOM = np.random.default_rng(3)
TEACHER = {"up": RANDOM.normal(size=(6, WIDTH)).astype("f"), "down": RANDOM.normal(size=(WIDTH, 4)).astype("f")}


@entry(SUMS, CLASSIFIER, batch_of(**LABELLED))
def distillation(params, batch, rng):
    student, teacher = mlp(params, batch["x"]) / 2, jax.lax.stop_gradient(mlp(TEACHER, batch["x"])) / 2
    kl = optax.kl_divergence(jax.nn.log_softmax(student), jax.nn.softmax(teacher))
    each = 0.5 * 4 * kl + 0.5 * cross_entropy(2 * student, batch["label"])
    return jdp.Loss(jnp.dot(each, batch["weight"]), jnp.sum(batch["weight"]))


def huber_terms(params, batch, rng):
    return optax.huber_loss(mlp(params, batch["x"]), batch["y"]).mean(axis=-1), batch["weight"]


REGRESSION = batch_of(x=floats(6), y=floats(4), weight=uneven)


@entry(SUMS, CLASSIFIER, REGRESSION, quotient(huber_terms))
def huber(params, batch, rng):
    values, weights = huber_terms(params, batch, rng)
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1)


@entry(SUMS, CLASSIFIER, REGRESSION, quotient(huber_terms))
def weighted_average(params, batch, rng):
    return jnp.average(huber_terms(params, batch, rng)[0], weights=batch["weight"])


def binary_terms(params, batch, rng):
    return optax.sigmoid_binary_cross_entropy(mlp(params, batch["x"]), batch["labels"]), batch["known"]


@entry(SUMS, CLASSIFIER, batch_of(x=floats(6), labels=below(2, 4), known=lengths(4, bool)), quotient(binary_terms))
def many_labels_some_unknown(params, batch, rng):
    nll, known = binary_terms(params, batch, rng)
    return nll.mean(where=known)


@entry(SUMS, CLASSIFIER, batch_of(**LABELLED))
def weight_decay_times_weight(params, batch, rng):
    weight = batch["weight"].sum()
    squares = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params))
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"]) * batch["weight"]
    return jdp.Loss(nll.sum() + 1e-2 * squares * weight, weight)


@entry(SUMS, CLASSIFIER, batch_of(**LABELLED))
def added_row_by_row(params, batch, rng):
    def add(sums, row):
        nll = cross_entropy(mlp(params, row["x"]), row["label"])
        return (sums[0] + row["weight"] * nll, sums[1] + row["weight"]), None

    (total, weight), _ = jax.lax.scan(add, (0.0, 0.0), batch)
    return jdp.Loss(total, weight)


EXPERTS = weights_of(gate=(6, 3), up=(3, 6, WIDTH), down=(3, WIDTH, 4))


@entry(SUMS, EXPERTS, batch_of(**LABELLED))
def experts_with_soft_routing(params, batch, rng):
    gates = jax.nn.softmax(batch["x"] @ params["gate"])
    hidden = jax.nn.relu(jnp.einsum("bd,edh->ebh", batch["x"], params["up"]))
    logits = jnp.einsum("be,ebh,ehc->bc", gates, hidden, params["down"])
    return jdp.Loss((cross_entropy(logits, batch["label"]) * batch["weight"]).sum(), batch["weight"].sum())


@entry(
    SUMS, weights_of(cell=(WIDTH, WIDTH), into=(3, WIDTH), out=(WIDTH, 4)), batch_of(x=floats(LENGTH, 3), y=below(4))
)
def recurrent(params, batch, rng):
    def step(h, x):
        h = jnp.tanh(h @ params["cell"] + x @ params["into"])
        return h, h

    start = jnp.zeros((batch["x"].shape[0], WIDTH))
    last, _ = jax.lax.scan(step, start, jnp.swapaxes(batch["x"], 0, 1))
    return -jnp.mean(jax.nn.log_softmax(last @ params["out"])[jnp.arange(len(last)), batch["y"]])


# Generative models.

AUTOENCODER = weights_of(encode=(6, 2 * WIDTH), decode=(WIDTH, 6))


@entry(SUMS, AUTOENCODER, batch_of(x=floats(6), weight=uneven), draws=True)
def variational_autoencoder(params, batch, rng):
    mean, log_var = jnp.split(batch["x"] @ params["encode"], 2, axis=-1)
    z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(rng, mean.shape)
    kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), axis=-1)
    each = jnp.sum((jax.nn.softplus(z) @ params["decode"] - batch["x"]) ** 2, axis=-1) + kl
    return jdp.Loss((each * batch["weight"]).sum(), batch["weight"].sum())


TIMED = weights_of(up=(7, WIDTH), down=(WIDTH, 6))
ALPHAS = np.cumprod(1 - np.linspace(1e-4, 0.2, 10, dtype=np.float32))


@entry(SUMS, TIMED, batch_of(x=floats(6)), draws=True)
def diffusion(params, batch, rng):
    """A time and noise of each row's own (arXiv:2006.11239)."""
    x, (for_time, for_noise) = batch["x"], jax.random.split(rng)
    t = jax.random.randint(for_time, (x.shape[0],), 0, 10)
    noise, kept = jax.random.normal(for_noise, x.shape), jnp.asarray(ALPHAS)[t][:, None]
    noisy = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
    return jnp.mean((mlp(params, jnp.concatenate([noisy, t[:, None] / 10], axis=-1)) - noise) ** 2)


@entry(SUMS, TIMED, batch_of(x=floats(6), weight=uneven), draws=True)
def flow_matching(params, batch, rng):
    def one(key, x):
        start, t = jax.random.normal(key, x.shape), jax.random.uniform(key)
        velocity = mlp(params, jnp.append(t * x + (1 - t) * start, t))
        return jnp.mean(optax.l2_loss(velocity, x - start))

    each = jax.vmap(one)(jax.random.split(rng, len(batch["x"])), batch["x"])
    return jdp.Loss(jnp.sum(each * batch["weight"]), batch["weight"].sum())


@entry(SUMS, weights_of(up=(6, WIDTH), down=(WIDTH, 6)), batch_of(x=floats(6)))
def score_matching(params, batch, rng):
    """The trace of the score's Jacobian, by one jvp a feature of each row (Hyvarinen 2005)."""

    def one(x):
        score, along = jax.linearize(lambda x: mlp(params, x), x)
        return jnp.trace(jax.vmap(along)(jnp.eye(6))) + 0.5 * jnp.sum(score**2)

    return jax.vmap(one)(batch["x"]).mean()


@entry(SUMS, weights_of(up=(3, WIDTH), down=(WIDTH, 3), mask=(3,)), batch_of(patches=floats(LENGTH, 3)), draws=True)
def masked_autoencoder(params, batch, rng):
    """Half of each row's patches are hidden (arXiv:2111.06377)."""
    patches = batch["patches"]
    order = jnp.argsort(jax.random.uniform(rng, patches.shape[:2]), axis=1)
    hidden = jnp.argsort(order, axis=1) >= LENGTH // 2
    seen = jnp.where(hidden[..., None], params["mask"], patches)
    attended = jax.nn.softmax(jnp.einsum("bnd,bmd->bnm", seen, seen)) @ seen
    errors = jnp.mean((mlp(params, attended) - patches) ** 2, axis=-1)
    return jdp.Loss(jnp.sum(errors * hidden), jnp.sum(hidden))


# Pictures, sounds and graphs.


@entry(SUMS, init_conv, batch_of(image=floats(4, 4, 2), label=below(5, 4, 4)))
def segmentation(model, batch, rng):
    """Label 4 is ignored."""
    counts = batch["label"] < 4
    nll = cross_entropy(model(batch["image"]), jnp.where(counts, batch["label"], 0))
    return jdp.Loss(jnp.sum(nll, where=counts), counts.sum())


@entry(SUMS, init_conv, batch_of(image=floats(4, 4, 2), label=below(4)))
def pooled_convolutions(model, batch, rng):
    pooled = nnx.max_pool(model(batch["image"]), (2, 2), strides=(2, 2)).mean(axis=(1, 2))
    return optax.losses.softmax_cross_entropy_with_integer_labels(pooled, batch["label"]).mean()


BOXES = {"x": floats(3, 6), "boxes": floats(3, 4), "label": below(4, 3), "there": lengths(3)}


@entry(SUMS, weights_of(label=(6, 4), box=(6, 4)), batch_of(**BOXES))
def detection(params, batch, rng):
    """Focal loss and L1, over the number of boxes that are there."""
    wanted = jax.nn.one_hot(batch["label"], 4) * batch["there"][..., None]
    focal = optax.sigmoid_focal_loss(batch["x"] @ params["label"], wanted, alpha=0.25, gamma=2.0).sum()
    distance = jnp.abs(batch["x"] @ params["box"] - batch["boxes"]).sum(-1)
    return jdp.Loss(focal + 5.0 * (distance * batch["there"]).sum(), batch["there"].sum())


SOUND = {"x": floats(LENGTH, 3), "padded": lengths(LENGTH), "labels": below(3, 2), "spoken": lengths(2)}


@entry(SUMS, weights_of(out=(3, 4)), batch_of(**SOUND))
def ctc(params, batch, rng):
    logits, silent = batch["x"] @ params["out"], 1 - batch["spoken"].at[:, 0].set(1)
    each = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), 1 + batch["labels"], silent)
    return jdp.Loss(each.sum(), jnp.float32(len(each)))


GRAPHS = {"nodes": floats(5, 3), "from": below(5, 7), "to": below(5, 7), "edge": lengths(7), "y": floats()}


@entry(SUMS, weights_of(message=(3, WIDTH), out=(WIDTH,)), batch_of(**GRAPHS))
def graphs(params, batch, rng):
    """A padded graph in each row."""

    def one(nodes, sources, targets, edge):
        messages = jax.nn.relu(nodes @ params["message"])[sources] * edge[:, None]
        return jax.ops.segment_sum(messages, targets, num_segments=5).mean(axis=0) @ params["out"]

    y = jax.vmap(one)(batch["nodes"], batch["from"], batch["to"], batch["edge"])
    return optax.squared_error(y, batch["y"]).mean()


# Embeddings.


@entry(SUMS, CLASSIFIER, batch_of(x=floats(6), positive=floats(6), negatives=floats(3, 6)))
def contrast_with_own_negatives(params, batch, rng):
    query, positive, negatives = (unit(mlp(params, batch[name])) for name in ("x", "positive", "negatives"))
    scores = jnp.concatenate([(query * positive).sum(-1)[:, None], jnp.einsum("bd,bnd->bn", query, negatives)], axis=1)
    return jnp.mean(jax.nn.logsumexp(scores / 0.1, axis=1) - scores[:, 0] / 0.1)


@entry(SUMS, CLASSIFIER, batch_of(anchor=floats(6), near=floats(6), far=floats(6)))
def triplets(params, batch, rng):
    anchor, near, far = (layer_norm(mlp(params, batch[name])) for name in ("anchor", "near", "far"))
    each = jnp.maximum(0.0, jnp.sum((anchor - near) ** 2 - (anchor - far) ** 2, axis=-1) + 1.0)
    return jdp.Loss(each.sum(), jnp.float32(each.size))


# Reinforcement.

ACTED = {"x": floats(6), "action": below(4), "logp": floats(), "advantage": floats(), "value": floats()}


@entry(SUMS, CLASSIFIER, batch_of(**ACTED))
def ppo(params, batch, rng):
    logp = jax.nn.log_softmax(mlp(params, batch["x"]))
    chosen = jax.vmap(lambda row, action: row[action])(logp, batch["action"])
    ratio = jnp.exp(chosen - batch["logp"])
    clipped = jnp.clip(ratio, 0.8, 1.2) * batch["advantage"]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return -jnp.minimum(ratio * batch["advantage"], clipped).mean() - 0.01 * entropy.mean()


STEPS = {"x": floats(6), "next": floats(6), "action": below(4), "reward": floats(), "done": below(2), "weight": uneven}


@entry(SUMS, lambda rng: {"online": CLASSIFIER(rng), "target": CLASSIFIER(rng)}, batch_of(**STEPS))
def double_q_learning(params, batch, rng):
    best = jnp.argmax(mlp(params["online"], batch["next"]), axis=-1)
    after = mlp(params["target"], batch["next"])[jnp.arange(best.shape[0]), best]
    wanted = jax.lax.stop_gradient(batch["reward"] + 0.99 * (1 - batch["done"]) * after)
    q = mlp(params["online"], batch["x"])
    errors = q[jnp.arange(q.shape[0]), batch["action"]] - wanted
    return jdp.Loss((batch["weight"] * jnp.square(errors)).sum(), batch["weight"].sum())


ACTOR = weights_of(actor=(6, 4), q1=(8, 1), q2=(8, 1), log_alpha=())


@entry(SUMS, ACTOR, batch_of(x=floats(6)), draws=True)
def soft_actor(params, batch, rng):
    mean, log_std = jnp.split(batch["x"] @ params["actor"], 2, axis=-1)
    noise = jax.random.normal(rng, mean.shape)
    action = jnp.tanh(mean + jnp.exp(jnp.clip(log_std, -5, 2)) * noise)
    logp = (-0.5 * noise**2 - log_std - jnp.log(1 - action**2 + 1e-6)).sum(-1)
    q = jnp.minimum(*(jnp.hstack([batch["x"], action]) @ params[name] for name in ("q1", "q2")))
    return (jnp.exp(params["log_alpha"]) * logp - q[:, 0]).mean()


# AlgoPerf's that are not above (mlcommons/algorithmic-efficiency): a sum over valid examples, and their number.


@entry(SUMS, weights_of(table=(16, 3), up=(5, 4), down=(9, 1)), batch_of(x=floats(5), ids=below(99, 2), weights=uneven))
def criteo(params, batch, rng):
    """Rows of one table, taken by hashed index; the logit by an index of rows."""
    rows = params["table"][(batch["ids"].reshape(-1) % 16)].reshape(len(batch["ids"]), -1)
    hidden = jnp.concatenate([jax.nn.relu(batch["x"] @ params["up"])[:, :3], rows], axis=1)
    logits = (hidden @ params["down"])[jnp.arange(len(hidden)), 0]
    each = optax.sigmoid_binary_cross_entropy(logits, (batch["x"][:, 0] > 0).astype(jnp.float32))
    return jdp.Loss((each * batch["weights"]).sum(), batch["weights"].sum())


@entry(SUMS, weights_of(embed=(WORDS, WIDTH), out=(WIDTH, WORDS)), batch_of(**TEXT))
def wmt(params, batch, rng):
    """Smoothed labels, less the least that they allow; padding weighs nothing."""
    smooth, rest = 0.9, 0.1 / (WORDS - 1)
    least = -(smooth * np.log(smooth) + (WORDS - 1) * rest * np.log(rest + 1e-20))
    soft = jax.nn.one_hot(batch["targets"], WORDS) * (smooth - rest) + rest
    each = -(soft * jax.nn.log_softmax(params["embed"][batch["tokens"]] @ params["out"])).sum(-1) - least
    return jdp.Loss((each * batch["mask"]).sum(), batch["mask"].sum())


IMAGES = {"image": floats(4, 4, 2), "target": floats(4, 4), "mean": floats(), "weights": uneven}


@entry(SUMS, init_conv, batch_of(**IMAGES))
def fastmri(model, batch, rng):
    """Each image normalised by its own mean and deviation."""
    wanted = batch["target"] - batch["target"].mean((1, 2), keepdims=True) + batch["mean"][:, None, None]
    wanted = wanted / (wanted.std((1, 2), keepdims=True) + 1e-6)
    each = jnp.abs(model(batch["image"])[..., 0] - wanted).mean((1, 2))
    return jdp.Loss((each * batch["weights"]).sum(), batch["weights"].sum())
