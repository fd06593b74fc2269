"""Whether layers are sent one by one is chosen by what that costs on the devices; which sees nothing but shapes."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from plain_layers import init_layers, layers_loss, tokens_of

import jdp
from jdp.core.gradients.overlap_cost import _joined, _waiting, settled
from jdp.core.tracing.collectives import Sent
from jdp.foresight.targets.resolve import target

QUICK = partial(init_layers, layers=6)


def step_on(name, strategy, overlap=None, rows=2, length=8, init=QUICK, **settings):
    """The step and its lowered program, on devices that are only described."""
    devices = target(name).devices
    plan = jdp.Plan(jdp.make_mesh(devices=devices, data=len(devices)), strategy, min_shard_size=64)
    state = jdp.abstract_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    loss = partial(layers_loss, remat="full")
    step = jdp.make_train_step(loss, plan, precision="bf16", overlap=overlap, **settings)
    rows *= len(devices) * step.accumulate
    return step, step.lower(state, tokens_of(rows, length))


@pytest.mark.aot
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_for_which_it_is_off_by_cost_is_the_one_without(accumulate, capsys):
    chosen, program = step_on("h100:8x8", "zero1", accumulate=accumulate)
    without, expected = step_on("h100:8x8", "zero1", overlap=False, accumulate=accumulate)
    ahead, other = step_on("h100:8x8", "zero1", overlap=True, accumulate=accumulate)
    assert "overlap off: some" in chosen.why and "would be waited for with it" in chosen.why
    assert "overlap off" not in without.why + ahead.why
    assert program.as_text() == expected.as_text() != other.as_text()


@pytest.mark.aot
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_layer_that_computes_for_as_long_as_it_sends_is_sent_meanwhile(strategy):
    """The ring of 512 devices takes as long as many rows; and as many are on each of 8."""
    init = partial(init_layers, layers=6, width=512, hidden=2048)
    for devices, rows, off in (("h100:64x8", 2, True), ("h100:1x8", 64, False)):
        step, _ = step_on(devices, strategy, rows=rows, length=512 if rows > 2 else 8, init=init)
        assert ("overlap off" in step.why) == off, (devices, step.why)


class Links:
    def seconds(self, sent):
        return sum(each.payload for each in sent)


def test_a_sum_over_replicas_hides_half():
    """It begins when the sum inside of a replica has ended."""
    scatter, reduce = (Sent(kind, (axis,), 2, 2, True) for kind, axis in (("scatter", "data"), ("reduce", "replica")))
    assert _waiting(10, 8.0, Links(), [scatter, scatter]) == 4, "the last round's"
    assert _waiting(10, 8.0, Links(), [scatter, reduce]) == 4 + 10 * 4 / 2


def test_devices_whose_rates_are_not_known_are_as_they_were():
    class Device:
        platform, device_kind = "gpu", "NVIDIA of next year"

    class Mesh:
        devices = np.array([Device()])

    cpus = jdp.make_mesh(devices=jax.devices()[:2])
    assert [settled(given, Mesh) for given in (None, True, False)] == [True, True, False]
    assert [settled(given, cpus) for given in (None, True, False)] == [False, True, False]


def test_xla_joins_until_a_result_would_be_too_large():
    sent = [Sent("all-gather", ("data",), size, size, False) for size in (10, 15, 10, 40, 5)]
    assert _joined(sent, 30) == [25, 10, 40, 5]
    scattered = [Sent("reduce-scatter", ("data",), 80, 10, True)] * 4
    assert _joined(scattered, 30) == [240, 80], "by what a device gets"
