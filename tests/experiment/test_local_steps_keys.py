"""[local_steps] in an experiment file: its rules, and a learning rate that goes by rounds."""

import jax.numpy as jnp
import pytest

from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, from_table
from jdp.experiment.optimizer import optimizer


def digits(local_steps, **tables):
    table = {"name": "local", "model": {"name": "mlp"}, "data": {"source": "digits"}, "local_steps": local_steps}
    return from_table(table | {"train": {"steps": 10, "batch_size": 64}} | tables)


def test_a_round_reaches_the_step_and_the_rate_falls_by_rounds():
    falling = {"name": "sgd", "momentum": 0, "lr": 1.0, "weight_decay": 0, "schedule": "linear"}
    round_of_four = {"steps": 4, "lr": 0.7, "momentum": 0.9}
    experiment = digits(round_of_four, mesh={"replica": 2, "data": 4}, optimizer=falling)
    step = Assembly.on_devices(experiment).train_step
    assert (step.local_steps.steps, step.local_steps.lr, step.local_steps.momentum) == (4, 0.7, 0.9)
    tx = optimizer(experiment)
    state, moved = tx.init({"w": jnp.zeros(())}), []
    for _ in range(12):
        updates, state = tx.update({"w": jnp.ones(())}, state, {"w": jnp.zeros(())})
        moved.append(float(updates["w"]))
    assert moved[0] == moved[3] != moved[4] == moved[7] != moved[8]


TWICE = {"mesh": {"replica": 2}}


@pytest.mark.parametrize(
    ("local_steps", "tables", "words"),
    [
        ({"steps": 4}, {}, "mesh.replica"),
        ({"steps": 0}, TWICE, "local_steps.steps"),
        ({"lr": 0.7}, {}, "local_steps.steps is none"),
        ({"steps": 4}, TWICE | {"wire": {"gradients": "int8"}}, "do not go together"),
        ({"steps": 4}, TWICE | {"partitioning": "auto"}, "partitioning"),
        ({"steps": 4, "momentum": 1.0}, TWICE, "local_steps.momentum"),
    ],
)
def test_what_does_not_fit_is_one_error(local_steps, tables, words):
    with pytest.raises(ExperimentError, match=words):
        digits(local_steps, **tables)
