"""Compiler options as a value: what it may be, what of it each platform's compiler takes, and that a step has it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp.base.notices import _said
from jdp.core.compiling.options import Compiler
from jdp.foresight.targets.resolve import target

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("overlop", '"default", "overlap", or a table of XLA\'s options.*given \'overlop\'; did you mean overlap'),
        (3, "given '3'"),
        ({"latency": True}, "names begin with xla_; given 'latency'"),
        ({SCHEDULER: [True]}, rf"true or false, a number or text; given {SCHEDULER} = \[True\]"),
    ],
)
def test_what_it_cannot_be(given, said):
    with pytest.raises(ValueError, match=said):
        Compiler.of(given)


def test_a_value_is_equal_to_itself_written_otherwise():
    assert Compiler.of({}) == Compiler.of("default") == Compiler() == Compiler.of(Compiler())
    one, other = {"xla_a": 1, "xla_b": "x"}, {"xla_b": "x", "xla_a": 1}
    assert Compiler.of(one) == Compiler.of(other) and Compiler.of(other).value == one
    assert str(Compiler.of(one)) == "xla_a=1, xla_b=x" and str(Compiler.of("overlap")) == "overlap"


def test_each_platform_takes_its_own_and_what_its_compiler_knows(capfd):
    a100, cpu = (jdp.make_mesh(devices=target(name).devices, data=-1) for name in ("a100:2x2", "cpu:2"))
    given = {SCHEDULER: True, "xla_gpu_gone": 1, "xla_cpu_enable_fast_math": False, "xla_gone": 1}
    _said.clear()
    with jax.set_mesh(cpu):  # as foresight lowers for another mesh
        assert Compiler.of(given).for_mesh(a100) == {SCHEDULER: True}
    assert Compiler.of(given).for_mesh(cpu) == {"xla_cpu_enable_fast_math": False}
    assert Compiler.of("overlap").for_mesh(a100)[SCHEDULER] is True
    assert Compiler.of("overlap").for_mesh(cpu) == Compiler().for_mesh(cpu) == {}
    said = capfd.readouterr().err
    for words in ("xla_gpu_gone on gpu", "xla_gone on gpu", "xla_gone on cpu", "left out on gpu: xla_cpu_enable"):
        assert said.count(words) == 1
    assert f"left out on cpu: {SCHEDULER}, xla_gpu_gone" in said and '"overlap" has no option for cpu' in said


@pytest.mark.parametrize(
    ("value", "said"), [(3, "takes true or false; given 3"), ("true", "takes true or false; given 'true'")]
)
def test_a_value_that_xla_refuses_is_one_error(value, said):
    mesh = jdp.make_mesh(devices=jax.devices()[:2], data=2)
    with pytest.raises(ValueError, match=f"xla_cpu_enable_fast_math {said}"):
        Compiler.of({"xla_cpu_enable_fast_math": value}).for_mesh(mesh)


def test_steps_are_compiled_with_their_options(tmp_path):
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1], data=1))
    state = jdp.init_state(lambda _: {"w": jnp.ones((8, 4))}, optax.sgd(0.1), plan, rng=jax.random.key(0))
    batch = {"x": np.ones((4, 8), "float32")}

    def loss(params, batch, rng):
        return jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2)

    for make, name in ((jdp.make_eval_step, "eval_step"), (jdp.make_train_step, "train_step")):
        make(loss, plan, compiler={"xla_dump_to": str(tmp_path)})(state, batch)
        assert list(tmp_path.glob(f"*jit_{name}*")), name
