"""The placements of a state: a list that shows itself as a table."""

from __future__ import annotations

import math
from typing import SupportsIndex, overload

from jdp.base.notebook import html_table
from jdp.core.sharding.leaf_table import IN_A_NOTEBOOK, Leaf, leaf_table, leaf_text
from jdp.core.sharding.placement import Placement


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
            Leaf(
                place.path,
                place.array,
                str(place.rest) + (" in host memory" if place.on_host else ""),
                math.prod(place.shape),
                place.bytes_per_device,
                place.reason,
                on_host=place.on_host,
            )
            for place in self
        ]
