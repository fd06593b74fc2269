"""The programs of `experiments/loops`: on four devices, under every strategy, each learns what one device learns.

Tolerances: a loss is of order 1 to 10 and the same sum in another order, 1e-6 of it a step; parameters are compared
within 2e-6, as Adam divides by small numbers. Every parameter ends where the plan says, as it began.
"""

import functools
import importlib
import itertools
import runpy
import sys

import jax
import numpy as np
import optax
import pytest
from paths import EXPERIMENTS
from trainings import assert_close, plan_of

import jdp

LOOPS = EXPERIMENTS / "loops"
STORIES = sorted({path.stem for path in LOOPS.glob("*.py")} - {"story", "tfrecord_files"})
ALIKE = [name for name in STORIES if name != "diloco"]  # whose devices learn what one does
FED = ("grain_loader", "tfrecords", "torch_loader")
"""Those whose data other libraries read."""


def story(name):
    """Import a program; its folder is on the path, as it is when Python runs it."""
    if str(LOOPS) not in sys.path:
        sys.path.append(str(LOOPS))
    if name == "torch_loader":
        pytest.importorskip("torch")
    return importlib.import_module(name)


@functools.cache
def on_one_device(name):
    return jax.device_get(story(name).train(plan_of("ddp", 1)))


same = functools.partial(assert_close, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("name", "strategy"), [*itertools.product(ALIKE, ("ddp", "zero1", "zero3")), ("dpo", "zero2")])
@pytest.mark.default_ids("grain_loader-zero3")
def test_four_devices_learn_what_one_learns(name, strategy):
    """Only DPO has microbatches: with one, zero2 is the program of zero1."""
    plan = plan_of(strategy, 4, min_shard_size=0)
    measured, models = story(name).train(plan)
    same((measured, models), on_one_device(name))
    for model in models if isinstance(models, tuple) else (models,):  # nnx states, or pytrees of arrays
        placed = jdp.place(model, plan)
        for leaf, expected in zip(jax.tree.leaves(model), jax.tree.leaves(placed), strict=True):
            assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
        sharded = [not leaf.is_fully_replicated for leaf in jax.tree.leaves(model)]
        assert any(sharded) == (strategy != "ddp")


def test_a_program_runs_from_the_command_line(monkeypatch, capsys):
    story("array_metrics")
    monkeypatch.setattr(sys, "argv", ["array_metrics.py", "zero2"])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the devices have started
    runpy.run_path(str(LOOPS / "array_metrics.py"), run_name="__main__")
    first, *steps = capsys.readouterr().out.split("step ")
    assert first.startswith("zero2 on data=8 cpu devices")
    assert len(steps) == 3
    assert "'confusion': array([[" in steps[0]


@pytest.mark.rest
def test_islands_take_the_published_outer_step():
    """DiLoCo by hand: one island after another on one device, then the outer step with Nesterov's momentum."""
    diloco = story("diloco")
    measured, params = diloco.train(plan_of("zero1", 4, min_shard_size=0))
    expected = jax.device_get(jax.jit(diloco.init)(jax.random.key(0)))
    states, held = [diloco.TX.init(expected)] * diloco.ISLANDS, jax.tree.map(np.zeros_like, expected)

    @jax.jit
    def one_step(params, opt_state, batch):
        loss = lambda p: diloco.loss_fn(p, batch, None).total / len(batch["x"])  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = diloco.TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for batch, losses in zip(diloco.rounds(2), measured, strict=True):
        ends = []
        for island in range(diloco.ISLANDS):
            own = expected
            for h in range(diloco.STEPS):
                rows = jax.tree.map(lambda x, at=(island, h): x[at], batch)
                own, states[island], loss = one_step(own, states[island], rows)
            ends.append(jax.device_get(own))
            np.testing.assert_allclose(losses[island], loss, rtol=2e-5)
        delta = jax.tree.map(lambda p, *e: p - sum(e) / len(e), expected, *ends)
        held = jax.tree.map(lambda m, d: 0.9 * m + d, held, delta)
        expected = jax.tree.map(lambda p, d, m: p - 0.7 * (d + 0.9 * m), expected, delta, held)
    # AdamW's first steps divide by the gradient's size: rounding of sums in another order grows tenfold
    assert_close(params, expected, atol=2e-5)
    assert not any(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", FED)
def test_processes_together_feed_each_row_once(name, tmp_path):
    """Rows as `jdp.process_rows` gives them to two processes, and to two that hold a part of the same rows."""
    program = story(name)
    if name == "tfrecords":
        program.write_data(tmp_path)

    def batches_of(rows):
        return list(program.loader(tmp_path, rows) if name == "tfrecords" else program.loader(rows))

    whole = batches_of(list(range(32)))
    for rows in (list(range(16)), list(range(16, 32)), [*range(8), *range(16, 24)]):
        parts = batches_of(rows)
        assert len(parts) == len(whole) > 1
        for part, batch in zip(parts, whole, strict=True):
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.asarray(y)[rows]), part, batch)  # noqa: B023
    first, second = (np.asarray(jax.tree.leaves(batch)[-1]) for batch in whole[:2])
    assert not np.array_equal(first, second)


@pytest.mark.rest
def test_the_private_gradient_follows_the_algorithm():
    """Abadi et al., algorithm 1: each example's own gradient, divided by max(1, norm / C); their mean."""
    program, random = story("private"), np.random.default_rng(1)
    x = random.normal(size=(program.ROWS, program.FEATURES)).astype("float32")
    x[::2] *= 0.03  # gradients that need no clipping
    batch = {"x": x, "y": x.sum(axis=1)}
    plan = plan_of("zero2", 4, min_shard_size=0)
    params = jdp.init(program.init, plan, rng=jax.random.key(0))
    metrics, grads = jdp.value_and_grad(program.loss_fn, plan, check_loss=False)(params, batch, jax.random.key(0))

    params, clipped = jax.device_get(params), []
    for i in range(program.ROWS):
        own = jax.grad(program.example_loss)(params, jax.tree.map(lambda x: x[i], batch))  # noqa: B023
        norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(own)))
        clipped.append(jax.tree.map(lambda g: g / max(1, norm / program.CLIP), own))  # noqa: B023
    expected = jax.tree.map(lambda *each: np.mean(each, axis=0), *clipped)
    assert_close(grads, expected, atol=1e-7)
    assert 0 < float(metrics["clipped"]) < 1
