"""Check that a step can use an optimizer: its state is arrays of constant shapes, and its update needs nothing more.

Both are checked on shapes when the state is made, so a mistake is found before a compilation.
"""

import math
import re
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr

from jdp.base.errors import UserError
from jdp.base.formatting import listed
from jdp.base.toml import described
from jdp.base.tree_paths import path_of
from jdp.core.reading.jaxprs import DECOMPOSITIONS, every_eqn
from jdp.core.types import PyTree

GIVEN = "value"
"""Optax' name for the loss, an optimizer's argument besides gradients, state and parameters."""


def is_optimizer(tx: Any) -> bool:
    return not isinstance(tx, type) and all(callable(getattr(tx, name, None)) for name in ("init", "update"))


def check_optimizer(tx: Any) -> None:
    if not is_optimizer(tx):
        fix = " Call it first, with its settings." if callable(tx) else ""
        fix = " Pass its optax transformation." if hasattr(tx, "opt_state") else fix
        raise UserError(f"tx is an optax optimizer, e.g. optax.adamw(3e-4); given {described(tx)}.{fix}")


def apply(tx: Any, grads: PyTree, opt_state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree]:
    """Return parameters and optimizer state after an update, which gets the loss as `value` if it accepts that."""
    if isinstance(params, optax.LookaheadParams):  # two copies; the gradient is that of the fast one
        grads = grads.fast
    tx = optax.with_extra_args_support(tx)
    try:
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    except TypeError as error:  # an optimizer with other extra arguments (optax.contrib.sam)
        if f"unexpected keyword argument {GIVEN!r}" not in str(error):
            raise
        updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def first_state(tx: Any, params: PyTree) -> PyTree:
    """Return `tx.init(params)` with every leaf as a `jax.Array`."""
    opt_state = tx.init(params)
    for path, leaf in jax.tree.leaves_with_path(opt_state):
        if not isinstance(leaf, jax.Array | int | float | complex) and not hasattr(leaf, "__array__"):
            raise UserError(
                f"An optimizer's state holds arrays only; opt_state/{path_of(path)} is {leaf!r}. Keep settings in the "
                "functions of optax.GradientTransformation(init, update)."
            )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=jnp.result_type(leaf)), opt_state)


def check_update(tx: Any, params: PyTree, opt_state: PyTree) -> ClosedJaxpr:
    """Check one update, on shapes alone; return its program."""
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        trace = jax.make_jaxpr(partial(apply, tx), return_shape=True)
        program, (_, after) = trace(params, opt_state, params, loss)
    except Exception as error:
        raise UserError(_why_not(error, params)) from error
    old, new = (
        {path_of(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (opt_state, after)
    )
    for path in dict.fromkeys((*old, *new)):
        if old.get(path) != new.get(path):
            raise UserError(
                f"An optimizer's state keeps its structure, shapes and dtypes from step to step; opt_state/{path} is "
                f"{old.get(path, 'nothing')} before an update and {new.get(path, 'nothing')} after it. Change its init."
            )
    return program


def products(program: ClosedJaxpr) -> set[int]:
    """Return the numbers of elements of the arrays that a program multiplies as matrices, or decomposes."""
    names = {"dot_general", *DECOMPOSITIONS}
    eqns = (eqn for eqn in every_eqn(program.jaxpr) if eqn.primitive.name in names)
    return {math.prod(x.aval.shape) for eqn in eqns for x in eqn.invars}  # pyright: ignore[reportAttributeAccessIssue]


def _why_not(error: Exception, params: PyTree) -> str:
    """Describe the failure of an optimizer's update on shapes; jdp is not its cause."""
    given = f"A step gives an optimizer gradients, state, parameters and {GIVEN}= (the loss); this optimizer's update"
    if isinstance(error, TypeError) and "missing" in str(error) and (missing := re.findall(r"'(\w+)'", str(error))):
        return f"{given} also needs {', '.join(missing)}. Leave out its cause, as in optax.lbfgs(linesearch=None)."
    *_, last = traceback.extract_tb(error.__traceback__)
    said = next(iter(str(error).splitlines()), "").rstrip(".")
    scalars = [path_of(path) for path, leaf in jax.tree.leaves_with_path(params) if not leaf.shape]
    return (
        f"{given} raised {type(error).__name__}: {said} ({Path(last.filename).name}:{last.lineno}). Choose another "
        "optimizer, for all parameters or for those that it cannot update (optax.multi_transform)."
        + (f" Scalars here: {listed(scalars)}." if scalars else "")
    )
