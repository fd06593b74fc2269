"""Loss functions in which a row's term depends on other rows, written as their users write them.

A line that ends in `# mixes` is one that an error may name.
"""

import jax
import jax.numpy as jnp
import optax
from loss_entries import batch_of, below, entry, floats, lengths, mlp, uneven, unit, weights_of

import jdp

MIXES = []
WIDTH = 8
CLASSIFIER = weights_of(up=(6, WIDTH), down=(WIDTH, 4))
SCORER = weights_of(up=(6, WIDTH), down=(WIDTH, 1))
LABELLED = batch_of(x=floats(6), label=below(4), weight=uneven)
REGRESSION = batch_of(x=floats(6), y=floats())
VIEWS = batch_of(a=floats(6), b=floats(6))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels

# Every row against every row.


@entry(MIXES, weights_of(image=(6, WIDTH), text=(5, WIDTH), scale=()), batch_of(image=floats(6), text=floats(5)))
def clip(params, batch, rng):
    image, text = (unit(batch[name] @ params[name]) for name in ("image", "text"))
    logits = jnp.exp(params["scale"]) * image @ text.T  # mixes
    own = jnp.arange(logits.shape[0])
    return (cross_entropy(logits, own).mean() + cross_entropy(logits.T, own).mean()) / 2


@entry(MIXES, weights_of(image=(6, WIDTH), text=(5, WIDTH), bias=()), batch_of(image=floats(6), text=floats(5)))
def siglip(params, batch, rng):
    image, text = (unit(batch[name] @ params[name]) for name in ("image", "text"))
    logits = 10 * image @ text.T + params["bias"]  # mixes
    signs = 2 * jnp.eye(logits.shape[0]) - 1
    return jdp.Loss(-jax.nn.log_sigmoid(signs * logits).sum(), jnp.float32(logits.shape[0]))


@entry(MIXES, CLASSIFIER, VIEWS)
def nt_xent(params, batch, rng):
    z = unit(mlp(params, jnp.concatenate([batch["a"], batch["b"]])))
    rows = z.shape[0] // 2
    similar = jnp.where(jnp.eye(2 * rows, dtype=bool), -jnp.inf, z @ z.T / 0.5)  # mixes
    return cross_entropy(similar, (jnp.arange(2 * rows) + rows) % (2 * rows)).mean()


@entry(MIXES, CLASSIFIER, VIEWS)
def in_batch_negatives(params, batch, rng):
    query, document = mlp(params, batch["a"]), mlp(params, batch["b"])
    logp = jax.nn.log_softmax(jnp.einsum("id,jd->ij", query, document))  # mixes
    return jdp.Loss(-jnp.trace(logp), jnp.float32(len(query)))


@entry(MIXES, CLASSIFIER, LABELLED)
def hardest_triplets(params, batch, rng):
    z, label = mlp(params, batch["x"]), batch["label"]
    distance = jnp.sum((z[:, None] - z[None, :]) ** 2, axis=-1)  # mixes
    same = label[:, None] == label[None, :]  # mixes
    positive = jnp.max(jnp.where(same, distance, 0.0), axis=1)
    negative = jnp.min(jnp.where(same, 1e6, distance), axis=1)
    return jax.nn.relu(positive - negative + 0.2).mean()


@entry(MIXES, SCORER, REGRESSION)
def pairwise_ranking(params, batch, rng):
    scores = mlp(params, batch["x"])[:, 0]
    above = batch["y"][:, None] > batch["y"][None, :]  # mixes
    nll = jax.nn.softplus(scores[None, :] - scores[:, None])  # mixes
    return jnp.sum(nll * above) / jnp.maximum(above.sum(), 1)


@entry(MIXES, SCORER, LABELLED)
def auc_surrogate(params, batch, rng):
    scores, positive = mlp(params, batch["x"]).squeeze(-1), (batch["label"] > 1).astype(jnp.float32)
    hinge = jnp.square(jax.nn.relu(1 - (scores[:, None] - scores)))  # mixes
    pairs = positive[:, None] * (1 - positive)  # mixes
    return (hinge * pairs).sum() / (pairs.sum() + 1e-8)


