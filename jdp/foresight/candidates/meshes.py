"""Other meshes for a step: which factorisations of a target's devices are worth compiling, by closed form.

    devices = replica × data × the model's own axis

`replica` takes whole hosts, so that `data` and the model's axis stay on as few hosts as can be. The model's axis stays
within a host, and is searched where the plan's rules shard parameters over it. A mesh and a strategy are left out where

- they cannot run: a rule, the batch or `refuse` does not divide, or a device cannot hold the state at rest; or
- `MOST` others are kept. First each strategy on replicas of as few hosts as hold its state (`hybrid_axes`): these hid
  most where all sizes were compiled. Then of each strategy the mesh that sends for the shortest time.

Sending counts the strategy's row of the contract (`traffic/theory.py`), under zero3 layer by layer. For the model's
axis it counts an all-reduce of activations [tokens of a device, width] for each matrix that the axis shards (Shoeybi et
al. 2019, arXiv:1909.08053, section 3). Each is timed by the links that it crosses (`timing/collectives.py`). Only
compiling shows how much of it computation hides.

The same program is tried once: ddp sums over `replica` as over `data`, and with one microbatch zero2 is zero1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.base.formatting import format_bytes, format_seconds
from jdp.core.batch import batch_rows
from jdp.core.sharding.axes import DATA, REPLICA
from jdp.core.sharding.mesh import own_axes
from jdp.core.sharding.placement import Placement, axes_of, spec_entry
from jdp.core.sharding.strategy import strategy
from jdp.core.state import TrainState, own_shapes
from jdp.core.step import Step
from jdp.core.types import Batch
from jdp.core.update.optimized import exchanged
from jdp.foresight.memory.peak import available_bytes
from jdp.foresight.targets.relocate import Candidate, abstract_on, candidate_name, hybrid_axes
from jdp.foresight.targets.resolve import Target
from jdp.foresight.timing.collectives import Groups, collective_seconds
from jdp.foresight.traffic.reductions import ring_bytes
from jdp.foresight.traffic.theory import theory

MOST = 3
"""Ways on other meshes that are compiled: each takes as long as a strategy does."""
NAMED = 3
"""Ways of a kind that are named; of more only the number is reported."""

Refuse = Callable[[Mapping[str, int]], str | None]
"""A mesh (axis -> size) -> why the model cannot run on it; None: it can."""


@dataclass(frozen=True)
class MeshWay:
    """A strategy on another mesh."""

    strategy: str  # its name
    axes: Mapping[str, int]  # the mesh, axis -> size
    sends: float = 0.0  # by closed form: seconds, or bytes of a device where link rates are not known

    def __str__(self) -> str:
        return candidate_name(self.strategy, 1, None, self.axes)


@dataclass(frozen=True)
class MeshSearch:
    """Which ways on other meshes are compiled, and why the others are not."""

    kept: tuple[MeshWay, ...]  # those to compile, in order
    ways: int  # how many there are
    left_out: tuple[str, ...]  # why the others are left out, a clause for each reason
    in_seconds: bool = True  # whether `MeshWay.sends` are seconds

    def amount(self, way: MeshWay) -> str:
        """Return what a way sends, in words."""
        return format_seconds(way.sends) if self.in_seconds else format_bytes(int(way.sends))

    @property
    def words(self) -> str:
        """A sentence or two: how many ways there are, which are compiled, and why the others are not."""
        if not self.ways:
            return f"--axes: no other mesh can be tried. Left out: {'; '.join(self.left_out) or 'nothing'}"
        kept = ", ".join(f"{way} {self.amount(way)}" for way in self.kept) or "none"
        ways = f"{self.ways} way{'s' * (self.ways > 1)} on other meshes"
        found = f"--axes: of {ways} {len(self.kept)} compiled, beside what a step sends: {kept}"
        return f"{found}. Left out: {'; '.join(self.left_out)}" if self.left_out else found

    def to_json(self) -> dict[str, Any]:
        """Return the `axes` that `jdp plan --axes --json` prints."""
        unit = "sends_seconds" if self.in_seconds else "sends_bytes"
        kept = [{"strategy": way.strategy, "mesh": dict(way.axes), unit: way.sends} for way in self.kept]
        return {"ways": self.ways, "compiled": kept, "left_out": list(self.left_out)}


def search_axes(
    step: Step,
    state: TrainState,
    batch: Batch,
    target: Target,
    *,
    strategies: Sequence[str],
    accumulate: Sequence[int],
    tokens: int,
    refuse: Refuse = lambda axes: None,
) -> MeshSearch:
    """Choose ways on other meshes to compile. Nothing is compiled here."""
    count, rounded = accumulate[0], math.lcm(*accumulate)
    own = abstract_on(step.changed(accumulate=count), state, batch, target, microbatches=rounded)
    sizes, rows = dict(own.step.plan.mesh.shape), batch_rows(own.batch)
    model_axis, left_out = _model_axis(own.step)
    if target.hosts == 1:
        left_out.insert(0, "replicas, as there is one host")
    names = [name for name in strategies if name != "zero2" or rounded > 1 or "zero1" not in strategies]
    kept, large, reasons = list[MeshWay](), list[MeshWay](), dict[str, int]()
    for axes in factorisations(target, sizes, model_axis):
        replicas = axes.get(REPLICA, 1) != sizes.get(REPLICA, 1)
        tried = [name for name in names if strategy(name).shard_state or not replicas]
        if reason := refuse(axes):
            reasons[reason] = reasons.get(reason, 0) + len(tried)
            continue
        for name in tried:
            way = MeshWay(name, axes)
            try:
                plan = replace(own.step.plan, strategy=name)
                other = own.step.changed(plan=plan)
                found = abstract_on(other, state, batch, target, microbatches=rounded, axes=axes)
                placements = found.step.plan.placements(found.state)
            except ValueError as error:  # a rule that does not divide
                reasons[str(error).split(". ")[0]] = reasons.get(str(error).split(". ")[0], 0) + 1
                continue
            held = sum(placement.bytes_per_device for placement in placements if not placement.on_host)
            if batch_rows(found.batch) != rows:
                reason = f"{rows} rows do not divide over {found.step.plan.batch_shards} shards of the batch"
                reasons[reason] = reasons.get(reason, 0) + 1
            elif target.memory_bytes is not None and held > available_bytes(target.memory_bytes):
                large.append(replace(way, sends=held))
            else:
                kept.append(replace(way, sends=_sends(found, target, tokens / count)))
    kept = _in_order(kept, hybrid_axes(target, own.state))
    search = MeshSearch(tuple(kept[:MOST]), len(kept) + len(large) + sum(reasons.values()), (), target.chip is not None)
    left_out += [f"{count}, as {reason}" for reason, count in reasons.items()]
    if large:
        most = max(large, key=lambda way: way.sends)
        left_out.append(
            f"{len(large)} whose state alone is more than a device has, such as {most} {format_bytes(int(most.sends))}"
        )
    if longer := kept[MOST:]:
        shown = ", ".join(f"{way} {search.amount(way)}" for way in longer[:NAMED])
        left_out.append(f"{len(longer)} others, {'such as ' * (len(longer) > NAMED)}{shown}")
    return replace(search, left_out=tuple(left_out))


def _in_order(ways: Sequence[MeshWay], hybrid: Mapping[str, int] | None) -> list[MeshWay]:
    """Return the ways, first those on the mesh `hybrid`, then the first of each strategy by what it sends."""
    by_sends = sorted(ways, key=lambda way: way.sends)
    preferred = [way for way in by_sends if way.axes == hybrid]
    named = {way.strategy: way for way in reversed(by_sends) if way not in preferred}
    firsts = [way for way in by_sends if way in named.values()]
    return [*preferred, *firsts, *(way for way in by_sends if way not in (*preferred, *firsts))]


def factorisations(target: Target, own: Mapping[str, int], model_axis: str | None) -> list[dict[str, int]]:
    """Return the meshes of a target's devices, without the step's own."""
    kept = math.prod(size for axis, size in own.items() if axis not in (REPLICA, DATA, model_axis))
    hosts = [count for count in range(1, target.hosts + 1) if target.hosts % count == 0]
    inside = [count for count in range(1, target.per_host + 1) if model_axis and target.per_host % count == 0] or [1]
    found = list[dict[str, int]]()
    for replicas in hosts:
        for model in inside:
            data, left = divmod(len(target.devices), replicas * model * kept)
            if left or not data:
                continue
            outer = {REPLICA: replicas} if replicas > 1 or REPLICA in own else {}
            axes = {**outer, **own, DATA: data, **outer, **({model_axis: model} if model_axis else {})}
            if axes != dict(own):
                found.append(axes)
    return found


def _model_axis(step: Step) -> tuple[str | None, list[str]]:
    """Return the axis of the model's own that is searched, and why there is none."""
    named = {axis for _, spec in step.plan.rules for entry in spec for axis in axes_of(entry)} - {DATA, REPLICA}
    if len(named) == 1:
        return named.pop(), []
    if named:
        return None, [f"other sizes of {' and '.join(sorted(named))}, as one axis of the model's is searched"]
    return None, ["axes of the model's own, as no [rules] shard parameters over one"]


