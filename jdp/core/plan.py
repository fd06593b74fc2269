"""The plan: a mesh and a strategy, which determine the sharding of every leaf of a train state.

Parameters get their compute spec from `rules`, else from the model's own metadata, and their rest spec
(`placement.rest_spec`). A leaf of the optimizer state that mirrors a parameter, or is derived from one, is sharded like
it (`placement.specs_for_leaf`), another one by its own shape. Everything else is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.base.errors import UserError, public
from jdp.base.formatting import html_table, listed
from jdp.base.notices import notice
from jdp.base.toml import described
from jdp.base.tree_paths import matches, path_of
from jdp.base.words import Offload, StrategyName, is_integer
from jdp.core.sharding.axes import DATA, REPLICA, factors
from jdp.core.sharding.host_memory import PINNED, check_offload
from jdp.core.sharding.leaf_table import Placements
from jdp.core.sharding.mesh import batch_axes, check_mesh
from jdp.core.sharding.placement import (
    Placement,
    axes_of,
    bytes_per_device,
    check_fits,
    checked_rules,
    data_last,
    keep_axes,
    rest_spec,
    shards,
    specs_for_leaf,
)
from jdp.core.sharding.strategy import STRATEGIES, Strategy, strategy
from jdp.core.state import Static, TrainState
from jdp.core.types import PyTree

MIN_SHARD_SIZE = 1024
"""Parameters with fewer elements (4 KiB of fp32) stay replicated: gathering them takes latency, not bandwidth."""
_GATHERED = {"never": "–", "step": "gathered once a step", "use": "gathered at each use"}
_WRITE = 'Write jdp.Plan(jdp.make_mesh(data=-1), "zero1")'


@dataclass(frozen=True)
class Plan:
    """A mesh and a strategy: they determine the sharding of every leaf of a state. Immutable; `print` describes it.

        >>> plan = jdp.Plan(jdp.make_mesh(data=8), "zero1")
        >>> print(plan)
        zero1 on data=8 cpu devices: gathered once a step

    Args:
        mesh: a mesh of `jdp.make_mesh`, or another whose axes have type Auto and whose batch's axes are called `data`
            and, over slow links, `replica`.
        strategy: "ddp" replicates everything: take it when the state fits on each device. "zero1", "zero2" and "zero3"
            shard parameters and optimizer state over `data`, for states that do not fit. They differ in when gradients
            are reduced and weights gathered (`jdp.core.sharding.strategy`).
        rules: pairs of a path pattern and a `PartitionSpec`, such as `[("*/kernel", PartitionSpec(None, "model"))]`.
            Needed for tensor parallelism of a model whose parameters have no sharding metadata. `*` matches any
            characters, slashes too. The first pattern that matches a parameter's path gives its compute spec; without
            one, the model's own metadata does. A spec that names `data` fixes the dimension that ZeRO shards; otherwise
            the plan chooses it.
        min_shard_size: parameters with fewer elements than this stay replicated, because gathering them takes latency,
            not bandwidth. Lower it for a model of many small parameters that must not be replicated.
        offload: "optimizer" keeps the optimizer state in the hosts' pinned memory except during the update. Leaves of
            fewer than `min_shard_size` elements stay on the devices. Use it when the activations do not fit beside it
            even under zero3. None: everything is on the devices.

    Raises:
        ValueError: `mesh` is not a mesh, has no axis called `data`, or has an axis of another type than Auto. The
            strategy or `offload` is unknown, or `offload` needs memory that the devices do not have. A rule is not a
            pair of a pattern and a spec, or names `replica` or an unknown axis. `min_shard_size` is not a whole number.
    """

    mesh: Mesh
    strategy: StrategyName = "ddp"
    rules: Sequence[tuple[str, PartitionSpec]] = field(default=(), kw_only=True)
    min_shard_size: int = field(default=MIN_SHARD_SIZE, kw_only=True)
    offload: Offload | None = field(default=None, kw_only=True)

    @public()
    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.mesh), Mesh):
            raise UserError(f"A plan's mesh is a jax.sharding.Mesh; given {described(self.mesh)}. {_WRITE}.")
        strategy(self.strategy)
        if not is_integer(self.min_shard_size) or self.min_shard_size < 0:
            rule = "min_shard_size is a whole number of elements, 0 or more"
            raise UserError(f"{rule}; given {self.min_shard_size!r}. Give 0 or 1024.")
        check_mesh(self.mesh)
        object.__setattr__(self, "rules", checked_rules(self.rules, self.mesh.axis_names))
        check_offload(self.offload, self.mesh)

    def __repr__(self) -> str:
        keywords = [(each.name, each.default, getattr(self, each.name)) for each in fields(self) if each.kw_only]
        changed = "".join(f", {name}={value!r}" for name, default, value in keywords if value != default)
        return f"Plan({self._devices}, {self.strategy!r}{changed})"

    def __str__(self) -> str:
        gather = {**_GATHERED, "never": "everything replicated"}[self.row.gather]
        host = "" if self.offload is None else "; optimizer state in host memory"
        return f"{self.strategy} on {self._devices}: {gather}{host}"

    @property
    def _devices(self) -> str:
        return f"{factors(self.mesh.shape)} {self.mesh.devices.flat[0].platform} devices"

    def _repr_html_(self) -> str:
        row, sharded = self.row, f"sharded over {DATA}"
        reduced = "at each microbatch" if row.reduce_each_microbatch else "once a step"
        rows = [
            ("what", "how"),
            ("parameters, optimizer state", sharded if row.shard_state else "replicated"),
            ("gradients", f"{'reduce-scattered' if row.shard_state else 'all-reduced'} {reduced}"),
            ("working copy of the parameters", _GATHERED[row.gather]),
            ("rows of a batch", f"split into {self.batch_shards}"),
            *((f"rule for {pattern}", str(spec)) for pattern, spec in self.rules),
        ]
        return html_table(str(self), rows)

    @property
    def row(self) -> Strategy:
        """The strategy's row of the table of strategies."""
        return STRATEGIES[self.strategy]

    @property
    def batch_shards(self) -> int:
        """Number of shards of a batch: the product of the sizes of `replica` and `data`."""
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

    def rest_sharding(self, placement: Placement) -> NamedSharding:
        """Return the sharding of a leaf between steps, with its memory kind.

        Args:
            placement: the leaf's.
        """
        return NamedSharding(self.mesh, placement.rest, memory_kind=PINNED if placement.on_host else None)

    def on(self, mesh: Mesh) -> Plan:
        """Return this plan for another mesh.

        Args:
            mesh: as for `Plan`, for example of described devices.
        """
        return self if mesh == self.mesh else replace(self, mesh=mesh)

    def param_placements(self, params: PyTree, static: Static | None = None) -> PyTree:
        """Return a tree like `params` with a `Placement` for each leaf; paths start at the parameters.

        Args:
            params: the parameters, real or abstract.
            static: the state's: which parameters are trained, and the specs that the model's own metadata asks for.
        """
        self.check_rules([path_of(path) for path, _ in jax.tree.leaves_with_path(params)])
        placements = self.tree_placements(params, () if static is None else static.specs)
        if static is None or static.trained is None:
            return placements
        leaves, treedef = jax.tree.flatten(placements)
        return treedef.unflatten([replace(p, trained=t) for p, t in zip(leaves, static.trained, strict=True)])

    def check_rules(self, paths: Sequence[str]) -> None:
        """Check that every rule has a parameter that it matches.

        Args:
            paths: of all parameters.

        Raises:
            ValueError: a rule matches nothing.
        """
        for pattern, _ in self.rules:
            if not any(matches(path, [pattern]) for path in paths):
                raise UserError(f"Every rule must match a parameter; {pattern!r} matches none of {listed(paths, 5)}.")

    def tree_placements(
        self, tree: PyTree, specs: Sequence[tuple[str, PartitionSpec]] = (), of: Mapping[str, Placement] | None = None
    ) -> PyTree:
        """Return a tree like `tree` with a `Placement` for each leaf; rules need not match.

        Args:
            tree: parameters, or with `of` a tree that belongs to them; real or abstract.
            specs: (path, spec) for the parameters that the model's own metadata shards.
            of: path -> placement of the parameters that the tree belongs to.
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
        """
        params = {p.path: p for p in jax.tree.leaves(self.param_placements(state.params, state.static))}

        def place(key_path: Any, leaf: Any) -> Placement:
            path = path_of(key_path)
            head, _, tail = path.partition("/")
            if head == "params":
                return replace(params[tail], path=path)
            if head == "opt_state":
                placement = self._place_optimizer_leaf(path, leaf, params)
                if self.offload is None or not leaf.shape or leaf.size < self.min_shard_size:
                    return placement
                return replace(placement, memory="host", reason=f"{placement.reason}; in host memory")
            return self._placement(path, leaf, PartitionSpec(), PartitionSpec(), f"replicated: {head}")

        return jax.tree.map_with_path(place, state)

    def placements(self, state: TrainState) -> Placements:
        """Return the sharding of every leaf of a state: path, shape, dtype, specs, bytes per device, reason.

        Args:
            state: a train state, real or abstract.

        Raises:
            ValueError: a rule matches nothing; a rule or the metadata shards a dimension that does not divide.
        """
        return Placements(jax.tree.leaves(self.state_placements(state)))

    def shardings(self, state: TrainState) -> TrainState:
        """Return a tree like `state` with the `NamedSharding` that each leaf has between steps.

        Args:
            state: a train state, real or abstract.
        """
        return jax.tree.map(self.rest_sharding, self.state_placements(state))

    def _on_this_mesh(self, specs: Sequence[tuple[str, PartitionSpec]]) -> dict[str, PartitionSpec]:
        """Return the metadata's specs without the axis names that the mesh lacks; report those names once."""
        known = set(self.mesh.shape) - {REPLICA}
        names = {axis for _, spec in specs for entry in spec for axis in axes_of(entry)}
        if dropped := sorted(names - known):
            notice(
                f"the model's sharding metadata names {', '.join(map(repr, dropped))}, but parameters are sharded over "
                f"{', '.join(sorted(known))} only: these names are ignored. Plan(rules=...) overrides metadata"
            )
        return {path: PartitionSpec(*(keep_axes(known, entry) for entry in spec)) for path, spec in specs}

    def _place_param(self, path: str, leaf: Any, metadata: dict[str, PartitionSpec]) -> Placement:
        pattern, rule = next((rule for rule in self.rules if matches(path, [rule[0]])), ("", None))
        source = "the model's metadata" if rule is None else f"the rule for {pattern!r}"
        spec = PartitionSpec(*map(data_last, metadata.get(path, PartitionSpec()) if rule is None else rule))
        compute = PartitionSpec(*(keep_axes(set(self.mesh.shape) - {DATA}, entry) for entry in spec))
        check_fits(path, leaf.shape, spec, source, self.mesh.shape)
        if not self.row.shard_state:
            return self._placement(path, leaf, compute, compute, f"{self.strategy} replicates it over data")
        rest, reason = rest_spec(leaf.shape, compute, dict(self.mesh.shape), self.min_shard_size)
        if compute != spec:
            rest, reason = spec, f"sharded as {source if rule is None else 'its rule'} says: {spec}"
        return self._placement(path, leaf, rest, compute, reason)

    def _place_optimizer_leaf(self, path: str, leaf: Any, params: Mapping[str, Placement]) -> Placement:
        specs = specs_for_leaf(path.removeprefix("opt_state/"), tuple(leaf.shape), params)
        if specs.final or not self.row.shard_state or any(DATA in axes_of(entry) for entry in specs.rest):
            return self._placement(path, leaf, specs.rest, specs.compute, specs.reason)
        rest, reason = rest_spec(leaf.shape, specs.compute, dict(self.mesh.shape), self.min_shard_size)
        return self._placement(path, leaf, rest, specs.compute, f"{reason} ({specs.reason})")

    def _placement(self, path: str, leaf: Any, rest: PartitionSpec, compute: PartitionSpec, reason: str) -> Placement:
        size = bytes_per_device(leaf.shape, leaf.dtype, shards(rest, self.mesh.shape))
        return Placement(path, tuple(leaf.shape), str(leaf.dtype), rest, compute, size, reason)


def check_plan(plan: object, call: str, *others: object) -> None:
    """Check the type of a plan; `call` is the function's call in the right order, and `others` its other arguments."""
    if not isinstance(plan, Plan):
        is_exchanged = any(isinstance(other, Plan) for other in others)
        fix = f"Write the arguments in this order: {call}" if is_exchanged else _WRITE
        raise UserError(f"A plan is a jdp.Plan, of a mesh and a strategy; given {described(plan)}. {fix}.")
