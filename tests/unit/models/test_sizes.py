"""Models by name: the sizes that were published, what they hold, what training them costs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jdp.core.reading import count_flops
from jdp.models import SIZES, build, parameter_count


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (dataclasses.replace(SIZES["gpt2-124m"], vocab_size=50257), 124_439_808),  # openai/gpt-2
        (SIZES["gpt2-124m"], 124_439_808 + 47 * 768),
        (SIZES["llama-8b"], 8_030_261_248),  # meta-llama/Meta-Llama-3-8B
        (SIZES["gpt-1b"], 1_076_168_704),
        (SIZES["mlp"], 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10),
        (SIZES["resnet-digits"], 174_970),
        (SIZES["resnet-18"], 11_689_512),  # torchvision's, as the next
        (SIZES["resnet-50"], 25_557_032),
        (SIZES["vit-digits"], 202_058),
        (SIZES["vit-s16"], 22_050_664),  # timm's vit_small_patch16_224
        (SIZES["vit-b16"], 86_567_656),  # torchvision's and timm's
    ],
)
def test_named_models_have_the_published_sizes(config, count):
    assert parameter_count(config) == count


@pytest.mark.parametrize(("name", "published"), [("resnet-18", 1.81), ("resnet-50", 4.09), ("vit-b16", 17.56)])
def test_flops_of_the_forward_pass_are_torchvisions(name, published):
    """torchvision's model pages give 10^9 multiply-adds as GFLOPS."""
    config = SIZES[name]
    model = jax.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
    model.eval()
    structure, state = nnx.split(model)
    image = jax.ShapeDtypeStruct((1, config.image_size, config.image_size, config.channels), jnp.float32)
    forward = jax.make_jaxpr(lambda state, x: nnx.merge(structure, state)(x))(state, image)
    assert count_flops(forward.jaxpr) / 2e9 == pytest.approx(published, abs=0.005)
