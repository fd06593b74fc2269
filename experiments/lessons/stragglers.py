"""The pace of devices that wait for each other: a synchronous step takes as long as its slowest device."""

from typing import Any

import numpy as np

TIMES: dict[str, Any] = {
    "normal, 5 %": lambda random, shape: random.normal(1, 0.05, shape),
    "exponential tail": lambda random, shape: 0.9 + random.exponential(0.1, shape),
    "Pareto tail, α = 3": lambda random, shape: 0.9 + 0.2 * random.pareto(3, shape),
    "one at half speed": lambda random, shape: np.ones(shape) + (np.arange(shape[-1]) == 0),
}
"""Times of one device's step, of mean 1 but for the last: (random, shape) -> an array."""


def pace(name: str, devices: int, local: int, rounds: int = 200) -> float:
    """Return the mean time of a step if devices wait for each other after every `local` steps; 0: never."""
    times = TIMES[name](np.random.default_rng(0), (rounds, 16, devices))
    if not local:
        return float(1 / (1 / times.mean(axis=(0, 1))).mean())  # devices' rates add up
    return float(times.reshape(-1, local, devices).sum(axis=1).max(axis=1).mean() / local)
