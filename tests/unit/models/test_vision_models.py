"""ResNet and ViT against plain NumPy, the published numbers, and themselves on other meshes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdp
from jdp.models import ResNet, ResNetConfig, ViT, ViTConfig, build, classification_loss
from jdp.models.images import BatchNorm

BASIC = ResNetConfig(classes=5, blocks=(1, 2), width=4, image_size=8, channels=2, stem="small", zero_init=False)
BOTTLENECK = dataclasses.replace(BASIC, block="bottleneck", stem="imagenet", image_size=13)
VIT = ViTConfig(classes=5, layers=2, width=8, heads=2, patch=4, image_size=8, channels=2)
POOLED = dataclasses.replace(VIT, pool="mean", mlp_width=12, dropout=0.3)
WEIGHTS = jnp.array([1.0, 0, 0.5, 1, 0, 2])

both = pytest.mark.parametrize("config", [BASIC, BOTTLENECK], ids=["basic", "bottleneck"])
forward = jax.jit(lambda model, images, rng=None: model(images, rng=rng))


@functools.cache
def make(config):
    """A model off its start, filled in by NumPy: kernels that keep the scale, vectors off zero and one."""
    draw = np.random.default_rng(0).normal

    def fill(path, leaf):
        name = str(path[-2]).removeprefix(".")
        if name in ("bias", "mean", "scale", "var"):
            return jnp.float32(draw(size=leaf.shape) / 8 + (name in ("scale", "var")))
        inputs = math.prod(leaf.shape[:-1]) if leaf.ndim == 4 else leaf.shape[-2]
        return jnp.float32(draw(size=leaf.shape) / math.sqrt(inputs))

    return jax.tree.map_with_path(fill, jax.eval_shape(lambda: build(config, rngs=nnx.Rngs(0))))


def pictures(config, rows=6):
    return jax.random.normal(jax.random.key(7), (rows, config.image_size, config.image_size, config.channels))


def values(model):
    return {"/".join(map(str, path)): np.float64(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def windows(x, size, stride, fill=0.0):
    """The windows of padded images: [batch, rows, columns, channels, size, size]."""
    pad = size // 2
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]


class Plain:
    """A ResNet's logits in float64, and what becomes of its statistics."""

    def __init__(self, model, counted=None):
        self.config, self.p, self.counted, self.after = model.config, values(model), counted, {}

    def conv(self, x, name, stride):
        kernel = self.p[f"{name}/kernel"]
        return np.einsum("bhwcij,ijco->bhwo", windows(x, len(kernel), stride), kernel)

    def norm(self, x, name):
        mean, variance = self.p[f"{name}/mean"], self.p[f"{name}/var"]
        if self.counted is not None:
            rows = x[self.counted]
            old, momentum = (mean, variance), self.config.norm_momentum
            mean, variance = rows.mean((0, 1, 2)), rows.var((0, 1, 2))
            for kind, before, now in zip(("mean", "var"), old, (mean, variance), strict=True):
                self.after[f"{name}/{kind}"] = momentum * before + (1 - momentum) * now
        x = (x - mean) / np.sqrt(variance + self.config.norm_eps)
        return x * self.p[f"{name}/scale"] + self.p[f"{name}/bias"]

    def stem(self, x):
        is_small = self.config.stem == "small"
        x = np.maximum(self.norm(self.conv(x, "stem/conv", 1 if is_small else 2), "stem/norm"), 0)
        return x if is_small else windows(x, 3, 2, fill=-np.inf).max((-1, -2))

    def block(self, x, name, stride):
        strides = (1, stride, 1) if self.config.block == "bottleneck" else (stride, 1)
        y = x
        for i, step in enumerate(strides):
            y = self.norm(self.conv(y, f"{name}/conv{i + 1}", step), f"{name}/norm{i + 1}")
            y = np.maximum(y, 0) if i + 1 < len(strides) else y
        if f"{name}/shortcut/conv/kernel" in self.p:
            x = self.norm(self.conv(x, f"{name}/shortcut/conv", stride), f"{name}/shortcut/norm")
        return np.maximum(x + y, 0)

    def logits(self, images):
        x = self.stem(np.float64(images))
        for stage, blocks in enumerate(self.config.blocks):
            for i in range(blocks):
                x = self.block(x, f"stages/{stage}/blocks/{i}", 2 if stage and not i else 1)
        return x.mean((1, 2)) @ self.p["head/kernel"] + self.p["head/bias"]


