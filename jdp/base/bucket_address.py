"""Tell an address, such as s3://bucket/run, from a path on a disk of this machine."""

import os
import re

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//|/|$)")
"""Also with one slash, or none at the end: pathlib reduces two to one. One letter is a drive."""

_KNOWN = re.compile(r"(gs|gcs|s3a?|az|abfss?|adl|oss|hdfs|https?|ftp|file|memory):", re.IGNORECASE)
"""Kinds that are addresses even if the slashes are missing, or if a folder of that name exists."""

_HUB = ("hf:", "hf-stream:")
"""Prefixes of an experiment's sources and models, which may stand before the path of a folder."""


def address_of(given: object) -> str | None:
    """Return an address as text, its kind in lower case, with two slashes and none at its end; None for a path.

    An address without slashes, such as s3:bucket/run, stays as it is: `Remote.at` refuses it. A path whose first part
    looks like a kind and exists here is a path.
    """
    if not isinstance(given, str | os.PathLike):
        return None
    text = os.fspath(given)
    if not isinstance(text, str):
        return None
    found, known = _SCHEME.match(text), _KNOWN.match(text)
    if found and (known or found[2] == "//" or not (text.startswith(_HUB) or os.path.lexists(f"{found[1]}:"))):
        return f"{found[1].lower()}://{text[found.end() :].strip('/')}"
    return text if known else None


def scheme_of(address: str) -> str:
    """Return the kind of an address: "s3" of s3://bucket/run."""
    return address.partition(":")[0].lower()
