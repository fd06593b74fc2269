"""Answers to the exercises of experiments/lessons/README.md, and its worked numbers; its table names every lesson."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from load import LESSONS, load

import jdp
from jdp.base.chips import CHIPS
from jdp.foresight.traffic.theory import ring_bytes
from jdp.foresight.zero_formula import sent_bytes, zero_bytes

B7, B70, B175 = 7 * 10**9, 70 * 10**9, 175 * 10**9
README = (LESSONS / "README.md").read_text("utf-8")


def test_worked_numbers():
    assert 2 * B7 / 1e9 == 14
    assert ring_bytes("all-reduce", 2 * B7, 8) / 1e9 == 24.5
    assert 256 // 8 == 32 == 4 * 8
    totals = {name: zero_bytes(B175, 64, name).total / 1e9 for name in ("ddp", "zero1", "zero2", "zero3")}
    assert totals == pytest.approx({"ddp": 2800, "zero1": 732.8, "zero2": 388.3, "zero3": 43.75}, abs=0.05)


def test_links_are_those_that_plans_use():
    chip = CHIPS["h100"]
    rates = (
        chip.memory_bandwidth / 1e12,
        chip.link_bandwidth / 1e9,
        chip.host_bandwidth / 1e9,
        chip.network_bandwidth / 1e9,
    )
    shown = re.findall(r"^\| (?:memory|NVLink|PCIe|InfiniBand)[^|]*\| ([\d.]+) [TG]B/s", README, flags=re.MULTILINE)
    assert [f"{rate:.3g}" for rate in rates] == shown


def test_replica_is_mics_and_not_hpz():
    """With `replica` a group holds all state, as MiCS does; ZeRO++'s hpZ leaves optimizer state shared by all."""
    plan = jdp.Plan(jdp.make_mesh(replica=2, data=4), "zero3", min_shard_size=1)
    state = jdp.init_state(lambda rng: {"w": jnp.ones((8, 4))}, optax.adam(0.1), plan, rng=jax.random.key(0))
    moments = jax.tree.leaves(state.opt_state[0].mu) + jax.tree.leaves(state.params)
    assert {leaf.addressable_shards[0].data.size for leaf in moments} == {8 * 4 // 4}
    assert re.search(r"^\| MiCS [^|]*\| `replica`", README, flags=re.MULTILINE)
    assert not re.search(r"hpz[^|]*\| *`replica`", README, flags=re.IGNORECASE)


def test_1_seconds_of_an_all_reduce():
    assert ring_bytes("all-reduce", 2 * B7, 8) / 450e9 == pytest.approx(0.0544, abs=1e-4)


def test_2_uneven_shards():
    rows, means = np.array([3, 1]), np.array([1.0, 5.0])
    assert (rows * means).sum() / rows.sum() == 2
    assert means.mean() == 3


def test_3_three_kinds_of_parallelism():
    mesh = {"model": 8, "pipeline": 8, "data": 8}
    assert np.prod(list(mesh.values())) == 512
    held = B175 / (mesh["model"] * mesh["pipeline"])
    assert held / 1e9 == pytest.approx(2.73, abs=0.01)
    assert 2 * held / 1e9 == pytest.approx(5.47, abs=0.01)
    assert ring_bytes("all-reduce", 2 * held, mesh["data"]) / 1e9 == pytest.approx(9.57, abs=0.01)


def test_4_devices_for_70b():
    def fits(name, devices):
        return zero_bytes(B70, devices, name).total <= 80e9

    assert fits("zero3", 14)
    assert not fits("zero3", 13)
    assert not fits("zero2", 10**6)  # the whole weights are 140 GB


def test_5_where_a_naive_exchange_is_faster():
    size = load("ring_allreduce").size_where_equal(8, 10e-6, 50e9)
    assert size == pytest.approx(666_667, abs=1)


def test_6_a_speed_up():
    exposed = 3 * 0.1
    assert exposed / 82 == pytest.approx(0.004, abs=5e-4)
    assert 64 * (82 - exposed) / 82 == pytest.approx(63.8, abs=0.05)
    claimed = 64 * 0.95
    assert round(claimed, 1) == 60.8


def test_7_zero3_with_microbatches():
    sent = {k: sent_bytes(B7, 8, "zero3", accumulate=k) / sent_bytes(B7, 8, "ddp", accumulate=k) for k in (1, 4)}
    assert sent == {1: 1.5, 4: 6.0}


def test_8_rows_that_hide_an_all_reduce():
    """6 FLOPs a row and parameter against 2 · 7/8 · 4 bytes a parameter: rows = bytes · FLOPs a byte / 6."""
    flops_a_byte = 0.4 * 989e12 / 450e9
    assert ring_bytes("all-reduce", 4, 8) * flops_a_byte / 6 == pytest.approx(1026, abs=1)


def test_9_one_key_for_every_row():
    def loss_fn(params, batch, rng):
        kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        return jdp.Loss(jnp.square(jnp.where(kept, batch["x"], 0) @ params["w"]).sum(), jnp.float32(len(batch["x"])))

    batch, learnt = {"x": np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)}, []
    for devices in (1, 8):
        plan = jdp.Plan(jdp.make_mesh(data=devices, devices=jax.devices()[:devices]))
        state = jdp.init_state(lambda rng: {"w": jnp.ones((32, 4))}, optax.sgd(0.1), plan, rng=jax.random.key(0))
        state, _ = jdp.make_train_step(loss_fn, plan, check_loss=False)(
            state, jax.device_put(batch, plan.batch_sharding)
        )
        learnt.append(np.asarray(state.params["w"]))
    assert np.ptp(learnt[0]) > 0.1  # it did learn
    np.testing.assert_allclose(*learnt, atol=1e-5)  # float32 sums of 16 rows in another order


