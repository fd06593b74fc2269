"""From [optimizer] to optax: the learning rate over the run, and the update rule.

Warm-up and schedule count global steps, so microbatches and devices do not change them. LAMB, LARS and Adafactor use
the norm of each layer (`by_layer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jdp.base.toml import cut
from jdp.base.tree_paths import path_of
from jdp.core.update.ema import with_ema
from jdp.core.update.schedules import warmup
from jdp.experiment.file import ExperimentError
from jdp.experiment.muon import VECTORS, muon
from jdp.experiment.schema.experiment import Experiment
from jdp.models import GPTConfig, ViTConfig


def learning_rate(experiment: Experiment) -> optax.Schedule:
    """Return the learning rate as a function of the number of completed optimizer steps.

    It rises over the warm-up (`jdp.warmup`), whose last step has the peak. Then it is constant, or falls to
    `final_lr_fraction` of the peak at the end of the run: linearly, or as half a cosine (arXiv:1608.03983, eq. 5,
    without restarts). Steps are global: accumulation and device count do not change them.
    """
    settings, peak = experiment.optimizer, experiment.optimizer.lr
    steps = max(experiment.train.steps - settings.warmup_steps, 1)
    if settings.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps, alpha=settings.final_lr_fraction)
    elif settings.schedule == "linear":
        after = optax.linear_schedule(peak, peak * settings.final_lr_fraction, steps)
    else:
        after = optax.constant_schedule(peak)
    return warmup(after, settings.warmup_steps)


def optimizer(
    experiment: Experiment, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> optax.GradientTransformation:
    """Return the optimizer of [optimizer]; its state counts steps for the learning rate.

    The train step clips, because it knows the norm over all devices. With `ema_decay` the state also has an average of
    the parameters. Muon reads `shapes`, the shapes of all parameters by path; None: all are trained.
    """
    rule, decay = _rule(experiment, shapes or {}), experiment.optimizer.ema_decay
    return rule if decay is None else with_ema(rule, decay)


def _rule(experiment: Experiment, shapes: Mapping[str, tuple[int, ...]]) -> optax.GradientTransformation:
    """Return the update rule. Raises ExperimentError if optimizer.make does not return a rule.

    Weight decay excludes biases and norm scales by name, not by number of dimensions, because the scales of stacked
    layers have two.
    """
    chosen, rate = experiment.optimizer, learning_rate(experiment)
    if chosen.make:
        rule = chosen.call(rate)
        if not isinstance(rule, optax.GradientTransformation):
            raise ExperimentError(
                f"optimizer.make = {chosen.make!r} returns an optax.GradientTransformation; given {cut(repr(rule))}: "
                "return one"
            )
        return rule
    config = experiment.model.config
    stacked = isinstance(config, GPTConfig | ViTConfig) and bool(config.scan)
    decay: dict[str, Any] = {"weight_decay": chosen.weight_decay, "mask": decay_mask}
    moments: dict[str, Any] = {"b1": chosen.b1, "b2": chosen.b2}
    decayed, descent = optax.add_decayed_weights(**decay), optax.scale_by_learning_rate(rate)
    match chosen.name:
        case "adamw":
            return optax.adamw(rate, **moments, eps=chosen.eps, **decay)
        case "adam":
            return optax.adam(rate, **moments, eps=chosen.eps)
        case "lion":
            return optax.lion(rate, **moments, **decay)
        case "adagrad":
            return optax.adagrad(rate, eps=chosen.eps)
        case "sgd":
            step = optax.trace(chosen.momentum) if chosen.momentum else optax.identity()
            return optax.chain(step, decayed, descent)
        case "adafactor":  # as in optax, but the rate comes last, so that it scales the decay as in the other rules
            scaled = by_layer(optax.scale_by_param_block_rms(), stacked)
            mean = [optax.ema(chosen.momentum, debias=False)] if chosen.momentum else []
            clipped = by_layer(optax.clip_by_block_rms(1.0), stacked)
            step = optax.chain(optax.chain(optax.scale_by_factored_rms(), clipped, scaled, *mean))
            return optax.chain(step, decayed, descent)
        case "lamb":
            adam = optax.scale_by_adam(**moments, eps=chosen.eps)
            trust = by_layer(optax.scale_by_trust_ratio(), stacked)
            return optax.chain(adam, decayed, trust, descent)
        case "lars":
            trust = by_layer(optax.scale_by_trust_ratio(trust_coefficient=0.001), stacked)  # as optax.lars
            masked = optax.masked(trust, decay_mask)  # biases and scales keep the plain rate (arXiv:1708.03888, sec. 5)
            return optax.chain(decayed, masked, descent, optax.trace(chosen.momentum))
        case "rmsprop":
            return optax.rmsprop(rate, decay=chosen.b2, eps=chosen.eps, momentum=chosen.momentum or None)
        case "muon":
            share = 1.0 if chosen.adam_lr is None else chosen.adam_lr / chosen.lr
            adamw = optax.adamw(lambda count: share * rate(count), **moments, eps=chosen.eps, **decay)
            return muon(rate, adamw, decayed, shapes, beta=chosen.beta, eps=chosen.eps)


def decay_mask(params: Any) -> Any:
    """Return a tree of bools: True for parameters that decay, False where the last key is `bias` or `scale`."""
    return jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) not in VECTORS, params)


def by_layer(rule: optax.GradientTransformation, stacked: bool) -> optax.GradientTransformation:
    """Apply a stateless, leaf-wise rule to each layer of the leaves below `layers` separately."""
    if not stacked:
        return rule

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def one(update: jax.Array, *param: jax.Array) -> Any:
            return rule.update(update, state, *param)[0]

        def leaf(path: Any, *arrays: jax.Array) -> Any:
            return (jax.vmap(one) if path_of(path).startswith("layers/") else one)(*arrays)

        trees = (updates,) if params is None else (updates, params)
        return jax.tree.map_with_path(leaf, *trees), state

    return optax.GradientTransformation(rule.init, update)