@entry(MIXES, CLASSIFIER, VIEWS)
def maximum_mean_discrepancy(params, batch, rng):
    a, b = mlp(params, batch["a"]), mlp(params, batch["b"])

    def kernel(x, y):
        return jax.vmap(lambda one: jnp.exp(-jnp.sum((one - y) ** 2, axis=-1)))(x).mean()  # mixes

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


@entry(MIXES, SCORER, REGRESSION)
def distance_correlation(params, batch, rng):
    def centred(x):
        d = jnp.abs(x[:, None] - x[None, :])  # mixes
        return d - d.mean(0) - d.mean(1, keepdims=True) + d.mean()  # mixes

    a, b = centred(mlp(params, batch["x"])[:, 0]), centred(batch["y"])
    return 1 - (a * b).mean() / jnp.sqrt((a * a).mean() * (b * b).mean() + 1e-9)


@entry(MIXES, SCORER, REGRESSION)
def crps_of_an_ensemble(params, batch, rng):
    """The rows are the members, which share one observation."""
    members = mlp(params, batch["x"])[:, 0]
    spread = jnp.abs(members[:, None] - members).mean()  # mixes
    return jnp.abs(members - batch["y"]).mean() - 0.5 * spread


# Statistics of the batch.


@entry(MIXES, weights_of(up=(6, WIDTH), down=(WIDTH, 4), predict=(4, 4)), VIEWS)
def byol(params, batch, rng):
    def project(x):
        h = x @ params["up"]
        h = (h - h.mean(axis=0)) / jnp.sqrt(h.var(axis=0) + 1e-5)  # mixes
        return jax.nn.relu(h) @ params["down"]

    online, target = project(batch["a"]) @ params["predict"], jax.lax.stop_gradient(project(batch["b"]))
    return (2 - 2 * optax.losses.cosine_similarity(online, target, epsilon=1e-6)).mean()


@entry(MIXES, CLASSIFIER, VIEWS)
def vicreg(params, batch, rng):
    a, b = mlp(params, batch["a"]), mlp(params, batch["b"])
    total = 25 * jnp.mean((a - b) ** 2)
    for z in (a, b):
        total += 25 * jax.nn.relu(1 - jnp.sqrt(z.var(axis=0) + 1e-4)).mean()  # mixes
        z = z - z.mean(axis=0)  # mixes
        covariance = z.T @ z / (z.shape[0] - 1)  # mixes
        total += jnp.sum(jnp.square(covariance - jnp.diag(jnp.diag(covariance)))) / z.shape[1]  # mixes
    return total


@entry(MIXES, CLASSIFIER, VIEWS)
def barlow_twins(params, batch, rng):
    a, b = (jax.nn.standardize(mlp(params, batch[name]), axis=0) for name in "ab")  # mixes
    correlation = jnp.einsum("bi,bj->ij", a, b) / len(a)  # mixes
    off = 5e-3 + (1 - 5e-3) * jnp.eye(4)
    return jnp.sum(off * (correlation - jnp.eye(4)) ** 2)  # mixes


ACTED = batch_of(x=floats(6), action=below(4), logp=floats(), advantage=floats(), reward=floats())


@entry(MIXES, CLASSIFIER, ACTED)
def ppo_with_normalised_advantages(params, batch, rng):
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # mixes
    logp = jax.nn.log_softmax(mlp(params, batch["x"]))[jnp.arange(advantage.shape[0]), batch["action"]]
    ratio = jnp.exp(logp - batch["logp"])
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()


@entry(MIXES, CLASSIFIER, ACTED)
def grpo(params, batch, rng):
    """Two answers to each question (arXiv:2402.03300): first one of each, then the other."""
    rewards = batch["reward"].reshape(2, -1)
    advantage = ((rewards - rewards.mean(axis=0)) / (rewards.std(axis=0) + 1e-4)).reshape(-1)  # mixes
    logp = jnp.take_along_axis(jax.nn.log_softmax(mlp(params, batch["x"])), batch["action"][:, None], axis=1)[:, 0]
    return jdp.Loss(-(jnp.exp(logp - batch["logp"]) * advantage).sum(), jnp.float32(len(logp)))


