"""Which checkpoints of a directory stay: policies for Orbax, and the metrics that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint import checkpoint_managers

from jdp.base.formatting import finite_or_none
from jdp.checkpoint.upkeep import ownership


class PreserveForeign:
    """A policy of Orbax that also preserves foreign entries, and announces the steps to be deleted."""

    def __init__(self, directory: Path, announce: Callable[[Sequence[int]], None], policy: Any) -> None:
        self._directory, self._announce, self._policy = directory, announce, policy

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        kept = self._policy.should_preserve(checkpoints, context=context)
        pairs = list(zip((info.step for info in checkpoints), kept, strict=True))
        stays = [bool(keep) or not ownership.may_delete(self._directory, step) for step, keep in pairs]
        self._announce([step for (step, _), stay in zip(pairs, stays, strict=True) if not stay])
        return stays


def policy(keep: int | None, keep_every: int | None, score: Any) -> Any:
    """Return a policy of Orbax that keeps a checkpoint if any of these keeps it."""
    policies: list[Any] = [checkpoint_managers.LatestN(keep)]  # None: all
    if keep_every is not None:
        policies.append(checkpoint_managers.EveryNSteps(keep_every))
    if score is not None:
        policies.append(checkpoint_managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False))
    return checkpoint_managers.AnyPreservationPolicy(policies)


def metric(name: str, value: Any) -> float | None:
    """Return a metric for JSON; None, for one that is not finite, means that it was not measured."""
    try:
        return finite_or_none(float(value))
    except (TypeError, ValueError):
        raise ValueError(
            f"A metric is one number; {name!r} is {value!r}. Leave it out where it was not measured."
        ) from None
