"""The plan: a mesh and a strategy, and from them where every leaf of a train state lives.

`Plan.placements` walks the state once:
1. parameters get their compute spec (from `rules`, else from the model's own metadata) and their rest spec
   (`placement.rest_spec`);
2. a leaf of the optimizer state that mirrors a parameter, or is made from one, lies as that parameter does
   (`jdp.core.sharding.optimizer_state`); any other is placed by its own shape;
3. everything else (step, rng, model state) is replicated.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdp.core.notices import notice
from jdp.core.paths import path_of
from jdp.core.sharding.mesh import DATA, REPLICA, batch_axes, hosts_along, replicas_for_hosts
from jdp.core.sharding.optimizer_state import kinship
from jdp.core.sharding.placement import Placement, axes_of, bytes_per_device, rest_spec, shards, spec_entry
from jdp.core.sharding.strategy import Strategy, strategy
from jdp.core.state import Static, TrainState
from jdp.core.types import PyTree, is_whole

MIN_SHARD_SIZE = 1024
"""Elements below which a gather is latency: 4 KiB of fp32."""


@dataclass(frozen=True)
class Plan:
    """A mesh, a strategy, and where every leaf lives.

    Args:
        mesh: a mesh with a `data` axis (`make_mesh`). Axes of type Explicit (the default of `jax.make_mesh`) are taken
            as Auto; `plan.mesh` is the mesh with Auto axes.
        strategy: "ddp", "zero1", "zero2" or "zero3".
        rules: pairs of a path pattern (`fnmatch`: `*` matches anything, slashes too) and a PartitionSpec, for the
            model's own axes. The first that matches a parameter's path gives its compute spec, before what the model's
            own metadata asks (`Static.specs`). A spec that names `data` fixes the dimension that ZeRO shards; otherwise
            the plan chooses.
        min_shard_size: parameters with fewer elements than this stay replicated: a gather of them would be latency.

    Raises:
        ValueError: unknown strategy, no `data` axis or an axis of type Manual, a rule that is no such pair or names an
            axis the mesh lacks.
    """

    mesh: Mesh
    strategy: str = "ddp"
    rules: Sequence[tuple[str, PartitionSpec]] = field(default=(), kw_only=True)
    min_shard_size: int = field(default=MIN_SHARD_SIZE, kw_only=True)

    def __post_init__(self) -> None:
        strategy(self.strategy)
        object.__setattr__(self, "rules", _pairs(self.rules))
        if not is_whole(self.min_shard_size) or self.min_shard_size < 0:
            raise ValueError(f"min_shard_size is a whole number of elements, 0 or more; got {self.min_shard_size!r}.")
        if DATA not in self.mesh.shape:
            raise ValueError(f"A plan needs a mesh with a `data` axis; got axes {tuple(self.mesh.shape)}.")
        object.__setattr__(self, "mesh", _auto(self.mesh))
        for pattern, spec in self.rules:
            for axis in (axis for entry in spec for axis in axes_of(entry)):
                if axis not in self.mesh.shape:
                    raise ValueError(
                        f"A rule may name axes of the mesh only, {tuple(self.mesh.shape)}; "
                        f"the rule for {pattern!r} names {axis!r}."
                    )
                if axis == REPLICA:
                    raise ValueError(
                        f"The `replica` axis carries the batch only: nothing is sharded over it; the rule for "
                        f"{pattern!r} names it. Use `data`, or an axis of the model's own."
                    )

    def __str__(self) -> str:
        axes = " × ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        words = {"never": "everything replicated", "step": "gathered once a step", "use": "gathered at each use"}
        return f"{self.strategy} on {axes} {self.mesh.devices.flat[0].platform} devices: {words[self.row.gather]}"

    @property
    def row(self) -> Strategy:
        """The strategy's row of the table."""
        return strategy(self.strategy)

    @property
    def batch_shards(self) -> int:
        """Into how many parts a batch is split: the sizes of `replica` and `data` multiplied."""
        return shards(PartitionSpec(self.batch_axes), dict(self.mesh.shape))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that the batch is split over."""
        return batch_axes(self.mesh)

    @property
    def batch_spec(self) -> PartitionSpec:
        return PartitionSpec(self.batch_axes)

    @property
    def batch_sharding(self) -> NamedSharding:
        """How a batch lies: its leading dimension over `replica` and `data`."""
        return NamedSharding(self.mesh, self.batch_spec)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def on(self, mesh: Mesh) -> Plan:
        """The same plan on another mesh, for example of devices that are only described."""
        return replace(self, mesh=mesh)

    def param_placements(self, params: PyTree, static: Static | None = None) -> PyTree:
        """A tree like `params` with a `Placement` for each leaf; paths start at the parameters.

        `static` is the state's: it knows which parameters are trained, and what the model's own metadata asks.

        Raises:
            ValueError: a rule matches nothing; a rule or the metadata shards a dimension that does not divide.
        """
        for pattern, _ in self.rules:
            if not any(fnmatch.fnmatchcase(path_of(p), pattern) for p, _ in jax.tree.leaves_with_path(params)):
                raise ValueError(f"Every rule must match a parameter; {pattern!r} matches none.")
        asked = {} if static is None else self._on_this_mesh(static.specs)
        places = jax.tree.map_with_path(lambda path, leaf: self._place_param(path_of(path), leaf, asked), params)
        trained = None if static is None else static.trained
        if trained is None:
            return places
        leaves, treedef = jax.tree.flatten(places)
        return treedef.unflatten([replace(p, trained=t) for p, t in zip(leaves, trained, strict=True)])

    def state_placements(self, state: TrainState) -> TrainState:
        """A tree like `state` with a `Placement` for each leaf."""
        params = self.param_placements(state.params, state.static)
        mirrors = {p.path: p for p in jax.tree.leaves(params)}

        def place(path: Any, leaf: Any) -> Placement:
            whole = path_of(path)
            head, _, tail = whole.partition("/")
            if head == "params":
                return replace(mirrors[tail], path=whole)
            if head == "opt_state":
                return self._place_opt(whole, leaf, mirrors)
            return self._placement(whole, leaf, PartitionSpec(), PartitionSpec(), f"replicated: {head}")

        return jax.tree.map_with_path(place, state)

    def placements(self, state: TrainState) -> list[Placement]:
        """Where every leaf of `state` (real or abstract) lives, and why."""
        return jax.tree.leaves(self.state_placements(state))

    def shardings(self, state: TrainState) -> TrainState:
        """A tree like `state` with the `NamedSharding` each leaf has at rest."""
        return jax.tree.map(lambda p: NamedSharding(self.mesh, p.rest), self.state_placements(state))

    def report_replicated(self, state: TrainState) -> None:
        """Say once which parameters a ZeRO strategy could not shard, and why; under ddp, which rules ask it to."""
        if self.mesh.shape[DATA] == 1:
            return
        if not self.row.shard_state:
            for pattern in (pattern for pattern, spec in self.rules if any(DATA in axes_of(entry) for entry in spec)):
                notice(
                    f"the rule for {pattern!r} shards over data, which {self.strategy} does not: what it matches lies "
                    "whole along data; take zero1, zero2 or zero3, or leave data out of the rule"
                )
            return
        if (replicas := replicas_for_hosts(self.mesh)) is not None:
            data, hosts = self.mesh.shape[DATA], hosts_along(self.mesh, DATA)
            notice(
                f"{self.strategy} gathers and reduces along data={data}, which lies over {hosts} hosts; "
                f"replica={replicas} × data={data // replicas} does it on each host's fast links, and every device "
                f"then holds {replicas} times as much state"
            )
        whole = [p for p in jax.tree.leaves(self.param_placements(state.params, state.static)) if p.dim is None]
        small = [p for p in whole if "min_shard_size" in p.reason]
        for p in (p for p in whole if p not in small):
            notice(f"{p.path} {list(p.shape)} is {p.reason} ({p.bytes_per_device:,} bytes on every device)")
        if small:
            names = ", ".join(p.path for p in small[:3]) + (", ..." if len(small) > 3 else "")
            notice(
                f"{len(small)} parameters of fewer than {self.min_shard_size} elements stay replicated "
                f"({sum(p.bytes_per_device for p in small):,} bytes on every device): {names}"
            )

    def _on_this_mesh(self, specs: Sequence[tuple[str, PartitionSpec]]) -> dict[str, PartitionSpec]:
        """The metadata's specs without the names that the mesh lacks; which those are is said once."""
        known = set(self.mesh.shape) - {REPLICA}
        names = {axis for _, spec in specs for entry in spec for axis in axes_of(entry)}
        if dropped := sorted(names - known):
            notice(
                f"the model's sharding metadata names {', '.join(map(repr, dropped))}, no axes of the mesh "
                f"({', '.join(self.mesh.shape)}) that parameters are sharded over: dropped there; Plan(rules=...) goes "
                "before metadata"
            )
        return {path: PartitionSpec(*(_only(known, entry) for entry in spec)) for path, spec in specs}

    def _place_param(self, path: str, leaf: Any, asked: dict[str, PartitionSpec]) -> Placement:
        rule = next((spec for pattern, spec in self.rules if fnmatch.fnmatchcase(path, pattern)), None)
        whose = "the model's metadata" if rule is None else "a rule"
        rule = PartitionSpec(*map(_data_last, asked.get(path, PartitionSpec()) if rule is None else rule))
        compute = PartitionSpec(*(_only(set(self.mesh.shape) - {DATA}, entry) for entry in rule))
        self._check_fits(path, leaf.shape, rule, whose)
        if not self.row.shard_state:
            return self._placement(path, leaf, compute, compute, f"{self.strategy} replicates it over data")
        if compute != rule:
            return self._placement(
                path, leaf, rule, compute, f"sharded as {whose.replace('a rule', 'its rule')} says: {rule}"
            )
        rest, reason = rest_spec(leaf.shape, compute, dict(self.mesh.shape), self.min_shard_size)
        return self._placement(path, leaf, rest, compute, reason)

    def _place_opt(self, path: str, leaf: Any, params: dict[str, Placement]) -> Placement:
        kin = kinship(path.partition("/")[2], tuple(leaf.shape), params)
        if kin.whole or not self.row.shard_state or any(DATA in axes_of(entry) for entry in kin.rest):
            return self._placement(path, leaf, kin.rest, kin.compute, kin.reason)
        spec, reason = rest_spec(leaf.shape, kin.compute, dict(self.mesh.shape), self.min_shard_size)
        return self._placement(path, leaf, spec, kin.compute, f"{reason} ({kin.reason})")

    def _placement(self, path: str, leaf: Any, rest: PartitionSpec, compute: PartitionSpec, reason: str) -> Placement:
        size = bytes_per_device(leaf.shape, leaf.dtype, shards(rest, dict(self.mesh.shape)))
        return Placement(path, tuple(leaf.shape), str(leaf.dtype), rest, compute, size, reason)

    def _check_fits(self, path: str, shape: tuple[int, ...], rule: PartitionSpec, whose: str) -> None:
        """Hold a rule, or a spec of the model's metadata, against a parameter's shape."""
        if len(rule) > len(shape):
            raise ValueError(f"The spec {rule} of {whose} has {len(rule)} entries, but {path} has shape {list(shape)}.")
        named = [axis for entry in rule for axis in axes_of(entry)]
        if len(set(named)) < len(named):
            raise ValueError(f"{whose.capitalize()} names an axis once; {rule} for {path} does not.")
        for dim, size in enumerate(shape):
            pieces = shards(PartitionSpec(spec_entry(rule, dim)), dict(self.mesh.shape))
            if size % pieces:
                mesh = " × ".join(f"{axis}={count}" for axis, count in self.mesh.shape.items())
                raise ValueError(
                    f"{whose.capitalize()} must shard dimensions that divide: dimension {dim} of {path} {list(shape)} "
                    f"is {size}, and {rule} cuts it into {pieces}. Change the size, or the mesh ({mesh}), or the rule: "
                    "Plan(rules=...) goes before metadata."
                )


