"""Check the settings of a step before anything is traced: what each may be, and which of them go together."""

from typing import Any

from jdp.base.notices import notice
from jdp.base.numbers import is_integer, is_number
from jdp.base.words import Partitioning
from jdp.core.plan import Plan
from jdp.core.update.local_steps import LocalSteps
from jdp.core.wire.settings import WIDE, Wire


def check_settings(accumulate: int, group: int, partitioning: Partitioning | None) -> None:
    """Check what every step has. Raises ValueError."""
    counts = (
        ("accumulate", "the number of microbatches", accumulate),
        ("group", "the number of neighbouring rows that belong together", group),
    )
    for name, what, value in counts:
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name} is {what}, at least 1; given {value!r}. Give an integer.")
    if partitioning not in ("auto", "manual", None):
        raise ValueError(
            f'partitioning is "auto", "manual" or None (jdp chooses); given {partitioning!r}. Leave it out.'
        )


def check_training_settings(clip_norm: float | None, noise_scale: bool, overlap: bool | None, donate: bool) -> None:
    """Check what a training step has besides. Raises ValueError."""
    if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm is a positive norm, or None; given {clip_norm!r}. Give a number, such as 1.0.")
    if noise_scale not in (True, False):
        raise ValueError(f"noise_scale is True, or False not to measure it; given {noise_scale!r}. Give a bool.")
    if overlap not in (True, False, None):
        raise ValueError(f"overlap is True, False, or None (jdp chooses); given {overlap!r}. Leave it out.")
    if donate not in (True, False):
        raise ValueError(f"donate is True, or False to keep the old state; given {donate!r}. Give a bool.")


def settled_partitioning(
    partitioning: Partitioning | None,
    plan: Plan,
    wire: Wire,
    buckets: Any,
    local: LocalSteps | None,
    noise_scale: bool,
) -> Partitioning | None:
    """Return "manual" if a setting of a training step takes that, else what was asked for."""
    sends_otherwise = wire != WIDE or buckets is not None
    if local is not None:
        _check_local_steps(wire, buckets, partitioning)
        if plan.offload is not None:
            raise ValueError(
                f"local_steps keeps an optimizer on every replica's devices; given Plan(offload={plan.offload!r}) too: "
                "leave one of them out."
            )
    if sends_otherwise:
        _check_synchronisation(wire, buckets, partitioning, plan)
    if noise_scale:
        _check_noise_scale(plan, partitioning, local)
    return "manual" if local is not None or sends_otherwise or noise_scale else partitioning


def _check_local_steps(wire: Wire, buckets: Any, partitioning: Partitioning | None) -> None:
    others = {"wire": wire != WIDE, "buckets": buckets is not None, 'partitioning="auto"': partitioning == "auto"}
    if given := [name for name, is_given in others.items() if is_given]:
        raise ValueError(
            'local_steps takes neither wire nor buckets nor partitioning="auto"; given '
            f"{' and '.join(given)}: leave that out, or local_steps."
        )


def _check_synchronisation(wire: Wire, buckets: Any, partitioning: Partitioning | None, plan: Plan) -> None:
    """Check wire and buckets against the partitioning and the strategy; report what a strategy leaves out of them."""
    whole = is_integer(buckets) and buckets > 0
    if buckets is not None and buckets != "auto" and not whole:
        raise ValueError(
            f'buckets is a number of bytes, at least 1, "auto" or None; given {buckets!r}: give an integer, such as '
            "25_000_000."
        )
    name = "buckets" if wire == WIDE else "wire"
    if partitioning == "auto":
        raise ValueError(
            f'{name} takes partitioning="manual", where jdp issues the collectives; given partitioning="auto", where '
            "XLA does: leave partitioning out."
        )
    if wire.weights is not None and plan.row.gather == "never":
        notice(f"{plan.strategy} gathers no weights: what Wire.weights={wire.weights!r} asks changes nothing there")
    if plan.row.gather != "use":
        return
    if wire.gradients in ("topk", "powersgd"):
        raise ValueError(
            f"{wire.gradients} needs error feedback, which {plan.strategy} does not have, as it reduces inside the "
            f"backward pass; given wire={wire.gradients!r}: take zero2, or int8, which rounds right on average."
        )
    if wire.gradients is not None and wire.error_feedback:
        notice(f"{plan.strategy} reduces inside the backward pass: wire={wire.gradients!r} has no error feedback there")
    if buckets is not None:
        notice(f"{plan.strategy} reduces each layer where it is computed: buckets={buckets!r} holds for small leaves")


def _check_noise_scale(plan: Plan, partitioning: Partitioning | None, local: LocalSteps | None) -> None:
    fix = "leave noise_scale out"
    if partitioning == "auto" or local is not None:
        given = 'partitioning="auto"' if partitioning == "auto" else "local_steps"
        raise ValueError(f"noise_scale needs each device's own gradient of a step; given {given}: {fix}, or that.")
    if plan.row.gather == "use":
        raise ValueError(
            f"noise_scale needs each device's own gradient, and {plan.strategy} reduces it layer by layer; given "
            f"{plan.strategy}: {fix}, or take zero2."
        )
    if plan.batch_shards == 1:
        raise ValueError(
            f"noise_scale compares gradients of 2 shards of the batch or more; given {dict(plan.mesh.shape)}: {fix}."
        )
