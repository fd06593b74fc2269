"""Muon under ZeRO: each form sends what its formula says, and all learn the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from load import load

lesson, toy = load("zero_muon"), load("muon_toy")
N, D = 8, 4 * 8 * 64**2 * 7 / 8  # bytes that a device sends in an all-gather of eight float32 matrices
KINDS = ("reduce-scatter", "all-gather", "all-to-all", "all-reduce")


@pytest.fixture(scope="module")
def zero1(mesh):
    return toy.forms(mesh, "zero1", 4) | {"by hand": lesson.by_hand(mesh, 4)}


def in_units_of_d(result):
    return [pytest.approx(result.sent[kind] / D, abs=0.002) for kind in KINDS]  # scalars beside them: loss, norms


@pytest.mark.parametrize(
    ("form", "sent"),
    [("AdamW", [1, 1, 0, 0]), ("naive", [1, 16, 0, 0])] + [(form, [1, 1, 2 / N, 0]) for form in ("owned", "by hand")],
)
def test_zero1_sends_what_the_formula_says(zero1, form, sent):
    assert sent == in_units_of_d(zero1[form])


def test_all_forms_learn_the_same(zero1):
    losses = [each.losses for form, each in zero1.items() if form != "AdamW"]
    assert losses[0][-1] < losses[0][0]
    for each in losses[1:]:
        np.testing.assert_allclose(each, losses[0], atol=1e-5)  # float32, products in another order


@pytest.mark.rest
@pytest.mark.parametrize(("strategy", "adamw", "naive"), [("ddp", 2, 2), ("zero3", 2.875, 17.875)])
def test_other_strategies_send_what_the_formula_says(mesh, strategy, adamw, naive):
    found = toy.forms(mesh, strategy, 0)
    owned = adamw + (1 if strategy == "ddp" else 2 / N)
    assert [each.total / D for each in found.values()] == pytest.approx([adamw, naive, owned], abs=0.003)
    update = {form: each.flops - found["AdamW"].flops for form, each in found.items()}
    devices_that_compute_each_matrix = N if strategy == "ddp" else 1
    assert update["naive"] / update["owned"] == pytest.approx(devices_that_compute_each_matrix, rel=0.15)  # elementwise


def test_a_shards_update_is_not_the_updates_shard():
    assert lesson.error_of_shards(jnp.sign, 8) == 0
    assert lesson.error_of_shards(lesson.newton_schulz, 2) > 0.5


@pytest.mark.parametrize(("matrices", "padded"), [(2, 8), (12, 16)])
def test_stacks_are_padded_to_the_devices(mesh, matrices, padded):
    assert lesson.sent_by_owners(mesh, matrices) == pytest.approx(2 * D / N * padded / N)
    x = jax.random.normal(jax.random.key(0), (matrices, 16, 16))
    owned = jax.jit(jax.shard_map(lesson.owned, mesh=mesh, in_specs=lesson.SHARDS, out_specs=lesson.SHARDS))
    np.testing.assert_allclose(owned(x), jax.vmap(lesson.newton_schulz)(x), atol=1e-5)
