"""The choices that several models have."""

from typing import Literal

Activation = Literal["swiglu", "gelu", "gelu_exact"]
NormKind = Literal["rms", "layer"]
Attend = Literal["auto", "xla", "cudnn"]
Remat = Literal["full", "dots"]
