"""The models of a gradient's call that differ from those of the call before in their values alone.

A gradient outside of `jit` reads its models anew at each call: their leaves, a module's variables, the placements.
Models that have the structure, shapes, dtypes and shardings of those that were checked need not be checked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import Any

import jax

from jdp.core import flax_nnx
from jdp.core.state import Layout, Leaves, Models


class RepeatedModels:
    """What was found of the models of the last call.

    Attributes:
        layout: where the leaves of the joined models belong.
    """

    __slots__ = ("_avals", "_is_deleted", "_shardings", "_tree", "layout")

    def __init__(self, state: Models) -> None:
        leaves, self._tree = jax.tree.flatten((state.params, state.model_state))
        kinds = {*map(type, leaves)}
        self.layout = Layout(jax.tree.structure(state), state.static, {}, kinds)
        # The method itself takes a third of the time of one that is looked up for each array.
        self._is_deleted = next(iter(kinds)).is_deleted if len(kinds) == 1 else methodcaller("is_deleted")
        self._avals, self._shardings = _described(leaves)

    def joined(self, models: Sequence[Any], rng: jax.Array) -> Leaves | None:
        """Return the joined models as leaves; None if they have to be checked."""
        adapters = self.layout.static.adapter.adapters
        if len(models) != len(adapters):
            return None
        parts = [flax_nnx.split(model, known) for model, known in zip(models, adapters, strict=True)]
        if any(part[2] is not known for part, known in zip(parts, adapters, strict=True)):
            return None
        joined = tuple([part[0] for part in parts]), tuple([part[1] for part in parts])
        leaves = self.layout.leaves_of(joined, self._tree)
        if leaves is None:
            return None
        avals, shardings = _described(leaves)
        if avals != self._avals or shardings != self._shardings or any(map(self._is_deleted, leaves)):
            return None
        self._avals, self._shardings = avals, shardings  # the very objects of the next call, if a program returned them
        return Leaves(self.layout, [*leaves, rng])


_aval, _sharding = attrgetter("aval"), attrgetter("sharding")


def _described(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return [*map(_aval, leaves)], [*map(_sharding, leaves)]
