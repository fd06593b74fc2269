"""Processes that differ: the same words on all of them, before anything is computed. Two real processes, one run."""

import json
import re

import pytest
from own_process import python

PROGRAM = """
from pathlib import Path
import json, jax, jax.numpy as jnp, numpy as np, optax
import jdp
from jdp.core.cluster import agreement

jdp.initialize(timeout_seconds=60)
jdp.keep_programs(Path(__file__).with_name("programs"))
rank, reported = jax.process_index(), {}
plan = jdp.Plan(jdp.make_mesh(data=-1), min_shard_size=0)
fixed = np.random.default_rng(7).normal(size=(32, 32)).astype(np.float32)


def params(rng):
    return {"w": jax.random.normal(rng, (4,)) + fixed[0, :4]}


def loss(params, batch, rng):
    return jdp.Loss((batch["x"] @ params["w"]).sum(), jnp.float32(batch["x"].shape[0]))


def make(init=params, tx=optax.sgd(0.1), plan=plan, seed=0):
    return jdp.init_state(init, tx, plan, rng=jax.random.key(seed))


def refused(name, call):
    try:
        call()
        reported[name] = "accepted"
    except (ValueError, RuntimeError) as error:
        reported[name] = f"{type(error).__name__}: {error}"


def fed(rows):
    with jdp.shard_batches([{"x": np.ones((rows, 4), np.float32)}], plan) as feed:
        return next(feed)


rank_noise = np.random.default_rng(rank).normal(size=(32, 32)).astype(np.float32)
refused("key", lambda: make(seed=rank))
noisy = lambda rng: {"w": jnp.asarray(rank_noise) + jax.random.normal(rng, (32, 32))}
refused("numpy randomness", lambda: make(noisy))
refused("plan", lambda: make(plan=jdp.Plan(plan.mesh, "zero1" if rank else "ddp")))

state, step = make(), jdp.make_train_step(loss, plan)
half = np.full((4, 4), 1.0 + rank, np.float32)
refused("numpy batch", lambda: step(state, {"x": half}))
refused("rows", lambda: step(state, fed(4 * (1 + rank))))
other = jdp.make_train_step(lambda p, b, r: jdp.Loss(loss(p, b, r).total * (1 + rank), 8.0), plan)
refused("program", lambda: other(state, fed(4)))
apart = jdp.make_train_step(loss, plan, compiler={"xla_cpu_enable_fast_math": rank == 1})
refused("compiler", lambda: apart(state, fed(4)))
weights, key = jdp.init(params, plan, rng=jax.random.key(0)), jax.random.key(3)
gradient = jdp.value_and_grad(loss, plan)
refused("gradient batch", lambda: gradient(weights, {"x": half}, key))
scaled = jdp.value_and_grad(lambda p, b, r: jdp.Loss(loss(p, b, r).total * (1 + rank), 8.0), plan)
refused("gradient program", lambda: scaled(weights, fed(4), key))
hyper = make(tx=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
hyper.opt_state.hyperparams["learning_rate"] = 0.5 + rank
refused("numbers", lambda: step(hyper, fed(4)))
refused("place", lambda: make() if rank else step(state, fed(4)))

metrics, grads = gradient(weights, fed(4), key)
assert float(metrics["weight"]) == 8.0
state, metrics = step(state, fed(4))
calls, real = [], agreement.agree
import jdp.core.batch
jdp.core.batch.agree = lambda place, facts, mesh: calls.append(place) or real(place, facts, mesh)
state, metrics = step(state, fed(4))
gradient(weights, fed(4), jax.random.key(4))
assert calls == [], "a batch of the shapes before asks nobody"
state, metrics = step(state, fed(8))
assert calls == ["the train step"] * 2, calls
assert float(metrics["weight"]) == 16.0
evaluated = jdp.make_eval_step(loss, plan)(state, fed(4))
assert float(evaluated["weight"]) == 8.0

alone = jdp.Plan(jdp.make_mesh(data=2, devices=jax.local_devices()))
own = jdp.init_state(params, optax.sgd(0.1), alone, rng=jax.random.key(rank))
own, metrics = jdp.make_train_step(loss, alone)(own, {"x": half})
assert float(metrics["weight"]) == 4.0, "each process by itself, on a mesh of its own"
if rank == 0:
    refused("alone at the barrier", lambda: agreement.agree("nowhere", [], plan.mesh, wait_seconds=1))
print("REPORTED", json.dumps(reported), flush=True)
"""


