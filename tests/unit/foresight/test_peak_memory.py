"""Memory by class, on programs that XLA's GPU compiler made for eight H100s.

Arguments are exact from the plan. What XLA allocates is the other side of every account.
"""

import jax
import pytest
from test_traffic import GPT, MLP, abstract_batch, compiled, mlp_loss

import jdp
from jdp.foresight.memory import CLASSES, RESERVED_BYTES, Memory, memory
from jdp.foresight.program.compiled import compile_step


@pytest.mark.aot
@pytest.mark.parametrize(
    ("config", "strategy", "accumulate"),
    [(MLP, "zero1", 1), (MLP, "ddp", 4), (GPT, "zero3", 4)],
    ids=["mlp-zero1-1", "mlp-ddp-4", "gpt-zero3-4"],
)
@pytest.mark.default_ids("mlp-zero1-1")
def test_classes_add_up_to_the_allocations(config, strategy, accumulate):
    """Exact, from the placements; what XLA allocates is the other side of every account."""
    program = compiled(config, strategy, None, accumulate, adam=True)
    found, memory = program.compiled, program.report.memory
    assert memory.total == sum(memory.by_class().values()) == found.total_bytes
    assert min(memory.by_class().values()) >= 0 and list(memory.by_class()) == list(CLASSES)
    sizes = {}
    for place in program.step.plan.placements(program.state):
        kind = place.path.partition("/")[0]
        sizes[kind] = sizes.get(kind, 0) + place.bytes_per_device
    assert (memory.parameters, memory.optimizer) == (sizes["params"], sizes["opt_state"])
    batch = jax.tree.leaves(abstract_batch(config, 8 * accumulate * 2))
    assert memory.batch == sum(leaf.size * leaf.dtype.itemsize for leaf in batch) // 8
    assert found.argument_bytes == sum(sizes.values()) + memory.batch == sum(each.bytes for each in memory.arguments)
    assert memory.outside == 0
    state_leaves = [each for each in memory.arguments if each.path.startswith(("params/", "opt_state/"))]
    assert all(each.in_place for each in state_leaves if each.bytes > 1024)


@pytest.mark.aot
def test_an_evaluation_step_leaves_the_optimizer_state_outside():
    trained = compiled(MLP, "zero1", None, 1, adam=True)
    step = jdp.make_eval_step(mlp_loss, trained.step.plan, precision="bf16", check_loss=False)
    program = compile_step(step.lower(trained.state, abstract_batch(MLP, 16)))
    found = memory(program, step, trained.state)
    assert found.optimizer == 0
    assert found.outside >= trained.report.memory.optimizer
    assert found.fits(2**40).needed == found.total + found.outside


def test_fits_as_jax_allocates():
    gib = 2**30
    fits = lambda total: Memory(temporaries=total * gib).fits(80 * gib)  # noqa: E731
    usual, more, too_much = fits(60), fits(70), fits(79)
    assert (usual.fits, usual.needed, usual.available, usual.fraction) == (True, 60 * gib, 78 * gib, None)
    assert more.fits and more.fraction == 0.875 and "XLA_CLIENT_MEM_FRACTION=0.875" in more.words
    assert not too_much.fits and too_much.fraction is None and "does not fit" in too_much.words
    assert too_much.available == 80 * gib - RESERVED_BYTES
