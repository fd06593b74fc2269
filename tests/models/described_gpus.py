"""A training step of a GPT compiled for GPUs that are not there, and attention with its gradients."""

import jax
import numpy as np
import optax
from flax import nnx
from without_triton import WITHOUT_TRITON

import jdp
from jdp.experiment.losses import text_loss
from jdp.foresight.targets.relocate import abstract_on
from jdp.foresight.targets.resolve import target
from jdp.foresight.verify import report
from jdp.models import build


def compiled_step(name, config, plan, *columns, partitioning=None):
    """Compile a step of 16 rows for the target of this name; return the program, and whether it keeps the contract."""
    state = jdp.abstract_state(
        lambda rng: build(config, rngs=nnx.Rngs(rng)), optax.sgd(1e-3), plan, rng=jax.random.key(0)
    )
    step = jdp.make_train_step(
        text_loss, plan, precision="bf16", partitioning=partitioning, compiler=WITHOUT_TRITON, check_loss=False
    )
    batch = {column: np.zeros((16, config.context), np.int32) for column in ("tokens", "targets", "weights", *columns)}
    devices = target(name)
    candidate = abstract_on(step, state, batch, devices)
    compiled = candidate.compile(devices)
    return compiled, report(candidate.step, candidate.state, compiled, name)


def with_gradients(form):
    """Return a program that computes `form` and the gradients of its arguments, given that of its result."""

    @jax.jit
    def run(cotangent, *arguments):
        mixed, pull = jax.vjp(form, *arguments)
        return mixed, *pull(cotangent)

    return run
