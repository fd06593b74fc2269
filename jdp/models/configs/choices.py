"""The choices that several models have."""

from typing import Literal, get_args

Activation = Literal["swiglu", "gelu", "gelu_exact"]
NormKind = Literal["rms", "layer"]
Attend = Literal["auto", "xla", "cudnn"]
Remat = Literal["dots", "dots_except_mlp", "full"]
Scan = bool | Literal["auto"]
SCANS = (True, False, "auto")
REMATS = (None, *get_args(Remat))
