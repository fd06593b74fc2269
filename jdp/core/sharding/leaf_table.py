"""The leaves of a tree as a table: path, dtype and shape, spec and bytes on a device. No element is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jdp.base.formatting import align_columns, format_bytes, format_rate, html_table
from jdp.base.tree_paths import path_of
from jdp.core.sharding.host_memory import PINNED
from jdp.core.sharding.placement import Placement, bytes_per_device
from jdp.core.types import PyTree

IN_A_TERMINAL, IN_A_NOTEBOOK = 24, 120
"""The most leaves that a table shows; it leaves out the middle of a longer list."""


@dataclass(frozen=True)
class Leaf:
    """An array, described without reading it; `bytes_per_device` is an upper bound if its sharding is not known."""

    path: str
    array: str
    sharding: str
    elements: int
    bytes_per_device: int
    why: str = ""
    is_sharding_known: bool = True
    on_host: bool = False


def leaves_of(tree: PyTree) -> list[Leaf]:
    return [_leaf(path_of(path), value) for path, value in jax.tree.leaves_with_path(tree)]


def _leaf(path: str, value: Any) -> Leaf:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return Leaf(path, type(value).__name__, "no array", 0, 0)
    traced = isinstance(value, Tracer)  # the compiler chooses its sharding
    sharding, part = None if traced else getattr(value, "sharding", None), shape
    if isinstance(sharding, jax.sharding.Sharding):
        with suppress(ValueError):  # a spec that does not fit
            part = sharding.shard_shape(shape)
    is_known = sharding is not None or isinstance(value, np.ndarray | np.generic)
    on_host = getattr(sharding, "memory_kind", None) == PINNED
    words = type(value if sharding is None else sharding).__name__
    if isinstance(sharding, NamedSharding):
        words = f"{sharding.spec}"
    words += " in host memory" * on_host
    if isinstance(value, jax.Array) and not traced and value.is_deleted():
        words += ", donated"
    size, array = math.prod(shape), f"{dtype}{[*shape]}"
    return Leaf(path, array, words, size, bytes_per_device(part, dtype, 1), is_sharding_known=is_known, on_host=on_host)


def leaf_table(leaves: Sequence[Leaf], most: int) -> list[tuple[str, ...]]:
    """Return headings, a row for each leaf, a row for each part of the tree and a row for all of it."""
    rows = [(leaf.path, leaf.array, leaf.sharding, _held([leaf]), leaf.why) for leaf in leaves]
    if len(leaves) > most:
        first, last = most - most // 2, len(leaves) - most // 2
        rows[first:last] = [_sum(f"… {last - first} leaves left out", leaves[first:last])]
    parts = dict[str, list[Leaf]]()
    for leaf in leaves:
        parts.setdefault(leaf.path.partition("/")[0], []).append(leaf)
    if len(parts) > 1:
        rows += [_sum(f"all of {name}", of) for name, of in parts.items() if len(of) > 1]
    rows = [("leaf", "array", "sharded as", "a device", "why"), *rows, _sum("total", leaves)]
    if on_host := [leaf for leaf in leaves if leaf.on_host]:
        rows.append(_sum("of it in host memory", on_host))
    return rows if any(leaf.why for leaf in leaves) else [row[:-1] for row in rows]


def _sum(name: str, leaves: Sequence[Leaf]) -> tuple[str, str, str, str, str]:
    elements = sum(leaf.elements for leaf in leaves)
    return name, f"{format_rate(elements)} elements in {len(leaves)}", "", _held(leaves), ""


def _held(leaves: Sequence[Leaf]) -> str:
    bound = "" if all(leaf.is_sharding_known for leaf in leaves) else "≤ "
    return bound + format_bytes(sum(leaf.bytes_per_device for leaf in leaves))


def leaf_text(title: str, leaves: Sequence[Leaf]) -> str:
    """Return the table as text for a terminal, under a title."""
    return "\n".join([title, *align_columns(leaf_table(leaves, IN_A_TERMINAL))])


class Placements(list[Placement]):
    """The result of `Plan.placements`: a list, one `Placement` a leaf; a slice of it is one too."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Placement: ...

    @overload
    def __getitem__(self, index: slice) -> Placements: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Placement | Placements:
        return Placements(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def __repr__(self) -> str:
        return leaf_text(f"{len(self)} placements", self.leaves)

    def _repr_html_(self) -> str:
        return html_table(f"{len(self)} placements", leaf_table(self.leaves, IN_A_NOTEBOOK))

    @property
    def leaves(self) -> list[Leaf]:
        """The rows of its table."""
        return [
            Leaf(p.path, p.array, words, math.prod(p.shape), p.bytes_per_device, p.reason, on_host=p.on_host)
            for p, words in ((p, f"{p.rest}" + " in host memory" * p.on_host) for p in self)
        ]
