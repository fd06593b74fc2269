"""From [optimizer] to optax: the learning rate over the run, and the update rule.

Warm-up and schedule count global steps, so microbatches and devices do not change them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jdp.base.formatting import listed
from jdp.base.notices import notice
from jdp.base.toml import cut
from jdp.base.tree_paths import path_of
from jdp.core.update.ema import with_ema
from jdp.core.update.muon import Form, scale_by_muon, scaled
from jdp.core.update.schedules import warmup
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Experiment

Shapes = Mapping[str, tuple[int, ...]]

VECTORS = ("bias", "scale")
"""Last part of the paths of parameters that are vectors, even if stacked layers give them two dimensions."""


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


def optimizer(experiment: Experiment, shapes: Shapes | None = None) -> optax.GradientTransformation:
    """Return the optimizer of [optimizer]; its state counts steps for the learning rate.

    The train step clips, because it knows the norm over all devices. With `ema_decay` the state also has an average of
    the parameters. Muon reads `shapes`, the shapes of all parameters by path; None: all are trained.
    """
    rule, decay = _rule(experiment, shapes or {}), experiment.optimizer.ema_decay
    return rule if decay is None else with_ema(rule, decay)


def _rule(experiment: Experiment, shapes: Shapes) -> optax.GradientTransformation:
    """Return the update rule. Raises ExperimentError if optimizer.make does not return a rule.

    Weight decay excludes biases and norm scales by name, not by dimensions, because those of stacked layers have two.
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
        case "sgd":
            step = optax.trace(chosen.momentum) if chosen.momentum else optax.identity()
            return optax.chain(step, decayed, descent)
        case "muon":
            share = 1.0 if chosen.adam_lr is None else chosen.adam_lr / chosen.lr
            adamw = optax.adamw(lambda count: share * rate(count), **moments, eps=chosen.eps, **decay)
            return muon(adamw, (decayed, descent), shapes, beta=chosen.beta, eps=chosen.eps)


def decay_mask(params: Any) -> Any:
    """Return a tree of bools: True for parameters that decay, False where the last key is `bias` or `scale`."""
    return jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) not in VECTORS, params)


# Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

_OUTER = re.compile(r".*embed.*|(.*_)?emb|wte|wpe|stem|(.*_)?head|classifier|logits")
"""A part of the path of an embedding or a head."""
_HEAD = re.compile(r"(.*_)?head|classifier|logits|.*unembed.*")
_NUMBERED = re.compile(r"(?:params/)?(\w*?)[/_]?(\d+)(?:/\w+)?")
"""A linear map in a model that numbers its layers, such as `layers/2/kernel`, `Dense_2/kernel` or `linear2/kernel`."""
_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)")
RMS = 0.2
"""Root mean square of AdamW's updates, as measured in the paper."""