def _auto(mesh: Mesh) -> Mesh:
    """The same devices with Auto axes: where XLA, or jdp's own shard_map, decides what moves."""
    types = mesh.axis_types
    if AxisType.Manual in types:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"A plan's mesh has axes of type Auto; got {types}. Write jdp.make_mesh({axes}), and leave "
            "partitioning='manual' to make_train_step."
        )
    if AxisType.Explicit not in types:
        return mesh
    notice(
        "the mesh's axes are Explicit (jax.make_mesh's default): jdp takes them as Auto, as jdp.make_mesh makes them"
    )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(types))


def _pairs(rules: Any) -> tuple[tuple[str, PartitionSpec], ...]:
    """The rules as pairs of a pattern and a spec, each entry of which is None, a name or several."""
    example = 'rules=[("*/kernel", PartitionSpec(None, "model"))]'
    if isinstance(rules, Mapping | str) or not isinstance(rules, Iterable):
        raise ValueError(f"A plan's rules are a sequence of pairs, as in {example}; got {rules!r}.")
    pairs: list[tuple[str, PartitionSpec]] = []
    for rule in rules:  # pyright: ignore[reportUnknownVariableType]
        match rule:
            case (str() as pattern, PartitionSpec() as spec):
                pass
            case _:
                raise ValueError(
                    f"A rule is a pair of a path pattern and a PartitionSpec, as in {example}; got {rule!r}."
                )
        for entry in spec:
            if not all(isinstance(axis, str) for axis in _named(entry)):
                raise ValueError(
                    f"A dimension in a rule is None, an axis or a tuple of axes; the rule for {pattern!r} has "
                    f"{entry!r}. Write None for a dimension that is not sharded."
                )
        pairs.append((pattern, spec))
    return tuple(pairs)


def _named(entry: object) -> tuple[object, ...]:
    """What an entry of a spec names, right or wrong."""
    return tuple(entry) if isinstance(entry, tuple | list) else () if entry is None else (entry,)  # pyright: ignore


def _data_last(entry: object) -> object:
    """The model's own axes cut a dimension first, so that gathering over `data` gives a device its own part."""
    axes = axes_of(entry)
    return (*(axis for axis in axes if axis != DATA), DATA) if DATA in axes and len(axes) > 1 else entry


def _only(axes: set[str], entry: object) -> object:
    """One entry of a spec, with the names in `axes` only."""
    left = tuple(axis for axis in axes_of(entry) if axis in axes)
    return left[0] if len(left) == 1 else (left or None)
