"""Reduce gradients in buckets, encoded or not: fewer, larger collectives than one a leaf, of fewer bytes.

A leaf's gradient becomes rows, one for each device that will own a shard of it. The rows of a bucket's leaves are side
by side, so that one collective sends them all:

    sharded leaf       [N, elements / N]  reduced over `data`: row d is device d's shard at rest
    replicated leaf    [D, elements / D]  reduced over all D shards of the batch; row d is gathered again

Unencoded rows are reduce-scattered (sharded) or all-reduced (replicated). Encoded, row d of every device is sent to
device d (all-to-all), which decodes and adds them in float32. Replicated leaves, and shards over `replica`, are then
encoded once more and gathered. The error of encoding is kept in the train state and added to the next gradient
(`feedback.py`); that of the second encoding is kept by the device that made it. PowerSGD sums two factors of each
matrix instead (Vogels et al. 2019, algorithm 1), over all shards of the batch at once.

Buckets are filled in the order in which the backward pass finishes its gradients, so that the first can be sent while
the rest is computed (Li et al. 2020, arXiv:2006.15704, section 3.2.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdp.core.precision import Precision
from jdp.core.sharding.axes import DATA
from jdp.core.sharding.mesh import batch_axes
from jdp.core.sharding.placement import Placement, shards
from jdp.core.state import ERROR
from jdp.core.types import PyTree
from jdp.core.wire import collectives
from jdp.core.wire.encodings import decode, encode, exchange, from_rows, side_by_side, split, to_rows
from jdp.core.wire.rounding import own_key
from jdp.core.wire.settings import Wire

LATENCY_BYTES = 4e6
"""Bytes that a link carries during the latency of a collective, for "auto": 20 µs at 200 GB/s, as between H100s."""


@dataclass(frozen=True)
class Bucket:
    """Leaves, by index, whose gradients one collective carries, and whether it carries codes."""

    leaves: tuple[int, ...]
    encoded: bool


@dataclass
class _Work:
    """A device's gradients, errors and factors, by leaf; None for a leaf without one."""

    grads: list[Any]
    errors: list[Any]
    factors: list[Any]
    key: jax.Array | None  # the device's own, for stochastic rounding; None rounds to the nearest
    sent: Any = None  # the result of the last collective
    drawn: int = 0

    def after_the_last(self, packed: jax.Array) -> jax.Array:
        """Have a bucket wait for the one before it; XLA would join collectives that do not depend on each other."""
        return packed if self.sent is None else jax.lax.optimization_barrier((packed, self.sent))[0]

    def encode(self, wire: Wire, rows: jax.Array) -> jax.Array:
        """Return the codes of rows; each call draws its own rounding."""
        self.drawn += 1
        return encode(wire, rows, None if self.key is None else jax.random.fold_in(self.key, self.drawn))


