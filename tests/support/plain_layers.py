"""Two small models: stacked layers, for tests in which the model does not matter, and a layer that keeps a variable.

The layers' loss is the next token's. Embeddings are tied, and some parameters are too small to shard, as in a GPT; its
step is a third of a GPT's to compile.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jdp
from jdp.models import next_token_loss


def init_layers(rng, layers=5, width=32, hidden=64, vocabulary=64):
    """Tied embeddings; stacked layers of two matrices and a bias, which is too small to shard, as the scale is."""
    keys = jax.random.split(rng, 3)
    up, down = (0.2 * jax.random.normal(key, (layers, width, hidden)) for key in keys[:2])
    embed = 0.5 * jax.random.normal(keys[2], (vocabulary, width))
    stacked = {"up": up, "down": down.mT, "bias": jnp.zeros(layers)}
    return {"embed": embed, "layers": stacked, "scale": jnp.ones(width)}


def layers_loss(params, batch, rng, remat=None, dropout=0.0):
    """The next token's; dropout draws for every row, in every layer."""
    keys = jax.random.split(rng, len(params["layers"]["bias"]))

    def layer(each, x):
        weights, key = each
        out = jax.nn.silu(x @ weights["up"]) @ weights["down"] + weights["bias"]
        return x + (jax.random.bernoulli(key, 1 - dropout, out.shape) * out if dropout else out)

    x = jdp.scan_layers(layer, (params["layers"], keys), params["embed"][batch["tokens"]], remat=remat)
    return jdp.Loss(*next_token_loss((x * params["scale"]) @ params["embed"].T, batch["targets"], batch["weights"]))


def tokens_of(rows, length=8, seed=0):
    """A batch for `layers_loss`: of 64 tokens."""
    tokens = np.random.default_rng(seed).integers(0, 64, (2, rows, length), dtype=np.int32)
    return {"tokens": tokens[0], "targets": tokens[1], "weights": np.ones((rows, length), np.float32)}


class Keeping(nnx.Module):
    """A layer, and a variable, `seen`, that each call sets to `change` of its value and of the rows."""

    def __init__(self, rngs, width, first, change):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.seen, self.change = nnx.Variable(first), change

    def __call__(self, x):
        self.seen.set_value(jax.lax.stop_gradient(self.change(self.seen.get_value(), x)))
        return self.linear(x)


def keeping(width, first, change):
    """The `init` of such a model."""
    return lambda rng: Keeping(nnx.Rngs(rng), width, first, change)
