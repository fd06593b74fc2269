"""What a loss' program proves: the table of losses.

That the table itself is true is computed in `test_losses_table.py`. A loss that mixes rows must never be proven a sum;
one that is a sum and not proven so is tried on values, or shown the whole batch.
"""

import contextlib
import re

import jax
import optax
import pytest
from losses_that_mix import MIXES
from losses_that_sum import SUMS

import jdp
from jdp.core.gradients.loss_trace import trace_loss
from jdp.core.gradients.row_proof.proof import prove
from jdp.core.precision import Precision

PLAN = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1]))
UNDECIDED = {"sorted_against_sorted", "mixup_by_a_permutation", "state_from_row_to_row", "moco_with_the_new_queue"}
UNDECIDED |= {"gradient_reversal_of_domain_means"}  # whose own gradient is not read
"""Losses that mix, of which their programs do not tell it."""


def proof_of(init, loss, batch, rows=8, mesh=None):
    state = jdp.abstract_state(init, optax.sgd(0.1), PLAN, rng=jax.random.key(0))
    first, second = [trace_loss(loss, Precision(), state, batch(rows), n) for n in (rows, 2 * rows)]
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return prove(first, second)


@pytest.mark.parametrize("each", SUMS, ids=repr)
def test_a_sum_over_rows_is_proven(each):
    proof = proof_of(each.init, each.loss, each.batch)
    assert proof.verdict == "sum" and (proof.reading is not None) == (each.as_sum is not None), proof.why


@pytest.mark.parametrize("each", MIXES, ids=repr)
def test_a_loss_that_mixes_rows_is_never_proven(each):
    proof = proof_of(each.init, each.loss, each.batch)
    assert proof.verdict == ("unknown" if each.name in UNDECIDED else "mixes"), proof
    if proof.verdict == "mixes" and (found := re.search(r"losses_that_mix.py:(\d+)", proof.why)):
        assert int(found[1]) in each.marked_lines
