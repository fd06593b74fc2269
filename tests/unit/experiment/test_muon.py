"""[optimizer] name = "muon": hidden matrices by optax' Muon, all else by AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

from jdp.base.tree_paths import matches, path_of
from jdp.core.flax_nnx import split
from jdp.core.state import trained_part
from jdp.experiment.file import from_table
from jdp.experiment.optimizer import decay_mask, learning_rate, matrix_dimensions, optimizer
from jdp.models import SIZES, GPTConfig
from jdp.models.construction import build, parameter_shapes

LAST_TWO, CONVOLUTION = (-2, -1), ((-4, -3, -2), (-1,))
TINY = GPTConfig(vocab_size=16, context=8, layers=3, width=8, heads=2, bias=True, tied=False)


def made_by_file(shapes=None, **settings):
    given = {"name": "x", "model": {"name": "gpt-nano"}, "train": {"steps": 10, "batch_size": 8}}
    experiment = from_table(given | {"optimizer": {"name": "muon", **settings}})
    return experiment, optimizer(experiment, shapes)


def params_of(config):
    return jax.jit(lambda: split(build(config, rngs=nnx.Rngs(0)))[0])()


def steps(tx, params, count=3):
    """Return the parameters after some steps with gradients that are drawn from their paths."""

    @jax.jit
    def update(step, state, params):
        keys = iter(jax.random.split(jax.random.key(step), len(jax.tree.leaves(params))))
        grads = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), params)
        updates, state = tx.update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    state = tx.init(params)
    for step in range(count):
        state, params = update(step, state, params)
    return params


def flat(tree):
    return {path_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.mark.rest
@pytest.mark.parametrize("adam_lr", [None, 0.003])
def test_updates_are_those_of_optax_written_by_hand(adam_lr):
    """Matrices as by `optax.contrib.muon`, each layer by itself; the others as by `optax.adamw`."""
    settings = {"lr": 0.02, "beta": 0.9, "b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    more = {"schedule": "cosine", "warmup_steps": 2, "final_lr_fraction": 0.1}
    experiment, tx = made_by_file(**settings, **more, **({} if adam_lr is None else {"adam_lr": adam_lr}))
    params, rate = params_of(TINY), learning_rate(experiment)
    share = 1 if adam_lr is None else adam_lr / 0.02
    adamw = optax.adamw(lambda count: share * rate(count), b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1, mask=decay_mask)
    whole = muon(
        rate, beta=0.9, eps=1e-6, weight_decay=0.1, consistent_rms=0.2,
        muon_weight_dimension_numbers=jax.tree.map(
            lambda leaf: MuonDimensionNumbers(1, 2) if leaf.ndim == 3 else None, params
        ),
    )  # fmt: skip
    got, matrices, others = (flat(steps(each, params)) for each in (tx, whole, adamw))
    kernels = [path for path in got if matches(path, "layers/*/kernel")]
    assert len(kernels) == 7
    for path, leaf in got.items():
        expected = matrices if path in kernels else others
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


UNROLLED = GPTConfig(vocab_size=16, context=8, layers=2, width=8, heads=2, scan=False, qk_norm=True)
FAMILIES = {
    "gpt2-124m": (SIZES["gpt2-124m"], {"layers/*/kernel": LAST_TWO}, 6 * 12),
    "llama-8b": (SIZES["llama-8b"], {"layers/*/kernel": LAST_TWO}, 7 * 32),
    "unrolled": (UNROLLED, {"layers/*/kernel": LAST_TWO}, 7 * 2),
    "vit-s16": (SIZES["vit-s16"], {"layers/*/kernel": LAST_TWO}, 6 * 12),
    "resnet-50": (SIZES["resnet-50"], {"stages/*/kernel": CONVOLUTION}, 52),
    "mlp": (SIZES["mlp"], {"layers/[01]/kernel": LAST_TWO}, 2),
}


def found_in(shapes, wrt="*"):
    """Return the dimensions by path for a model with these shapes, of which some are trained."""
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items() if matches(path, wrt)}
    found = matrix_dimensions(params, shapes)
    return {path: None if dims is None else tuple(dims) for path, dims in found.items()}


@pytest.mark.parametrize(("config", "expected", "count"), FAMILIES.values(), ids=FAMILIES)
def test_hidden_matrices_of_jdps_models_and_nothing_else(config, expected, count):
    shapes = parameter_shapes(config)
    wanted = {path: next((d for pattern, d in expected.items() if matches(path, pattern)), None) for path in shapes}
    found = found_in(shapes)
    assert found == wanted
    assert sum(int(np.prod(shapes[path][:-2])) if d == LAST_TWO else 1 for path, d in found.items() if d) == count


OTHERS = {
    "heads of nnx": (
        {"a/query/kernel": (8, 2, 4), "a/query/bias": (2, 4), "a/out/kernel": (2, 4, 8), "a/out/bias": (8,)},
        {"a/query/kernel": ((-3,), (-2, -1)), "a/out/kernel": ((-3, -2), (-1,))},
    ),
    "stacked heads without biases": (
        {"b/ln/scale": (3, 8), "b/mix/value/kernel": (3, 8, 2, 4), "b/up/kernel": (3, 8, 8), "tok/embedding": (9, 8)},
        {"b/mix/value/kernel": ((-3,), (-2, -1)), "b/up/kernel": LAST_TWO},
    ),
    "linen": (
        {"params/Conv_0/kernel": (3, 3, 4, 8), "params/Conv_0/bias": (8,), "params/BatchNorm_0/scale": (8,)}
        | {f"params/Dense_{i}/kernel": (8, 8) for i in range(11)},
        {"params/Conv_0/kernel": CONVOLUTION} | {f"params/Dense_{i}/kernel": LAST_TWO for i in range(10)},
    ),
    "equinox": (
        {"body/0/weight": (4, 2, 3, 3), "body/0/bias": (4, 1, 1), "body/1/norm/weight": (4,), "lm_head/weight": (9, 4)},
        {"body/0/weight": ((-3, -2, -1), (-4,))},
    ),
    "stacked equinox": ({"body/norm/weight": (3, 4), "body/up/weight": (3, 8, 4)}, {"body/up/weight": LAST_TWO}),
    "experts": ({"b/ln/scale": (8,), "b/experts/kernel": (4, 8, 8)}, {"b/experts/kernel": LAST_TWO}),
    "cannot be told": ({"stack/kernel": (3, 8, 8), "mix/w": (2, 8, 4), "mix/bias": (2,), "token": (1, 8)}, {}),
}


@pytest.mark.parametrize(("shapes", "expected"), OTHERS.values(), ids=OTHERS)
def test_names_of_flax_and_equinox_tell_the_matrices(shapes, expected):
    assert {path: dims for path, dims in found_in(shapes).items() if dims} == expected


def test_frozen_norms_still_tell_that_layers_are_stacked():
    shapes = parameter_shapes(GPTConfig(vocab_size=16, context=8, layers=2, width=8, heads=2, lora_rank=2))
    assert set(found_in(shapes, "*/lora_?").values()) == {LAST_TWO}
    assert set(found_in(shapes, "layers/*/kernel").values()) == {LAST_TWO}


def test_frozen_leaves_have_no_state_and_are_reported(fresh_notices, capsys):
    params = jax.eval_shape(lambda: params_of(TINY))
    trained = trained_part(params, [path != "final_norm/scale" for path in flat(params)])
    shapes = {path: leaf.shape for path, leaf in flat(params).items()}
    _, tx = made_by_file(shapes, lr=0.1)
    after = jax.eval_shape(lambda params: steps(tx, params, 1), trained)
    assert jax.tree.structure(after) == jax.tree.structure(trained)
    assert "final_norm/scale" not in "".join(flat(jax.eval_shape(tx.init, trained)))
    said = "muon: 21 matrices in 7 leaves; adamw: 11 leaves, besides biases and scales embed/tokens, head/kernel"
    assert capsys.readouterr().err == f"jdp: {said}\n"
