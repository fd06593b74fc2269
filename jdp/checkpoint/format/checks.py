"""What a writer or a reader of weights may be given, checked before anything is written or read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jdp.base.notices import notice
from jdp.base.tree_paths import matches
from jdp.checkpoint.errors import CheckpointError


def check_values(leaves: Mapping[str, Any]) -> None:
    """Check that every leaf has values that can be written."""
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"Only arrays can be written; {path} is abstract, {leaf.dtype}{list(leaf.shape)} without values. Give "
                "the state that jdp.init_state, a train step or jdp.restore returned."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise CheckpointError(
                f"Only arrays can be written; {path} has been given to a train step, which took its memory over "
                "(donated it). Write the state that the step returned, or make the step with donate=False."
            )


def ignored_names(names: Mapping[str, Sequence[str]], ignore: Sequence[str], file: Path) -> set[str]:
    """Return the arrays of a file that `ignore` matches, and report how many they are."""
    ignored: dict[str, None] = {}
    for pattern in (ignore,) if isinstance(ignore, str) else ignore:
        matched = [path for path, known in names.items() if any(matches(name, pattern) for name in known)]
        if not matched:
            some = ", ".join(known[-1] for known in list(names.values())[:5]) + ", …" * (len(names) > 5)
            raise CheckpointError(
                f"Every pattern of `ignore` must match something in the file; {pattern!r} matches nothing of {file}, "
                f"which has {some or 'nothing'}. Leave it out, or fix it."
            )
        ignored.update(dict.fromkeys(matched))
    if ignored:
        first = next(iter(ignored))
        notice(f"{file}: {len(ignored)} of {len(names)} arrays are left unread, as `ignore` asks; the first is {first}")
    return set(ignored)


def needed_but_ignored(path: str) -> CheckpointError:
    """Return the error for an `ignore` that leaves out what the model needs."""
    return CheckpointError(
        f"What `ignore` leaves unread the model must not need; it has {path}. Leave that out of `ignore`, or put "
        f"{path!r} into `missing` too, to keep the target's value."
    )


def check_kept(kept: Mapping[str, Any], file: Path) -> None:
    """Check the leaves that keep the target's values, as `file` lacks them."""
    for path, leaf in kept.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise CheckpointError(
                f"{file} lacks {path}, which `missing` lets keep the target's value, but the target is abstract: "
                "pass a real state (jdp.init_state)."
            )


def check_sharding(leaf: Any, path: str) -> None:
    """Check that a leaf of a target can be read onto."""
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(f"Every leaf of a target needs a sharding; {path} has none. Take jdp.abstract_state(...).")
