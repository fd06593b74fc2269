"""Paths of leaves in a tree, patterns for them, and the folder that jdp's own source lies in."""

import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

PACKAGE = Path(__file__).parents[1]
"""The folder of the package itself. A folder *called* jdp may be a clone, or a user's."""


def path_of(path: Any) -> str:
    """A key path as text: "params/layers/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def matches(path: str, patterns: str | Iterable[str]) -> bool:
    """Return True if one of the patterns matches the path; `*` matches any characters, slashes too.

    Args:
        path: as `path_of` gives it.
        patterns: in the words of `fnmatch.fnmatchcase`; a string is one pattern.
    """
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
