"""The plan: a mesh and a strategy, and from them where every leaf of a train state lives.

`Plan.placements` walks the state once:
1. parameters get their compute spec (from `rules`) and their rest spec (`placement.rest_spec`);
2. a leaf of the optimizer state that mirrors a parameter - its path ends with the parameter's, and the shapes agree -
   lies where that parameter lies; any other is placed by its own shape;
3. everything else (step, rng, model state) is replicated.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.mesh import DATA, REPLICA, batch_axes
from jdp.notices import notice
from jdp.placement import Placement, axes_of, bytes_per_device, rest_spec, shards, spec_entry
from jdp.state import TrainState
from jdp.strategy import Strategy, strategy
from jdp.types import PyTree


@dataclass(frozen=True)
class Plan:
    """A mesh, a strategy, and where every leaf lives.

    Args:
        mesh: a mesh with a `data` axis (`make_mesh`).
        strategy: "ddp", "zero1", "zero2" or "zero3".
        rules: pairs of a path pattern (`fnmatch`: `*` matches anything, slashes too) and a PartitionSpec, for the
            model's own axes. The first that matches a parameter's path gives its compute spec. A spec that names `data`
            fixes the dimension that ZeRO shards; otherwise the plan chooses.
        min_shard_size: parameters with fewer elements than this stay replicated: a gather of them would be latency.

    Raises:
        ValueError: unknown strategy, no `data` axis, a rule that names an axis the mesh lacks.
    """

    mesh: Mesh
    strategy: str = "ddp"
    rules: Sequence[tuple[str, PartitionSpec]] = field(default=(), kw_only=True)
    min_shard_size: int = field(default=1024, kw_only=True)

    def __post_init__(self) -> None:
        strategy(self.strategy)
        object.__setattr__(self, "rules", tuple((pattern, spec) for pattern, spec in self.rules))
        if DATA not in self.mesh.shape:
            raise ValueError(f"A plan needs a mesh with a `data` axis; got axes {tuple(self.mesh.shape)}.")
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

    def param_placements(self, params: PyTree) -> PyTree:
        """A tree like `params` with a `Placement` for each leaf; paths start at the parameters."""
        for pattern, _ in self.rules:
            if not any(fnmatch.fnmatchcase(path_of(p), pattern) for p, _ in jax.tree.leaves_with_path(params)):
                raise ValueError(f"Every rule must match a parameter; {pattern!r} matches none.")
        return jax.tree.map_with_path(lambda path, leaf: self._place_param(path_of(path), leaf), params)

    def state_placements(self, state: TrainState) -> TrainState:
        """A tree like `state` with a `Placement` for each leaf."""
        params = self.param_placements(state.params)
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
        """Say once which parameters a ZeRO strategy could not shard, and why."""
        if not self.row.shard_state or self.mesh.shape[DATA] == 1:
            return
        whole = [p for p in jax.tree.leaves(self.param_placements(state.params)) if p.dim is None]
        small = [p for p in whole if "min_shard_size" in p.reason]
        for p in (p for p in whole if p not in small):
            notice(f"{p.path} {list(p.shape)} is {p.reason} ({p.bytes_per_device:,} bytes on every device)")
        if small:
            names = ", ".join(p.path for p in small[:3]) + (", ..." if len(small) > 3 else "")
            notice(
                f"{len(small)} parameters of fewer than {self.min_shard_size} elements stay replicated "
                f"({sum(p.bytes_per_device for p in small):,} bytes on every device): {names}"
            )

    def _place_param(self, path: str, leaf: Any) -> Placement:
        rule = next((spec for pattern, spec in self.rules if fnmatch.fnmatchcase(path, pattern)), PartitionSpec())
        compute = PartitionSpec(*(_without_data(entry) for entry in rule))
        self._check_divides(path, leaf.shape, rule)
        if not self.row.shard_state:
            return self._placement(path, leaf, compute, compute, f"{self.strategy} replicates it over data")
        if compute != rule:
            return self._placement(path, leaf, rule, compute, f"sharded as its rule says: {rule}")
        rest, reason = rest_spec(leaf.shape, compute, dict(self.mesh.shape), self.min_shard_size)
        return self._placement(path, leaf, rest, compute, reason)

    def _place_opt(self, path: str, leaf: Any, params: dict[str, Placement]) -> Placement:
        parts = path.split("/")
        for start in range(len(parts) + 1):
            mirrored = params.get("/".join(parts[start:]))
            if mirrored is not None and mirrored.shape == leaf.shape:
                reason = f"mirrors params/{mirrored.path}"
                return self._placement(path, leaf, mirrored.rest, mirrored.compute, reason)
        if not self.row.shard_state:
            return self._placement(path, leaf, PartitionSpec(), PartitionSpec(), f"{self.strategy} replicates it")
        spec, reason = rest_spec(leaf.shape, PartitionSpec(), dict(self.mesh.shape), self.min_shard_size)
        return self._placement(path, leaf, spec, PartitionSpec(), f"{reason} (no parameter has this shape)")

    def _placement(self, path: str, leaf: Any, rest: PartitionSpec, compute: PartitionSpec, reason: str) -> Placement:
        size = bytes_per_device(leaf.shape, leaf.dtype, shards(rest, dict(self.mesh.shape)))
        return Placement(path, tuple(leaf.shape), str(leaf.dtype), rest, compute, size, reason)

    def _check_divides(self, path: str, shape: tuple[int, ...], rule: PartitionSpec) -> None:
        if len(rule) > len(shape):
            raise ValueError(f"The rule {rule} has {len(rule)} entries, but {path} has shape {list(shape)}.")
        for dim, size in enumerate(shape):
            pieces = shards(PartitionSpec(spec_entry(rule, dim)), dict(self.mesh.shape))
            if size % pieces:
                raise ValueError(
                    f"A rule must shard dimensions that divide: dimension {dim} of {path} {list(shape)} is {size}, "
                    f"and {rule} cuts it into {pieces}."
                )


def nearest_sizes(size: int, unit: int) -> str:
    """The multiples of `unit` around `size`, for messages: "56 or 64"."""
    below = size // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def path_of(path: Any) -> str:
    """A key path as text: "params/layers/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _without_data(entry: object) -> object:
    left = tuple(axis for axis in axes_of(entry) if axis != DATA)
    return left[0] if len(left) == 1 else (left or None)
