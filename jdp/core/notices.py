"""Nothing is silent: a choice made, a leaf replicated, a fallback taken is said, once a process.

Notices go to the logger "jdp" where the application lets it speak at level INFO. Where nobody configured logging (a
library that we use may have added a handler, but no level) we print them ourselves, to standard error.
"""

import logging
import sys

logger = logging.getLogger("jdp")
_said: set[str] = set()


def notice(message: str) -> None:
    """Say `message` at level INFO, the first time it is given in this process; process 0 speaks for all."""
    import jax

    if message in _said or jax.process_index() != 0:
        return
    _said.add(message)
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(message)
    elif logger.getEffectiveLevel() <= logging.WARNING:
        print(f"jdp: {message}", file=sys.stderr)