@functools.partial(jax.jit, static_argnums=2)
def normalised(x, mask, axis_name=None):
    norm = BatchNorm(4, axis_name=axis_name, rngs=nnx.Rngs(0))
    y = norm(x, mask=mask[:, None, None, None])
    return y, norm.mean[...], norm.var[...]


def test_statistics_cover_all_weighted_rows():
    x = np.random.default_rng(3).normal(1, 2, (16, 3, 3, 4)).astype(np.float32)
    mask = np.arange(16) < 9  # four devices with both rows, one with one, three with none
    expected = normalised(x, mask)
    local = functools.partial(normalised, axis_name=("replica", "data"))
    mesh, spec = jdp.make_mesh(replica=2, data=4), jax.P(("replica", "data"))
    shards = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, jax.P(), jax.P())))(x, mask)
    for got, want in zip(shards, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # sums in another order
    np.testing.assert_allclose(expected[1], 0.01 * x[:9].mean((0, 1, 2)), rtol=1e-4, atol=1e-6)


def test_padding_leaves_the_averages_alone():
    y, mean, variance = map(np.asarray, normalised(np.ones((2, 3, 3, 4), np.float32), np.zeros(2, bool)))
    assert np.isfinite(y).all() and np.all(mean == 0) and np.all(variance == 1)


@both
@pytest.mark.default_ids("basic")
def test_a_resnet_is_its_formula(config):
    plain = Plain(make(config), counted=np.asarray(WEIGHTS != 0))
    expected = plain.logits(pictures(config))
    call = jax.jit(lambda model: (model(pictures(config), weights=WEIGHTS), nnx.state(model, nnx.BatchStat)))
    logits, statistics = call(make(config))
    assert logits.dtype == jnp.float32
    # float32 against float64 through nine norms, each of which may divide by a small standard deviation.
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    found = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(statistics)}
    assert found.keys() == plain.after.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, plain.after[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_evaluation_uses_a_resnets_averages():
    model = nnx.clone(make(BASIC))
    model.eval()
    images = pictures(BASIC)
    before = values(model)
    logits, kept = jax.jit(lambda model: (model(images, weights=WEIGHTS), nnx.state(model)))(model)
    np.testing.assert_allclose(logits, Plain(model).logits(images), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(forward(model, images[:1]), logits[:1], rtol=1e-4, atol=1e-5)  # other rows have no say
    after = values(kept)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_resnet_starts_as_he_and_goyal_say():
    config = dataclasses.replace(BOTTLENECK, width=64, zero_init=True)
    model = jax.jit(lambda: ResNet(config, rngs=nnx.Rngs(0)))()
    for path, leaf in values(model).items():
        if path.endswith("kernel"):
            std = 0.01 if path.startswith("head") else math.sqrt(2 / (math.prod(leaf.shape[:2]) * leaf.shape[-1]))
            assert leaf.std() == pytest.approx(std, rel=0.1), path
        elif path.endswith("scale"):
            assert np.all(leaf == (0 if path.endswith("norm3/scale") else 1)), path


def plain_vit(model, image):
    """A ViT's logits of one image in float64."""
    config, p = model.config, values(model)

    def norm(x, name, i=...):
        y = x - x.mean(-1, keepdims=True)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + config.norm_eps)
        return y * p[f"{name}/scale"][i] + p[f"{name}/bias"][i]

    def linear(x, name, i):
        return x @ p[f"layers/{name}/kernel"][i] + p[f"layers/{name}/bias"][i]

    size, side = config.patch, config.image_size
    cut = [image[r : r + size, c : c + size].ravel() for r in range(0, side, size) for c in range(0, side, size)]
    x = np.float64(cut) @ p["embed/patches/kernel"] + p["embed/patches/bias"]
    x = np.concatenate([p["embed/token"], x]) if config.pool == "token" else x
    x = x + p["embed/positions"]
    for i in range(config.layers):
        y = norm(x, "layers/attention_norm", i)
        query, key, value = (linear(y, f"attention/{name}", i) for name in ("query", "key", "value"))
        heads = []
        for q, k, v in zip(*(np.split(each, config.heads, axis=-1) for each in (query, key, value)), strict=True):
            weights = np.exp(q @ k.T / math.sqrt(q.shape[-1]))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + linear(np.concatenate(heads, -1), "attention/output", i)
        up = linear(norm(x, "layers/mlp_norm", i), "mlp/up", i)
        x = x + linear(up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3))) / 2, "mlp/down", i)
    x = norm(x, "final_norm")
    return (x[0] if config.pool == "token" else x.mean(0)) @ p["head/kernel"] + p["head/bias"]