@dataclass(frozen=True)
class Synchroniser:
    """How a step's gradients are reduced if that is not one collective a leaf.

    Attributes:
        mesh: of the plan.
        placements: of the trained parameters, in the order of the tree's leaves.
        precision: its `reduce` is the dtype of gradients that are not encoded.
        wire: the encoding.
        buckets: as for `jdp.make_train_step`, in `Precision.reduce`.
        order: the leaves' indices as the backward pass finishes them.
        in_backward: zero3: the backward pass reduces sharded leaves one by one, and only `finish` is called.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    precision: Precision
    wire: Wire
    buckets: int | str | None
    order: tuple[int, ...] = ()
    in_backward: bool = False

    @property
    def bucket_bytes(self) -> float:
        """The size of a bucket in bytes. "auto": for M bytes √(M · `LATENCY_BYTES`), which costs least.

        n buckets of M / n bytes take n latencies, and the last one's bytes are sent after the backward pass. The sum n
        · α + M / (n · β) is least for buckets of √(M · α · β) bytes.
        """
        if self.buckets is None:
            return 0
        if self.buckets != "auto":
            return float(self.buckets)
        return math.sqrt(sum(map(self._bytes, range(len(self.placements)))) * LATENCY_BYTES)

    def reduce(self, grads: PyTree, kept: dict[str, PyTree], seed: Any) -> tuple[PyTree, dict[str, PyTree]]:
        """Sum gradients over `data` and scatter them: compute spec -> rest spec; replicated leaves stay as they are.

        Leaves that PowerSGD sends are summed over all shards of the batch.
        """
        return self._run(self._reduce, grads, kept, seed, at_rest=False)

    def finish(self, grads: PyTree, kept: dict[str, PyTree], seed: Any) -> tuple[PyTree, dict[str, PyTree]]:
        """Sum gradients at rest specs over the batch axes that `reduce` left out; arguments and result are as there."""
        return self._run(self._finish, grads, kept, seed, at_rest=True)

    def kept_shapes(self) -> dict[str, list[jax.ShapeDtypeStruct | None]]:
        """Return the global shapes that are kept between steps, for each leaf; {} if nothing is.

        `ERROR` is [D, ...] for the D shards of the batch; PowerSGD's "factor" is [matrices, columns, rank].
        """
        count = self._batch_shards
        if count == 1 or self.in_backward or not self.wire.error_feedback or self.wire.gradients is None:
            return {}
        encoded = [self.is_encoded(i) or self.is_low_rank(i) for i in range(len(self.placements))]
        shapes = [jax.ShapeDtypeStruct((count, *p.shape), jnp.float32) for p in self.placements]
        kept = {ERROR: [s if e else None for s, e in zip(shapes, encoded, strict=True)]}
        if self.wire.gradients == "powersgd":
            views = [matrices(p.own_shape) if self.is_low_rank(i) else None for i, p in enumerate(self.placements)]
            kept["factor"] = [v and jax.ShapeDtypeStruct((v[0], v[2], self.wire.rank), jnp.float32) for v in views]
        return kept

    def is_encoded(self, index: int) -> bool:
        """Return True if this leaf's gradient is sent as codes."""
        placement = self.placements[index]
        devices = self._batch_shards if placement.dim is None else self.mesh.shape[DATA]
        return devices > 1 and self.wire.encodes(self._elements(index), devices)

    def is_low_rank(self, index: int) -> bool:
        """Return True if PowerSGD sends this leaf: a matrix whose factors have fewer elements, on no model axis."""
        placement = self.placements[index]
        if self.wire.gradients != "powersgd" or self._model_shards(placement) > 1 or len(placement.own_shape) < 2:
            return False
        _, rows, columns = matrices(placement.own_shape)
        return self.wire.rank * (rows + columns) < rows * columns

    def buckets_of(self, indices: Sequence[int], devices: int, bytes_of: Callable[[int], int]) -> Iterator[Bucket]:
        """Yield these leaves in buckets, in the order of readiness; those of a bucket are all encoded, or none."""
        open_buckets: dict[bool, list[int]] = {}
        wanted, itemsize = set(indices), self.precision.reduce_dtype.itemsize
        for index in self.order or reversed(range(len(self.placements))):
            if index not in wanted:
                continue
            encoded = self.wire.encodes(bytes_of(index) // itemsize, devices)
            bucket = open_buckets.setdefault(encoded, [])
            if bucket and sum(map(bytes_of, (*bucket, index))) > self.bucket_bytes:
                yield Bucket(tuple(bucket), encoded)
                bucket.clear()
            bucket.append(index)
        yield from (Bucket(tuple(bucket), encoded) for encoded, bucket in open_buckets.items() if bucket)

    @property
    def _batch_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in batch_axes(self.mesh))

    def _model_shards(self, placement: Placement) -> int:
        return shards(placement.compute, dict(self.mesh.shape))

    def _elements(self, index: int) -> int:
        placement = self.placements[index]
        return math.prod(placement.shape) // self._model_shards(placement)

    def _bytes(self, index: int) -> int:
        return self._elements(index) * self.precision.reduce_dtype.itemsize

    def _run(
        self, stage: Callable[[_Work], None], grads: PyTree, kept: dict[str, PyTree], seed: Any, at_rest: bool
    ) -> Any:
        """Run a stage on each device's own arrays; `at_rest`: the gradients are at their rest specs already."""
        stochastic = self.wire.gradients is not None and (self.in_backward or not self.wire.error_feedback)
        leaves, treedef = jax.tree.flatten(grads)
        trees = {name: treedef.flatten_up_to(kept[name]) for name in kept}
        nothing = [None] * len(leaves)
        compute = [p.compute for p in self.placements]
        rest = [collectives.replica_view_spec(p, self.mesh) for p in self.placements]
        replicated = PartitionSpec()
        others = ([PartitionSpec(None, *spec) for spec in compute], [replicated] * len(leaves), [replicated])

        def run(given: list[list[Any]]) -> list[list[Any]]:
            grads, errors, factors, [seed] = map(list, given)
            work = _Work(grads, errors, factors, own_key(seed, self.mesh))
            stage(work)
            return [work.grads, work.errors, work.factors, [seed]]

        given = [leaves, trees.get(ERROR, nothing), trees.get("factor", nothing), [seed if stochastic else None]]
        before, after = [[rest if at_rest else compute, *others], [rest, *others]]
        leaves, errors, factors, _ = collectives.on_model_shards(run, given, before, after, self.mesh)
        named = {ERROR: errors, "factor": factors}
        return treedef.unflatten(leaves), {name: treedef.unflatten(named[name]) for name in kept}

    def _reduce(self, work: _Work) -> None:
        low_rank = [i for i in range(len(self.placements)) if self.is_low_rank(i)]
        for bucket in self.buckets_of(low_rank, 1, self._bytes):
            self._low_rank(bucket.leaves, work)
        sharded = [i for i, p in enumerate(self.placements) if p.dim is not None and i not in low_rank]
        for bucket in self.buckets_of(sharded, self.mesh.shape[DATA], self._bytes):
            self._scatter(bucket, work)

    def _finish(self, work: _Work) -> None:
        left = [i for i in range(len(self.placements)) if not self.is_low_rank(i)]
        whole = [i for i in left if self.placements[i].dim is None]
        sharded = [i for i in left if self.placements[i].dim is not None]
        axes = batch_axes(self.mesh)
        for bucket in self.buckets_of(whole, self._batch_shards, self._bytes):
            self._sum(bucket, axes, work)
        others, data = tuple(axis for axis in axes if axis != DATA), self.mesh.shape[DATA]
        replicas = math.prod(self.mesh.shape[axis] for axis in others)
        for bucket in self.buckets_of(sharded, replicas, lambda i: self._bytes(i) // data) if replicas > 1 else ():
            self._sum(bucket, others, work)

    def _scatter(self, bucket: Bucket, work: _Work) -> None:
        """Sum a bucket of sharded leaves over `data`, each device getting its shard of each."""
        count = self.mesh.shape[DATA]
        dims = [self._dim(i) for i in bucket.leaves]
        grads = [work.grads[i] for i in bucket.leaves]
        if not bucket.encoded and len(bucket.leaves) == 1:
            waiting = work.after_the_last(grads[0])
            shards_of = [jax.lax.psum_scatter(waiting, DATA, scatter_dimension=dims[0], tiled=True)]
            work.sent = shards_of[0]
        else:
            packed = [to_rows(x, dim, count) for x, dim in zip(self._corrected(bucket, work), dims, strict=True)]
            sizes = [rows.shape[1] for rows in packed]
            if bucket.encoded:
                rows = side_by_side(packed, self.wire)
                codes = work.encode(self.wire, rows)
                own = decode(self.wire, exchange(codes, (DATA,)), rows.shape[1]).sum(axis=0)
                lost = rows - decode(self.wire, codes, rows.shape[1])
                self._keep(bucket, work, split(lost, sizes, self.wire), count)
                pieces = split(own[None], sizes, self.wire)
            else:
                rows = work.after_the_last(jnp.concatenate(packed, axis=1))
                work.sent = own = jax.lax.psum_scatter(rows, DATA, scatter_dimension=0, tiled=False)
                pieces = split(own[None], sizes)
            shapes = [(*x.shape[:d], x.shape[d] // count, *x.shape[d + 1 :]) for x, d in zip(grads, dims, strict=True)]
            shards_of = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        for i, dim, shard in zip(bucket.leaves, dims, shards_of, strict=True):
            reshaped = collectives.model_shards(self.placements[i], self.mesh) > 1
            work.grads[i] = shard[(slice(None),) * dim + (None,)] if reshaped else shard

    def _sum(self, bucket: Bucket, axes: tuple[str, ...], work: _Work) -> None:
        """Sum a bucket over mesh axes, so that every device along them has the complete sum."""
        grads, count = [work.grads[i] for i in bucket.leaves], math.prod(self.mesh.shape[axis] for axis in axes)
        whole = axes == batch_axes(self.mesh)
        if not bucket.encoded:
            flat = [x.reshape(-1) for x in grads]
            together = work.after_the_last(jnp.concatenate(flat) if len(flat) > 1 else flat[0])
            work.sent = total = jax.lax.psum(together, axes)
            pieces = split(total[None], [x.size for x in flat])
        else:
            packed = [to_rows(x, None, count) for x in (self._corrected(bucket, work) if whole else grads)]
            sizes = [rows.shape[1] for rows in packed]
            rows = side_by_side(packed, self.wire)
            codes, width = work.encode(self.wire, rows), rows.shape[1]
            own = decode(self.wire, exchange(codes, axes), width).sum(axis=0, keepdims=True)
            second = work.encode(self.wire, own)
            total = decode(self.wire, jax.lax.all_gather(second, axes, axis=0, tiled=True), width)
            lost = rows - decode(self.wire, codes, width)
            lost = lost.at[jax.lax.axis_index(axes)].add((own - decode(self.wire, second, width))[0])
            self._keep(bucket, work, split(lost, sizes, self.wire), count, whole=whole)
            pieces = split(total, sizes, self.wire)
        for i, x, piece in zip(bucket.leaves, grads, pieces, strict=True):
            work.grads[i] = piece.reshape(-1)[: x.size].reshape(x.shape)

    def _low_rank(self, leaves: Sequence[int], work: _Work) -> None:
        """Sum leaves over all shards of the batch by two factors: P = M Q, orthonormal; then Q = Mᵀ P; P Qᵀ for M."""
        axes = batch_axes(self.mesh)
        corrected = [work.grads[i].astype(jnp.float32) + work.errors[i][0] for i in leaves]
        flats = [self.placements[i].flat for i in leaves]
        own = [x if flat is None else flat.from_rest(x) for x, flat in zip(corrected, flats, strict=True)]
        views = [x.reshape(matrices(x.shape)) for x in own]
        starts = [_started(work.factors[i], i) for i in leaves]
        left = _summed([m @ q for m, q in zip(views, starts, strict=True)], axes)
        left = [jnp.linalg.qr(p)[0] for p in left]
        products = [jnp.swapaxes(m, 1, 2) @ p for m, p in zip(views, left, strict=True)]
        right = _summed(products, axes)
        for i, x, m, p, mine, q in zip(leaves, own, views, left, products, right, strict=True):
            flat, dim = self.placements[i].flat, self.placements[i].dim
            total, lost = (y.reshape(x.shape) for y in (p @ jnp.swapaxes(q, 1, 2), m - p @ jnp.swapaxes(mine, 1, 2)))
            if flat is not None:
                total, lost = flat.to_rest(total), flat.to_rest(lost)
            work.errors[i] = lost[None]
            work.factors[i] = q
            if dim is not None:
                size = total.shape[dim] // self.mesh.shape[DATA]
                total = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index(DATA) * size, size, dim)
            work.grads[i] = total

    def _corrected(self, bucket: Bucket, work: _Work) -> list[jax.Array]:
        """Return the gradients of a bucket; for encoding in float32 and with the error of the encoding before."""
        if not bucket.encoded:
            return [work.grads[i] for i in bucket.leaves]
        grads = [work.grads[i].astype(jnp.float32) for i in bucket.leaves]
        errors = [work.errors[i] for i in bucket.leaves]
        return [g if e is None else g + e[0] for g, e in zip(grads, errors, strict=True)]

    def _keep(self, bucket: Bucket, work: _Work, lost: list[jax.Array], count: int, whole: bool = True) -> None:
        """Keep the error of encoding rows; not `whole`: rows of shards at rest, which are a part of a gradient."""
        for i, rows in zip(bucket.leaves, lost, strict=True):
            error = work.errors[i]
            if error is None:
                continue
            shape, dim = error.shape[1:], self._dim(i) if self.placements[i].dim is not None else None
            if whole:
                kept = from_rows(rows, shape, dim)
            else:
                own = to_rows(error[0], dim, self.mesh.shape[DATA])
                flat = rows.reshape(-1)[: own.shape[1]]
                kept = from_rows(own.at[jax.lax.axis_index(DATA)].add(flat), shape, dim)
            work.errors[i] = kept[None]

    def _dim(self, index: int) -> int:
        dim = self.placements[index].dim
        assert dim is not None
        return dim


def matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (matrices, rows, columns) as PowerSGD reads a leaf of two dimensions or more.

    The leading one of three or more counts matrices, as of the layers of a scan. The others are split where rows plus
    columns are fewest.
    """
    count, rest = (shape[0], shape[1:]) if len(shape) > 2 else (1, shape)
    splits = [(math.prod(rest[:i]), math.prod(rest[i:])) for i in range(1, len(rest))]
    return (count, *min(splits, key=sum))


def _summed(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Sum arrays over mesh axes in one collective."""
    total = jax.lax.psum(jnp.concatenate([x.reshape(-1) for x in arrays]), axes)
    pieces = split(total[None], [x.size for x in arrays])
    return [piece.reshape(x.shape) for piece, x in zip(pieces, arrays, strict=True)]


def _started(factor: jax.Array, index: int) -> jax.Array:
    """Return PowerSGD's Q of the step before; for the first step, random numbers."""
    random = jax.random.normal(jax.random.key(index), factor.shape, factor.dtype)
    return jnp.where((factor != 0).any(), factor, random)
