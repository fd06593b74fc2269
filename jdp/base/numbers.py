"""Two tests for numbers that a user gave."""

from numbers import Integral, Real
from typing import Any


def is_integer(value: Any) -> bool:
    """Return True if `value` is an integer of Python or NumPy; booleans and 8.0 are not."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: Any) -> bool:
    """Return True if `value` is a real number of Python or NumPy; booleans are not."""
    return not isinstance(value, bool) and isinstance(value, Real)