@pytest.mark.parametrize("config", [VIT, POOLED], ids=["token", "mean"])
@pytest.mark.default_ids("mean")
def test_a_vit_is_its_formula(config):
    model, images = make(config), pictures(config, 2)
    logits = forward(model, images)
    assert logits.dtype == jnp.float32
    expected = np.stack([plain_vit(model, np.asarray(image)) for image in images])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_vit_starts_as_its_authors_code():
    config = dataclasses.replace(VIT, width=64, mlp_width=128)
    model = jax.jit(lambda: ViT(config, rngs=nnx.Rngs(0)))()
    for path, leaf in values(model).items():
        std = math.sqrt(2 / sum(leaf.shape[-2:])) if path.endswith("kernel") else 0.0
        special = {"embed/patches/kernel": 1 / math.sqrt(32), "embed/positions": 0.02, "head/kernel": 0.0}
        assert leaf.std() == pytest.approx(special.get(path, std), rel=0.1), path


def test_the_classification_loss_is_weighted():
    logits = jnp.array([[2.0, 0, 0], [0, 1, 0], [0, 0, 3], [5, 0, 0]])
    labels, weights = jnp.array([0, 2, 2, -1]), jnp.array([1.0, 2.0, 0.5, 0.0])
    total, weight, correct = jax.jit(classification_loss)(logits, labels, weights)
    nats = [math.log(math.e**2 + 2) - 2, math.log(math.e + 2), math.log(math.e**3 + 2) - 3]
    assert (total.dtype, weight.dtype, correct.dtype) == (jnp.float32,) * 3
    assert float(total) == pytest.approx(nats[0] + 2 * nats[1] + 0.5 * nats[2], rel=1e-5)
    assert (float(weight), float(correct)) == (3.5, 1.5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: dataclasses.replace(BASIC, blocks=()), r"one stage at least; given blocks = \(\)\. Write \(2, 2\)"),
        (lambda: dataclasses.replace(BASIC, blocks=[1]), r"blocks is a tuple of positive integers; given \[1\]"),
        (lambda: dataclasses.replace(BASIC, norm_momentum=1.0), r"norm_momentum is a rate in \[0, 1\); given 1\.0"),
        (lambda: dataclasses.replace(VIT, patch=3), r"patch must divide .*image_size\(8\) % patch\(3\) = 2\. .* 9"),
        (lambda: make(BASIC)(jnp.ones((2, 8, 8, 2), "uint8")), r"channels\(2\)\] floats; given uint8\[2, 8, 8, 2\]"),
        (lambda: make(BASIC)(jnp.ones((2, 8, 8, 2)), weights=jnp.ones(3)), r"weights are \[batch\]; given \[3\]"),
        (lambda: make(VIT)(jnp.ones((2, 12, 8, 2))), r"image_size\(8\) pixels .*; given float32\[2, 12, 8, 2\]"),
    ],
)
def test_broken_rules_are_refused_with_the_fix(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
