"""`gpt2_124m` is nanoGPT's `config/train_gpt2.py`: the model, its start, a step and the rate, beside nanoGPT by hand.

nanoGPT (karpathy/nanoGPT, commit 3adf61e) is written here from `model.py` and `train.py`: layers one by one, AdamW and
clipping as PyTorch has them.
"""

import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.core.sharding.mesh import make_mesh
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.experiment.optimizer import decay_mask
from jdp.models import parameter_count

RECIPE = Path(__file__).parents[2] / "experiments/gpt2_124m.toml"
ROWS, LENGTH, WORDS, HEADS = 8, 16, 64, 4
TOY = {"model.layers": 2, "model.width": 32, "model.heads": HEADS, "model.context": LENGTH, "model.vocab_size": WORDS}
TOY |= {"data.length": LENGTH, "data.heldout_fraction": 0.2, "train.batch_size": ROWS, "train.accumulate": 2}
TOY |= {"precision": "fp32", "sample": "none"}
"""Sizes, and a type in which the numbers can be compared."""


def get_lr(step):
    """nanoGPT's `get_lr`."""
    if step < 2000:
        return 6e-4 * (step + 1) / 2001
    if step > 600_000:
        return 6e-5
    ratio = (step - 2000) / (600_000 - 2000)
    return 6e-5 + 0.5 * (1 + math.cos(math.pi * ratio)) * (6e-4 - 6e-5)


def layer_norm(x, weight):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * weight


