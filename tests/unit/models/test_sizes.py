"""Models by name: the sizes that were published, what they hold, what training them costs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from counted_flops import flops_per_example
from flax import nnx

from jdp.core.reading import count_flops
from jdp.models import SIZES, ResNetConfig, ViTConfig, build, parameter_count

BOTTLENECK = ResNetConfig(classes=5, blocks=(1, 2), block="bottleneck", width=4, image_size=13, channels=2)
VIT = ViTConfig(classes=5, layers=2, width=8, heads=2, patch=4, image_size=8, channels=2)


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


@pytest.mark.parametrize("name", SIZES)
def test_named_models_are_nothing_but_parameters(name):
    model = jax.eval_shape(lambda: build(SIZES[name], rngs=nnx.Rngs(0)))
    variables = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    kinds = {nnx.Param, nnx.BatchStat} if name.startswith("resnet") else {nnx.Param}
    assert {type(variable) for variable in variables} == kinds
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.float32)}
    kernels = [leaf for path, leaf in nnx.to_flat_state(nnx.state(model)) if path[-1] == "kernel"]
    assert all(2 <= leaf.ndim <= (4 if name.startswith("resnet") else 3) for leaf in kernels)


def abstract_forward(config):
    """The evaluation of one image on abstract values, and these."""
    model = jax.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
    model.eval()
    size = config.image_size
    return lambda model, x: model(x), model, jax.ShapeDtypeStruct((1, size, size, config.channels), jnp.float32)


@pytest.mark.parametrize("config", [SIZES["resnet-18"], BOTTLENECK, dataclasses.replace(VIT, scan=False)])
def test_flops_are_three_times_the_forward_pass(config):
    f, model, image = abstract_forward(config)
    structure, state = nnx.split(model)
    traced = jax.jit(lambda state, x: f(nnx.merge(structure, state), x)).trace(state, image)
    assert flops_per_example(config) == 3 * count_flops(traced.jaxpr.jaxpr)
    if config == SIZES["resnet-18"]:
        # XLA leaves out products with padding: of a 3 x 3 kernel on 7 x 7 pixels 18 %, of the whole network 7 %.
        counted = traced.lower().cost_analysis()["flops"]
        assert 0.92 < counted / (flops_per_example(config) / 3) < 1


@pytest.mark.parametrize(("name", "published"), [("resnet-18", 1.81), ("resnet-50", 4.09), ("vit-b16", 17.56)])
def test_flops_of_the_forward_pass_are_torchvisions(name, published):
    """torchvision's model pages give 10^9 multiply-adds as GFLOPS."""
    assert flops_per_example(SIZES[name]) / 6e9 == pytest.approx(published, abs=0.005)
