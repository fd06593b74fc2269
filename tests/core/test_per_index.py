"""Where a program has a dimension along which it computes each index by itself, and the program for one index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdp.core.tracing.per_index import Along, Mixes, one_index, places_of


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (lambda x: x @ x.mT, Along(0)),
        (lambda x: x.transpose(1, 0, 2).reshape(4, 15), Along(1, 5)),
        (lambda x: jnp.linalg.norm(x, axis=(1, 2)), Along(0)),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + i, x), Along(0)),
        (lambda x: jax.lax.cond(True, lambda y: 2 * y, jnp.ones_like, x), Along(0)),
        (lambda x: jnp.cumsum(x, 0), Mixes),
        (lambda x: x / x.sum(), Mixes),
        (lambda x: jnp.einsum("lmn,kmn->lk", x, x), Mixes),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, y), x[0], x)[1], Mixes),
        (lambda x: x.at[0].set(0.0), Mixes),
    ],
)
def test_where_a_program_has_its_leading_dimension(function, place):
    program = jax.make_jaxpr(function)(jnp.ones((3, 4, 5)))
    if place is Mixes:
        with pytest.raises(Mixes):
            places_of(program, [Along(0)])
    else:
        assert places_of(program, [Along(0)]) == [place]
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 5)), jnp.float32)
        [eqn], whole = jax.make_jaxpr(jax.jit(function))(x).eqns, np.moveaxis(function(x), place.dim, 0)
        for i, wanted in enumerate(np.split(whole, 3)):
            [got] = one_index(eqn, [x[i : i + 1]], [Along(0)])
            np.testing.assert_allclose(np.moveaxis(got, place.dim, 0), wanted, rtol=1e-6)
