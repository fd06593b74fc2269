"""What a loss' program proves: the table of losses, and forms that a rule could take for a sum by mistake.

That the table itself is true is computed in `test_losses_table.py`. A loss that mixes rows must never be proven a sum;
one that is a sum and not proven so is tried on values, or shown the whole batch.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from losses_that_mix import MIXES
from losses_that_sum import SUMS

import jdp
from jdp.core.gradients.loss_trace import trace_loss
from jdp.core.gradients.row_proof.proof import prove
from jdp.core.precision import Precision
from jdp.foresight.targets.resolve import target

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


def batch_of(rows):
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(rows, 6)).astype("f"), "w": random.uniform(size=rows).astype("f")}


def init(_):
    return {"w": jnp.ones((6, 6))}


def of_rows(form):
    """A loss of x · w, [rows, 6], and the rows' weights, as `form` makes total and weight of them."""
    return lambda params, batch, rng: jdp.Loss(*form(batch["x"] @ params["w"], batch["w"]))


SORTED = jax.jit(jax.lax.sort)
clipped = jax.custom_vjp(lambda y: y)
clipped.defvjp(lambda y: (y, None), lambda _, g: (g / jnp.linalg.norm(g),))
FORMS = {
    "views put one after another, and taken apart": (
        lambda y, w: (jnp.multiply(*jnp.split(jnp.concatenate([y, 2 * y]) ** 2, 2)).sum(), w.sum()),
        "sum",
    ),
    "views put one after another, compared with the other row's": (
        lambda y, w: ((jnp.concatenate([y, 2 * y]) * jnp.repeat(y, 2, axis=0)).sum(), w.sum()),
        "mixes",
    ),
    "each row's number repeated, as einops does": (
        lambda y, w: (jnp.multiply(jnp.tile(w[:, None, None], (1, 5, 6)), y[:, None]).sum(), w.sum()),
        "sum",
    ),
    "tiled views, taken apart": (
        lambda y, w: (jnp.multiply(*jnp.split(jnp.tile(y, (2, 1)) ** 2, 2)).sum(), w.sum()),
        "sum",
    ),
    "tiled views, compared with another row's": (
        lambda y, w: ((jnp.tile(y, (2, 1)) * jnp.repeat(y, 2, axis=0)).sum(), w.sum()),
        "mixes",
    ),
    "a constant for each row by tiling one": (
        lambda y, w: ((y.sum(1) * jnp.tile(jnp.arange(2.0), len(w) // 2)).sum(), w.sum()),
        "unknown",
    ),
    "a sum over rows, tiled over them": (
        lambda y, w: ((y * jnp.tile(y.sum(0, keepdims=True), (len(y), 1))).sum(), w.sum()),
        "mixes",
    ),
    "the last rows only": (lambda y, w: ((y[4:] ** 2).sum(), w.sum()), "mixes"),
    "all rows but one": (lambda y, w: ((y[:-1] ** 2).sum(), w.sum()), "mixes"),
    "a weight for each row's number": (lambda y, w: ((y.sum(1) * jnp.arange(len(w))).sum(), w.sum()), "unknown"),
    "a constant weight": (lambda y, w: ((y**2).sum(), 100.0), "mixes"),
    "a sum over a mean's weight": (lambda y, w: ((y**2).sum(), w.mean()), "mixes"),
    "a mean of weight one": (lambda y, w: ((y**2).mean(), 1.0), "sum"),
    "one added to the sum": (lambda y, w: ((y**2).sum() + 1.0, w.sum()), "unknown"),
    "one added for each row": (lambda y, w: ((y**2).sum() + len(w), w.sum()), "sum"),
    "rows divided by their number": (lambda y, w: ((y**2 / len(w)).sum(), 1.0), "sum"),
    "a function of rows divided by their number": (lambda y, w: (jnp.exp(y / len(w)).sum(), w.sum()), "unknown"),
    "rows as a matrix of their own": (lambda y, w: ((y.reshape(4, -1, 6).sum(1) ** 2).sum(), w.sum()), "mixes"),
    "rows in chunks": (lambda y, w: ((y.reshape(4, -1, 6) ** 2).sum((0, 2)).sum(), w.sum()), "sum"),
    "a part of the chunks": (lambda y, w: ((y.reshape(4, -1, 6) ** 2).sum(1)[:2].sum(), w.sum()), "mixes"),
    "reversed rows": (lambda y, w: ((y[::-1] ** 2).sum(), w.sum()), "sum"),
    "reversed rows times rows": (lambda y, w: ((y[::-1] * y).sum(), w.sum()), "mixes"),
    "a running sum over features": (lambda y, w: (jnp.cumsum(y, axis=1).sum(), w.sum()), "sum"),
    "a running sum over rows": (lambda y, w: (jnp.cumsum(y, axis=0).sum(), w.sum()), "mixes"),
    "decay in a loop over rows": (
        lambda y, w: (jax.lax.scan(lambda c, v: (0.9 * c + v.sum(), None), 0.0, y)[0], w.sum()),
        "mixes",
    ),
    "a sum in a loop over rows": (
        lambda y, w: (jax.lax.scan(lambda c, v: (c + v.sum(), None), 0.0, y)[0], w.sum()),
        "sum",
    ),
    "an index of each row": (lambda y, w: (y[jnp.arange(len(w)), (w * 5).astype(int)].sum(), w.sum()), "sum"),
    "an index of another row": (lambda y, w: (y[(w * 5).astype(int)].sum(), w.sum()), "unknown"),
    "two products contracted over rows": (lambda y, w: (jnp.einsum("rf,r->", y, w), w.sum()), "sum"),
    "a covariance": (lambda y, w: (jnp.square(y.T @ y).sum(), w.sum()), "mixes"),
    "one row written": (lambda y, w: (y.at[0].set(0.0).sum(), w.sum()), "unknown"),
    "a column written": (lambda y, w: (y.at[:, 0].set(0.0).sum(), w.sum()), "sum"),
    "columns sorted apart": (lambda y, w: (jnp.square(jnp.diff(jnp.sort(y, axis=0), axis=1)).sum(), w.sum()), "mixes"),
    "two sorts by one function": (lambda y, w: ((SORTED(y[:, 0]) * SORTED(y[:, 1])).sum(), w.sum()), "mixes"),
    "halves of views that were sorted together": (
        lambda y, w: (jnp.multiply(*jnp.split(jnp.sort(jnp.concatenate([y[:, 0], -y[:, 0]])), 2)).sum(), w.sum()),
        "unknown",
    ),
    "every second of two columns, sorted together": (
        lambda y, w: (jnp.square(jnp.sort(y[:, :2].reshape(-1))[::2]).sum(), w.sum()),
        "unknown",
    ),
    "ones for half of the rows, zeros for the others": (
        lambda y, w: ((y[:, 0] * jnp.concatenate([jnp.ones(len(w) // 2), jnp.zeros(len(w) // 2)])).sum(), w.sum()),
        "unknown",
    ),
    "ones for half of the rows, by padding": (
        lambda y, w: ((y[:, 0] * jnp.pad(jnp.ones(len(w) // 2), (0, len(w) // 2))).sum(), w.sum()),
        "unknown",
    ),
    "two numbers, each for half of the rows": (
        lambda y, w: ((y[:, 0] * jnp.repeat(jnp.array([1.0, 3.0]), len(w) // 2)).sum(), w.sum()),
        "unknown",
    ),
    "two numbers by turns": (
        lambda y, w: ((y[:, 0] * jnp.broadcast_to(jnp.array([1.0, 3.0]), (len(w) // 2, 2)).ravel()).sum(), w.sum()),
        "unknown",
    ),
    "ones put beside ones": (
        lambda y, w: ((y[:, 0] * jnp.concatenate([jnp.ones(len(w) // 2)] * 2)).sum(), w.sum()),
        "sum",
    ),
    "a row's number in a loop": (
        lambda y, w: (jax.lax.map(lambda v: v[0].sum() * v[1], (y, jnp.arange(len(w)))).sum(), w.sum()),
        "unknown",
    ),
    "rows reversed along another axis": (
        lambda y, w: ((y.reshape(4, -1, 6)[::-1] * y.reshape(4, -1, 6)[:, ::-1]).sum(), w.sum()),
        "unknown",
    ),
    "a sum for each row": (lambda y, w: ((jnp.ones((len(w), len(w))) @ y).sum(), w.sum()), "mixes"),
    "a factor a row": (lambda y, w: (jax.lax.fori_loop(0, len(w), lambda i, c: 0.9 * c, y).sum(), w.sum()), "unknown"),
    "a sum once a row": (
        lambda y, w: (jax.lax.fori_loop(0, len(w), lambda i, c: c + y.sum(), 0.0), w.sum()),
        "unknown",
    ),
    "a power of rows": (lambda y, w: ((y ** len(w)).sum(), w.sum()), "unknown"),
    "a column by rows": (lambda y, w: (y[:, len(w) % 5].sum(), w.sum()), "unknown"),
    "every second row by windows": (
        lambda y, w: (jax.lax.reduce_window(y, 0.0, jax.lax.add, (1, 1), (2, 1), "VALID").sum(), w.sum()),
        "mixes",
    ),
    "a weight of yes and no": (lambda y, w: (y.sum(), (w > 2).sum().astype(bool).astype(float)), "mixes"),
    "a gradient of one's own": (lambda y, w: (clipped(y).sum(), w.sum()), "unknown"),
    "a branch by rows": (lambda y, w: (jax.lax.cond(w.sum() > 3, jnp.sum, jnp.max, y), w.sum()), "mixes"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_look_alike_are_told_apart(name):
    form, verdict = FORMS[name]
    proof = proof_of(init, of_rows(form), batch_of)
    assert proof.verdict == verdict, proof.why


@pytest.mark.parametrize(
    "form",
    [lambda q, rows, w: q + jnp.square(w).sum() / rows, lambda q, rows, w: q * rows],
    ids=["a penalty over rows", "times rows"],
)
def test_what_follows_a_quotient_does_not_grow_with_the_rows(form):
    def loss(params, batch, rng):
        nll = jnp.square(batch["x"] @ params["w"]).mean(1) * batch["w"]
        return form(nll.sum() / batch["w"].sum(), len(nll), params["w"])

    assert proof_of(init, loss, batch_of).verdict == "unknown"


def test_a_metric_that_is_no_sum_is_told():
    def loss(params, batch, rng):
        y = batch["x"] @ params["w"]
        return jdp.Loss((y**2).sum(), batch["w"].sum(), {"largest": y.max()})

    proof = proof_of(init, loss, batch_of)
    assert proof.verdict == "sum" and not proof.of_metrics


@pytest.mark.aot
def test_a_proof_computes_constants_where_the_mesh_is_only_described():
    """`jdp plan` proves under the mesh of devices that are not there, on which nothing can be computed."""
    mesh = jdp.make_mesh(devices=target("h100:1x1").devices)
    proofs = {each.name: proof_of(each.init, each.loss, each.batch, mesh=mesh) for each in SUMS}
    assert {name: proof.why for name, proof in proofs.items() if proof.verdict != "sum"} == {}