@entry(MIXES, SCORER, REGRESSION)
def standardised_targets(params, batch, rng):
    y = batch["y"] - jnp.mean(batch["y"])  # mixes
    y = y / jnp.std(batch["y"])  # mixes
    return optax.huber_loss(mlp(params, batch["x"])[:, 0], y).mean()


@entry(MIXES, weights_of(up=(6, WIDTH), down=(WIDTH, 4)), VIEWS)
def dino_centring(params, batch, rng):
    teacher = jax.lax.stop_gradient(mlp(params, batch["b"]))
    wanted = jax.nn.softmax((teacher - teacher.mean(axis=0, keepdims=True)) / 0.04)  # mixes
    each = optax.softmax_cross_entropy(mlp(params, batch["a"]) / 0.1, wanted)
    return jdp.Loss(each.sum(), jnp.float32(each.shape[0]))


@entry(MIXES, CLASSIFIER, VIEWS)
def swav_sinkhorn(params, batch, rng):
    codes = jnp.exp(jax.lax.stop_gradient(mlp(params, batch["a"])) / 0.5)

    def balance(_, q):
        q = q / q.sum(axis=0, keepdims=True) / q.shape[1]  # mixes
        return q / q.sum(axis=1, keepdims=True) / q.shape[0]

    codes = jax.lax.fori_loop(0, 3, balance, codes)  # mixes
    each = -(codes * len(codes) * jax.nn.log_softmax(mlp(params, batch["b"]) / 0.5)).sum(-1)
    return jdp.Loss(each.sum(), jnp.float32(len(each)))


@jax.custom_vjp
def reverse(x):
    return x


