"""Paths of leaves in a tree, patterns that match them, and the folder of jdp's own source."""

import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

PACKAGE = Path(__file__).parents[1]
"""The folder of the package itself. A folder *called* jdp may be a clone, or a user's."""


def path_of(path: Any) -> str:
    """Return a key path of `jax.tree_util` as text: "params/layers/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def path_in_model(number: int, models: int, path: str) -> str:
    """Return the path of a leaf of one of the models that a gradient takes: which model, where there are several."""
    return path if models == 1 else f"model {number}: {path}"


def matches(path: str, patterns: str | Iterable[str]) -> bool:
    """Return True if one of the patterns matches the path; `*` matches any characters, slashes too."""
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
