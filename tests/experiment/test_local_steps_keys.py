"""[local_steps] in an experiment file: its rules, and a learning rate that goes by rounds."""

import jax.numpy as jnp
import pytest

from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, load
from jdp.experiment.optimizer import optimizer

DIGITS = """
name = "local"
[model]
name = "mlp"
[data]
source = "digits"
[train]
steps = 10
batch_size = 64
"""


def loaded(tmp_path, text):
    (tmp_path / "local.toml").write_text(text + DIGITS)
    return load(tmp_path / "local.toml")


def test_a_round_reaches_the_step_and_the_rate_falls_by_rounds(tmp_path):
    text = "mesh = {replica = 2, data = 4}\n"
    text += "optimizer = {name = 'sgd', momentum = 0, lr = 1.0, weight_decay = 0, schedule = 'linear'}\n"
    experiment = loaded(tmp_path, text + "local_steps = {steps = 4, lr = 0.7, momentum = 0.9}\n")
    step = Assembly.on_devices(experiment).train_step
    assert (step.local_steps.steps, step.local_steps.lr, step.local_steps.momentum) == (4, 0.7, 0.9)
    tx = optimizer(experiment)
    state, moved = tx.init({"w": jnp.zeros(())}), []
    for _ in range(12):
        updates, state = tx.update({"w": jnp.ones(())}, state, {"w": jnp.zeros(())})
        moved.append(float(updates["w"]))
    assert moved[0] == moved[3] != moved[4] == moved[7] != moved[8]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("local_steps = {steps = 4}", "mesh.replica"),
        ("local_steps = {steps = 0}\nmesh = {replica = 2}", "local_steps.steps"),
        ("local_steps = {lr = 0.7}", "local_steps.steps is none"),
        ("local_steps = {steps = 4}\nmesh = {replica = 2}\nwire = {gradients = 'int8'}", "do not go together"),
        ("local_steps = {steps = 4}\nmesh = {replica = 2}\npartitioning = 'auto'", "partitioning"),
        ("local_steps = {steps = 4, momentum = 1.0}\nmesh = {replica = 2}", "local_steps.momentum"),
    ],
)
def test_what_does_not_fit_is_one_error(tmp_path, text, words):
    with pytest.raises(ExperimentError, match=words):
        loaded(tmp_path, text + "\n")
