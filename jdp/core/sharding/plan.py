"""The plan: a mesh and a strategy, and from them how every leaf of a train state is sharded.

`Plan.placements` walks the state once:
1. parameters get their compute spec (from `rules`, else from the model's own metadata) and their rest spec
   (`placement.rest_spec`);
2. a leaf of the optimizer state that mirrors a parameter, or is derived from one, is sharded as that parameter is
   (`optimizer_state.specs_for_leaf`); any other is placed by its own shape;
3. everything else (step, rng, model state) is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdp.core.formatting import listed
from jdp.core.host_memory import check_offload, rest_sharding
from jdp.core.notices import notice
from jdp.core.numbers import is_integer
from jdp.core.paths import matches, path_of
from jdp.core.sharding.axes import DATA, REPLICA, factors
from jdp.core.sharding.mesh import batch_axes, hosts_along, replicas_for_hosts
from jdp.core.sharding.optimizer_state import specs_for_leaf
from jdp.core.sharding.placement import Placement, axes_of, bytes_per_device, rest_spec, shards, spec_entry
from jdp.core.sharding.strategy import Strategy, strategy
from jdp.core.state import STACKED, Static, TrainState
from jdp.core.types import PyTree

MIN_SHARD_SIZE = 1024
"""Parameters with fewer elements (4 KiB of fp32) stay replicated: gathering them takes latency, not bandwidth."""


@dataclass(frozen=True)
class Plan:
    """A mesh, a strategy, and from them how every leaf of a state is sharded. Immutable; `print(plan)` describes it.

    Args:
        mesh: a mesh with a `data` axis (`jdp.make_mesh`). Axes of type Explicit (the default of `jax.make_mesh`) become
            Auto: `plan.mesh` is the mesh with Auto axes.
        strategy: "ddp" replicates everything; "zero1", "zero2" and "zero3" shard parameters and optimizer state over
            `data`, and differ in when gradients are reduced and weights gathered (`jdp.core.sharding.strategy`).
        rules: pairs of a path pattern and a `PartitionSpec`, which shard parameters over the model's own axes, such as
            `[("*/kernel", PartitionSpec(None, "model"))]`. `*` matches any characters, slashes too. The first pattern
            that matches a parameter's path gives its compute spec; without one, the model's own metadata does. A spec
            that names `data` fixes the dimension that ZeRO shards; otherwise the plan chooses it.
        min_shard_size: parameters with fewer elements than this stay replicated, because gathering them would take
            latency, not bandwidth.

        offload: "optimizer" keeps the optimizer's state and the master weights, all but leaves of fewer than
            `min_shard_size` elements, in the hosts' pinned memory between steps. None: everything is on the devices.

    Raises:
        ValueError: the strategy is unknown; the mesh has no `data` axis, or one of type Manual; a rule is no pair of a
            pattern and a spec, or names `replica` or an axis that the mesh lacks; `min_shard_size` is no whole number;
            or `offload` is unknown, or asks for memory that the mesh's devices do not have.
    """

    mesh: Mesh
    strategy: str = "ddp"
    rules: Sequence[tuple[str, PartitionSpec]] = field(default=(), kw_only=True)
    min_shard_size: int = field(default=MIN_SHARD_SIZE, kw_only=True)
    offload: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        strategy(self.strategy)
        object.__setattr__(self, "rules", _checked_rules(self.rules))
        if not is_integer(self.min_shard_size) or self.min_shard_size < 0:
            given = repr(self.min_shard_size)
            raise ValueError(f"min_shard_size is a whole number of elements, 0 or more; given {given}. Give 0 or 1024.")
        if DATA not in self.mesh.shape:
            raise ValueError(
                f"A plan needs a mesh with a `data` axis; given axes {tuple(self.mesh.shape)}. Use jdp.make_mesh."
            )
        object.__setattr__(self, "mesh", _with_auto_axes(self.mesh))
        check_offload(self.offload, self.mesh)
        for pattern, spec in self.rules:
            for axis in (axis for entry in spec for axis in axes_of(entry)):
                if axis not in self.mesh.shape:
                    raise ValueError(
                        f"A rule may name axes of the mesh only, {tuple(self.mesh.shape)}; "
                        f"the rule for {pattern!r} names {axis!r}. Add that axis to the mesh, or change the rule."
                    )
                if axis == REPLICA:
                    raise ValueError(
                        f"The `replica` axis carries the batch only: nothing is sharded over it; the rule for "
                        f"{pattern!r} names it. Use `data`, or an axis of the model's own."
                    )

    def __str__(self) -> str:
        gather = {"never": "everything replicated", "step": "gathered once a step", "use": "gathered at each use"}
        platform = self.mesh.devices.flat[0].platform
        host = "" if self.offload is None else "; optimizer state and master weights in host memory"
        return f"{self.strategy} on {factors(self.mesh.shape)} {platform} devices: {gather[self.row.gather]}{host}"

    @property
    def row(self) -> Strategy:
        """The strategy's row of the table of strategies."""
        return strategy(self.strategy)

    @property
    def batch_shards(self) -> int:
        """Number of shards of a batch: the sizes of `replica` and `data` multiplied."""
        return shards(PartitionSpec(self.batch_axes), dict(self.mesh.shape))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that the batch is split over, outermost first."""
        return batch_axes(self.mesh)

    @property
    def batch_spec(self) -> PartitionSpec:
        """Spec of a batch: its leading dimension over `replica` and `data`."""
        return PartitionSpec(self.batch_axes)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch: its leading dimension over `replica` and `data`."""
        return NamedSharding(self.mesh, self.batch_spec)

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of an array that every device holds in full."""
        return NamedSharding(self.mesh, PartitionSpec())

    def on(self, mesh: Mesh) -> Plan:
        """Return this plan for another mesh.

        Args:
            mesh: as for `Plan`, for example of devices that are only described.

        Raises:
            ValueError: as `Plan` does.
        """
        return replace(self, mesh=mesh)

    def param_placements(self, params: PyTree, static: Static | None = None) -> PyTree:
        """Return a tree like `params` with a `Placement` for each leaf; paths start at the parameters.

        Args:
            params: the parameters, real or abstract.
            static: the state's: which parameters are trained, and the specs that the model's own metadata asks for.

        Raises:
            ValueError: a rule matches nothing; a rule or the metadata shards a dimension that does not divide.
        """
        self.check_rules([path_of(path) for path, _ in jax.tree.leaves_with_path(params)])
        placements = self.tree_placements(params, () if static is None else static.specs)
        leaves, treedef = jax.tree.flatten(placements)
        if static is not None and static.trained is not None:
            leaves = [replace(p, trained=t) for p, t in zip(leaves, static.trained, strict=True)]
        return treedef.unflatten(list(map(self._in_memory, leaves)))

    def check_rules(self, paths: Sequence[str]) -> None:
        """Check that every rule has a parameter that it matches.

        Args:
            paths: of all parameters.

        Raises:
            ValueError: a rule matches nothing.
        """
        for pattern, _ in self.rules:
            if not any(matches(path, [pattern]) for path in paths):
                raise ValueError(
                    f"Every rule must match a parameter; {pattern!r} matches none of {listed(paths, 5)}. Fix it."
                )

    def tree_placements(
        self,
        tree: PyTree,
        specs: Sequence[tuple[str, PartitionSpec]] = (),
        of: Mapping[str, Placement] | None = None,
    ) -> PyTree:
        """Return a tree like `tree` with a `Placement` for each leaf; rules need not match.

        Args:
            tree: parameters, or with `of` what belongs to them; real or abstract.
            specs: (path, spec) for the parameters that the model's own metadata shards.
            of: path -> placement of the parameters that the tree belongs to.

        Raises:
            ValueError: a rule or the metadata shards a dimension that does not divide.
        """
        if of is not None:
            belongs = lambda path, leaf: self._place_optimizer_leaf(path_of(path), leaf, of)  # noqa: E731
            return jax.tree.map_with_path(belongs, tree)
        metadata = self._on_this_mesh(specs)
        return jax.tree.map_with_path(lambda path, leaf: self._place_param(path_of(path), leaf, metadata), tree)

    def state_placements(self, state: TrainState) -> TrainState:
        """Return a tree like `state` with a `Placement` for each leaf.

        Args:
            state: a train state, real or abstract.

        Raises:
            ValueError: as `param_placements` does.
        """
        params = {p.path: p for p in jax.tree.leaves(self.param_placements(state.params, state.static))}

        def place(key_path: Any, leaf: Any) -> Placement:
            path = path_of(key_path)
            head, _, tail = path.partition("/")
            if head == "params":
                return replace(params[tail], path=path)
            if head == "opt_state" and STACKED in state.sync:
                one = self._place_optimizer_leaf(path, jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
                rest, compute = (PartitionSpec(REPLICA, *spec) for spec in (one.rest, one.compute))
                return self._placement(path, leaf, rest, compute, f"each replica's own; {one.reason}")
            if path.startswith("sync/momentum/"):
                return replace(params[tail.partition("/")[2]], path=path)
            if head == "opt_state":
                return self._in_memory(self._place_optimizer_leaf(path, leaf, params))
            if path.startswith("sync/error/"):
                spec = PartitionSpec(self.batch_axes, *params[tail.partition("/")[2]].compute)
                return self._placement(path, leaf, spec, spec, "each shard of the batch has its own")
            return self._placement(path, leaf, PartitionSpec(), PartitionSpec(), f"replicated: {head}")

        return jax.tree.map_with_path(place, state)

    def placements(self, state: TrainState) -> list[Placement]:
        """Return how every leaf of a state is sharded, and why: path, shape, dtype, specs, bytes per device, reason.

        Args:
            state: a train state, real or abstract.

        Raises:
            ValueError: a rule matches nothing; a rule or the metadata shards a dimension that does not divide.
        """
        return jax.tree.leaves(self.state_placements(state))

    def shardings(self, state: TrainState) -> TrainState:
        """Return a tree like `state` with the `NamedSharding` that each leaf has between steps.

        Args:
            state: a train state, real or abstract.

        Raises:
            ValueError: a rule matches nothing; a rule or the metadata shards a dimension that does not divide.
        """
        return jax.tree.map(lambda p: rest_sharding(self.mesh, p), self.state_placements(state))

    def report_replicated(self, state: TrainState) -> None:
        """Report once which parameters a ZeRO strategy cannot shard, and why; under ddp, which rules name `data`.

        Args:
            state: a train state, real or abstract.
        """
        if self.mesh.shape[DATA] == 1:
            return
        if not self.row.shard_state:
            for pattern in (pattern for pattern, spec in self.rules if any(DATA in axes_of(entry) for entry in spec)):
                notice(
                    f"the rule for {pattern!r} shards over data, which {self.strategy} does not: what it matches is "
                    "replicated over data; take zero1, zero2 or zero3, or leave data out of the rule"
                )
            return
        if (replicas := replicas_for_hosts(self.mesh)) is not None:
            data, hosts = self.mesh.shape[DATA], hosts_along(self.mesh, DATA)
            notice(
                f"{self.strategy} gathers and reduces along data={data}, which spans {hosts} hosts; "
                f"replica={replicas} × data={data // replicas} does it on each host's fast links, and every device "
                f"then holds {replicas} times as much state"
            )
        params = jax.tree.leaves(self.param_placements(state.params, state.static))
        replicated = [p for p in params if p.dim is None]
        small = [p for p in replicated if "min_shard_size" in p.reason]
        for p in (p for p in replicated if p not in small):
            notice(f"{p.path} {list(p.shape)} is {p.reason} ({p.bytes_per_device:,} bytes on every device)")
        if small:
            notice(
                f"{len(small)} parameters of fewer than {self.min_shard_size} elements stay replicated "
                f"({sum(p.bytes_per_device for p in small):,} bytes on every device): {listed(p.path for p in small)}"
            )

    def _on_this_mesh(self, specs: Sequence[tuple[str, PartitionSpec]]) -> dict[str, PartitionSpec]:
        """Return the metadata's specs without the axis names that the mesh lacks; report those names once."""
        known = set(self.mesh.shape) - {REPLICA}
        names = {axis for _, spec in specs for entry in spec for axis in axes_of(entry)}
        if dropped := sorted(names - known):
            notice(
                f"the model's sharding metadata names {', '.join(map(repr, dropped))}, no axes of the mesh "
                f"({', '.join(self.mesh.shape)}) that parameters are sharded over: dropped there; Plan(rules=...) goes "
                "before metadata"
            )
        return {path: PartitionSpec(*(_keep_axes(known, entry) for entry in spec)) for path, spec in specs}

    def _place_param(self, path: str, leaf: Any, metadata: dict[str, PartitionSpec]) -> Placement:
        pattern, rule = next((rule for rule in self.rules if matches(path, [rule[0]])), ("", None))
        source = "the model's metadata" if rule is None else f"the rule for {pattern!r}"
        spec = PartitionSpec(*map(_data_last, metadata.get(path, PartitionSpec()) if rule is None else rule))
        compute = PartitionSpec(*(_keep_axes(set(self.mesh.shape) - {DATA}, entry) for entry in spec))
        self._check_fits(path, leaf.shape, spec, source)
        if not self.row.shard_state:
            return self._placement(path, leaf, compute, compute, f"{self.strategy} replicates it over data")
        if compute != spec:
            reason = f"sharded as {source if rule is None else 'its rule'} says: {spec}"
            return self._placement(path, leaf, spec, compute, reason)
        rest, reason = rest_spec(leaf.shape, compute, dict(self.mesh.shape), self.min_shard_size)
        return self._placement(path, leaf, rest, compute, reason)

    def _place_optimizer_leaf(self, path: str, leaf: Any, params: Mapping[str, Placement]) -> Placement:
        specs = specs_for_leaf(path.removeprefix("opt_state/"), tuple(leaf.shape), params)
        if specs.final or not self.row.shard_state or any(DATA in axes_of(entry) for entry in specs.rest):
            return self._placement(path, leaf, specs.rest, specs.compute, specs.reason)
        rest, reason = rest_spec(leaf.shape, specs.compute, dict(self.mesh.shape), self.min_shard_size)
        return self._placement(path, leaf, rest, specs.compute, f"{reason} ({specs.reason})")

    def _placement(self, path: str, leaf: Any, rest: PartitionSpec, compute: PartitionSpec, reason: str) -> Placement:
        size = bytes_per_device(leaf.shape, leaf.dtype, shards(rest, dict(self.mesh.shape)))
        return Placement(path, tuple(leaf.shape), str(leaf.dtype), rest, compute, size, reason)

    def _in_memory(self, placement: Placement) -> Placement:
        """Return the placement of a parameter or a leaf of the optimizer's state, in the memory where it rests."""
        large = placement.shape and math.prod(placement.shape) >= self.min_shard_size
        if self.offload is None or not large or not placement.trained:
            return placement
        return replace(placement, memory="host", reason=f"{placement.reason}; in host memory")

    def _check_fits(self, path: str, shape: tuple[int, ...], spec: PartitionSpec, source: str) -> None:
        """Check a parameter's spec against its shape; `source` ("the …") is what gave the spec."""
        if len(spec) > len(shape):
            raise ValueError(
                f"A spec has at most one entry for each dimension; {spec} of {source} has {len(spec)}, and {path} has "
                f"shape {list(shape)}. Leave out entries."
            )
        named, subject = [axis for entry in spec for axis in axes_of(entry)], f"T{source[1:]}"
        if len(set(named)) < len(named):
            raise ValueError(f"{subject} names an axis once; {spec} for {path} does not. Remove one.")
        for dim, size in enumerate(shape):
            pieces = shards(PartitionSpec(spec_entry(spec, dim)), dict(self.mesh.shape))
            if size % pieces:
                raise ValueError(
                    f"{subject} must shard dimensions that divide: dimension {dim} of {path} {list(shape)} "
                    f"is {size}, and {spec} splits it into {pieces}. Change the size, or the mesh "
                    f"({factors(self.mesh.shape)}), or the rule: Plan(rules=...) goes before metadata."
                )


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """Return a mesh of the same devices whose axes have type Auto, as GSPMD and jdp's own `shard_map` need."""
    types = mesh.axis_types
    if AxisType.Manual in types:
        axes = factors(mesh.shape).replace(" × ", ", ")
        raise ValueError(
            f"A plan's mesh has axes of type Auto; given {types}. Write jdp.make_mesh({axes}), and leave "
            "partitioning='manual' to make_train_step."
        )
    if AxisType.Explicit not in types:
        return mesh
    notice(
        "the mesh's axes are Explicit (jax.make_mesh's default): jdp takes them as Auto, as jdp.make_mesh makes them"
    )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(types))


