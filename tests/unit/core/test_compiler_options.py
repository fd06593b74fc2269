"""Compiler options as a value: what it may be, what of it each platform's compiler takes, and that a step has it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainings import plan_of

import jdp
from jdp.core.compiling.options import Compiler
from jdp.foresight.targets.resolve import target

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
BATCH = {"x": np.ones((8, 4), "f")}


def loss(params, batch, rng):
    return jnp.square(batch["x"] @ params["w"]).mean()


def state_on(plan):
    return jdp.init_state(lambda rng: {"w": jnp.ones((4, 4))}, optax.sgd(0.1), plan, rng=jax.random.key(0))


@pytest.mark.aot
def test_each_platform_takes_its_own_options(fresh_notices, capfd):
    a100, cpu = (jdp.make_mesh(devices=target(name).devices, data=-1) for name in ("a100:2x2", "cpu:2"))
    given = {SCHEDULER: True, "xla_gpu_gone": 1, "xla_cpu_enable_fast_math": False, "xla_gone": 1}
    with jax.set_mesh(cpu):  # as foresight lowers for another mesh
        assert Compiler.of(given).for_mesh(a100) == {SCHEDULER: True}
    assert Compiler.of(given).for_mesh(cpu) == {"xla_cpu_enable_fast_math": False}
    assert Compiler.of("overlap").for_mesh(a100)[SCHEDULER] is True
    assert Compiler.of("overlap").for_mesh(cpu) == Compiler().for_mesh(cpu) == {}
    said = capfd.readouterr().err
    for words in ("xla_gpu_gone on gpu", "xla_gone on gpu", "xla_gone on cpu", "left out on gpu: xla_cpu_enable"):
        assert said.count(words) == 1
    assert f"left out on cpu: {SCHEDULER}, xla_gpu_gone" in said and '"overlap" has no option for cpu' in said


def test_a_value_that_xla_refuses_is_one_error():
    mesh = jdp.make_mesh()
    with pytest.raises(ValueError, match="xla_cpu_enable_fast_math takes true or false; given 1"):
        Compiler.of({"xla_cpu_enable_fast_math": 1}).for_mesh(mesh)
    assert Compiler.of({"xla_cpu_enable_fast_math": True}).for_mesh(mesh), "1, which equals it, was refused"


def test_steps_are_compiled_with_their_options(tmp_path):
    plan = plan_of(devices=1)
    for make, name in ((jdp.make_eval_step, "eval_step"), (jdp.make_train_step, "train_step")):
        make(loss, plan, compiler={"xla_dump_to": str(tmp_path)})(state_on(plan), BATCH)
        assert list(tmp_path.glob(f"*jit_{name}*")), name


@pytest.mark.aot
def test_auto_is_overlap_on_several_gpus(capfd):
    names = ("h100:1x8", "h100:1x1", "cpu:2")
    meshes = {name: jdp.make_mesh(devices=target(name).devices, data=-1) for name in names}
    chosen = {name: Compiler.of("auto").on(mesh).preset for name, mesh in meshes.items()}
    assert chosen == {"h100:1x8": "overlap", "h100:1x1": "default", "cpu:2": "default"}
    for name, mesh in meshes.items():
        assert Compiler.of("auto").for_mesh(mesh) == Compiler.of(chosen[name]).for_mesh(mesh)
    beside = jdp.make_mesh(devices=target("h100:1x8").devices, data=4, model=2)
    assert Compiler.of("auto").on(beside).preset == "default", "an axis of the model's is sent along too"
    assert Compiler.of("default").on(meshes["h100:1x8"]).preset == "default", "what is written out stays"
    assert "no option for" not in capfd.readouterr().err


def test_a_nested_step_leaves_its_options(fresh_notices, capfd):
    """Whatever of state and batch is traced: nothing of them where both are closed over."""
    plan = plan_of(devices=2)
    state, options = state_on(plan), {"xla_cpu_enable_fast_math": False}
    step = jdp.make_train_step(loss, plan, compiler=options, donate=False, check_loss=False)
    alone = step(state, BATCH)[1]["loss"]
    assert "are left out" not in capfd.readouterr().err
    assert jax.jit(step)(state, BATCH)[1]["loss"] == alone
    assert jax.jit(lambda x: x * step(state, BATCH)[1]["loss"])(1.0) == alone
    assert jax.grad(lambda p: step(dataclasses.replace(state, params=p), BATCH)[1]["loss"])(state.params)["w"].any()
    assert capfd.readouterr().err.count("its own are left out") == 1
    assert step(step(state, BATCH)[0], BATCH)[1]["loss"] < alone