def muon(
    adamw: optax.GradientTransformation, after: Sequence[optax.GradientTransformation], shapes: Shapes, **settings: Any
) -> optax.GradientTransformation:
    """Return Muon for the hidden matrices and `adamw` for the other parameters.

    The momentum of a matrix [m, n] is orthogonalized and scaled by 0.2 · sqrt(max(m, n)) (Liu et al. 2025,
    arXiv:2502.16982, section 2.2). Its elements then have the root mean square of AdamW's updates, so one learning rate
    and one weight decay serve both. Muon is not for "embeddings, classifier heads, and hidden gains/biases" (README of
    github.com/KellerJordan/Muon). The first layer of an image model embeds its pixels. A convolution is a matrix
    [outputs, all other dimensions], and so is an attention kernel with a dimension for heads. Layers stacked for a
    scan, and experts, are many matrices.

    `after` are weight decay and learning rate, and `settings` are the arguments of `scale_by_muon`. `shapes` has the
    shapes of all parameters by path, which identify stacked layers even if norms are frozen.
    """
    made = partial(_partition, adamw, after, shapes, settings)

    def init(params: Any) -> Any:
        _report(params, matrix_dimensions(params, shapes))
        return made(params).init(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return made(updates).update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _partition(
    adamw: Any, after: Sequence[Any], shapes: Shapes, settings: Mapping[str, Any], params: Any
) -> optax.GradientTransformation:
    dims = matrix_dimensions(params, shapes)
    masked = jax.tree.map(lambda _, dim: optax.MaskedNode() if dim is None else dim, params, dims)
    step = scale_by_muon(weight_dimension_numbers=masked, **settings)
    to_adamws = optax.stateless(lambda updates, _: jax.tree.map(partial(scaled, RMS), updates, masked))
    labels = jax.tree.map(lambda _, dim: "adamw" if dim is None else "muon", params, dims)
    return optax.partition({"muon": optax.chain(step, to_adamws, *after), "adamw": adamw}, labels)


def _report(params: Any, dims: Any) -> None:
    """Report how many matrices Muon updates, and which leaves other than biases and scales AdamW updates."""
    leaves, treedef = jax.tree.flatten_with_path(params)
    found = list(zip(leaves, treedef.flatten_up_to(dims), strict=True))
    hidden = [Form.of(leaf.shape, dim).sizes[0] for (_, leaf), dim in found if dim is not None]
    others = [path_of(path) for (path, _), dim in found if dim is None]
    outer = [path for path in others if not is_vector(path)]
    notice(
        f"muon: {sum(hidden)} matrices in {len(hidden)} leaves; adamw: {len(others)} leaves"
        + (f", besides biases and scales {listed(outer, 6)}" if outer else "")
    )


# Hidden matrices.


def matrix_dimensions(params: Any, shapes: Shapes | None = None) -> Any:
    """Return for each parameter the dimensions of its matrices, counted from the last, or None if it has none.

    `shapes` has the shapes of all parameters by path, frozen ones included; None: those of `params`.
    """
    known = {path_of(path): tuple(leaf.shape) for path, leaf in jax.tree.leaves_with_path(params)} | dict(shapes or {})
    vectors = {path: vector for path, shape in known.items() if is_vector(path) and (vector := _vector(shape))}
    last = set() if any(_HEAD.fullmatch(part) for path in known for part in path.split("/")) else _last_numbered(known)

    def dimensions(path: Any, _: Any) -> MuonDimensionNumbers | None:
        name = path_of(path)
        return None if is_vector(name) or name in last else _dimensions(name, known[name], vectors)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def is_vector(path: str) -> bool:
    """Return True for biases and norm scales (Equinox: `norm/weight`)."""
    *modules, name = path.split("/")
    return name in VECTORS or (bool(modules) and _NORM.search(modules[-1].lower()) is not None)


def _vector(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without last dimensions of size 1: the bias of Equinox' convolution is [outputs, 1, 1]."""
    return shape if shape[-1:] != (1,) else _vector(shape[:-1])


def _last_numbered(shapes: Shapes) -> set[str]:
    """Return the last of each row of numbered linear maps: the head, if no parameter has that name."""
    found: dict[str, tuple[int, str]] = {}
    for path, shape in shapes.items():
        numbered = _NUMBERED.fullmatch(path)
        if numbered and len(shape) == 2 and not is_vector(path):
            found[numbered[1]] = max(found.get(numbered[1], (0, path)), (int(numbered[2]), path))
    return {path for _, path in found.values()}


def _dimensions(path: str, shape: tuple[int, ...], vectors: Shapes) -> MuonDimensionNumbers | None:
    """Return the matrix of a leaf; None for an embedding or a head, or if names and shapes do not identify it."""
    *modules, name = path.split("/")
    if len(shape) < 2 or any(map(_OUTER.fullmatch, (*modules, name))):
        return None
    stacked = _stacked(modules, shape, vectors)
    if len(shape) - (stacked or 0) == 2 or name in ("lora_a", "lora_b") or "expert" in path:
        found = MuonDimensionNumbers(-2, -1)
    elif stacked is None or len(shape) - stacked < 2 or name not in ("kernel", "weight"):
        return None
    else:
        found = _grouped(modules, name, len(shape) - stacked, stacked, vectors)
    return found if min(Form.of(shape, found).sizes[1:]) > 1 else None


def _grouped(modules: list[str], name: str, count: int, stacked: int, vectors: Shapes) -> MuonDimensionNumbers:
    """Return the matrix of a kernel with `count` dimensions, three or more, not counting those that stack layers.

    Flax's kernels end with the output dimensions, as many as the bias has; Equinox' kernels begin with them.
    """
    if name == "weight":
        return MuonDimensionNumbers(tuple(range(1 - count, 0)), (-count,))
    if bias := vectors.get("/".join((*modules, "bias"))):
        outputs = len(bias) - stacked
    else:
        outputs = count - 1 if modules[-1] in ("query", "key", "value") else 1
    return MuonDimensionNumbers(tuple(range(-count, -outputs)), tuple(range(-outputs, 0)))


def _stacked(modules: list[str], shape: tuple[int, ...], vectors: Shapes) -> int | None:
    """Return how many first dimensions stack layers: those shared with the nearest vectors; None without such vectors.

    Vectors in another part of the model do not count, because only the layers may be stacked.
    """
    outermost = 1 if modules[:1] == ["params"] else 0
    for depth in range(len(modules), outermost, -1):
        inside = "/".join(modules[:depth]) + "/"
        near = [vector for path, vector in vectors.items() if path.startswith(inside)]
        if near:
            same = (takewhile(lambda pair: pair[0] == pair[1], zip(vector, shape, strict=False)) for vector in near)
            return min(min(len(vector) - 1, len([*pairs])) for vector, pairs in zip(near, same, strict=True))
    return None
