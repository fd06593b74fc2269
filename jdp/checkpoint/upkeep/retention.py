"""Which checkpoints of a directory to keep, and which is the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jdp.base.errors import UserError
from jdp.base.formatting import finite_or_none
from jdp.checkpoint.errors import CheckpointError

Metrics = Mapping[int, Mapping[str, float | None] | None]
"""Step -> its metrics, None if they cannot be read; a metric is None if it was not finite."""


@dataclass(frozen=True)
class Retention:
    """A checkpoint is kept while any of these rules keeps it; see `jdp.Checkpoints`."""

    keep: int | None
    keep_every: int | None
    best: str | None
    mode: str

    def __post_init__(self) -> None:
        for name, count in (("keep", self.keep), ("keep_every", self.keep_every)):
            if count is not None and count < 1:
                raise UserError(f"{name} is a positive number of steps or None; given {count}. Give 1 or more.")
        if self.mode not in ("min", "max"):
            raise UserError(
                f'mode is "min" or "max"; given {self.mode!r}. Use "min" for a loss, "max" for an accuracy.'
            )

    def best_step(self, metrics: Metrics) -> int | None:
        """Return the best step by the metric, the newest of equals; None if none has a finite value."""
        sign = -1.0 if self.mode == "min" else 1.0
        values = {step: (numbers or {}).get(self.best or "") for step, numbers in metrics.items()}
        scores = [(sign * value, step) for step, value in values.items() if value is not None]
        return max(scores)[1] if scores else None

    def kept(self, metrics: Metrics) -> set[int]:
        """Return the steps to keep."""
        steps = sorted(metrics)
        kept = {*steps} if self.keep is None else {*steps[-self.keep :]}
        kept |= {step for step in steps if self.keep_every is not None and step % self.keep_every == 0}
        if self.best is not None:
            kept |= {step for step, numbers in metrics.items() if numbers is None}  # may be the best
        best = self.best_step(metrics)
        return kept if best is None else kept | {best}

    def numbers(self, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Return metrics for JSON; a metric that is not finite becomes None and counts as not measured."""
        numbers: dict[str, float | None] = {}
        for name, value in metrics.items():
            try:
                numbers[name] = finite_or_none(float(value))
            except (TypeError, ValueError):
                raise UserError(
                    f"A metric is one number; {name!r} is {value!r}. Leave it out if it was not measured."
                ) from None
        if numbers and self.best is not None and self.best not in numbers:
            raise UserError(
                f"The best checkpoint is chosen by {self.best!r}; given only the metrics {list(numbers)}. Pass it too."
            )
        return numbers

    def chosen(
        self, directory: Path, steps: Sequence[int], step: int | Literal["best"] | None, best: int | None
    ) -> tuple[Path, str]:
        """Return the folder of a step, "best" or the newest (None), and the fix if it is damaged."""
        if step == "best" and self.best is None:
            raise CheckpointError('step="best" needs a metric: Checkpoints(directory, best="eval_loss").')
        number = best if step == "best" else max(steps, default=None) if step is None else step
        existing = ", ".join(map(str, steps)) or "none"
        if step == "best" and number is None:
            raise CheckpointError(
                f"No checkpoint in {directory} was saved with a finite {self.best!r}; there are: {existing}."
            )
        if number not in steps:
            which = "" if number is None else f" {number}"
            raise CheckpointError(f"There is no checkpoint{which} in {directory}; there are: {existing}.")
        fix = "This directory has no other checkpoint: remove that folder to start afresh"
        if others := ", ".join(str(other) for other in steps if other != number):
            fix = f"Restore another, with step=... (there are: {others}), or remove that folder"
        return directory / str(number), fix