def nanogpt_loss(params, tokens, targets):
    """The mean cross-entropy of nanoGPT's `GPT`, with bias = False: linear maps [in, out], a layer's by its number."""
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    later = jnp.triu(jnp.ones((tokens.shape[1],) * 2, bool), 1)
    layer = 0
    while f"{layer} ln_1" in params:
        normed = layer_norm(x, params[f"{layer} ln_1"])
        q, k, v = (normed @ params[f"{layer} {name}"] for name in ("query", "key", "value"))
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1).swapaxes(1, 2) for y in (q, k, v))
        scores = jnp.where(later, -jnp.inf, q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
        mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
        x = x + mixed @ params[f"{layer} attention c_proj"]
        hidden = layer_norm(x, params[f"{layer} ln_2"]) @ params[f"{layer} c_fc"]
        hidden = 0.5 * hidden * (1 + jax.lax.erf(hidden / math.sqrt(2)))
        x = x + hidden @ params[f"{layer} mlp c_proj"]
        layer += 1
    logits = layer_norm(x, params["ln_f"]) @ params["wte"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def nanogpt_step(params, tokens, targets, step):
    """The loss, the norm, and the parameters after a step of PyTorch's AdamW whose moments are zero before it."""
    loss, grads = jax.value_and_grad(nanogpt_loss)(params, tokens, targets)
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    scale, rate, count = min(1.0, 1.0 / (norm + 1e-6)), get_lr(step), step + 1
    after = {}
    for name, p in params.items():
        gradient = scale * grads[name]
        decayed = p * (1 - rate * 0.1) if p.ndim >= 2 else p
        mean, square = 0.1 * gradient / (1 - 0.9**count), 0.05 * gradient**2 / (1 - 0.95**count)
        after[name] = decayed - rate * mean / (jnp.sqrt(square) + 1e-8)
    return float(loss), norm, after


NAMES = {"attention_norm/scale": "ln_1", "mlp_norm/scale": "ln_2", "mlp/up/kernel": "c_fc"}
NAMES |= {"attention/query/kernel": "query", "attention/key/kernel": "key", "attention/value/kernel": "value"}
NAMES |= {"attention/output/kernel": "attention c_proj", "mlp/down/kernel": "mlp c_proj"}


def nanogpts(params):
    """jdp's parameters, whose layers are stacked, under nanoGPT's names."""
    flat = {"/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    wte, wpe, ln_f = (flat.pop(name) for name in ("embed/tokens", "embed/positions", "final_norm/scale"))
    layers = {f"{i} {NAMES[path.removeprefix('layers/')]}": leaf[i] for path, leaf in flat.items() for i in range(2)}
    return {"wte": wte, "wpe": wpe, "ln_f": ln_f, **layers}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The recipe on four devices, at the size of a toy, and a batch of it."""
    tmp_path = tmp_path_factory.mktemp("tokens")
    rows = np.random.default_rng(0).integers(0, WORDS, (40, LENGTH + 1))
    np.savez(tmp_path / "tokens.npz", tokens=rows)
    given = {key: str(value) for key, value in TOY.items()} | {"data.source": f"{tmp_path}/tokens.npz"}
    experiment = load(RECIPE, given)
    assembly = Assembly(experiment, make_mesh(devices=jax.devices()[:4], **experiment.mesh))
    with assembly.inputs.feed(assembly.inputs.data.train, seed=0, shuffle=True) as feed:
        return assembly, next(feed)


@pytest.mark.parametrize(("step", "spread"), [(0, 1), (2000, 1), (2000, 16), (599_999, 16)])
def test_a_step_is_nanogpts(toy, step, spread):
    """From equal weights, on four devices in two microbatches. `spread` widens the embedding: gradients are clipped."""
    assembly, batch = toy
    state = assembly.training.state()
    widened = {**state.params, "embed": {**state.params["embed"], "tokens": spread * state.params["embed"]["tokens"]}}
    counted = jax.tree.map(lambda x: x + step if jnp.issubdtype(x.dtype, jnp.integer) else x, state.opt_state)
    state = replace(state, params=widened, opt_state=counted)
    before = jax.device_get(nanogpts(state.params))
    loss, norm, expected = nanogpt_step(before, np.asarray(batch["tokens"]), np.asarray(batch["targets"]), step)
    assert (norm > 1.1) == (spread > 1)
    state, metrics = assembly.training.step(state, batch)
    assert (float(metrics["loss"]), float(metrics["grad_norm"])) == pytest.approx((loss, norm), rel=1e-5)
    after = nanogpts(state.params)
    assert after.keys() == expected.keys()
    for name, values in expected.items():
        # A weight rounds to 6e-8 of itself. Adam divides a gradient by its size: one near eps, of which there are few,
        # moves the weight by up to 1e-3 of the rate more or less, also in PyTorch. Decay is 2e-3 (0.1 x 0.02) and more.
        off = np.abs(after[name] - values) - 1.2e-7 * np.abs(values)
        assert off.max() < 1e-2 * get_lr(step) and np.mean(off > 5e-4 * get_lr(step)) < 2e-3, name


def test_the_rate_is_nanogpts(toy):
    """After the peak a step of the cosine may lie between: 3e-6 of the peak."""
    rate = toy[0].training.learning_rate
    for step in (0, 1, 1000, 1999, 2000):
        assert float(rate(step)) == pytest.approx(get_lr(step), rel=1e-6)
    for step in (2001, 10_000, 300_000, 599_000, 600_000):
        assert float(rate(step)) == pytest.approx(get_lr(step), abs=3e-6 * 6e-4)


def test_what_decays_is_what_has_two_dimensions(toy):
    params = toy[0].training.state().params
    decays = nanogpts(jax.tree.map(lambda mask, leaf: np.full(len(leaf), mask), decay_mask(params), params))
    dimensions = {name: leaf.ndim for name, leaf in nanogpts(params).items()}
    assert {name for name in decays if np.all(decays[name])} == {name for name, n in dimensions.items() if n >= 2}


def test_its_keys_are_those_of_the_published_run():
    experiment = load(RECIPE)
    model, given, train = experiment.model.config, experiment.optimizer, experiment.train
    assert (model.layers, model.width, model.heads, model.context, model.vocab_size) == (12, 768, 12, 1024, 50304)
    assert (model.tied, model.bias, model.dropout, model.positions, model.norm) == (True, False, 0, "learned", "layer")
    assert parameter_count(model) - 1024 * 768 == 123_587_328  # nanoGPT prints 123.59M, without positions
    assert (given.b1, given.b2, given.eps, given.weight_decay, given.clip_norm) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert train.batch_size * experiment.data.length == 12 * 1024 * 40 == 491_520
    assert (train.steps, experiment.precision, experiment.data.heldout_fraction) == (600_001, "bf16", 0.0005)


def test_it_starts_as_nanogpt_does(toy):
    """Normal, 0.02; what is added to the residual stream 0.02 / sqrt(2 layers). To four deviations of that estimate."""
    for name, leaf in nanogpts(jax.device_get(toy[0].training.state().params)).items():
        if leaf.ndim == 1:
            assert np.all(leaf == 1), name
            continue
        std = 0.02 / math.sqrt(2 * 2) if "c_proj" in name else 0.02
        assert leaf.std() == pytest.approx(std, rel=4 / math.sqrt(2 * leaf.size)), name
