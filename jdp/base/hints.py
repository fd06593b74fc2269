"""The hint of an error message about a misspelt word: "did you mean ...?"."""

import difflib
from collections.abc import Iterable

from jdp.base.shorten import LONGEST


def nearest(word: str, words: Iterable[str], before: str = "; did you mean ", cutoff: float = 0.5) -> str:
    """Return "; did you mean NAME?" for the word of `words` that is nearest to `word`; "" if none is near."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff) if len(word) <= LONGEST else []
    return f"{before}{near[0]}?" if near else ""