def test_10_weights_kept_between_the_passes():
    """One gather instead of two: D + D, and the whole working copy is there: what jdp calls zero2."""
    assert sent_bytes(B7, 8, "zero2") == 2 / 3 * sent_bytes(B7, 8, "zero3") == sent_bytes(B7, 8, "ddp")
    assert zero_bytes(B7, 8, "zero2").parameters == 2 * B7


def test_11_momentum_gathered_once():
    adamw = sent_bytes(B7, 8, "zero1", params=4, grads=4)
    assert (adamw + ring_bytes("all-gather", 2 * B7, 8)) / adamw == 1.25
    assert (adamw + 2 * ring_bytes("all-to-all", 2 * B7 // 8, 8)) / adamw == 1.0625


def test_every_lesson_is_in_the_order():
    rows = re.findall(r"^\| \d+ \| \[(\w+\.py)\]", README, flags=re.MULTILINE)
    assert len(rows) == len(set(rows)) == 17
    programs = {path.name for path in LESSONS.glob("*.py") if "def main(" in path.read_text("utf-8")}
    assert programs == set(rows)


INTERVIEW = (LESSONS / "INTERVIEW.md").read_text("utf-8")


def test_questions_with_a_program_or_table_each():
    asked = re.split(r"^\d+\. ", INTERVIEW, flags=re.MULTILINE)[1:]
    assert len(asked) == 31
    headings = {
        re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall(r"^## (.*)", README, re.M)
    }
    for each in asked:
        links = re.findall(r"\]\(([\w.]+)(?:#([\w-]+))?\)", each)
        assert links and all((LESSONS / file).is_file() and (not part or part in headings) for file, part in links), (
            each
        )
        answer = re.sub(
            r"See \[.*|\[[^]]*\]\([^)]*\)[^.]*\.|Exercise \d+ of.*|`jdp plan --table.*",
            "",
            each.split("**")[2],
            flags=re.S,
        )
        assert len(re.findall(r"[.?](?:\s|$)", answer)) <= 3, answer


def test_80_gb_of_model_state():
    held = {n: [zero_bytes(5 * 10**9, n, name).total / 1e9 for name in ("ddp", "zero1", "zero3")] for n in (8, 2)}
    assert held == {8: [80, 27.5, 10], 2: [80, 50, 40]}


def test_numbers_of_the_interview_are_those_recorded():
    planned = load("planned")
    (first, *_, last), replicas = planned.RECORDED[planned.FEW], planned.RECORDED[planned.REPLICAS][-1]
    shown = f"reach {last[0]:.0%} while 8 reach {first[0]:.0%}".replace("%", " %")
    assert shown in INTERVIEW and f"it is {replicas[0]:.0%}".replace("%", " %") in INTERVIEW
