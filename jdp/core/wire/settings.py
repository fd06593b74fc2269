"""The settings of compression, for gradients and weights that are sent (`encodings.py` has the encodings).

Sources: blocks with a scale each, Dettmers et al. 2022 (arXiv:2110.02861); int8 gradients by all-to-all and int8
weights in ZeRO-3's gathers, ZeRO++, Wang et al. 2023 (arXiv:2306.10209); the largest elements only, Lin et al. 2018
(arXiv:1712.01887); low rank, PowerSGD, Vogels et al. 2019 (arXiv:1905.13727); stochastic rounding, Alistarh et al. 2017
(QSGD, arXiv:1610.02132); error feedback, Karimireddy et al. 2019 (arXiv:1901.09847).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jdp.base.hints import nearest
from jdp.base.numbers import is_integer, is_number
from jdp.base.words import Encoding, WeightEncoding

QUANTISED = ("bf16", "int8", "fp8")
GRADIENTS = (*QUANTISED, "topk", "powersgd")
SCALE_BYTES = 4


@dataclass(frozen=True)
class Wire:
    """How gradients and weights are encoded while they are sent between devices; they are added up in float32.

        >>> wire = jdp.Wire("int8", weights="int8")  # gradients, and ZeRO's gathers
        >>> train_step = jdp.make_train_step(loss_fn, plan, wire=wire)
        >>> state, metrics = train_step(state, batch)

    Attributes:
        gradients: the encoding of gradients, for slow links. None: as `Precision.reduce` says. "bf16": 2 bytes an
            element. "int8", "fp8" (e4m3): 1 byte an element and a float32 scale for each block. "topk": the largest
            elements and their indices, 8 bytes each. "powersgd": factors of low rank, for leaves of two dimensions or
            more; others in float32.
        weights: the encoding of weights in the gathers of zero1, zero2 and zero3, where these are the larger part.
            None: in `Precision.compute`. "int8": 1 byte an element and a scale for each block; the weights at rest stay
            as they are.
        block: elements that share a scale, for "int8" and "fp8". Smaller blocks round less and send more scales. Leaves
            are not encoded if a device owns fewer elements than this.
        fraction: share of the elements that "topk" sends, above 0 and up to 1. Raise it when the loss falls behind.
        rank: rank of PowerSGD's factors. Raise it when the loss falls behind.
        error_feedback: add the error of this step's encoding to the next step's mean gradient. It takes memory for a
            float32 gradient on every device, in the train state: give False when this memory is needed. Rounding is
            then drawn from the step's key, and so right on average; "topk" and "powersgd" need the feedback. zero3 has
            none: it reduces inside the backward pass.

    Raises:
        ValueError: a setting is unknown or out of range.
    """

    gradients: Encoding | None = None
    weights: WeightEncoding | None = None
    block: int = 256
    fraction: float = 0.01
    rank: int = 4
    error_feedback: bool = True

    def __post_init__(self) -> None:
        for name, known in (("gradients", GRADIENTS), ("weights", ("int8",))):
            value = getattr(self, name)
            if value is not None and value not in known:
                hint = nearest(str(value), known) or "."
                raise ValueError(f"Wire.{name} is one of {', '.join(known)}, or None; given {value!r}{hint}")
        if not is_integer(self.block) or self.block < 8:
            raise ValueError(
                f"Wire.block is the number of elements that share a scale, 8 or more; given {self.block!r}: give an "
                "integer, such as 256."
            )
        if not is_number(self.fraction) or not 0 < self.fraction <= 1:
            raise ValueError(
                f"Wire.fraction is the share of elements that topk sends, above 0 and up to 1; given "
                f"{self.fraction!r}: give a number, such as 0.01."
            )
        if not is_integer(self.rank) or self.rank < 1:
            raise ValueError(
                f"Wire.rank is PowerSGD's rank, 1 or more; given {self.rank!r}: give an integer, such as 4."
            )
        for name, default, scheme in (("fraction", Wire.fraction, "topk"), ("rank", Wire.rank, "powersgd")):
            if (given := getattr(self, name)) != default and self.gradients != scheme:
                raise ValueError(
                    f'Wire.{name} is a setting of "{scheme}"; given {name}={given} with gradients={self.gradients!r}: '
                    f'leave it out, or give gradients="{scheme}".'
                )
        if self.error_feedback not in (True, False):
            raise ValueError(f"Wire.error_feedback is True or False; given {self.error_feedback!r}: give one of them.")
        if not self.error_feedback and self.gradients in ("topk", "powersgd"):
            raise ValueError(
                f"{self.gradients} needs error feedback: elements that it leaves out would be lost for good; given "
                "error_feedback=False: leave it True, or take int8."
            )

    @staticmethod
    def of(wire: Encoding | Wire | None) -> Wire:
        """Return the `Wire` that a short name stands for.

        Args:
            wire: None (nothing is encoded); the name of an encoding of gradients, such as "int8"; or a `Wire`.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(wire, Wire):
            return wire
        if wire is not None and wire not in GRADIENTS:
            is_text = isinstance(wire, str)  # pyright: ignore[reportUnnecessaryIsInstance]
            hint = (nearest(wire, GRADIENTS) if is_text else None) or ". Give one of these."
            raise ValueError(f"wire is one of {', '.join(GRADIENTS)}, a jdp.Wire, or None; given {wire!r}{hint}")
        return Wire(wire)

    def encodes(self, elements: int, devices: int) -> bool:
        """Return True if a gradient is encoded: each device owns a block of its elements, or more.

        Args:
            elements: of the leaf.
            devices: that share its sum.
        """
        return self.gradients in (*QUANTISED, "topk") and elements >= devices * self.block

    def row_bytes(self, elements: int) -> int:
        """Return the bytes of codes and scales for one device's part of a leaf.

        Args:
            elements: of that part; they are padded to whole blocks.
        """
        padded = self.padded(elements)
        if self.gradients == "topk":
            return 8 * self.kept(padded)
        if self.gradients == "bf16":
            return 2 * padded
        return padded + padded // self.block * SCALE_BYTES

    def padded(self, elements: int) -> int:
        """Return a number of elements rounded up to whole blocks.

        Args:
            elements: any number.
        """
        return -(-elements // self.block) * self.block

    def kept(self, elements: int) -> int:
        """Return the number of elements that topk sends.

        Args:
            elements: of which it takes the largest.
        """
        return max(1, math.ceil(self.fraction * elements))


WIDE = Wire()
"""Nothing is encoded."""
