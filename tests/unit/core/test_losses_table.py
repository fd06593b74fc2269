"""The trial accepts losses that are sums over rows and refuses losses that mix rows."""

import jax
import optax
import pytest
from losses_table import MIXES, SUMS, Entry
from trainings import plan_of

import jdp

ROWS = 8
PLAN = plan_of("ddp", 2)


def tried(each: Entry):
    """The step after the trial of the loss, which returns `jdp.Loss`, as several microbatches ask for."""

    def loss(model, batch, rng):
        rows, value = len(jax.tree.leaves(batch)[0]), each.loss(model, batch, rng)
        return value if isinstance(value, jdp.Loss) else jdp.Loss(value * rows, rows)

    state = jdp.init_state(each.init, optax.sgd(0.1), PLAN, rng=jax.random.key(0))
    step, batch = jdp.make_train_step(loss, PLAN, accumulate=2), each.batch(ROWS)
    with jax.transfer_guard("disallow"):
        step.loss.check_first(state, batch)
    return step


@pytest.mark.parametrize("each", SUMS, ids=repr)
@pytest.mark.default_ids("ctc", "diffusion")
def test_the_trial_accepts_a_sum(each):
    assert tried(each).partitioning == "manual"


@pytest.mark.parametrize("each", MIXES, ids=repr)
@pytest.mark.default_ids("load_balancing", "siblings_are_alike", "cox_survival")
def test_the_trial_refuses_a_loss_that_mixes_rows(each):
    with pytest.raises(ValueError, match=r"must be a sum over rows.*(change the part of rows|Loss)"):
        tried(each)
