"""Batch statistics: what a step sums over the whole batch beside gradients, for batch norms and for metrics.

For each microbatch a BatchNorm of C channels sums over all devices C sums, C sums of squares and a count; the backward
pass sums the same number of cotangents: 2 (2C + 1) float32 (Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1;
their gradients run through the statistics). A metric that is an array is summed in each microbatch, and so is its
weight, at most as large. These are of activations, not parameters: the contract reports them apart and compares them
with this number. Tensors are taken for statistics by their shape, in the order of the schedule, up to
the number: what is beyond counts as anything else does.
"""

import math
from dataclasses import dataclass

from jdp.foresight.traffic.origin import Piece

ITEMSIZE = 4
"""Bytes: statistics are summed in float32, whatever is computed in."""


@dataclass(frozen=True)
class BatchStatistics:
    """The statistics that a step takes over all devices."""

    shapes: tuple[tuple[int, ...], ...] = ()  # of the running averages, two for each BatchNorm, layers stacked
    rounds: int = 1  # microbatches a step
    metrics: tuple[tuple[int, ...], ...] = ()  # shapes of metrics that are arrays, and of no parameter's shape

    @property
    def elements(self) -> int:
        """What is summed in one direction of one microbatch: 2C + 1 for each norm."""
        counts = sum(math.prod(shape[:-1]) for shape in self.shapes) // 2
        return sum(map(math.prod, self.shapes)) + counts

    @property
    def payload_bytes(self) -> int:
        """A step: forward and backward, and of metrics the sum and the weight, over all microbatches."""
        return 2 * self.rounds * ITEMSIZE * (self.elements + sum(map(math.prod, self.metrics)))

    def fits(self, piece: Piece) -> bool:
        """Return True if a tensor may be statistics: C or 2C float32 channels, with or without the count; a metric."""
        if math.prod(piece.dims) in map(math.prod, self.metrics):
            return True
        channels = {shape[-1] for shape in self.shapes}
        sizes = {size for c in channels for size in (c, c + 1, 2 * c, 2 * c + 1)}
        return piece.dtype == "f32" and math.prod(piece.dims) in sizes
