"""How far two correct runs may differ, element by element: rounding, measured on the training itself.

A run on other devices, or in microbatches, adds the same terms in another order. That leaves a relative error of about
√n · u in a sum of n terms (u the unit roundoff; Higham and Mary 2019, doi:10.1137/18M1226312). Its effect depends on
the training: Adam divides a gradient by its own size, and deep models and many steps amplify errors. So the bound is
measured. *Shadows* are reference runs whose weights w and gradients g (before clipping) are changed at every step by

    ± a/2 · |w|     and     ± a · (|g| + size of the terms of g),     a = FACTOR · u     (`reference._with_noise`)

This is several times the error of correct runs, so that a shadow changes every sign that a correct run may change. The
error of a small GPT's gradients was at most 3 u of that size in bf16, and 13 u in fp32 (n = 1024). The signs of the
noise are random by element and constant over the steps, and shadows come in pairs of opposite signs: if the error
changes a sign, one of the pair shows it. Let `widest[i]` be the largest deviation of element i from the reference, over
all shadows and the steps so far. Two runs are equal at a step if for every element

    |difference[i]|  ≤  MARGIN · (widest[i] + mean of widest over the leaf) + ULPS · eps · |reference[i]|

Here eps is the spacing of the leaf's dtype at 1. Loss, weight and gradient norm are sums in fp32: their bounds have the
fp32 value of a in place of ULPS · eps. Integers and keys must be equal; two NaN count as equal.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jdp.base.tree_paths import path_of
from jdp.core.precision import Precision
from jdp.core.state import TrainState
from jdp.core.types import Batch, Metrics

FACTOR = {"fp32": 128.0, "bf16": 16.0}
"""Least noise of the shadows in units of u. fp32: 2√n for n = 4096; a larger batch has more. bf16: the number of
successive roundings, because products are summed in fp32 and rounded to bf16 between operations."""
MARGIN = 4.0
"""Bound / largest deviation of the shadows: after ten chaotic steps a run is a random draw, as the four shadows are."""
ULPS = 8.0
"""Roundings of the update itself, which are the same in the shadows and the reference."""
PAIRS = 2
"""Pairs of shadows."""
METRICS = ("weight", "loss", "grad_norm")
"""The metrics of a step that are compared."""

Array = NDArray[Any]


class Closest(NamedTuple):
    """The element of a run with the largest ratio of difference to bound."""

    step: int = 0  # optimizer steps done; 0 is the state before the first
    leaf: str = ""  # "loss", "weight", "grad_norm", or the path of a leaf of the state, such as "params/embed/tokens"
    difference: float = 0.0  # |element - reference|
    bound: float = 0.0  # the most that rounding explains
    ratio: float = 0.0  # difference / bound; 0 if both are 0
    beyond: int = 0  # number of leaves beyond their bounds at this step


def snapshot(state: TrainState, metrics: Metrics | None = None) -> dict[str, Array]:
    """Copy the compared metrics, by name, and all leaves of a state, by path, to NumPy."""
    values: dict[str, Any] = {name: metrics[name] for name in METRICS} if metrics else {}
    for path, leaf in jax.tree.leaves_with_path(state):
        key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        values[path_of(path)] = jax.random.key_data(leaf) if key else leaf
    return {name: np.array(value) for name, value in jax.device_get(values).items()}


def relative_noise(precision: Precision, batch: Batch) -> tuple[float, float]:
    """Return a = FACTOR · u of fp32 sums over the batch, and of the coarsest dtype of computation or sums."""
    terms = max(np.size(leaf) for leaf in jax.tree.leaves(batch))
    sums = max(FACTOR["fp32"], 2 * math.sqrt(terms)) * 2.0**-24
    coarse = FACTOR["bf16"] * 2.0**-9 if "bf16" in (precision.compute, precision.reduce) else 0.0
    return sums, max(coarse, sums)


@dataclass
class Record:
    """The reference at every step, and the deviations of its shadows."""

    noise: float  # the relative error that a sum over the batch in fp32 may always have
    values: list[dict[str, Array]] = field(default_factory=list[dict[str, Array]])  # snapshots, by step
    # for each step, name -> largest deviation of each element; `close` replaces deviations by bounds
    widest: list[dict[str, Array]] = field(default_factory=list[dict[str, Array]])

    def add(self, values: dict[str, Array]) -> None:
        self.values.append(values)
        self.widest.append({name: np.zeros(x.shape, np.float32) for name, x in values.items() if _is_float(x)})

    def widen(self, step: int, shadow: Mapping[str, Array]) -> None:
        for name, widest in self.widest[step].items():
            np.maximum(widest, _difference(shadow[name], self.values[step][name]), out=widest)

    def close(self) -> None:
        so_far: dict[str, Array] = {}
        for values, widest in zip(self.values, self.widest, strict=True):
            for name, deviation in widest.items():
                so_far[name] = np.maximum(so_far.get(name, 0.0), deviation)
                scale = np.abs(values[name].astype(np.float32))
                floor = self.noise if name in METRICS else ULPS * float(jax.numpy.finfo(values[name].dtype).eps)
                deviation[...] = MARGIN * (so_far[name] + so_far[name].mean()) + floor * scale

    def compare(self, step: int, values: Mapping[str, Array]) -> Closest:
        """Compare a run with the reference after `step` steps."""
        elements = [self._closest(step, name, x) for name, x in values.items()]
        # Weight and loss precede the gradients. The leaf with the wrong gradient says more than the norm.
        rank = {"weight": 3, "loss": 2, "grad_norm": 0}
        worst = max(elements, key=lambda element: (rank.get(element.leaf, 1) * (element.ratio > 1), element.ratio))
        return worst._replace(beyond=sum(element.ratio > 1 for element in elements))

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each thing that this record cannot prove."""
        if bad := [step for step, values in enumerate(self.values) if step and not np.isfinite(values["loss"])]:
            return (f"the reference's own loss is not finite at step {bad[0]}: later steps prove little",)
        if wide := [step for step, x in enumerate(self.widest) if not all(np.isfinite(b).all() for b in x.values())]:
            return (f"from step {wide[0]} on, rounding alone makes values infinite or NaN: any value passes",)
        names = [name for name in self.values[0] if name.startswith("params/")]
        if weak := [name for name in names if self._is_weak(name)]:
            return (
                f"in {len(weak)} of {len(names)} parameters, such as {weak[0]}, the bound is more than a tenth of the "
                "change in these steps: an error of that size would pass. In bf16, --precision fp32 tightens the bound",
            )
        return ()

    def _is_weak(self, name: str) -> bool:
        first, *later = (values[name].astype(np.float32) for values in self.values)
        changes, bounds = [np.abs(x - first).mean() for x in later], [each[name].mean() for each in self.widest[1:]]
        return all(10 * bound > change or not change for bound, change in zip(bounds, changes, strict=True))

    def _closest(self, step: int, name: str, value: Array) -> Closest:
        difference = _difference(value, self.values[step][name]).ravel()
        if not difference.size:
            return Closest(step, name)
        bound = self.widest[step][name].ravel() if name in self.widest[step] else np.zeros_like(difference)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(difference == 0, 0.0, np.nan_to_num(difference / bound, nan=np.inf, posinf=np.inf))
        index = int(np.argmax(ratio))
        return Closest(step, name, float(difference[index]), float(bound[index]), float(ratio[index]))


def _difference(a: Array, b: Array) -> Array:
    """Return |a - b| elementwise in float32: 0 if both are NaN or the same infinity, infinite if only one is."""
    assert a.shape == b.shape, (a.shape, b.shape)
    if not _is_float(a):
        return (a != b).astype(np.float32)
    a, b = a.astype(np.float32), b.astype(np.float32)
    with np.errstate(invalid="ignore"):
        difference = np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), np.float32(0), difference)


def _is_float(x: Array) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.numpy.floating))
