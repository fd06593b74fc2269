"""Training by optimizers of matrices, and the same on one device: the runs that tests compare.

The gradient is simple and of full rank: (weights - target), times what a batch has. The reference is a loop of plain
JAX and optax. float32 sums over devices run in another order; Newton-Schulz steps make 1e-6 of that at most.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from judged import judged

import jdp

BOUND, ROWS, STEPS = 1e-5, 72, 10
LAST = optax.contrib.MuonDimensionNumbers(-2, -1)


def is_shape(x):
    return isinstance(x, tuple)


def arrays(shapes, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: random.normal(size=shape).astype(np.float32), shapes, is_leaf=is_shape)


def loss_of(shapes):
    target = arrays(shapes, 2)

    def loss(params, batch, rng):
        half = jax.tree.map(lambda p, t: ((p - t) ** 2).sum() / 2, params, target)
        return jdp.Loss(batch["w"].sum() * sum(jax.tree.leaves(half)), jnp.float32(batch["w"].shape[0]))

    return loss


def batches(steps=STEPS):
    random = np.random.default_rng(3)
    return [{"w": random.uniform(0.5, 1.5, ROWS).astype(np.float32)} for _ in range(steps)]


def by_hand(shapes, tx, steps=STEPS):
    """Parameters and optimizer state after some steps on one device."""
    params, loss = arrays(shapes, 1), loss_of(shapes)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(p, batch, None).total / ROWS)(params)
        tx_ = optax.with_extra_args_support(tx)
        updates, opt_state = tx_.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in batches(steps):
        params, opt_state = step(params, opt_state, batch)
    return jax.device_get((params, opt_state))


def plan_of(strategy="zero1", devices=8, mesh=None, **settings):
    mesh = mesh if isinstance(mesh, jax.sharding.Mesh) else jdp.make_mesh(devices=jax.devices()[:devices], **mesh or {})
    return jdp.Plan(mesh, strategy, **{"min_shard_size": 24, **settings})


def start(plan, shapes, tx, accumulate=1, wrt=None, **settings):
    state = jdp.init_state(
        lambda rng: jax.tree.map(jnp.asarray, arrays(shapes, 1)), tx, plan, rng=jax.random.key(0), wrt=wrt
    )
    return state, jdp.make_train_step(loss_of(shapes), plan, accumulate=accumulate, **settings, check_loss=False)


def run(state, step, given):
    for batch in given:
        state, _ = step(state, batch)
    return state


def assert_same(got, wanted, bound=BOUND):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float64) for x in (one, other)), 0, bound, err_msg=jax.tree_util.keystr(path)
        )


def values(state):
    return jax.device_get((state.params, state.opt_state))


def assert_kept(state, step):
    report = judged(step, state, batches(1)[0])
    assert report.kept, report
    assert report.ratio <= 1.02


def assert_trains_as_one_device(shapes, tx, plan, reference=None, state_bound=BOUND):
    state, step = start(plan, shapes, tx)
    after, alone = values(run(state, step, batches())), by_hand(shapes, reference or tx)
    assert_same(after[0], alone[0])
    assert_same(after[1], alone[1], state_bound)
