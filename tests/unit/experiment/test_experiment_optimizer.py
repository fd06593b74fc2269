"""[optimizer]: the learning rate over the run, and the update rule that optax makes of the file."""

import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdp.experiment.file import ExperimentError, from_table
from jdp.experiment.optimizer import learning_rate, optimizer
from jdp.experiment.schema.tables import RuleName


def experiment(*, optimizer, steps=50, batch_size=16, model=None):
    train = {"steps": steps, "batch_size": batch_size}
    return from_table({"name": "x", "model": model or {"name": "gpt-nano"}, "train": train, "optimizer": optimizer})


def rates(**settings):
    schedule = learning_rate(experiment(steps=10, optimizer={"lr": 1.0, **settings}))
    return [float(np.asarray(schedule(count))) for count in range(11)]


def test_the_learning_rate_warms_up_to_lr():
    np.testing.assert_allclose(rates(warmup_steps=4), [0.25, 0.5, 0.75] + [1.0] * 8, rtol=1e-6)
    np.testing.assert_allclose(rates(), [1.0] * 11)
    np.testing.assert_allclose(rates(warmup_steps=10), [*np.arange(1, 11) / 10, 1.0], rtol=1e-6)


def test_the_learning_rate_falls_to_its_fraction():
    linear = rates(warmup_steps=2, schedule="linear", final_lr_fraction=0.2)
    np.testing.assert_allclose(linear, [0.5, *np.linspace(1.0, 0.2, 9)[[0, *range(9)]]], rtol=1e-6)
    cosine = rates(schedule="cosine", final_lr_fraction=0.2)
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * count / 10)) for count in range(11)]
    np.testing.assert_allclose(cosine, expected, rtol=1e-5)


@pytest.mark.parametrize("name", typing.get_args(RuleName))
@pytest.mark.default_ids("adamw")
def test_every_optimizer_descends(name):
    tx = optimizer(experiment(optimizer={"name": name, "lr": 0.05}))
    params = {"w": jnp.array([1.0, -2.0])}
    state = tx.init(params)
    for _ in range(60):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
    assert float(jnp.abs(params["w"]).max()) < 0.5  # type: ignore[index]


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
def test_weight_decay_excludes_biases_and_scales_of_layers(name):
    """The last key decides, and all of it."""
    params = {
        "layers": {
            "norm": {"scale": jnp.ones((3, 4))},
            "scale": {"kernel": jnp.ones((3, 4, 4)), "bias": jnp.ones((3, 4))},
        },
        "embed": {"scale_up": jnp.ones((5, 4)), "upscale": jnp.ones((5, 4))},
    }
    tx = optimizer(experiment(optimizer={"lr": 0.1, "name": name, "weight_decay": 0.5}))
    updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_array_equal(updates["layers"]["norm"]["scale"], 0.0)
    np.testing.assert_array_equal(updates["layers"]["scale"]["bias"], 0.0)
    for decayed in (updates["layers"]["scale"]["kernel"], *updates["embed"].values()):
        np.testing.assert_allclose(decayed, -0.1 * 0.5, rtol=1e-6)


OTHER = {"b1": 0.5, "b2": 0.5, "eps": 0.1, "momentum": 0.5, "beta": 0.5, "adam_lr": 0.5, "weight_decay": 0.5}
"""Key of a rule -> a value that is no rule's default."""


def updates_of(made):
    """Three updates of a matrix and a bias. Lion's have signs that depend on both decays."""
    tx, params = optimizer(made), {"up": {"kernel": jnp.arange(1.0, 7).reshape(2, 3), "bias": jnp.ones(3)}}
    state, found = tx.init(params), []
    for scale in (3.0, -0.01, -0.1):
        updates, state = tx.update(jax.tree.map(lambda leaf, scale=scale: scale * leaf, params), state, params)
        found += jax.tree.leaves(updates)
    return np.concatenate([np.ravel(each) for each in found])


@pytest.mark.parametrize("name", typing.get_args(RuleName))
def test_keys_that_change_no_update_are_refused(name):
    plain = experiment(optimizer={"name": name})
    usual = updates_of(plain)
    for key, value in OTHER.items():
        changed = plain.model_copy(update={"optimizer": plain.optimizer.model_copy(update={key: value})})  # not checked
        if (updates_of(changed) != usual).any():
            experiment(optimizer={"name": name, key: value})
        else:
            with pytest.raises(ExperimentError, match=rf"optimizer\.{key} is for .*, not {name}; given .*: remove it"):
                experiment(optimizer={"name": name, key: value})
