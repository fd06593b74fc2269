"""The reference that runs are compared with: a plain training loop on one device, without a mesh or a strategy.

It shares almost no code with the steps that it tests: only how a module is split and how a `Loss` is read. Each step
has the key `fold_in(fold_in(rng, STEPS), batches consumed)`, so the proof also detects a fault that all strategies
share. A step whose gradient is not finite changes nothing. The same program with `Noise` makes the shadows, which
measure rounding (`jdp.prove.bounds`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.base.errors import UserError
from jdp.base.words import StrategyName
from jdp.core import flax_nnx
from jdp.core.compiling.options import Compiler, CompilerValue
from jdp.core.gradients.loss_call import as_sums
from jdp.core.gradients.loss_check import hashed
from jdp.core.init.train_state import STEPS
from jdp.core.init.trees import resolve
from jdp.core.plan import Plan
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import make_mesh
from jdp.core.state import Static, TrainState, trained_part, with_trained
from jdp.core.step import Step
from jdp.core.types import Batch, InitFn, PyTree
from jdp.prove.bounds import PAIRS, Record, relative_noise, snapshot

Batches = Callable[[int], Batch]
"""`batches(index)` -> the global batch of the step after `index` consumed batches, as NumPy arrays."""

Noise = tuple[Any, Any]
"""Exaggerated rounding: the seed of random signs, constant over the steps (uint32), and a relative amplitude (float32).
A negative amplitude reverses all signs; 0 is no noise."""

FORWARD = 1 / 2
"""Noise of the weights relative to that of the gradients: the forward pass does not sum over the batch."""
ELSEWHERE = 1 / 16
"""Fraction of the whole gradient's root mean square that is added to the scale of each element; see `_with_noise`."""


QUICK: dict[str, CompilerValue] = {"xla_backend_optimization_level": 0}
"""Halves the time of compilation on CPU. The proof is the same: XLA partitions the program before LLVM runs."""