def _sends(candidate: Candidate, target: Target, tokens: float) -> float:
    """Return what a step sends, `tokens` a microbatch: seconds; a device's bytes where link rates are not known."""
    step, state, mesh = candidate.step, candidate.state, candidate.step.plan.mesh

    def cost(kind: str, payload: float, axes: Sequence[str], times: int) -> float:
        devices = math.prod(mesh.shape[axis] for axis in axes)
        if target.chip is None or devices == 1:
            return times * ring_bytes(kind, payload, devices)
        return times * collective_seconds(kind, payload, _groups(mesh, axes, target), target)

    sent = exchanged(step.plan, state)
    promised = theory(step.plan, state.params, step.settings, static=state.static, exchanged=sent)
    stacked = (leaf.shape for leaf in jax.tree.leaves(own_shapes(state.params, state.static)) if len(leaf.shape) > 2)
    layers = max((shape[0] for shape in stacked), default=1) if step.plan.row.gather == "use" else 1
    total = 0.0
    for each in promised.promises:
        times = each.rounds * (layers if DATA in each.axes else 1)
        total += cost(each.kind, each.payload_bytes / times, each.axes, times)
    rows = tokens / step.plan.batch_shards * step.precision.compute_dtype.itemsize
    placements: list[Placement] = jax.tree.leaves(step.plan.param_placements(state.params, state.static))
    for axis in own_axes(mesh):
        matrices = _activations(placements, axis).values()
        total += sum(cost("all-reduce", rows * width, (axis,), times * step.accumulate) for width, times in matrices)
    return total


