"""Retries for temporary failures: a full disk, or storage that is unreachable."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 240.0
"""How long to retry: less than the five minutes of a step's deadline."""
STOPPING_SECONDS = 10.0
"""How long to retry in a process that was asked to stop: schedulers kill it after half a minute."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0
_jitter = random.Random()  # processes that failed together retry at different times

_T = TypeVar("_T")


def retried(
    action: Callable[[bool], _T],
    *,
    passes: Callable[[Exception], bool],
    say: Callable[[str], None],
    stops: Callable[[], bool] = lambda: False,
) -> _T:
    """Call `action`; retry after growing pauses while `passes` accepts its exception, then raise it.

    `action` gets True on a retry. The first failure and the final success are reported. `stops` returns True once the
    process was asked to stop.
    """
    began, tries = 0.0, 0
    while True:
        try:
            result = action(tries > 0)
        except Exception as error:
            now = time.monotonic()
            began = began if tries else now
            pause = min(_FIRST_PAUSE * 2**tries, _LONGEST_PAUSE) * _jitter.uniform(0.5, 1.0)
            if not passes(error) or now + pause - began > (STOPPING_SECONDS if stops() else PATIENCE_SECONDS):
                raise
            if not tries:
                say(f"{str(error).removesuffix('.')}; retrying for {PATIENCE_SECONDS:.0f} s")
            tries += 1
        else:
            if tries:
                say(f"it succeeded after {time.monotonic() - began:.1f} s, at try {tries + 1}")
            return result
        time.sleep(pause)
