"""Paths and keys of a tree, patterns that match paths, and the folder of jdp's own source."""

import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jdp.base.errors import UserError
from jdp.base.toml import cut

PACKAGE = Path(__file__).parents[1]
"""The folder of the package itself. A folder *called* jdp may be a clone, or a user's."""


def path_of(path: Any) -> str:
    """Return a key path of `jax.tree_util` as text: "params/layers/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def path_in_model(number: int, models: int, path: str) -> str:
    """Return the path of a leaf, with the model's number if a gradient takes several models."""
    return path if models == 1 else f"model {number}: {path}"


def matches(path: str, patterns: str | Iterable[str]) -> bool:
    """Return True if one of the patterns matches the path; `*` matches any characters, slashes too."""
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def check_keys(tree: Any) -> None:
    """Check that JAX can order the keys of each dict of a tree."""
    if isinstance(tree, dict):
        try:
            sorted(tree)
        except TypeError as error:
            raise UserError(
                f"The keys of a dict in a tree must have an order, as JAX sorts them; given {cut(repr([*tree]), 100)}. "
                "Write all of them as text."
            ) from error
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    for child in children:
        check_keys(child)
