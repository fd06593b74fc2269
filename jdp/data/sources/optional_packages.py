"""Packages that jdp does without until a source needs one."""

import importlib
from typing import Any


def optional(package: str, needed_by: str, *, extra: str = "hf") -> Any:
    """Import the module `package` and return it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise ValueError(
            f"{needed_by} needs the package {error.name}, which is not installed: pip install '.[{extra}]'"
        ) from error
