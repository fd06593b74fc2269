"""Documents packed into one row: each has the logits, and the gradients, that it has alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_models as models
from test_models import make

from jdp.models import next_token_loss
from jdp.models.transformer import Segments

LLAMA = dataclasses.replace(models.LLAMA, context=12, scan=False)
GPT2 = dataclasses.replace(models.GPT2, context=12)
TOKENS = np.array(jax.random.randint(jax.random.key(7), (2, 12), 0, 19))
PACKED = np.array([[1] * 5 + [2] * 4 + [0] * 3, [7] * 3 + [8] * 9])  # two documents and padding; two that fill a row
DOCUMENTS = [(0, 0, 5), (0, 5, 9), (1, 0, 3), (1, 3, 12)]
WINDOW = dataclasses.replace(LLAMA, scan=True, window=3)
STYLES = pytest.mark.parametrize("config", [LLAMA, GPT2, WINDOW], ids=["llama", "gpt2", "window"])
forward = jax.jit(lambda model, tokens, segments=None: model(tokens, segments=segments))


def padded(row, start, end):
    return np.pad(TOKENS[row, start:end], (0, 12 - end + start))


@STYLES
@pytest.mark.default_ids("llama", "window")
def test_packed_documents_have_their_own_logits(config):
    model = make(config)
    packed, plain = np.asarray(forward(model, TOKENS, PACKED)), np.asarray(forward(model, TOKENS))
    assert np.any(np.abs(packed - plain)[:, 5:] > 0.1)  # what the segments shut out mattered
    for row, start, end in DOCUMENTS:
        alone = np.asarray(forward(model, np.stack([padded(row, start, end)] * 2)))  # two rows: the program of `plain`
        # Softmax over the row adds exact zeros for what is masked, but sums in another order.
        np.testing.assert_allclose(packed[row, start:end], alone[0, : end - start], rtol=1e-4, atol=1e-4)


def test_packed_batches_have_their_documents_gradients():
    model = make(GPT2)

    def total(model, tokens, segments, weights):
        return next_token_loss(model(tokens[:, :-1], segments=segments[:, :-1]), tokens[:, 1:], weights)[0]

    gradient = jax.jit(jax.grad(total))
    inside = (PACKED[:, 1:] == PACKED[:, :-1]) & (PACKED[:, 1:] > 0)
    packed = gradient(model, TOKENS, PACKED, inside)
    rows = [padded(*document) for document in DOCUMENTS]
    lengths = np.array([end - start for _, start, end in DOCUMENTS])
    weights = np.arange(1, 12) < lengths[:, None]
    apart = gradient(model, np.stack(rows), np.ones((4, 12), np.int32), weights)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(apart))
    for (path, mine), other in zip(jax.tree.leaves_with_path(packed), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5 * largest, err_msg=jax.tree_util.keystr(path))


def test_positions_begin_anew_in_each_document():
    segments = Segments.of(jnp.array([[4, 4, 4, 2, 2, 4, 0, 0]]))
    np.testing.assert_array_equal(segments.position, [[0, 1, 2, 0, 1, 0, 0, 1]])
    np.testing.assert_array_equal(segments.run, [[0, 0, 0, 1, 1, 2, 3, 3]])


def test_without_segments_no_mask_enters_the_program():
    model = make(LLAMA)
    trace = jax.make_jaxpr(lambda segments: model(TOKENS, segments=segments))
    plain, packed = str(trace(None)), str(trace(PACKED))
    assert "cumsum" in packed and "bool[2,1,12,12]" in packed
    assert "cumsum" not in plain and "bool[2,1,12,12]" not in plain
