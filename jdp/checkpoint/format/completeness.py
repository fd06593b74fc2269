"""The rule that a checkpoint is compared with its checksums before it is read, by all processes together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from jdp.base.notices import notice
from jdp.checkpoint.errors import DamagedError
from jdp.checkpoint.format import checksums
from jdp.core.cluster.barrier import from_every_process

_HOURS = 4 * 3600.0  # a share of the largest checkpoints takes longer to read than processes wait elsewhere


def require_whole(folder: Path, fix: str, wanted: Callable[[str], bool]) -> None:
    """Check that files of a checkpoint are as they were saved; one without checksums is taken as it is, and reported.

    Every process calls this; each reads a share of the files, and all raise the same error.
    """
    found = checksums.verify(folder, wanted, process=jax.process_index(), processes=jax.process_count())
    if found.status == "unverified":
        notice(
            f"{folder} has no checksums, as a version of jdp before these saved it: if its files have changed since, "
            "that may go unseen"
        )
    problem = next(filter(None, from_every_process("the checksums of a checkpoint", found.problem, seconds=_HOURS)), "")
    if problem:
        raise DamagedError(f"{folder} is damaged: {problem}. {fix}.", problem)