def _checked_rules(rules: Any) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return the rules as a tuple of pairs, after checking their types."""
    example = 'rules=[("*/kernel", PartitionSpec(None, "model"))]'
    if isinstance(rules, Mapping | str) or not isinstance(rules, Iterable):
        raise ValueError(
            f"A plan's rules are a sequence of pairs, as in {example}; given {rules!r}. Give a list of pairs."
        )
    pairs: list[tuple[str, PartitionSpec]] = []
    for rule in rules:  # pyright: ignore[reportUnknownVariableType]
        match rule:
            case (str() as pattern, PartitionSpec() as spec):
                pass
            case _:
                raise ValueError(
                    f"A rule is a pair of a path pattern and a PartitionSpec, as in {example}; given {rule!r}. Give "
                    "a PartitionSpec."
                )
        for entry in spec:
            axes: Any = entry if isinstance(entry, tuple | list) else () if entry is None else (entry,)
            if not all(isinstance(axis, str) for axis in axes):
                raise ValueError(
                    f"A dimension in a rule is None, an axis or a tuple of axes; the rule for {pattern!r} has "
                    f"{entry!r}. Write None for a dimension that is not sharded."
                )
        pairs.append((pattern, spec))
    return tuple(pairs)


def _data_last(entry: object) -> object:
    """Move `data` to the end of a spec's entry: then gathering over `data` yields each device's shard over the rest."""
    axes = axes_of(entry)
    return (*(axis for axis in axes if axis != DATA), DATA) if DATA in axes and len(axes) > 1 else entry


def _keep_axes(axes: set[str], entry: object) -> object:
    """Return a spec's entry without the names that are not in `axes`."""
    kept = tuple(axis for axis in axes_of(entry) if axis in axes)
    return kept[0] if len(kept) == 1 else (kept or None)
