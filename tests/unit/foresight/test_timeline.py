"""The schedule, simulated: texts whose timeline follows by construction, loops against the same work written out, and
programs that XLA's GPU compiler made."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from described_gpus import program_of

from jdp.foresight.program.module import parse
from jdp.foresight.targets.resolve import target
from jdp.foresight.timing.timeline import COMMUNICATION, COMPUTE, collective_cost, timeline

pytestmark = pytest.mark.aot


EVERYONE = (tuple(range(8)),)
# Elements of the copies and gathered shards below. On an H100: a short copy is a good deal shorter than the gather, a
# long one a good deal longer.
SHARD, SHORT, LONG = 2**18, 2**20, 2**27


@functools.cache
def h100():
    return target("h100:1x8")


def copy_seconds(elements):
    """A copy of float32 by the stated model: read and written at 85% of the bandwidth, and a launch."""
    return 1.9e-6 + 8 * elements / (0.85 * 3_352_320_000_000)


@functools.cache
def gather_seconds(shard=SHARD):
    return collective_cost("all-gather", 4 * 8 * shard, EVERYONE, h100()).seconds


# Texts from nested lists: ("compute", elements), ("start" or "sync", name, shard), ("done", name), ("loop", trips, […])


GROUPS = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"


def simulated(work):
    """The timeline of such a list, written as HLO text; loops become computations."""
    computations, numbers = ["HloModule m, is_scheduled=true, num_partitions=8\n"], itertools.count(1)

    def write(head, work):
        lines = [f"{head} {{", "  %p = s32[] parameter(0)"]
        for (kind, *fields), i in zip(work, numbers, strict=False):
            match kind, *fields:
                case "compute", size:
                    lines += [f"  %x.{i} = f32[{size}]{{0}} parameter(1)", f"  %y.{i} = f32[{size}]{{0}} copy(%x.{i})"]
                case "start" | "sync", name, shard:
                    result = f"f32[{8 * shard}]{{0}} all-gather"
                    if kind == "start":
                        result = f"(f32[{shard}]{{0}}, f32[{8 * shard}]{{0}}) all-gather-start"
                    lines += [f"  %x.{i} = f32[{shard}]{{0}} parameter(1)", f"  %{name} = {result}(%x.{i}), {GROUPS}"]
                case "done", name:
                    lines.append(f"  %done.{i} = f32[{8 * SHARD}]{{0}} all-gather-done(%{name})")
                case "loop", trips, inside:
                    write(f"%body.{i} (p: s32[]) -> s32[]", inside)
                    write(f"%condition.{i} (p: s32[]) -> pred[]", [])
                    known = "" if trips is None else f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
                    lines.append(f"  %while.{i} = s32[] while(%p), condition=%condition.{i}, body=%body.{i}{known}")
        computations.append("\n".join([*lines, "}"]))

    write("ENTRY %main (p: s32[]) -> s32[]", work)
    return timeline(parse("\n\n".join(computations)), h100())


def written_out(work):
    """The same work without loops; names of collectives made unique."""
    written = []

    def write(work, rounds):
        for kind, *fields in work:
            if kind == "loop":
                for i in range(fields[0]):
                    write(fields[1], (*rounds, len(written), i))
            elif kind == "compute":
                written.append((kind, *fields))
            else:
                written.append((kind, "_".join(map(str, (fields[0], *rounds))), *fields[1:]))

    write(work, ())
    return written


def by_hand(work):
    """(step, communication, compute) of work without loops: an event at a time."""
    now = free = communication = busy = 0.0
    ends = {}
    for kind, *rest in written_out(work):
        if kind == "compute":
            now, busy = now + copy_seconds(rest[0]), busy + copy_seconds(rest[0])
        elif kind == "done":
            now = max(now, ends[rest[0]])
        else:
            free = max(now, free) + gather_seconds(rest[1])
            communication += gather_seconds(rest[1])
            ends[rest[0]] = free
            now = free if kind == "sync" else now
    return max(now, free), communication, busy


def same(result, work):
    step, communication, busy = by_hand(work)
    assert result.step_seconds == pytest.approx(step, rel=1e-9)
    assert result.communication_seconds == pytest.approx(communication, rel=1e-9)
    assert result.compute_seconds == pytest.approx(busy, rel=1e-9)
    assert result.compute_seconds + result.exposed_seconds == pytest.approx(result.step_seconds, rel=1e-12)


START, DONE = ("start", "a", SHARD), ("done", "a")


def test_communication_without_computation_is_exposed():
    hidden = simulated([START, ("compute", LONG), DONE])
    assert hidden.step_seconds == pytest.approx(copy_seconds(LONG))
    assert (hidden.exposed_seconds, hidden.exposed_fraction) == (0, 0)
    partly = simulated([START, ("compute", SHORT), DONE])
    assert partly.exposed_seconds == pytest.approx(gather_seconds() - copy_seconds(SHORT))
    assert partly.exposed_fraction == pytest.approx(1 - copy_seconds(SHORT) / gather_seconds())
    for alone in ([START, DONE], [("sync", "a", SHARD)]):
        result = simulated([("compute", LONG), *alone, ("compute", LONG)])
        assert result.step_seconds == pytest.approx(2 * copy_seconds(LONG) + gather_seconds())
        assert result.exposed_fraction == pytest.approx(1)


def test_a_loop_of_unknown_length_counts_once():
    result = simulated([("loop", None, [("compute", LONG)])])
    assert result.step_seconds == pytest.approx(copy_seconds(LONG))
    assert any("unknown length" in caveat for caveat in result.caveats)
    assert not any("unknown" in caveat for caveat in simulated([("loop", 3, [("compute", LONG)])]).caveats)


def random_work(rng, depth=0):
    """Work in which every start has its done in the same computation, but may be in flight when a loop begins."""
    work, open_names = [], []
    for _ in range(rng.randint(2, 6)):
        kind = rng.choice(["compute", "compute", "start", "start", "done", "sync", "loop"])
        name = f"c{rng.getrandbits(40)}"
        if kind == "compute":
            work.append((kind, rng.choice([2**10, SHORT, 2**24, LONG])))
        elif kind == "start":
            open_names.append(name)
            work.append((kind, name, rng.choice([2**10, SHARD, 2**22])))
        elif kind == "sync":
            work.append((kind, name, SHARD))
        elif kind == "done" and open_names:
            work.append((kind, open_names.pop(rng.randrange(len(open_names)))))
        elif kind == "loop" and depth < 2:
            work.append((kind, rng.randint(0, 7), random_work(rng, depth + 1)))
    rng.shuffle(open_names)
    return work + [("done", name) for name in open_names]


@pytest.mark.parametrize("seed", range(60))
def test_loops_equal_the_same_work_written_out(seed):
    work = random_work(random.Random(seed))
    result = simulated(work)
    same(result, work)
    same(simulated(written_out(work)), work)
    busy = {lane: sum(e.seconds for e in result.events if e.lane == lane) for lane in (COMPUTE, COMMUNICATION)}
    assert busy[COMPUTE] == pytest.approx(result.compute_seconds, rel=1e-9)
    assert busy[COMMUNICATION] == pytest.approx(result.communication_seconds, rel=1e-9)


def test_a_long_loop_is_simulated_in_few_events():
    result = simulated([("loop", 10**9, [START, ("compute", SHORT), DONE])])
    assert result.step_seconds == pytest.approx(1e9 * gather_seconds(), rel=1e-6)
    assert result.compute_seconds == pytest.approx(1e9 * copy_seconds(SHORT), rel=1e-6)
    assert len(result.events) == 6  # two rounds of two, and the rest of either lane
    assert [event.times for event in result.events[-2:]] == [10**9 - 2] * 2


def test_flops_in_loops_count_each_round():
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    result = timeline(program_of(layers, (256, 512), (7, 512, 512)), target("h100:1x1"))
    assert result.flops == 7 * 2 * 256 * 512 * 512
    assert 0 < result.matmul_seconds < result.compute_seconds
    assert result.step_seconds == pytest.approx(result.compute_seconds)
