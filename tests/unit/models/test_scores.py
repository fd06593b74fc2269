"""Nats and ranks of labels, compared with NumPy; and that they are the same in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.models.losses import next_token_loss, next_token_scores, ranks


def test_a_rank_is_the_place_in_a_stable_order():
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (200, 7)).astype(np.float32)  # many are equal
    labels = rng.integers(0, 7, 200)
    order = np.argsort(-logits, axis=1, kind="stable")
    found = np.asarray(ranks(jnp.asarray(logits), jnp.asarray(labels)))
    assert found.tolist() == np.argmax(order == labels[:, None], axis=1).tolist()
    assert ((found == 0) == (np.asarray(jnp.argmax(logits, axis=-1)) == labels)).all()
    among = np.asarray(jax.lax.top_k(logits, 3)[1])
    assert ((found < 3) == (among == labels[:, None]).any(axis=1)).all()


@pytest.mark.rest
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_bytes", [2**20, 5 * 2 * 11 * 4, 1])
def test_scores_are_the_same_in_chunks_and_add_up_to_the_loss(tied, chunk_bytes):
    """Bound: float32 sums of four products in another order."""
    rng = np.random.default_rng(1)
    features, targets = rng.normal(size=(2, 13, 4)).astype(np.float32), rng.integers(0, 11, (2, 13))
    head = rng.normal(size=(11, 4) if tied else (4, 11)).astype(np.float32)
    score = jax.jit(lambda *given: next_token_scores(*given, tied=tied, chunk_bytes=chunk_bytes))
    nats, rank = map(np.asarray, score(features, head, targets))
    logits = (features @ (head.T if tied else head)).astype(np.float64)
    of_target = np.take_along_axis(logits, targets[..., None], axis=-1)
    np.testing.assert_allclose(nats, np.log(np.exp(logits).sum(-1)) - of_target[..., 0], rtol=2e-6, atol=1e-6)
    assert (rank == (logits > of_target).sum(-1)).all()
    total, _ = next_token_loss(jnp.asarray(logits, jnp.float32), targets, np.ones((2, 13)))
    assert nats.sum() == pytest.approx(float(total), rel=1e-6)
