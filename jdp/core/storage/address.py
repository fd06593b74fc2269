"""What is an address, such as s3://bucket/run, and what is a path on a disk of this machine."""

import os
import re

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_ONE_SLASH = re.compile(r"(gs|gcs|s3a?|az|abfss?|adl|hdfs|https?|ftp|file|memory):(/|$)")
"""Of known kinds also with one slash, or none at the end: pathlib reduces two to one."""


def address_of(given: object) -> str | None:
    """Return an address as text, with two slashes and none at its end; None for a path, or what is neither."""
    if not isinstance(given, str | os.PathLike):
        return None
    text = os.fspath(given)
    if not isinstance(text, str):
        return None
    if found := _SCHEME.match(text) or _ONE_SLASH.match(text):
        return f"{found[1]}://{text[found.end() :].strip('/')}"
    return None


def scheme_of(address: str) -> str:
    """Return the kind of an address: "s3" of s3://bucket/run."""
    return address.partition("://")[0].lower()
