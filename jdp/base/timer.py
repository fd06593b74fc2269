"""Call a function if a block of code takes long."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def call_after(seconds: float, function: Callable[..., Any], *arguments: Any) -> Generator[None]:
    """Call the function in a thread after some seconds, unless the code in `with` has ended by then."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