@dataclass(frozen=True)
class Reference:
    """The training as a plain loop on the first device of the user's plan; `init`, `tx`, `wrt` as in `init_state`."""

    init: InitFn
    tx: optax.GradientTransformation
    step: Step  # the user's, which gives loss, precision and clipping
    rng: jax.Array  # the typed key of all random numbers
    wrt: Any
    batches: Batches
    quick: bool = False  # LLVM's optimisations are off

    def plan(self, strategy: StrategyName, devices: int) -> Plan:
        plan = self.step.plan
        sizes = {name: 1 if devices == 1 else -1 if name == DATA else size for name, size in plan.mesh.shape.items()}
        return replace(plan, mesh=make_mesh(devices=[*plan.mesh.devices.flat][:devices], **sizes), strategy=strategy)

    def step_on(self, plan: Plan, accumulate: int) -> Step:
        """Return the step on another plan; the proof itself compares losses, so that none is tried."""
        compiler = Compiler.of({**dict(self.step.settings.compiler.options), **(QUICK if self.quick else {})})
        return self.step.changed(plan=plan, accumulate=accumulate, check_loss=False, compiler=compiler)

    def initial(self, rng: jax.Array) -> TrainState:
        model, specs = flax_nnx.built(self.init, rng)
        params, model_state, adapter = flax_nnx.split(model)
        static = Static(self.tx, adapter, specs, resolve(params, adapter, self.wrt))
        opt_state = self.tx.init(trained_part(params, static.trained))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, opt_state, model_state, jax.random.fold_in(rng, STEPS), zero, static)

    def next(self, state: TrainState, batch: Batch, noise: Noise) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the state after one more batch (global), and "loss", "weight", "grad_norm"."""
        precision = self.step.settings.precision
        key, trained = jax.random.fold_in(state.rng, state.step + state.skipped), state.static.trained
        working = optax.tree.cast(state.params, precision.compute_dtype)
        seed, amplitude = noise
        working = _with_noise(working, (seed, FORWARD * amplitude))

        def total(part: PyTree) -> tuple[jax.Array, Any]:
            value, model_state = self.loss(with_trained(working, part, trained), state, batch, key)
            sums = as_sums(value, batch)
            return sums.total, (sums, model_state)

        (_, (sums, model_state)), grads = jax.value_and_grad(total, has_aux=True)(trained_part(working, trained))
        grads = jax.tree.map(lambda g: g.astype(precision.reduce_dtype).astype(jnp.float32) / sums.weight, grads)
        grads = _with_noise(grads, noise, of_sums=True)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        if (limit := self.step.settings.clip_norm) is not None:
            grads = jax.tree.map(lambda g: jnp.where(norm > limit, g * limit / norm, g), grads)
        params = trained_part(state.params, trained)
        tx, loss = optax.with_extra_args_support(self.tx), sums.total / sums.weight
        updates, opt_state = tx.update(optax.tree.cast_like(grads, params), state.opt_state, params, value=loss)
        params = with_trained(state.params, optax.apply_updates(params, updates), trained)
        updated = replace(state, step=state.step + 1, params=params, opt_state=opt_state, model_state=model_state)
        skipped, is_finite = replace(state, skipped=state.skipped + 1), jnp.isfinite(norm) & jnp.isfinite(sums.total)
        return optax.tree.where(is_finite, updated, skipped), {"weight": sums.weight, "loss": loss, "grad_norm": norm}

    def loss(self, working: PyTree, state: TrainState, batch: Batch, key: jax.Array) -> tuple[Any, PyTree]:
        """Return the value of the loss function, and the model state afterwards."""
        adapter = state.static.adapter
        model = working if adapter is None else adapter.merge(working, state.model_state, key)
        value = self.step.loss_fn(model, batch, key)
        return value, state.model_state if adapter is None else adapter.changed(model)


def _with_noise(tree: PyTree, noise: Noise, *, of_sums: bool = False) -> PyTree:
    """Add ± amplitude · |x| to each element x, or with `of_sums` ± amplitude · (|x| + size of its terms).

    The error of a gradient is relative to the terms of its sum. Their size is the root mean square of the row (one
    token or one input) or of the leaf. A fraction of that over all leaves is added for a leaf that cancels as a whole,
    as the bias of attention's keys. An exact zero has no terms (the row of a token that did not occur).
    """
    (seed, amplitude), (leaves, treedef) = noise, jax.tree.flatten(tree)
    floats = [leaf.astype(jnp.float32) for leaf in leaves]
    everywhere = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in floats) / float(sum(x.size for x in floats)))

    def add_noise(index: int, x: jax.Array) -> jax.Array:
        scale = jnp.abs(x)
        if of_sums:
            row = _rms(x, axis=-1) if x.ndim else jnp.abs(x)
            scale = jnp.where(x == 0, 0.0, scale + jnp.maximum(row, _rms(x)) + ELSEWHERE * everywhere)
        return x + amplitude * jnp.where(hashed(seed, 2 * index + of_sums, x.shape) < 0.5, 1, -1) * scale

    noisy = [add_noise(i, x).astype(leaf.dtype) for i, (x, leaf) in enumerate(zip(floats, leaves, strict=True))]
    return jax.tree.unflatten(treedef, noisy)


def _rms(x: jax.Array, axis: int | None = None) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axis, keepdims=True))


def record_reference(reference: Reference, steps: int, begin: Callable[[str], None]) -> Record:
    """Run the reference and its shadows, and record them; `begin` gets the name of each run before it starts."""
    batch, device = reference.batches(0), reference.step.plan.mesh.devices.flat[0]
    compile_with = partial(jax.jit, compiler_options=QUICK if reference.quick else None)
    initial, following = compile_with(reference.initial), compile_with(reference.next, donate_argnums=0)
    sums, amplitude = relative_noise(reference.step.settings.precision, batch)
    shadows = [(np.uint32(index // 2), np.float32(amplitude * (-1) ** index)) for index in range(2 * PAIRS)]
    record = Record(sums)
    for index, noise in enumerate([(np.uint32(0), np.float32(0)), *shadows]):
        begin(f"shadow {index} of {2 * PAIRS}: the reference with larger rounding errors" if index else "the reference")
        state, metrics = initial(jax.device_put(reference.rng, device)), None
        for step in range(steps + 1):
            if step:
                state, metrics = following(state, *jax.device_put((reference.batches(step - 1), noise), device))
            values = snapshot(state, metrics)
            record.widen(step, values) if index else record.add(values)
    record.close()
    if not math.isfinite(loss := float(record.values[1]["loss"])):
        raise UserError(f"The loss on one device is {loss} at the first step, which nothing can be compared with.")
    return record
