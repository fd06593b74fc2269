"""Which steps of a directory belong to the current run, and which it has abandoned.

A run that goes back to an earlier step and saves again abandons the later ones. They are moved to `abandoned-1`,
`abandoned-2`, …, each of which can be restored from like any directory of checkpoints; nothing deletes them. A state
has no name of its run, only the number of batches consumed. So the steps that are restored and saved through the
directory are followed: a run that restored step 2 and saves step 3 writes another step 3 than the one on disk.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jdp.base.notices import warn
from jdp.checkpoint.upkeep import ownership
from jdp.core.cluster.barrier import from_first_process, meet


class Lineage:
    """The steps of a directory that belong to the current run, and those that it has abandoned."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: int | None = None  # the step that was saved or restored last
        self._own: set[int] = set()
        self._abandoned: set[int] = set()
        self._arrays: list[weakref.ref[Any]] | None = None
        self._warned = False

    def restored(self, step: int, existing: Sequence[int], state: Any) -> None:
        """Record that the complete `state` of `step` was read, from a directory with the steps `existing`, or memory.

        Reading one of the run's own steps changes nothing for the others: it may have been read only to look at it.
        """
        if step not in self._own:
            left = {*existing} & {*ownership.committed_steps(self._directory)}  # damaged ones were set aside
            self._own = {other for other in left if other <= step}
            self._abandoned = left - self._own
        self._last, self._arrays = (step, _references(state)) if step in existing else (None, None)

    def saved(self, step: int, state: Any) -> None:
        """Record that `state` was saved as `step`, after the steps it abandons were set aside."""
        existing = ownership.committed_steps(self._directory)
        self._own, self._abandoned = {other for other in existing if other < step} | {step}, set()
        self._last, self._arrays = step, _references(state)

    def failed(self, step: int | None) -> None:
        """Record that the last save failed, of this step if it had begun."""
        self._last = self._arrays = None
        self._own -= {step}

    def has(self, step: int, state: Any) -> bool:
        """Return True if `step` was saved or restored last; report a `state` other than that."""
        if step != self._last:
            return False
        known, given = self._arrays, _arrays_of(state)
        if known is not None and [id(ref()) for ref in known] != [id(leaf) for leaf in given]:
            warn(
                f"{self._directory}: checkpoint {step} was saved or restored just before and stays; another state with "
                "as many batches consumed is not saved: give it a directory of its own"
            )
        return True

    def set_aside(self, step: int) -> None:
        """Set the steps aside that are no longer this run's once it saves `step`. Every process calls this.

        These are `step` and those after it, and those after the step from which the run was resumed.
        """
        abandoned: list[int] = []
        if jax.process_index() == 0:
            ownership.discard_unfinished(self._directory, step)
            existing = ownership.committed_steps(self._directory)
            abandoned = [other for other in existing if other >= step or other in self._abandoned]
            if step not in abandoned and os.path.lexists(self._directory / str(step)):  # neither complete nor marked
                abandoned.append(step)
        if not from_first_process("whether checkpoints are set aside", bool(abandoned)):
            return
        if abandoned:
            aside = ownership.set_aside(self._directory, abandoned)
            back = f"after step {self._last}" if self._last is not None else "of this run"
            warn(
                f"{self._directory}: checkpoint {step} {back} differs from what was there: {_listed(abandoned)} "
                f"set aside in {aside.name}, which can be restored from and is yours to delete"
            )
        meet("Checkpoints.save, where process 0 sets checkpoints aside")

    def report_skipped(self, step: int) -> None:
        """Report own steps between the last one and `step`, once.

        If training went back to the last one, they are of the abandoned run. If that was restored only to look at it,
        they are not; nothing distinguishes the two.
        """
        last = self._last
        skipped = [other for other in sorted(self._own) if last is not None and last < other < step]
        if skipped and not self._warned:
            self._warned = True
            warn(
                f"{self._directory}: step {last} was restored, and step {step} is saved behind {_listed(skipped)}, "
                f"which stay; if training went back to {last}, they are of the abandoned run, and yours to remove"
            )


def _listed(steps: Sequence[int]) -> str:
    """Return steps in words: "checkpoints 2, 3"."""
    return f"checkpoint{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def _references(state: Any) -> list[weakref.ref[Any]]:
    return [weakref.ref(leaf) for leaf in _arrays_of(state)]


def _arrays_of(state: Any) -> list[jax.Array]:
    """Return the JAX arrays of a state; other leaves, such as scalars of NumPy, take no weak references."""
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
