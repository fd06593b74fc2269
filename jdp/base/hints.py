"""The hint of an error message about a misspelt word: "did you mean ...?"."""

import difflib
from collections.abc import Iterable

from jdp.base.shorten import LONGEST


def nearest(word: str, words: Iterable[str], before: str = "; did you mean ", cutoff: float = 0.5) -> str:
    """Return "; did you mean NAME?" for the word of `words` that is nearest to `word`; "" if none is near.

    Args:
        word: what was written; one of more than `LONGEST` characters has no nearest.
        words: what could have been meant.
        before: text before the name.
        cutoff: similarity between 0 and 1 that counts as near, as in `difflib.get_close_matches`.
    """
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff) if len(word) <= LONGEST else []
    return f"{before}{near[0]}?" if near else ""
