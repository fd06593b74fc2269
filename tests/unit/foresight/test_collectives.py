"""The HLO reader against compiled programs whose traffic is known by construction, for eight H100s and eight CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.foresight.program.collectives import collectives, total_wire_bytes, traffic
from jdp.foresight.targets.resolve import target

pytestmark = pytest.mark.aot


F32, BF16, ROWS = jnp.float32, jnp.bfloat16, P("data")
ON_BOTH = pytest.mark.parametrize("where", ["h100:1x8", "cpu:8"])


def compiled(where, f, in_spec=ROWS, out_spec=ROWS, dtype=F32) -> str:
    """The text of `f` on an array [64, 128]: 1024 elements a device, 8192 in all."""
    mesh = Mesh(np.array(target(where).devices), "data")
    step = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False))
    x = jax.ShapeDtypeStruct((64, 128), dtype, sharding=NamedSharding(mesh, in_spec))
    return step.lower(x).compile().as_text()


def psum(x):
    return lax.psum(x, "data")


def all_gather(x):
    return lax.all_gather(x, "data", tiled=True)


RING = [(i, (i + 1) % 8) for i in range(8)]
PROGRAMS = [  # function, in, out, kind, payload in elements, share of the payload that each device sends
    (psum, P("data"), P(), "all-reduce", 1024, 2 * 7 / 8),
    (lambda x: lax.psum_scatter(x, "data", tiled=True), P(), P("data"), "reduce-scatter", 8192, 7 / 8),
    (all_gather, P("data"), P(), "all-gather", 8192, 7 / 8),
    (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), P(None, "data"), P("data"), "all-to-all", 1024, 7 / 8),
    (lambda x: lax.ppermute(x, "data", RING), P("data"), P("data"), "collective-permute", 1024, 1),
]


@pytest.mark.parametrize(("f", "ins", "outs", "kind", "elements", "share"), PROGRAMS)
@pytest.mark.parametrize(("where", "dtype"), [("h100:1x8", F32), ("h100:1x8", BF16), ("cpu:8", F32)])
def test_bytes_of_one_collective(where, dtype, f, ins, outs, kind, elements, share):
    [found] = collectives(compiled(where, f, ins, outs, dtype))
    payload = elements * jnp.dtype(dtype).itemsize
    assert (found.kind, found.payload_bytes, found.count, found.caveats) == (kind, payload, 1, ())
    assert found.dtype == {F32: "f32", BF16: "bf16"}[dtype]
    assert found.wire_bytes == payload * share
    assert traffic([found]) == {kind: payload}


@ON_BOTH
def test_trip_counts_multiply_through_nested_loops(where):
    def outer(x, _):
        x = lax.scan(lambda x, _: (jnp.sin(psum(x)), None), x, None, length=5)[0]
        return all_gather(x)[:8], None

    inner, gather = collectives(compiled(where, lambda x: lax.scan(outer, x, None, length=3)[0]))
    assert (inner.kind, inner.loops, inner.count) == ("all-reduce", (3, 5), 15)
    assert (gather.kind, gather.loops, gather.count) == ("all-gather", (3,), 3)
    assert traffic([inner, gather]) == {"all-reduce": 15 * 4096, "all-gather": 3 * 32768}
    assert total_wire_bytes([inner, gather]) == 15 * 4096 * 2 * 7 / 8 + 3 * 32768 * 7 / 8


@ON_BOTH
def test_an_unknown_trip_count_is_one(where):
    def until(x):
        return lax.while_loop(lambda x: jnp.sum(x) < 10, psum, x)

    [found] = collectives(compiled(where, until))
    assert (found.loops, found.count) == ((None,), 1)
    assert found.caveats == ("inside a loop of unknown trip count: counted once",)


@ON_BOTH
def test_a_conditional_counts_its_larger_branch(where):
    def by_predicate(x):
        return lax.cond(x[0, 0] > 0, psum, lambda x: all_gather(x)[:8], x)

    [found] = collectives(compiled(where, by_predicate))
    assert (found.kind, found.payload_bytes) == ("all-gather", 32768)
    assert found.caveats == ("inside a conditional: the branch that sends most is counted",)
