"""The choices that several models have."""

from typing import Literal

Activation = Literal["swiglu", "geglu", "gelu", "gelu_exact"]
NormKind = Literal["rms", "rms_plus_one", "layer"]
Attend = Literal["auto", "xla", "cudnn"]
Remat = Literal["full", "dots"]
