"""A gradient that is not finite: the first cause is named, and the batch can be read again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_states import plan_of

import jdp
from jdp.guard.nonfinite import Inspection, save_batch

ROWS = 16


def init(rng):
    first, second, third = (0.3 * jax.random.normal(key, (4, 4)) for key in jax.random.split(rng, 3))
    return {"in": {"a": first}, "middle": {"b": second, "bias": jnp.ones(4)}, "out": {"c": third}}


def loss(params, batch, rng):
    hidden = batch["x"] @ params["in"]["a"]
    hidden = jnp.sqrt(jnp.square(hidden) * batch["scale"][:, None])  # at 0 a root is finite, and its slope is not
    hidden = hidden @ params["middle"]["b"] + params["middle"]["bias"]
    out = jnp.square(hidden @ params["out"]["c"]).sum(axis=1)
    return jdp.Loss(total=out.sum(), weight=jnp.float32(len(out)))


def batch_of(**changed):
    batch = {"x": np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32"), "scale": np.ones(ROWS, "float32")}
    for name, row in changed.items():
        batch[name][row] = np.nan if name == "x" else 0
    return batch


everywhere = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])


def found(strategy, done=1, tx=None, change=lambda state: state, settings=None, **changed):
    """Inspect step `done` on a `change`d state, with a batch that has NaN or zeros in these rows."""
    plan = plan_of(strategy)
    state = change(jdp.init_state(init, tx or optax.sgd(0.1), plan, rng=jax.random.key(0)))
    step = jdp.make_train_step(loss, plan, check_loss=False, **(settings or {"accumulate": 2}))
    return Inspection(step).of(jdp.place(state, plan), batch_of(**changed), done)


@everywhere
@pytest.mark.default_ids("zero3")
def test_nan_in_batches_is_named_with_rows(strategy):
    finding = found(strategy, done=7, x=[3, 9])
    (bad,) = finding.batch
    assert (bad.path, bad.places, finding.processes, finding.params) == ("x", (3, 9), (0,), ())
    assert np.isnan(finding.loss) and len(finding.gradients) == finding.leaves == 4
    first, second, third = finding.sentences
    assert first == "The batch of step 7 has NaN or infinities: x (at 3, 9 of 16 along its first dimension)."
    assert second == "The loss of step 7 is nan: the forward pass broke."
    assert third.startswith("4 of 4 gradients are not finite, in the order of the backward pass first out/c, ")


@everywhere
@pytest.mark.default_ids("zero3")
def test_gradients_break_where_the_backward_pass_does(strategy):
    finding = found(strategy, scale=5)
    assert (finding.batch, finding.params) == ((), ()) and np.isfinite(finding.loss)
    assert [bad.path for bad in finding.gradients] == ["in/a"]
    assert "the backward pass broke" in finding.sentences[0]


@everywhere
@pytest.mark.default_ids("ddp")
def test_nonfinite_parameters_come_before_the_loss(strategy):
    def broken(state):
        out = {"c": state.params["out"]["c"].at[2].set(jnp.inf)}
        return dataclasses.replace(state, params={**state.params, "out": out})

    finding = found(strategy, change=broken)
    assert [str(bad) for bad in finding.params] == ["out/c (at 2 of 4 along its first dimension)"]
    assert finding.sentences[0] == f"Before step 1 parameters were not finite: {finding.params[0]}."


@everywhere
def test_nonfinite_updates_are_named_with_leaves(strategy):
    """A learning rate of NaN, after a gradient that is finite."""
    finding = found(strategy, tx=optax.sgd(jnp.nan, momentum=0.9))
    names = [f"params/{name}" for name in ("in/a", "middle/b", "middle/bias", "out/c")]
    assert [str(bad) for bad in finding.updated] == names
    assert finding.sentences == [
        "The gradient of step 1 is finite; the optimizer's update is not. It would leave NaN or infinities in "
        f"{', '.join(names)}. Look at the learning rate (optimizer.lr)."
    ]


@pytest.mark.parametrize("settings", [{"precision": "fp32"}, {"precision": "bf16"}, {"wire": "int8"}], ids=str)
def test_gradients_are_seen_before_encoding_and_in_order(settings):
    """In the order of the backward pass. int8 would make a gradient that is not finite one of all numbers."""
    names = [bad.path.rpartition("/")[2] for bad in found("ddp", settings=settings, x=0).gradients]
    assert names[0] == "c" and names[-1] == "a" and {*names[1:3]} == {"b", "bias"}
    assert [bad.path for bad in found("ddp", settings=settings, scale=5).gradients] == ["in/a"]


def test_a_batch_is_read_as_it_was_written(tmp_path):
    batch = batch_of(x=2) | {"half": jnp.arange(ROWS, dtype=jnp.bfloat16)}
    batch["deep"] = {"ids": np.arange(2 * ROWS).reshape(ROWS, 2)}
    (placed,) = jdp.shard_batches([batch], plan_of("ddp"))
    file = save_batch(tmp_path / "events", 12, placed)
    assert file.name == "batch-12.npz"
    with np.load(file) as stored:
        again = {name.removeprefix("batch/"): stored[name] for name in stored}
    assert [*again] == ["rows", "deep/ids", "half", "scale", "x"] and again["rows"].tolist() == [*range(ROWS)]
    for name, leaf in (("deep/ids", batch["deep"]["ids"]), ("x", batch["x"])):
        np.testing.assert_array_equal(again[name], leaf)
    assert again["half"].tolist() == batch["half"].tolist()
