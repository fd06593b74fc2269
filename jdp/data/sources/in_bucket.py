"""The path of data that a user names."""

import os
from collections.abc import Callable
from pathlib import Path

from jdp.base.user_path import user_path


def local_path(source: str | os.PathLike[str], *, only: Callable[[str], bool] | None = None) -> Path:
    """Return the path of data that a user names."""
    return user_path(source)
