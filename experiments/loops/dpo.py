"""Direct preference optimization: a policy learns from pairs of answers, and stays near a frozen reference.

The one word: `jdp.value_and_grad` with two pytrees, of which it differentiates only the policy, and `accumulate=2`
microbatches. A pair is one example: both of its answers are in one row. `gradient.check` tries the loss on a few rows,
which is impossible inside the jitted step. Rafailov et al. 2023, arXiv:2305.18290, equation 7.

    python experiments/loops/dpo.py zero2
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from story import tell

import jdp

TOKENS, WIDTH, LENGTH, ROWS, BETA = 16, 8, 6, 32, 0.5


def init(rng):
    """Return a language model that reads one token: an embedding and a head."""
    embedding, head = jax.random.split(rng)
    return {
        "embedding": jax.random.normal(embedding, (TOKENS, WIDTH)),
        "head": jax.random.normal(head, (WIDTH, TOKENS)) / WIDTH**0.5,
    }


def log_likelihood(params, answers):
    """Return log p of each answer, float32 [rows], for tokens [rows, length]."""
    logits = params["embedding"][answers[:, :-1]] @ params["head"]
    return -optax.softmax_cross_entropy_with_integer_labels(logits, answers[:, 1:]).sum(-1)


def loss_fn(policy, reference, batch, rng):
    def gain(answers):
        return log_likelihood(policy, answers) - log_likelihood(reference, answers)

    margin = BETA * (gain(batch["chosen"]) - gain(batch["rejected"]))
    return jdp.Loss(jax.nn.softplus(-margin).sum(), jnp.float32(len(margin)), {"margin": margin.sum()})


def train(plan, steps=3):
    """Return the loss and the mean margin of each step, and the policy."""
    tx = optax.adam(3e-2)
    policy = reference = jdp.init(init, plan, rng=jax.random.key(0))
    policy = jax.tree.map(jnp.copy, policy)  # a step donates the policy, but not the reference
    opt_state = jdp.init(tx.init, plan, of=policy)
    gradient = jdp.value_and_grad(loss_fn, plan, accumulate=2)
    random = np.random.default_rng(0)
    batches = [
        {name: random.integers(0, TOKENS, (ROWS, LENGTH)) for name in ("chosen", "rejected")} for _ in range(steps)
    ]
    gradient.check(policy, reference, batches[0], jax.random.key(0))

    def step(policy, opt_state, reference, batch, rng):
        metrics, grads = gradient(policy, reference, batch, rng)
        updates, opt_state = tx.update(grads, opt_state, policy)
        return optax.apply_updates(policy, updates), opt_state, jnp.stack([metrics["loss"], metrics["margin"]])

    step, losses = jax.jit(step, donate_argnums=(0, 1)), []
    for i, batch in enumerate(batches):
        policy, opt_state, measured = step(policy, opt_state, reference, batch, jax.random.key(i))
        losses.append(measured)
    return losses, policy


if __name__ == "__main__":
    tell(train)
