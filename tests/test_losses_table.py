"""The table of losses is true, computed by comparing a batch's loss with that of its parts; the trial agrees."""

import inspect
import operator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from loss_entries import Entry
from losses_that_mix import MIXES
from losses_that_sum import SUMS

import jdp

ROWS = 8
PLAN = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:2]), min_shard_size=8)
HALVES = np.concatenate([np.arange(8).reshape(2, 4), np.arange(8).reshape(4, 2).T])
"""The rows of two parts: neighbours; and every second one, which parts neighbours."""
QUARTERS = np.arange(8).reshape(4, 2)


def same_for_every_row(draw):
    """Draw once for the leading dimension, so that a part's rows draw what they draw in the whole batch."""

    def drawn(*args, **kwargs):
        call = inspect.signature(draw).bind(*args, **kwargs)
        shape = call.arguments.get("shape", ())
        call.arguments["shape"] = (1, *shape[1:])[: len(shape)]
        return jnp.broadcast_to(draw(*call.args, **call.kwargs), shape)

    return drawn


@contextmanager
def rows_draw_alike():
    """`jax.random.split(key)` alone stays: it is for two draws, not for rows."""
    split = jax.random.split
    with pytest.MonkeyPatch.context() as patch:
        for name in ("normal", "uniform", "bernoulli", "randint"):
            patch.setattr(jax.random, name, same_for_every_row(getattr(jax.random, name)))
        alike = lambda key, num=None: split(key) if num is None else jnp.broadcast_to(key, (num,))  # noqa: E731
        patch.setattr(jax.random, "split", alike)
        yield


def sums(each: Entry, model, batch, rng):
    """The total and weight of the rows of `batch`; of a scalar without `as_sum`, as of a mean over the rows."""
    if each.as_sum is not None:
        return each.as_sum(model, batch, rng)
    value = each.loss(model, batch, rng)
    rows = len(jax.tree.leaves(batch)[0])
    return (value.total, value.weight) if isinstance(value, jdp.Loss) else (value * rows, rows)


def whole_and_parts(each: Entry, *splits: np.ndarray):
    """Return the loss of all rows, and pairs (Σtotal, Σweight): of all rows, then of the parts of each split."""
    model = each.init(jax.random.key(0))
    graph, leaves = nnx.split(model) if isinstance(model, nnx.Module) else (None, model)

    @jax.jit
    def compute(leaves, batch, key):
        def own_model():
            return leaves if graph is None else nnx.merge(graph, jax.tree.map(jnp.asarray, leaves))

        def of(rows):
            return tuple(map(jnp.float32, sums(each, own_model(), rows, key)))

        with rows_draw_alike():
            found = [of(batch)]
            for split in splits:
                totals = jax.lax.map(of, jax.tree.map(operator.itemgetter(split), batch))
                found += [tuple(x.reshape(split.size // ROWS, -1).sum(1) for x in totals)]
            return each.loss(own_model(), batch, key) if each.as_sum else found[0][0] / found[0][1], found

    value, found = compute(leaves, each.batch(ROWS), jax.random.key(0))
    pairs = np.concatenate([np.array(pair, np.float64).reshape(2, -1) for pair in found], axis=1).T
    return float(value), pairs


def test_names_are_unique():
    names = [each.name for each in SUMS + MIXES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("each", SUMS, ids=repr)
def test_a_sum_is_the_sum_of_its_parts(each):
    value, pairs = whole_and_parts(each, HALVES, QUARTERS)
    assert np.isfinite(pairs).all() and pairs[0, 1] > 0
    np.testing.assert_allclose(value, pairs[0, 0] / pairs[0, 1], rtol=1e-5)
    np.testing.assert_allclose(pairs[1:], np.broadcast_to(pairs[0], pairs[1:].shape), rtol=1e-5)


@pytest.mark.parametrize("each", MIXES, ids=repr)
def test_a_loss_that_mixes_rows_differs_in_parts(each):
    value, pairs = whole_and_parts(each, HALVES)
    assert np.isfinite(pairs).all() and (pairs[:, 1] > 0).all() and each.marked_lines
    assert max(abs(pairs[1:, 0] / pairs[1:, 1] - value)) > 1e-4 * abs(value)


def declared(each: Entry):
    """The loss as one that returns `jdp.Loss`: what its users have to write for several microbatches."""

    def loss(model, batch, rng):
        return jdp.Loss(*sums(each, model, batch, rng))

    return loss


def trial_of(loss, each: Entry, rows=ROWS):
    state = jdp.init_state(each.init, optax.sgd(0.1), PLAN, rng=jax.random.key(0))
    step = jdp.make_train_step(loss, PLAN, accumulate=2)
    step.loss.check_first(state, each.batch(rows))
    return step


@pytest.mark.parametrize("each", SUMS, ids=repr)
def test_the_trial_accepts_a_sum(each):
    assert trial_of(declared(each), each).partitioning == "manual"


@pytest.mark.parametrize("each", MIXES, ids=repr)
def test_the_trial_refuses_a_loss_that_mixes_rows(each):
    with pytest.raises(ValueError, match=r"must be a sum over rows.*(change the part of rows|Loss)"):
        trial_of(declared(each), each)
