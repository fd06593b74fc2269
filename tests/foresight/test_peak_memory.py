"""Memory by class, on programs that XLA's GPU compiler made for eight H100s.

Arguments are exact from the plan; of the other classes only temporaries grow with the batch. What XLA allocates is the
other side of every account.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from without_triton import WITHOUT_TRITON

import jdp
from jdp.experiment.assembly import text_loss
from jdp.foresight.memory import CLASSES, RESERVED_BYTES, Memory, memory
from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets.resolve import target
from jdp.models import GPTConfig, MLPConfig, build

# GPT-2's layers: compiling takes its time by the kernels, and these have fewest.
GPT = GPTConfig(
    vocab_size=512, context=64, layers=3, width=256, heads=4, positions="learned", activation="gelu", tied=True
)
MLP = MLPConfig(features_in=256, hidden=(512, 512), features_out=64)
DEVICES = 8


def mlp_loss(model, batch, rng):
    nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], rng=rng), batch["y"])
    return jdp.Loss(nll.sum(), jnp.float32(nll.size))


def abstract(config, strategy, rows):
    """Plan, state, batch and loss of a model on 8 H100s; `rows` of the batch on each of them."""
    plan = jdp.Plan(jdp.make_mesh(devices=target("h100:1x8").devices), strategy)
    init = lambda rng: build(config, rngs=nnx.Rngs(rng))  # noqa: E731
    state = jdp.abstract_state(init, optax.adamw(1e-3), plan, rng=jax.random.key(0))
    rows *= DEVICES
    if isinstance(config, MLPConfig):
        batch = {"x": jax.ShapeDtypeStruct((rows, 256), "float32"), "y": jax.ShapeDtypeStruct((rows,), "int32")}
        return plan, state, batch, mlp_loss
    shape = (rows, config.context)
    batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name in ("tokens", "targets")}
    return plan, state, batch | {"weights": jax.ShapeDtypeStruct(shape, "float32")}, text_loss


@functools.cache
def compiled(config, strategy, accumulate, rows=2):
    """(what XLA says, the step, its state, its memory); `rows` of a microbatch on each device."""
    plan, state, batch, loss = abstract(config, strategy, rows * accumulate)
    compiler = WITHOUT_TRITON if isinstance(config, GPTConfig) else "default"  # cuBLAS's products have workspaces
    step = jdp.make_train_step(loss, plan, accumulate=accumulate, precision="bf16", compiler=compiler, check_loss=False)
    found = compile_step(step.lower(state, batch))
    return found, step, state, memory(found, step, state)


def held(*case):
    return compiled(*case)[-1]


CASES = [
    (MLP, "zero1", 1, 1024),
    (MLP, "ddp", 4, 256),
    (GPT, "zero3", 4),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{ {GPT: 'gpt', MLP: 'mlp'}[c[0]] }-{c[1]}-{c[2]}")
def test_the_classes_add_up_and_arguments_are_those_of_the_plan(case):
    """Exact, from the placements; what XLA allocates is the other side of every account."""
    found, step, state, memory = compiled(*case)
    assert memory.total == sum(memory.by_class().values()) == found.total_bytes
    assert min(memory.by_class().values()) >= 0 and list(memory.by_class()) == list(CLASSES)
    sizes = {}
    for place in step.plan.placements(state):
        kind = place.path.partition("/")[0]
        sizes[kind] = sizes.get(kind, 0) + place.bytes_per_device
    assert (memory.parameters, memory.optimizer) == (sizes["params"], sizes["opt_state"])
    _, _, batch, _ = abstract(case[0], case[1], (case[3] if len(case) > 3 else 2) * case[2])
    assert memory.batch == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // DEVICES
    assert found.argument_bytes == sum(sizes.values()) + memory.batch == sum(each.bytes for each in memory.arguments)
    assert memory.outside == 0
    state_leaves = [each for each in memory.arguments if each.path.startswith(("params/", "opt_state/"))]
    assert all(each.in_place for each in state_leaves if each.bytes > 1024)


def test_an_evaluation_step_leaves_the_optimizer_state_outside():
    plan, state, batch, loss = abstract(MLP, "zero1", 2)
    step = jdp.make_eval_step(loss, plan, precision="bf16", check_loss=False)
    found = memory(compile_step(step.lower(state, batch)), step, state)
    assert found.optimizer == 0
    assert found.outside >= held(MLP, "zero1", 1, 1024).optimizer
    assert found.fits(2**40).needed == found.total + found.outside


def test_fits_as_jax_allocates():
    gib = 2**30
    fits = lambda total: Memory(temporaries=total * gib).fits(80 * gib)  # noqa: E731
    usual, more, too_much = fits(60), fits(70), fits(79)
    assert (usual.fits, usual.needed, usual.available, usual.fraction) == (True, 60 * gib, 78 * gib, None)
    assert more.fits and more.fraction == 0.875 and "XLA_CLIENT_MEM_FRACTION=0.875" in more.words
    assert not too_much.fits and too_much.fraction is None and "does not fit" in too_much.words
    assert too_much.available == 80 * gib - RESERVED_BYTES
