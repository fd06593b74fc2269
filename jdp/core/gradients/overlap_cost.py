"""Whether layer loops should send while they compute, or the step send for all layers at once: what waits less.

A ring's latency grows with its devices, whatever the bytes. In a loop each layer waits for one. Sent at once, all
layers share one, but little is computed meanwhile. Both are estimated, from the trace of the step that sends layer by
layer, the mesh and the chip's published rates. So all processes choose alike.

    round       FLOPs of its products / the chip's rate for them + what its kernels read and write / memory's bandwidth
    collective  NCCL's own model (`jdp.base.link_times`), after XLA has joined small ones
    by layer    Forward, of short rounds XLA begins every second one's gathers early. Backward, a round hides its
                reductions if it takes as long; half of them where replicas sum what devices have summed before. The
                first gathers and the last reductions are waited for.
    at once     three quarters are waited for

zero3 gathers layer by layer in any case, and does so ahead.
`experiments/benchmarks/overlap.py --forms` compares the choice with both programs, compiled and simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh

from jdp.base.chips import XLA_TYPES, Gpu
from jdp.base.formatting import format_seconds
from jdp.base.link_times import Group
from jdp.core.compiling.options import Compiler
from jdp.core.sharding.links import gpu_of, groups_along, slowest
from jdp.core.sharding.mesh import own_axes
from jdp.core.step_settings import StepSettings
from jdp.core.tracing.collectives import Sent, sent_by_round
from jdp.core.tracing.flops import count_flops, count_product_bytes

_PASSES = 4.5
"""What a layer's kernels read and write, in units of its products' operands and results, as compiled for GPT models."""
_COPIES = 4
"""How often a loop that sends reads or writes what a reduction returns: into a stack, and with it."""
_SHORT = 3
"""XLA begins every second round's gathers only when they are needed, unless a round takes so many times as long."""
_EXPOSED = 0.75
"""Share of what is sent at once that is waited for, as simulated (0.5 to 1): the rest is beside embedding and head."""


def settled(overlap: bool | None, mesh: Mesh) -> bool | None:
    """Return whether layer loops send while they compute on this mesh; None where the trace decides."""
    if overlap is not None:
        return overlap
    device = mesh.devices.flat[0]
    return None if gpu_of(mesh) is not None else device.platform != "cpu"


def why_off(jaxpr: Any, mesh: Mesh, settings: StepSettings) -> str | None:
    """Return why a step waits less if it sends for all layers at once; None if it does not.

    Args:
        jaxpr: the gradient of a microbatch, whose layer loops gather and reduce.
        mesh: the step's, of a chip whose rates are known.
        settings: the step's.
    """
    chip = gpu_of(mesh)
    if chip is None:
        return None
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    links = _Links(mesh, chip, settings.compiler.on(mesh))
    rate = chip.matmul_efficiency * chip.matmul_flops[XLA_TYPES[settings.precision.compute]]
    share = math.prod(mesh.shape[axis] for axis in own_axes(mesh))
    layered, everything = 0.0, list[Sent]()
    for each in sent_by_round(live):
        sent = [one for one in each.sent if one.reduces or settings.accumulate == 1]  # else gathered before the first
        everything += [one.stacked(each.rounds) for one in sent]
        if each.loop is None:
            layered += links.seconds(sent)
            continue
        body = each.loop.params["jaxpr"].jaxpr
        computing = count_flops(body) / rate + _PASSES * count_product_bytes(body) / chip.memory_bandwidth
        copied = _COPIES * sum(one.result_bytes for one in sent if one.reduces) / chip.memory_bandwidth
        layered += _waiting(each.rounds, computing / share, links, sent) + each.rounds * copied
    at_once = _EXPOSED * links.seconds(everything)
    if layered <= at_once:
        return None
    return f"some {format_seconds(layered)} would be waited for with it, {format_seconds(at_once)} without"


def _waiting(rounds: int, seconds: float, links: _Links, sent: list[Sent]) -> float:
    """Return the seconds that a loop waits for what its rounds send."""
    gathers = links.seconds(each for each in sent if not each.reduces)
    reductions = links.seconds(each for each in sent if each.reduces)
    waits = seconds < _SHORT * gathers
    pairs = rounds / 2 * (gathers + max(0.0, gathers - 2 * seconds)) if waits else 0.0
    is_chain = len({each.axes for each in sent if each.reduces and links.seconds([each])}) > 1
    exposed = max(reductions / 2 if is_chain else 0.0, reductions - seconds)
    return gathers + pairs + reductions + rounds * exposed


class _Links:
    """Times of collectives along axes of a mesh."""

    def __init__(self, mesh: Mesh, chip: Gpu, compiler: Compiler) -> None:
        self._mesh, self._chip, self._compiler = mesh, chip, compiler
        self._along: dict[tuple[str, ...], set[Group]] = {}

    def seconds(self, sent: Iterable[Sent]) -> float:
        """Return the seconds that these take one after another, those of a kind joined as XLA joins them."""
        kinds: dict[tuple[str, tuple[str, ...]], list[Sent]] = {}
        for each in sent:
            kinds.setdefault((each.kind, each.axes), []).append(each)
        total = 0.0
        for (kind, axes), those in kinds.items():
            if axes not in self._along:
                self._along[axes] = groups_along(self._mesh, axes)
            for payload in _joined(those, self._compiler.joined_bytes(kind)):
                total += slowest(kind, payload, self._along[axes], self._chip).seconds
        return total


def _joined(sent: list[Sent], most: int) -> list[int]:
    """Return the payloads after XLA's combiner: it joins until the results have `most` bytes."""
    payloads, held = list[int](), 0
    for each in sent:
        if payloads and held + each.result_bytes <= most:
            payloads[-1], held = payloads[-1] + each.payload, held + each.result_bytes
        else:
            payloads.append(each.payload)
            held = each.result_bytes
    return payloads
