"""PPO: a policy plays many games at once, then learns from them in several epochs of minibatches.

The one word: `jdp.value_and_grad`, in a loop over epochs and minibatches inside one jitted function. The rollout is
plain JAX, for which XLA gathers the policy's weights. A minibatch is chosen from the rollout's rows by a permutation of
all rows; the ratios are returned by row (`has_aux`). Schulman et al. 2017, arXiv:1707.06347, equation 7; the critic is
a second head.

    python experiments/loops/ppo.py zero1
"""

import jax
import jax.numpy as jnp
import optax
from story import tell

import jdp

GAMES, LENGTH, EPOCHS, MINIBATCHES, WIDTH, CLIP, DISCOUNT = 16, 4, 2, 2, 16, 0.2, 0.9


def init(rng):
    """Return a policy for the plane: position -> mean of the next step, and the position's value."""
    hidden, heads = jax.random.split(rng)
    return {"hidden": jax.random.normal(hidden, (2, WIDTH)), "heads": 0.1 * jax.random.normal(heads, (WIDTH, 3))}


def act(policy, position):
    """Return the mean of the next step, float32 [games, 2], and the value, [games]."""
    out = jnp.tanh(position @ policy["hidden"]) @ policy["heads"]
    return out[:, :2], out[:, 2]


def log_probability(mean, move):
    return -0.5 * jnp.square(move - mean).sum(-1)


def rollout(policy, rng):
    """Play from random positions, with a reward for steps that end near 0. Return rows, [games × length, ...]."""
    start, moves = jax.random.split(rng)

    def play(position, key):
        mean, value = act(policy, position)
        move = mean + jax.random.normal(key, mean.shape)
        reward = -jnp.square(position + move).sum(-1)
        row = {"position": position, "move": move, "before": log_probability(mean, move), "value": value}
        return jnp.clip(position + move, -2, 2), (row, reward)

    keys = jax.random.split(moves, LENGTH)
    _, (rows, rewards) = jax.lax.scan(play, jax.random.normal(start, (GAMES, 2)), keys)
    discounted = lambda later, reward: (reward + DISCOUNT * later,) * 2  # noqa: E731
    _, rows["return"] = jax.lax.scan(discounted, jnp.zeros(GAMES), rewards, reverse=True)
    advantage = rows["return"] - rows.pop("value")
    rows["advantage"] = (advantage - advantage.mean()) / advantage.std()  # over all games, before they are split
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(GAMES * LENGTH, *x.shape[2:]), rows), rewards.mean()


def loss_fn(policy, batch, rng):
    mean, value = act(policy, batch["position"])
    ratio = jnp.exp(log_probability(mean, batch["move"]) - batch["before"])
    gain = jnp.minimum(ratio * batch["advantage"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * batch["advantage"])
    return jdp.Loss((0.1 * jnp.square(value - batch["return"]) - gain).sum(), jnp.float32(len(gain))), ratio


def train(plan, steps=2):
    """Return the mean reward, the last loss and the share of clipped ratios of each step, and the policy."""
    tx = optax.adam(1e-2)
    policy = jdp.init(init, plan, rng=jax.random.key(0))
    opt_state = jdp.init(tx.init, plan, of=policy)
    gradient = jdp.value_and_grad(loss_fn, plan, has_aux=True)

    @jax.jit
    def step(policy, opt_state, rng):
        playing, shuffling = jax.random.split(rng)
        rows, reward = rollout(policy, playing)
        keys = jax.random.split(shuffling, EPOCHS)
        order = jax.vmap(lambda key: jax.random.permutation(key, GAMES * LENGTH))(keys)

        def update(carry, chosen):
            (metrics, ratio), grads = gradient(carry[0], jax.tree.map(lambda x: x[chosen], rows), rng)
            updates, opt_state = tx.update(grads, carry[1], carry[0])
            clipped = (jnp.abs(ratio - 1) > CLIP).mean()
            return (optax.apply_updates(carry[0], updates), opt_state), jnp.stack([metrics["loss"], clipped])

        chosen = order.reshape(EPOCHS * MINIBATCHES, -1)
        (policy, opt_state), last = jax.lax.scan(update, (policy, opt_state), chosen)
        return policy, opt_state, jnp.stack([reward, *last[-1]])

    measured = []
    for i in range(steps):
        policy, opt_state, values = step(policy, opt_state, jax.random.key(i))
        measured.append(values)
    return measured, policy


if __name__ == "__main__":
    tell(train)
