"""Which checkpoints of a directory stay: policies for Orbax, and the metrics that they use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from orbax.checkpoint import checkpoint_managers

from jdp.base.errors import UserError
from jdp.base.formatting import finite_or_none
from jdp.checkpoint.errors import CheckpointError
from jdp.checkpoint.upkeep import ownership


class PreserveForeign:
    """A policy of Orbax that also preserves foreign entries and `held` steps, and announces the steps to be deleted."""

    def __init__(
        self, directory: Path, announce: Callable[[Sequence[int]], None], policy: Any, held: Callable[[], int | None]
    ) -> None:
        self._directory, self._announce, self._policy, self._held = directory, announce, policy, held

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        kept = self._policy.should_preserve(checkpoints, context=context)
        pairs, held = list(zip((info.step for info in checkpoints), kept, strict=True)), self._held()
        stays = [bool(keep) or step == held or not ownership.may_delete(self._directory, step) for step, keep in pairs]
        self._announce([step for (step, _), stay in zip(pairs, stays, strict=True) if not stay])
        return stays


class Best:
    """The metric by which a checkpoint is the best of a directory, if there is one."""

    def __init__(self, name: str | None, mode: str) -> None:
        if mode not in ("min", "max"):
            raise UserError(f'mode is "min" or "max"; given {mode!r}. A loss has "min", an accuracy "max".')
        self.name, self._sign = name, -1.0 if mode == "min" else 1.0

    def score(self, metrics: Mapping[str, Any] | None) -> float:
        """Return the metric, its sign such that more is better; minus infinity if it was not measured."""
        value = None if metrics is None else metrics.get(self.name or "")
        return -math.inf if value is None else self._sign * value

    def numbers(self, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Return metrics for JSON; None, for one that is not finite, means that it was not measured."""
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        if numbers and self.name is not None and self.name not in numbers:
            raise UserError(
                f"The best checkpoint is chosen by {self.name!r}; given the metrics {list(numbers)}. Pass it too."
            )
        return numbers


def policy(keep: int | None, keep_every: int | None, best: Best) -> Any:
    """Return a policy of Orbax that keeps a checkpoint if any of these keeps it."""
    for name, count in (("keep", keep), ("keep_every", keep_every)):
        if count is not None and count < 1:
            raise UserError(f"{name} is a positive number of steps or None; given {count}. Give 1 or more.")
    policies: list[Any] = [checkpoint_managers.LatestN(keep)]  # None: all
    if keep_every is not None:
        policies.append(checkpoint_managers.EveryNSteps(keep_every))
    if best.name is not None:
        policies.append(
            checkpoint_managers.BestN(get_metric_fn=best.score, n=1, keep_checkpoints_without_metrics=False)
        )
    return checkpoint_managers.AnyPreservationPolicy(policies)


def _number(name: str, value: Any) -> float | None:
    try:
        return finite_or_none(float(value))
    except (TypeError, ValueError):
        raise UserError(
            f"A metric is one number; {name!r} is {value!r}. Leave it out where it was not measured."
        ) from None


def chosen(
    directory: Path, steps: Sequence[int], step: int | Literal["best"] | None, best: Best, best_step: int | None
) -> tuple[Path, str]:
    """Return the folder of a step, the best or (None) the newest, and what to do if it is damaged."""
    if step == "best" and best.name is None:
        raise CheckpointError('step="best" needs a metric to go by: Checkpoints(directory, best="eval_loss").')
    number = best_step if step == "best" else max(steps, default=None) if step is None else step
    existing = ", ".join(map(str, steps)) or "none"
    if step == "best" and number is None:
        raise CheckpointError(
            f"No checkpoint in {directory} was saved with a finite {best.name!r}; there are: {existing}."
        )
    if number not in steps:
        which = "" if number is None else f" {number}"
        raise CheckpointError(f"There is no checkpoint{which} in {directory}; there are: {existing}.")
    fix = "There is no other in this directory: remove that folder to start afresh"
    if others := ", ".join(str(other) for other in steps if other != number):
        fix = f"Restore another, with step=... (there are: {others}), or remove that folder"
    return directory / str(number), fix
