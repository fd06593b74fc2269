"""Models by name, and what one of them weighs and costs.

Counts are read off the abstract model (shapes without arrays), so there is no formula beside the model to go stale.
"""

import functools
import math
from typing import overload

import jax
from flax import nnx

from jdp.models.gpt import GPT, GPTConfig
from jdp.models.mlp import MLP, MLPConfig

# GPT-2 has 50257 = 29 * 1733 tokens. Padded to 50304 = 2**7 * 3 * 131, the table's largest dim divides over up to 128
# devices and fills tensor-core tiles; the 47 rows more are never a target, and their logits learn to be low.
PADDED_GPT2_VOCABULARY = 50_304

SIZES: dict[str, GPTConfig | MLPConfig] = {
    # Bytes as tokens; every modern part in small. 0.8 M parameters: minutes on two CPU cores.
    "gpt-nano": GPTConfig(vocab_size=256, context=256, layers=4, width=128, heads=4, kv_heads=2, tied=True),
    # GPT-2 small (Radford et al. 2019; openai/gpt-2). With vocab_size=50257 it has OpenAI's 124,439,808 parameters.
    "gpt2-124m": GPTConfig(
        vocab_size=PADDED_GPT2_VOCABULARY,
        context=1024,
        layers=12,
        width=768,
        heads=12,
        positions="learned",
        activation="gelu",
        norm="layer",
        tied=True,
        bias=True,
    ),
    # The body of Llama 3.2 1B (meta-llama/Llama-3.2-1B, config.json) with GPT-2's vocabulary. 1.08 B parameters.
    "gpt-1b": GPTConfig(
        vocab_size=PADDED_GPT2_VOCABULARY,
        context=2048,
        layers=16,
        width=2048,
        heads=32,
        kv_heads=8,
        mlp_width=8192,
        tied=True,
        rope_theta=500_000.0,
        remat="full",
    ),
    # Llama 3 8B (arXiv:2407.21783, table 3). 8,030,261,248 parameters.
    "llama-8b": GPTConfig(
        vocab_size=128_256,
        context=8192,
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        mlp_width=14_336,
        rope_theta=500_000.0,
        remat="full",
    ),
    # 28 x 28 pixels to ten classes.
    "mlp": MLPConfig(features_in=784, hidden=(512, 512), features_out=10),
}


@overload
def build(config: GPTConfig, *, rngs: nnx.Rngs) -> GPT: ...
@overload
def build(config: MLPConfig, *, rngs: nnx.Rngs) -> MLP: ...
@overload
def build(config: GPTConfig | MLPConfig, *, rngs: nnx.Rngs) -> GPT | MLP: ...
def build(config: GPTConfig | MLPConfig, *, rngs: nnx.Rngs) -> GPT | MLP:
    """The model that a configuration describes."""
    return GPT(config, rngs=rngs) if isinstance(config, GPTConfig) else MLP(config, rngs=rngs)


def parameter_count(config: GPTConfig | MLPConfig) -> int:
    """Number of parameters. A tied table counts once. Takes no memory."""
    return sum(_leaf_sizes(config).values())


def flops_per_token(config: GPTConfig | MLPConfig, length: int) -> float:
    """Floating point operations to train on one token (for an MLP: one example): 6 N + 12 L H Q T.

    PaLM (arXiv:2204.02311), appendix B: two operations per parameter in the forward pass and four in the backward pass,
    and for attention L layers, H heads of size Q, T tokens of context, the causal half not deducted. Rematerialisation
    is not counted: this is what the model needs, the numerator of MFU. N leaves out tables that are only looked up
    (positions, and the token table unless it also makes the logits): a lookup multiplies nothing.

    Args:
        length: tokens in a sequence; of no consequence to an MLP.
    """
    sizes = _leaf_sizes(config)
    if isinstance(config, MLPConfig):
        return 6.0 * sum(sizes.values())
    looked_up = {"embed/positions"} if config.tied else {"embed/positions", "embed/tokens"}
    multiplied = sum(size for path, size in sizes.items() if path not in looked_up)
    return 6.0 * multiplied + 12.0 * config.layers * config.width * length


@functools.cache
def _leaf_sizes(config: GPTConfig | MLPConfig) -> dict[str, int]:
    """Elements of every parameter by path, such as `layers/attention/query/kernel`."""
    model = jax.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): math.prod(leaf.shape) for path, leaf in flat}
