"""A decoder-only transformer; GPT-2 and Llama differ in fields of its configuration.

Dtypes: the embedding table's dtype is the dtype of the activations and of the matrix products. Softmax, norms, rotary
angles and logits are float32, as is the sum of a token's gradients over its occurrences.

Initial values (Radford et al. 2019, section 2.3, and openai/gpt-2 `src/model.py`): normal with standard deviation 0.02,
`position_std` for learned positions. The two projections that write to the residual stream are divided by
sqrt(2 * layers), because there are 2 * layers such writes; its variance does not grow with depth.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jdp.core.lookup import look_up
from jdp.models.configs import GPTConfig, require
from jdp.models.losses import TO_LOGITS, linear_next_token_loss
from jdp.models.modules import Linear, plus_to_each, product
from jdp.models.transformer import LayerSpec, Segments, make_layers, run_layers

INIT_STD = 0.02


class GPT(nnx.Module):
    """Tokens to next-token logits. Holds parameters only: no random state, no cache.

    Args:
        config: shape and choices.
        rngs: the `params` stream is used.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> config = GPTConfig(vocab_size=16, context=8, layers=1, width=8, heads=2)
    >>> jax.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))(jnp.zeros((4, 8), int))).shape
    (4, 8, 16)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config, rngs=rngs)
        layer = LayerSpec(config, std=INIT_STD, residual_std=INIT_STD / math.sqrt(2 * config.layers))
        self.layers = make_layers(layer, rngs.params())
        self.final_norm = layer.make_norm()
        width, vocabulary = config.width, config.vocab_size
        self.head = None if config.tied else Linear(width, vocabulary, std=INIT_STD, bias=False, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, rng: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Return the logits of each next token: [batch, length, vocab_size] float32.

        Args:
            tokens: [batch, length] integers; length at most `context`.
            rng: typed key for dropout; None: no dropout.
            segments: [batch, length] integers, the document of each token of a packed row: constant inside a document,
                different in its neighbour; 0 for padding. Attention stays inside a document, and positions restart, so
                the logits equal those of the document alone. None: a row is one document.

        Raises:
            ValueError: tokens or segments of another rank or dtype, or longer than the context; "cudnn" attention
                that cuDNN does not support.
        """
        return product(TO_LOGITS[self.head is None], *self._features(tokens, rng, segments, self.head))

    def features(
        self, tokens: jax.Array, *, rng: jax.Array | None = None, segments: jax.Array | None = None
    ) -> jax.Array:
        """Return the last norm's output: [batch, length, width] in compute dtype.

        Args:
            tokens, rng, segments: as for a call of the model.

        Raises:
            ValueError: as for a call of the model.
        """
        return self._features(tokens, rng, segments, None)[0]

    def _features(
        self, tokens: jax.Array, rng: jax.Array | None, segments: jax.Array | None, head: Linear | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the features, and the matrix that maps them to logits; `head` is given if nothing else uses it."""
        given, most = f"{tokens.dtype}{list(tokens.shape)}", self.config.context
        fits = tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer)
        require(fits, "tokens are integers [batch, length]", given, "Pass token numbers, with a batch dim")
        fix = "Shorten it, or raise context"
        require(tokens.shape[1] <= most, f"a sequence has at most context({most}) tokens", given, fix)
        packed = None
        if segments is not None:
            fits = segments.shape == tokens.shape and jnp.issubdtype(segments.dtype, jnp.integer)
            rule, given = f"segments are integers {list(tokens.shape)}, as the tokens", f"{segments.dtype}"
            require(fits, rule, f"{given}{list(segments.shape)}", "Number each row's documents")
            packed = Segments.of(segments)
        x = self.embed(tokens, None if packed is None else packed.position)
        kernel = None if head is None else head.kernel[...]
        x, kernel = run_layers(self.layers, x, self.config, rng, packed, kernel)
        return self.final_norm(x), self.embed.tokens[...] if kernel is None else kernel

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        *,
        rng: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return `next_token_loss` of the logits; large logits are computed in chunks.

        Args:
            tokens, rng, segments: as for a call of the model.
            targets: [batch, length] integers; arbitrary at weight zero.
            weights: [batch, length]; 0 for padding.

        Returns:
            The weighted sum of cross-entropies in nats, and the sum of the weights: two float32 scalars.

        Raises:
            ValueError: as for a call of the model.
        """
        features, head = self._features(tokens, rng, segments, self.head)
        return linear_next_token_loss(features, head, targets, weights, tied=self.head is None)

    def logits(self, x: jax.Array) -> jax.Array:
        """Return logits [..., vocab_size] float32: products in x's dtype, summed in float32.

        Args:
            x: [..., width] features, as `features` returns them.
        """
        head = self.embed.tokens if self.head is None else self.head.kernel
        return product(TO_LOGITS[self.head is None], x, head[...])


class Embedding(nnx.Module):
    """Token vectors `tokens` [vocab_size, width] and, when learned, position vectors `positions` [context, width]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        def table(rows: int, std: float) -> nnx.Param[jax.Array]:
            return nnx.Param(std * jax.random.normal(rngs.params(), (rows, config.width)))

        self.tied, self.tokens = config.tied, table(config.vocab_size, INIT_STD)
        self.positions = table(config.context, config.position_std) if config.positions == "learned" else None

    def __call__(self, tokens: jax.Array, position: jax.Array | None = None) -> jax.Array:
        """Embed [batch, length] integers as [batch, length, width] in the table's dtype; None: positions 0, 1, ..."""
        table = self.tokens[...]
        # In float32, so that gradients are summed in float32, as in `look_up`.
        x = table.astype(jnp.float32)[tokens] if self.tied else look_up(table, tokens)
        if self.positions is not None:
            first = tokens.shape[1] if position is None else None
            rows = self.positions[:first].astype(jnp.float32)
            x = plus_to_each(x, rows) if position is None else x + rows[position]
        return x.astype(table.dtype)
