"""Batch statistics: what a BatchNorm sends to normalise by the whole batch, told from gradients.

For each microbatch a BatchNorm of C channels sums over all devices C sums, C sums of squares and a count; the backward
pass sums the same number of cotangents: 2 (2C + 1) float32 (Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1;
their gradients run through the statistics). These are activations', not parameters': the contract names them apart and
holds them against this number. Which tensors they are is told by shape, in the order of the schedule, up to the number:
what is beyond counts as anything else does.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jdp.foresight.traffic.origin import Piece

ITEMSIZE = 4
"""Statistics are summed in float32, whatever is computed in."""


@dataclass(frozen=True)
class BatchStatistics:
    """The statistics that a step takes over all devices.

    Attributes:
        shapes: of the running averages, two for each BatchNorm (mean and variance), stacked ones with their layers.
        rounds: microbatches a step.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    rounds: int = 1

    @property
    def elements(self) -> int:
        """What is summed in one direction of one microbatch: 2C + 1 for each norm."""
        counts = sum(math.prod(shape[:-1]) for shape in self.shapes) // 2
        return sum(map(math.prod, self.shapes)) + counts

    @property
    def payload_bytes(self) -> int:
        """A step: forward and backward, over all microbatches."""
        return 2 * self.rounds * ITEMSIZE * self.elements

    def among(self, pieces: Iterable[Piece]) -> int:
        """Bytes of the tensors that may be statistics: C or 2C channels, with or without the count."""
        return sum(piece.payload_bytes for piece in pieces if self.fits(piece))

    def fits(self, piece: Piece) -> bool:
        channels = {shape[-1] for shape in self.shapes}
        sizes = {size for c in channels for size in (c, c + 1, 2 * c, 2 * c + 1)}
        return piece.dtype == "f32" and math.prod(piece.dims) in sizes
