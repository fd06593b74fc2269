"""The one "did you mean"."""

import difflib
from collections.abc import Iterable

from jdp.core.toml import LONGEST


def nearest(word: str, words: Iterable[str], before: str = "; did you mean ", cutoff: float = 0.5) -> str:
    """A hint naming the word of `words` nearest to `word`; empty when none is near."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff) if len(word) <= LONGEST else []
    return f"{before}{found[0]}?" if found else ""
