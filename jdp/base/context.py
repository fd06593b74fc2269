"""A context variable that has a value while a block runs."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Value = TypeVar("Value")


@contextmanager
def set_while(variable: ContextVar[Any], value: Value) -> Generator[Value]:
    """Set a context variable while the context lasts, and yield its value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
