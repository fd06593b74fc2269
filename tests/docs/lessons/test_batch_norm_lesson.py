"""BatchNorm on eight devices: what synchronised statistics send, and what a device's own statistics miss."""

import functools

import jax
import numpy as np
import pytest
from load import load

import jdp

lesson = load("batch_norm")
pytestmark = pytest.mark.usefixtures("scikit_learn")


@functools.cache
def one_step(rows=2):
    """The programs, and the running averages of the first norm after one step from the same weights."""
    plan = jdp.Plan(jdp.make_mesh(data=8), "ddp")
    images, labels = (leaf[: 8 * rows] for leaf in lesson.digits())
    steps = lesson.make_steps(plan)
    programs = {
        name: step.compile(lesson.start(plan, 0, name), {"images": images, "labels": labels})
        for name, step in steps.items()
    }
    states, _ = lesson.train(programs, plan, rows, 1, 0)
    return programs, {name: jax.device_get(state.model_state)["norms"]["0"] for name, state in states.items()}


@pytest.mark.rest
def test_statistics_are_small_and_many():
    """Forward and backward, a mean and a mean of squares of each channel: 4 float32; two collectives a norm."""
    (few, local), (many, synchronised) = (lesson.traffic(program, 8) for program in one_step()[0].values())
    assert many - few == 2 * len(lesson.CHANNELS)
    assert synchronised - local == pytest.approx(2 * 7 / 8 * 4 * 4 * sum(lesson.CHANNELS))


def test_devices_own_variance_is_less_than_the_total():
    """The law of total variance: the mean of the devices' variances is less than the variance of all rows, while the
    mean of their means is the mean. The running average has a tenth of both after a step; float32 sums: 1e-5."""
    averages = one_step()[1]
    local, synchronised = ({name: np.asarray(value) for name, value in averages[key].items()} for key in averages)
    assert local["mean"] == pytest.approx(synchronised["mean"], rel=1e-5, abs=1e-6)
    assert (local["var"] < synchronised["var"] - 1e-5).all()
