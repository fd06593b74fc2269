"""The words that settings take, as types, so that a type checker finds misspellings; checks and hints for them."""

import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Literal

from jdp.base.toml import LONGEST

StrategyName = Literal["ddp", "zero1", "zero2", "zero3"]
PrecisionName = Literal["fp32", "bf16"]
DtypeName = Literal["fp32", "bf16"]
Partitioning = Literal["auto", "manual"]
Encoding = Literal["bf16", "int8"]
CompilerPreset = Literal["auto", "default", "overlap"]
Offload = Literal["optimizer"]
Rematerialise = Literal["dots", "dots_except_mlp", "full"]


def is_integer(value: Any) -> bool:
    """Return True if `value` is an integer of Python or NumPy; booleans and 8.0 are not."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: Any) -> bool:
    """Return True if `value` is a real number of Python or NumPy; booleans are not."""
    return not isinstance(value, bool) and isinstance(value, Real)


def nearest(word: str, words: Iterable[str], before: str = "; did you mean ", cutoff: float = 0.5) -> str:
    """Return "; did you mean NAME?" for the word of `words` that is nearest to `word`; "" if none is near."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff) if len(word) <= LONGEST else []
    return f"{before}{near[0]}?" if near else ""
