"""Plans, short trainings and their comparison: the set-up of tests in which a step is made and called a few times."""

import jax
import numpy as np

import jdp


def plan_of(strategy="ddp", devices=8, *, min_shard_size=8, rules=(), **axes):
    """A plan over the first of this machine's devices; without `axes` along `data` alone."""
    mesh = jdp.make_mesh(devices=jax.devices()[:devices], **axes)
    return jdp.Plan(mesh, strategy, rules=rules, min_shard_size=min_shard_size)


def abstract_step(loss, init, tx, plan, *, wrt=None, **settings):
    """(step, abstract state), to trace or to compile for a target. The loss is not tried."""
    state = jdp.abstract_state(init, tx, plan, rng=jax.random.key(0), wrt=wrt)
    return jdp.make_train_step(loss, plan, **{"check_loss": False, **settings}), state


def train(loss, init, tx, plan, batches, *, seed=0, wrt=None, **settings):
    """Train a new state on these batches: (step, last state, metrics of each step). The loss is not tried before."""
    state = jdp.init_state(init, tx, plan, rng=jax.random.key(seed), wrt=wrt)
    step, measured = jdp.make_train_step(loss, plan, **{"check_loss": False, **settings}), []
    for batch in batches:
        state, metrics = step(state, batch)
        measured.append(metrics)
    return step, state, measured


def assert_close(got, wanted, rtol=1e-5, atol=1e-6):
    """Trees of one structure; by default their leaves differ as sums of float32 do in another order."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(leaf, other, rtol, atol, err_msg=jax.tree_util.keystr(path))