def _activations(placements: Sequence[Placement], axis: str) -> dict[str, tuple[int, int]]:
    """Return the activations that the matrices [..., in, out] sharded over `axis` have summed: name -> (width, times).

    Sharded over `in`, the output is a sum over the axis, in the forward pass; over `out`, the gradient of the input is,
    in the backward pass: once for matrices of one module, which have one input (query, key and value).
    """
    found = dict[str, tuple[int, int]]()
    for placement in placements:
        if len(placement.shape) < 2:
            continue
        *stacked, rows, columns = placement.shape
        dims = len(placement.shape)
        if axis in axes_of(spec_entry(placement.compute, dims - 2)):
            found[placement.path] = (columns, math.prod(stacked))
        elif axis in axes_of(spec_entry(placement.compute, dims - 1)):
            found["/".join(placement.path.split("/")[:-2])] = (rows, math.prod(stacked))
    return found


def _groups(mesh: Mesh, axes: Sequence[str], target: Target) -> Groups:
    """Return the groups of devices that differ along `axes` only, as positions among the target's devices."""
    position = {device: number for number, device in enumerate(target.devices)}
    places = np.vectorize(position.__getitem__, otypes=[int])(mesh.devices)
    last = [mesh.axis_names.index(axis) for axis in axes]
    moved = np.moveaxis(places, last, range(-len(last), 0))
    size = math.prod(mesh.shape[axis] for axis in axes)
    return tuple(tuple(map(int, group)) for group in moved.reshape(-1, size))