reverse.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@entry(MIXES, CLASSIFIER, LABELLED)
def gradient_reversal_of_domain_means(params, batch, rng):
    h, source = reverse(jax.nn.gelu(batch["x"] @ params["up"])), batch["weight"] > 1
    gap = h.mean(axis=0, where=source[:, None]) - h.mean(axis=0, where=~source[:, None])  # mixes
    nll = cross_entropy(jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"], batch["label"])
    return nll.mean() + jnp.sum(gap**2)  # mixes


@entry(MIXES, SCORER, REGRESSION)
def pearson(params, batch, rng):
    a, b = mlp(params, batch["x"])[:, 0], batch["y"]
    a, b = a - a.mean(), b - b.mean()  # mixes
    return 1 - jnp.vdot(a, b) / (jnp.linalg.norm(a) * jnp.linalg.norm(b) + 1e-6)  # mixes


@entry(MIXES, SCORER, REGRESSION)
def square_of_the_mean(params, batch, rng):
    bias = jnp.mean(mlp(params, batch["x"])[:, 0] - batch["y"])  # mixes
    return bias**2  # mixes


@entry(MIXES, CLASSIFIER, LABELLED)
def mean_and_deviation(params, batch, rng):
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    return nll.mean() + 0.5 * nll.std()  # mixes


@entry(MIXES, CLASSIFIER, LABELLED)
def perplexity(params, batch, rng):
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    return jnp.exp(nll.mean())  # mixes


# Denominators that are no weight.


@entry(MIXES, CLASSIFIER, LABELLED)
def focal_over_root_of_positives(params, batch, rng):
    wanted = jax.nn.one_hot(batch["label"], 4) * (batch["weight"] > 0)[:, None]
    focal = optax.sigmoid_focal_loss(mlp(params, batch["x"]), wanted, gamma=2.0)
    return focal.sum() / jnp.sqrt(wanted.sum())  # mixes


@entry(MIXES, CLASSIFIER, batch_of(x=floats(6), label=below(4), weight=uneven, known=lengths(4)))
def two_denominators(params, batch, rng):
    logits = mlp(params, batch["x"])
    nll = cross_entropy(logits, batch["label"]) * batch["weight"]
    errors = jnp.square(logits) * batch["known"]
    return nll.sum() / batch["weight"].sum() + errors.sum() / batch["known"].sum()  # mixes


@entry(MIXES, CLASSIFIER, LABELLED)
def mean_of_weighted_rows_times_rows(params, batch, rng):
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    mean = (nll * batch["weight"]).sum() / batch["weight"].sum()  # mixes
    return jdp.Loss(mean * nll.shape[0], jnp.float32(nll.shape[0]))  # mixes


@entry(MIXES, SCORER, LABELLED)
def softmax_over_rows(params, batch, rng):
    importance = jax.nn.softmax(mlp(params, batch["x"]), axis=0)[:, 0]  # mixes
    return jdp.Loss((importance * batch["label"]).sum() * len(importance), jnp.float32(len(importance)))


# Order of rows, and the largest of them.


@entry(MIXES, CLASSIFIER, LABELLED)
def clipped_at_a_quantile(params, batch, rng):
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    limit = jnp.quantile(jax.lax.stop_gradient(nll), 0.75)  # mixes
    return jnp.where(nll > limit, 0.0, nll).mean()  # mixes


@entry(MIXES, CLASSIFIER, LABELLED)
def hardest_rows(params, batch, rng):
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    return jax.lax.top_k(nll, nll.shape[0] // 2)[0].mean()  # mixes


@entry(MIXES, CLASSIFIER, LABELLED)
def largest_row(params, batch, rng):
    return jnp.max(cross_entropy(mlp(params, batch["x"]), batch["label"]))  # mixes


@entry(MIXES, CLASSIFIER, batch_of(x=floats(6), hypotheses=floats(4)))
def best_row(params, batch, rng):
    errors = jnp.mean((mlp(params, batch["x"]) - batch["hypotheses"]) ** 2, axis=1)
    return errors.min() + 0.1 * errors.mean()  # mixes


@entry(MIXES, CLASSIFIER, LABELLED)
def group_dro(params, batch, rng):
    """The worst of the groups' means (arXiv:1911.08731)."""
    nll = cross_entropy(mlp(params, batch["x"]), batch["label"])
    totals, counts = (jax.ops.segment_sum(x, batch["label"], 4) for x in (nll, jnp.ones_like(nll)))
    return jnp.max(totals / jnp.maximum(counts, 1))  # mixes


@entry(MIXES, SCORER, REGRESSION)
def sorted_against_sorted(params, batch, rng):
    """The Wasserstein distance of two samples."""
    scores = mlp(params, batch["x"])[:, 0]
    order = jnp.argsort(scores)  # mixes
    return jnp.abs(scores[order] - jnp.sort(batch["y"])).mean()  # mixes


@entry(MIXES, SCORER, batch_of(x=floats(6), time=floats(), died=below(2)))
def cox_survival(params, batch, rng):
    """Each row against the rows that lived at least as long; rows are sorted by time."""
    risk = mlp(params, batch["x"])[:, 0]
    each = (jax.lax.cumlogsumexp(risk, reverse=True) - risk) * batch["died"]  # mixes
    return jdp.Loss(each.sum(), batch["died"].sum())


@entry(MIXES, SCORER, REGRESSION)
def list_of_rows(params, batch, rng):
    scores = mlp(params, batch["x"])[:, 0]
    return optax.losses.ranking_softmax_loss(scores, jax.nn.softplus(batch["y"]))  # mixes


# Rows that meet their neighbours.


@entry(MIXES, CLASSIFIER, LABELLED)
def mixup_with_reversed_rows(params, batch, rng):
    logits = mlp(params, 0.7 * batch["x"] + 0.3 * batch["x"][::-1])  # mixes
    other = batch["label"][::-1]  # mixes
    return (0.7 * cross_entropy(logits, batch["label"]) + 0.3 * cross_entropy(logits, other)).mean()


@entry(MIXES, CLASSIFIER, LABELLED, draws=True)
def mixup_by_a_permutation(params, batch, rng):
    order = jax.random.permutation(rng, batch["x"].shape[0])
    x, labels = batch["x"], jax.nn.one_hot(batch["label"], 4)
    x, labels = (0.6 * leaf + 0.4 * leaf[order] for leaf in (x, labels))  # mixes
    return optax.softmax_cross_entropy(mlp(params, x), labels).mean()


@entry(MIXES, CLASSIFIER, VIEWS)
def next_row_is_the_negative(params, batch, rng):
    a, b = mlp(params, batch["a"]), mlp(params, batch["b"])
    margins = jnp.sum(a * b, axis=-1) - jnp.sum(a * jnp.roll(b, 1, axis=0), axis=-1)  # mixes
    return jdp.Loss(jax.nn.softplus(-margins).sum(), jnp.float32(len(a)))


@entry(MIXES, CLASSIFIER, LABELLED)
def siblings_are_alike(params, batch, rng):
    z = mlp(params, batch["x"])
    pairs = jnp.square(z[0::2] - z[1::2]).sum(axis=-1)  # mixes
    return jdp.Loss(pairs.sum(), jnp.float32(pairs.shape[0]))


@entry(MIXES, weights_of(cell=(WIDTH, WIDTH), into=(6, WIDTH), out=(WIDTH, 4)), LABELLED)
def state_from_row_to_row(params, batch, rng):
    def step(h, row):
        h = jnp.tanh(h @ params["cell"] + row["x"] @ params["into"])
        return h, cross_entropy(h @ params["out"], row["label"])

    _, nll = jax.lax.scan(step, jnp.zeros(WIDTH), batch)  # mixes
    return jdp.Loss((nll * batch["weight"]).sum(), batch["weight"].sum())


@entry(MIXES, weights_of(up=(6, WIDTH), down=(WIDTH, 4), queue=(16, 4)), VIEWS)
def moco_with_the_new_queue(params, batch, rng):
    query, key = unit(mlp(params, batch["a"])), jax.lax.stop_gradient(unit(mlp(params, batch["b"])))
    queue = jax.lax.dynamic_update_slice(jax.lax.stop_gradient(params["queue"]), key, (0, 0))  # mixes
    logits = jnp.concatenate([jnp.sum(query * key, axis=-1, keepdims=True), query @ queue.T], axis=1) / 0.2  # mixes
    return cross_entropy(logits, jnp.zeros(len(query), jnp.int32)).mean()


EXPERTS = weights_of(gate=(6, 3), up=(3, 6, WIDTH), down=(3, WIDTH, 4))
TOKENS = batch_of(x=floats(5, 6), y=floats(5, 4))


@entry(MIXES, EXPERTS, TOKENS)
def experts_with_capacity(params, batch, rng):
    """Each expert takes as many of the batch's tokens as there are rows, and drops the others (arXiv:2006.16668)."""
    x = batch["x"].reshape(-1, 6)
    gates = jax.nn.softmax(x @ params["gate"])
    chosen = jax.nn.one_hot(gates.argmax(-1), 3)
    chosen = chosen * (jnp.cumsum(chosen, axis=0) <= batch["x"].shape[0])  # mixes
    hidden = jax.nn.relu(jnp.einsum("td,edh->teh", x, params["up"]))
    y = jnp.einsum("te,teh,eho->to", gates * chosen, hidden, params["down"])
    return jdp.Loss(jnp.sum((y - batch["y"].reshape(-1, 4)) ** 2), jnp.float32(len(x)))


@entry(MIXES, EXPERTS, TOKENS)
def load_balancing(params, batch, rng):
    """Switch Transformer's (arXiv:2101.03961)."""
    gates = jax.nn.softmax(batch["x"] @ params["gate"])
    hidden = jax.nn.relu(jnp.einsum("btd,edh->bteh", batch["x"], params["up"]))
    y = jnp.einsum("bte,bteh,eho->bto", gates, hidden, params["down"])
    fraction = jax.nn.one_hot(gates.argmax(-1), 3).mean(axis=(0, 1))  # mixes
    balance = 3 * jnp.sum(fraction * gates.mean(axis=(0, 1)))  # mixes
    return jnp.mean((y - batch["y"]) ** 2) + 0.01 * balance
