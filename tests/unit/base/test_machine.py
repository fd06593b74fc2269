"""Threads for virtual CPU devices: XLA aborts in a collective if a pool of few threads runs two steps at once."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.base import machine, notices


@pytest.fixture
def provide(monkeypatch, capsys):
    """provide(started=False, **variables) -> (PJRT_NPROC afterwards, notices): two cores, eight devices asked for."""

    def called(*, started=False, **variables):
        monkeypatch.setattr(machine, "cores", lambda: 2)
        monkeypatch.setattr(machine, "jax_has_started", lambda: started)
        monkeypatch.setattr(notices, "_said", set())
        for name in ("PJRT_NPROC", "NPROC"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        machine.provide_threads()
        return os.environ.get("PJRT_NPROC"), capsys.readouterr().err

    return called


def test_enough_threads_are_kept_as_set(provide):
    assert provide() == ("16", "")
    assert provide(NPROC="16") == (None, "")
    assert provide(NPROC="4", PJRT_NPROC="64") == ("64", "")
    assert provide(NPROC="15") == ("16", "jdp: NPROC=15 is too few threads for 8 CPU devices: XLA gets 16\n")


def test_too_few_started_threads_are_reported(provide):
    chosen, said = provide(started=True)
    assert chosen is None
    assert said.startswith("jdp: JAX has started 8 CPU devices with too few threads") and "NPROC=16" in said
    assert provide(started=True, NPROC="16") == (None, "")


def slow_loss(params, batch, rng):
    """About a tenth of a second."""
    x = jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ params["w"]), batch["x"])
    return jdp.Loss((x**2).sum(), jnp.float32(batch["x"].shape[0]))


@pytest.mark.parametrize("kind", ["train", "gradient"])
def test_a_call_waits_for_the_one_before(kind):
    plan, key = jdp.Plan(jdp.make_mesh()), jax.random.key(0)
    state = jdp.init_state(lambda rng: {"w": jax.random.normal(rng, (256, 256))}, optax.sgd(1e-3), plan, rng=key)
    batch = jax.device_put({"x": np.ones((256, 256), np.float32)}, plan.batch_sharding)
    if kind == "train":
        step = jdp.make_train_step(slow_loss, plan, donate=False, check_loss=False)
        losses = [step(state, batch)[1]["loss"] for _ in range(3)]
    else:
        gradient = jdp.value_and_grad(slow_loss, plan, check_loss=False)
        losses = [gradient(state.params, batch, key)[0]["loss"] for _ in range(3)]
    assert losses[0].is_ready() and losses[1].is_ready()