ONE_CHANGES = """
import sys, jax, numpy as np, optax, jdp

jdp.initialize(timeout_seconds=60)
plan = jdp.Plan(jdp.make_mesh(data=-1), "zero2", min_shard_size=0)
init, tx = lambda rng: {"w": jax.random.normal(rng, (4,))}, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
state = jdp.init_state(init, tx, plan, rng=jax.random.key(0))
loss = lambda params, batch, rng: jdp.Loss((batch["x"] @ params["w"]).sum(), len(batch["x"]))
step, last = jdp.make_train_step(loss, plan, check_loss=False), jax.process_index() == 1
rows = (8, 4, 8, 4 if sys.argv[1] == "rows" and last else 8)
for number, batch in enumerate(jdp.shard_batches(({"x": np.ones((n, 4), np.float32)} for n in rows), plan)):
    if sys.argv[1] == "number" and number == 3 and last:
        state.opt_state.hyperparams["learning_rate"] = 0.5
    state, metrics = step(state, batch)
    print("steps", number + 1, float(metrics["loss"]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rows", r"process 0 has x: float32\[16, 4\], process 1 has x: float32\[8, 4\]"),
        ("number", r"process 0 has none, process 1 has opt_state/hyperparams/learning_rate = 0\.5"),
    ],
)
def test_a_change_on_one_process_ends_all(tmp_path, case, words):
    """A batch of a shape that all had before, or a learning rate: the others would wait in a collective for ever."""
    program = tmp_path / "program.py"
    program.write_text(ONE_CHANGES)
    launch = ["-m", "jdp", "launch", "-n", "2", "--devices-per-process", "2", "--", str(program), case]
    done = python(*launch)
    assert done.returncode == 78, done.stdout + done.stderr
    for rank in (0, 1):
        assert re.search(rf"\[{rank}\] .*, at the train step; process 1 differs: {words}", done.stdout + done.stderr)
        assert f"[{rank}] steps 3" in done.stdout
        assert f"[{rank}] steps 4" not in done.stdout


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """What each of two processes reported, case by case."""
    program = tmp_path_factory.mktemp("processes") / "program.py"
    program.write_text(PROGRAM)
    done = python("-m", "jdp", "launch", "-n", "2", "--devices-per-process", "2", "--", str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^\[(\d)\] REPORTED (.*)$", done.stdout, re.MULTILINE)
    return {int(rank): json.loads(text) for rank, text in found}


WORDS = {
    "key": r"Mismatch: The key must be the same on every process, at init_state; process 1 differs: process 0 has .*"
    r"\[0, 0\], process 1 has .*\[0, 1\]\. Make it from a number .*jax\.random\.key\(0\)",
    "numpy randomness": r"Mismatch: The program \(its constants too\) must be the same .*, at init_state; process 1 "
    r"differs: process 0 has .*constant dense<#.*tensor<32x32xf32>.* numpy's or Python's own random numbers",
    "plan": "Mismatch: The plan must be the same .*: process 0 has ddp, process 1 has zero1",
    "rows": r"Mismatch: The batch's shapes and dtypes must be the same on every process, at the train step; process "
    r"1 differs: process 0 has x: float32\[8, 4\], process 1 has x: float32\[16, 4\]\. .*jdp\.process_rows",
    "program": r"The program .*at the train step; process 1 differs: process 0 has .*dense<1\.0.*"
    r"process 1 has .*dense<2\.0",
    "compiler": "The compiler's options must be the same .*at the train step; process 1 differs: process 0 has "
    "xla_cpu_enable_fast_math = False, process 1 has xla_cpu_enable_fast_math = True. Give every process the same",
    "gradient program": r"The program .*at the gradient; process 1 differs: .*dense<2\.0",
    "numbers": "The numbers that were set in the state must be the same on every process, at the train step; process 1 "
    r"differs: process 0 has opt_state/hyperparams/learning_rate = 0\.5, process 1 has .* = 1\.5\. Set them on every",
    **dict.fromkeys(
        ("numpy batch", "gradient batch"),
        r"batch \['x'\] is a numpy\.ndarray of this process alone\. Write `for batch in jdp\.shard_batches",
    ),
    "place": "The place in the program must be the same on every process; process 1 differs: process 0 has the train "
    "step, process 1 has init_state",
}


@pytest.mark.parametrize("case", WORDS)
def test_processes_that_differ_raise_the_same_error(reported, case):
    assert re.search(WORDS[case], reported[0][case]), reported[0][case]
    assert reported[1][case] == reported[0][case]
    assert "\n" not in reported[0][case]


def test_who_does_not_come_is_named(reported):
    words = "LostPeer: .* nowhere together; in 1 seconds process 1 did not"
    assert re.search(words, reported[0]["alone at the barrier"])
