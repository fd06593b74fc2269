"""The smallest cluster that a step fits: fewer, or more, of the target's devices with the same global batch.

Of a candidate that was compiled for N devices, n of them hold about

    fixed + (parameters, gradients and optimizer state where they are shared, activations and batch) × N / n

by section 5 of Rajbhandari et al. 2019 (arXiv:1910.02054): ddp shares nothing, and activations go with a device's rows
(`foreseen`). Sizes that the batch does not divide over are left out. `verified` then compiles the size that this
says, and the one below it, and goes on to the next where that says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jdp.base.chips import Gpu
from jdp.base.disk_cache import Cache
from jdp.base.formatting import format_bytes
from jdp.core.batch import batch_rows
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.strategy import strategy
from jdp.foresight.candidates.max_batch import OnProgress
from jdp.foresight.memory.peak import Memory, available_bytes, memory
from jdp.foresight.program.compiled import CompileError
from jdp.foresight.targets import resolve
from jdp.foresight.targets.relocate import Candidate, abstract_on
from jdp.foresight.targets.resolve import Target

MOST_DEVICES = 4096
PROBES = 6
"""Sizes that are compiled at most."""


@dataclass(frozen=True)
class Smallest:
    """The smallest cluster that a step fits."""

    target: str  # such as "h100:1x4"
    name: str  # of the candidate that fits there
    needed: int  # bytes a device holds; compiled or foreseen
    available: int  # bytes of a device's memory that a step can have
    compiled: bool = False  # whether the sizes were compiled
    below: tuple[str, int | None] | None = None  # the next smaller size, and its bytes (None: does not compile)

    @property
    def held(self) -> str:
        """What a device holds of what it has, such as "61 GiB of 77.1 GiB"."""
        return f"{format_bytes(self.needed)} of {format_bytes(self.available)}"

    def __str__(self) -> str:
        how = "as compiled" if self.compiled else "foreseen, not compiled (--smallest compiles it)"
        below = ""
        if self.below is not None:
            name, needed = self.below
            below = f"; on {name} it {'does not compile' if needed is None else f'needs {format_bytes(needed)}'}"
        return f"Smallest that fits the same batch, {how}: {self.name} on {self.target}, {self.held}{below}."

    def to_json(self) -> dict[str, Any]:
        """Return the `smallest` that `jdp plan --json` prints."""
        return {
            "target": self.target,
            "candidate": self.name,
            "needed": self.needed,
            "available": self.available,
            "compiled": self.compiled,
            "below": None if self.below is None else {"target": self.below[0], "needed": self.below[1]},
        }


def sizes_of(target: Target) -> list[str]:
    """Return the names of clusters of a target's devices, smallest first: parts of a host, then whole hosts."""
    if not isinstance(target.chip, Gpu) or target.config is None:
        return []
    inside = [2**power for power in range(target.per_host.bit_length()) if 2**power < target.per_host]
    hosts = [2**power for power in range((MOST_DEVICES // target.per_host).bit_length())]
    return [f"{target.kind}:1x{count}" for count in inside] + [f"{target.kind}:{h}x{target.per_host}" for h in hosts]


def foreseen(candidates: Sequence[Candidate], held: Sequence[Memory | None], target: Target) -> Smallest | None:
    """Return the smallest cluster that one of the candidates is foreseen to fit; None where that cannot be said."""
    if target.memory_bytes is None:
        return None
    available, below = available_bytes(target.memory_bytes), None
    for name in sizes_of(target):
        least = min(_needs(candidates, held, _count(name)), key=lambda pair: pair[0], default=None)
        if least is None:
            continue
        if least[0] <= available:
            return Smallest(name, least[1].name, least[0], available, below=below)
        below = (name, least[0])
    return None


def verified(
    candidates: Sequence[Candidate],
    held: Sequence[Memory | None],
    target: Target,
    *,
    cache: Cache | None,
    progress: OnProgress | None = None,
) -> Smallest | None:
    """Return the smallest cluster that one of the candidates fits, by compiling it, and that it does not fit below."""
    guess = foreseen(candidates, held, target)
    if guess is None:
        return None
    sizes = [name for name in sizes_of(target) if _needs(candidates, held, _count(name))]
    seen, at = dict[int, int | None](), sizes.index(guess.target)
    least: Smallest | None = None
    while 0 <= at < len(sizes) and at not in seen and len(seen) < PROBES:
        chosen = min(_needs(candidates, held, _count(sizes[at])), key=lambda pair: pair[0])[1]
        if progress is not None:
            progress(0, None, f"{chosen.name} on {sizes[at]}")
        seen[at] = needed = _compiled(chosen, sizes[at], cache)
        if needed is not None and needed <= guess.available:
            below = (sizes[at - 1], seen[at - 1]) if at - 1 in seen else None
            least = Smallest(sizes[at], chosen.name, needed, guess.available, compiled=True, below=below)
            at -= 1
        else:
            if least is not None:
                least = replace(least, below=(sizes[at], needed))
            at += 1
    return least


def _compiled(candidate: Candidate, name: str, cache: Cache | None) -> int | None:
    """Return the bytes that a device holds; None of what XLA gives up on."""
    target = resolve.target(name)
    moved = abstract_on(candidate.step, candidate.state, candidate.batch, target)
    try:
        compiled = replace(moved, remat=candidate.remat).compile(target, cache)
    except CompileError:
        return None
    return memory(compiled, moved.step, moved.state).total


def _needs(candidates: Sequence[Candidate], held: Sequence[Memory | None], devices: int) -> list[tuple[int, Candidate]]:
    """Return what a device is foreseen to hold under each candidate on so many devices that its mesh can have."""
    found = list[tuple[int, Candidate]]()
    for candidate, own in zip(candidates, held, strict=True):
        mesh, rows = candidate.step.plan.mesh, batch_rows(candidate.batch)
        shards, others = mesh.shape[DATA], mesh.size // mesh.shape[DATA]
        if own is None or candidate.axes is not None or devices % others:
            continue
        if rows % (candidate.step.batch_unit.rows // shards * (devices // others)):  # another batch would be taken
            continue
        found.append((_foreseen(own, candidate, shards * others / devices), candidate))
    return found


def _foreseen(own: Memory, candidate: Candidate, times: float) -> int:
    """Return what a device is foreseen to hold where it has `times` as much of what `data` shares, and as many rows."""
    shared = times if strategy(candidate.step.plan.strategy).shard_state else 1
    state = (own.parameters + own.gradients + own.optimizer) * shared
    return int(state + (own.activations + own.batch) * times + own.working + own.other)


def _count(name: str) -> int:
    return math.prod(map(int, name.rpartition(":")[2].split("x")))
