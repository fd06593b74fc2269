"""A fair clock for two contenders on a machine that other programs use too."""

import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def in_turns(contenders: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, np.ndarray]:
    """Call each contender once per round, so that a slow moment of the machine slows all of them.

    Args:
        contenders: each starts work and returns its (pending) arrays.
        rounds: how often.
        warmup: rounds before those, which compile.

    Returns: For each contender [rounds, 3] seconds: processor time of the calling thread until the call returned
        (dispatch), processor time of all threads until the arrays were ready, wall time until then.
    """
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    gc.disable()  # as timeit does: a collection would slow one contender at random
    for turn in range(-warmup, rounds):
        for name, call in contenders.items():
            thread, process, wall = time.thread_time(), time.process_time(), time.perf_counter()
            pending = call()
            thread = time.thread_time() - thread
            jax.block_until_ready(pending)
            if turn >= 0:
                found[name].append((thread, time.process_time() - process, time.perf_counter() - wall))
    gc.enable()
    return {name: np.array(each) for name, each in found.items()}
