"""A compiled step beside what is known of its arguments: every report of one, of jdp or not, is read from this."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from jax.sharding import Mesh

from jdp.foresight.program.compiled import Compiled
from jdp.foresight.timing.float8 import Float8Products, float8_products
from jdp.foresight.traffic.origin import Parameters, Sites


@dataclass(frozen=True)
class Reading:
    """One compiled step."""

    compiled: Compiled
    mesh: Mesh  # of the devices that it was compiled for
    batch_axes: tuple[str, ...]  # the axes that rows of a batch are split over
    parameters: Parameters  # the arguments that a tensor is recognised as
    donated: Mapping[int, str] = field(repr=False)  # number -> path of the arguments that a result should replace
    offloads: bool = False  # copies to the host's memory were asked for
    accumulate: int = 1  # its microbatches, K

    @cached_property
    def sites(self) -> Sites:
        """The program's call graph."""
        return Sites(self.compiled.program, self.accumulate)

    @cached_property
    def float8(self) -> Float8Products | None:
        """The products asked for in float8; None without any."""
        found = float8_products(self.compiled.program, self.compiled.requests)
        return found if found.asked else None
