"""The words that settings take, as types, so that a type checker finds a misspelt one."""

from typing import Literal

StrategyName = Literal["ddp", "zero1", "zero2", "zero3"]
PrecisionName = Literal["fp32", "bf16"]
DtypeName = Literal["fp32", "bf16"]
Partitioning = Literal["auto", "manual"]
Encoding = Literal["bf16", "int8"]
CompilerPreset = Literal["auto", "default", "overlap"]
Offload = Literal["optimizer"]
Rematerialise = Literal["dots", "dots_except_mlp", "full"]
