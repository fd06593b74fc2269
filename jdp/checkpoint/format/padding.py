"""Leaves that are stored flat and padded (`Plan.pad`), and read for another number of devices.

Such a leaf is written in that form, each process its own part. The table of a checkpoint has its own shape, and under
"flat" the stored shape, so a checkpoint fits any number of devices. If the target's leaf has another form, the stored
one is read completely, a few leaves at a time, and converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdp.core.sharding.padded import Change, Flat
from jdp.core.state import TrainState, changed

Read = Callable[[Mapping[str, Any]], dict[str, Any]]

AT_ONCE = 2**30
"""Bytes of leaves that every device holds completely while they are converted; one leaf may be larger."""


def flat_leaves(tree: Any, paths: Mapping[str, Any]) -> dict[str, Flat]:
    """Return path -> form of the leaves of a state that are flat and padded; {} for any other tree."""
    if not isinstance(tree, TrainState) or not tree.static.flat:
        return {}
    return {path: flat for path, flat in tree.static.flat if path in paths}


def own_shape(shape: tuple[int, ...], flat: Flat | None) -> tuple[int, ...]:
    """Return the shape of a leaf before it was flat; it may have other dimensions in front."""
    return shape if flat is None else (*shape[: len(shape) - len(flat.at_rest)], *flat.shape)


def stored_flat(table: Mapping[str, Any]) -> dict[str, Flat]:
    """Return path -> form of the leaves that are stored flat, from a checkpoint's table."""
    stored: dict[str, dict[str, list[int]]] = table.get("flat", {})
    return {path: Flat(tuple(each["shape"]), tuple(each["at_rest"])) for path, each in stored.items()}


def described_flat(flat: Mapping[str, Flat]) -> dict[str, dict[str, list[int]]]:
    """Return the entries of a checkpoint's table for flat leaves: the inverse of `stored_flat`."""
    return {path: {"shape": [*each.shape], "at_rest": [*each.at_rest]} for path, each in flat.items()}


def converting(read: Read, stored: Mapping[str, Flat], flat: Mapping[str, Flat]) -> Read:
    """Return the function that reads leaves in any form, and converts them into that of the target's."""

    def read_converted(wanted: Mapping[str, Any]) -> dict[str, Any]:
        changes = {path: Change(stored.get(path), flat.get(path)) for path in wanted}
        changes = {path: change for path, change in changes.items() if change.given != change.wanted}
        arrays = read({path: leaf for path, leaf in wanted.items() if path not in changes})
        for some in _in_turn({path: wanted[path] for path in changes}):
            given = read({path: _source(leaf, changes[path]) for path, leaf in some.items()})
            others = dict[str, Any]()
            for path, leaf in some.items():
                if not isinstance(leaf, np.ndarray | np.generic):
                    others[path] = (given[path], changes[path], leaf.sharding)
                else:  # without JAX, which would make it 32 bits wide
                    form = changes[path].given
                    arrays[path] = given[path] if form is None else given[path][..., : form.row].reshape(leaf.shape)
            arrays |= dict(zip(others, changed(list(others.values())), strict=True))
        return arrays

    return read_converted


def _source(leaf: Any, change: Change) -> Any:
    """Return the leaf to read, replicated on every device, for one of the target's."""
    shape = own_shape(tuple(leaf.shape), change.wanted)
    if change.given is not None:
        shape = (*shape[: len(shape) - len(change.given.shape)], *change.given.at_rest)
    if isinstance(leaf, np.ndarray | np.generic):
        return np.empty(shape, leaf.dtype)
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(None,) * len(shape)))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def _in_turn(leaves: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a few leaves at a time, of `AT_ONCE` bytes together."""
    some, held = dict[str, Any](), 0
    for path, leaf in leaves.items():
        size = leaf.size * leaf.dtype.itemsize
        if some and held + size > AT_ONCE:
            yield some
            some, held = {}, 0
        some[path] = leaf
        held += size
    if some:
        yield some
