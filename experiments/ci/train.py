"""A training step in plain JAX and optax, with weights and Adam's moments sharded over all devices.

It does not import jdp. `make_step` returns the jitted step with abstract arguments, for `jdp verify` (`verify.yml`);
`python train.py` trains on this machine's devices.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, LAYERS, LENGTH = 512, 4, 256
tx = optax.adamw(3e-4)


def init(key):
    """Return weights and the optimizer's state."""
    weights = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    params = [{"kernel": w, "bias": jnp.zeros(WIDTH)} for w in weights]
    return params, tx.init(params)


def make_step():
    """Return the jitted step and its arguments: shapes, dtypes and shardings, no values."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("data"))

    def loss_fn(params, x, y):
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
            x = jax.lax.with_sharding_constraint(x, by_rows)  # weights are gathered, not rows
        return jnp.mean((x - y) ** 2)

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def abstract(leaf):
        """Return a matrix's shape, sharded by its columns; other arrays stay unsharded."""
        spec = P(None, "data") if len(leaf.shape) == 2 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params, opt_state = jax.tree.map(abstract, jax.eval_shape(init, jax.random.key(0)))
    rows = jax.ShapeDtypeStruct((4 * mesh.size, LENGTH, WIDTH), jnp.float32, sharding=by_rows)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, None))
    return jitted, (params, opt_state, rows, rows)


if __name__ == "__main__":
    train_step, (params, opt_state, x, y) = make_step()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))
    params, opt_state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    for number in range(10):
        x_key, y_key = jax.random.split(jax.random.key(number))
        batch = [jax.device_put(jax.random.normal(key, x.shape), x.sharding) for key in (x_key, y_key)]
        params, opt_state, loss = train_step(params, opt_state, *batch)
        print(f"step {number}  loss {loss:.4f}")
