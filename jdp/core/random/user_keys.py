"""Random keys that users give."""

from typing import Any

import jax
import jax.numpy as jnp

from jdp.base.errors import UserError


def key_of_init(rng: jax.Array) -> jax.Array:
    """Return the key that `init` gets of a user's seed: one seed makes one model, whatever it is made with."""
    return jax.random.fold_in(rng, 0)


def typed_key(rng: Any) -> jax.Array:
    """Return `rng` as a typed key; a legacy uint32 key is accepted as well."""
    if not isinstance(getattr(rng, "shape", None), tuple):  # an nnx.Rngs has every attribute
        given = repr(rng) if rng is None or isinstance(rng, int | float | str) else f"a {type(rng).__name__}"
        fix = "Pass one that it makes: rngs.params()" if callable(rng) else "Make it of the seed"
        raise UserError(f"rng is a key, such as jax.random.key(0); given {given}. {fix}.")
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        key = rng
    else:
        try:
            key = jax.random.wrap_key_data(rng)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"rng is a key, such as jax.random.key(0); given {rng.dtype}{list(rng.shape)}. Pass one."
            ) from error
    if key.shape:
        raise UserError(f"rng is one key, such as jax.random.key(0); given keys of shape {list(key.shape)}. Pass one.")
    return key
