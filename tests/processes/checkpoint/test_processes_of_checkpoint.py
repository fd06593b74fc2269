"""Checkpoints in processes of their own: kills while one saves or copies, and several processes with a part each."""

import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from own_process import python
from paths import ROOT, SUPPORT
from storage_servers import copies, whole

import jdp
from jdp.checkpoint import check
from jdp.launch import launch

pytestmark = pytest.mark.usefixtures("quick_mirror")


KILLED = """
import os, signal, sys, time
import jax, jax.numpy as jnp
import jdp
from storage_servers import copies

with jdp.Checkpoints(sys.argv[1], mirror=sys.argv[2]) as saved:
    saved.save({"w": jnp.full(1000, 1.0)}, {"step": 1}, step=1)
    saved.wait()
    while copies(sys.argv[2]) != {1: True}: time.sleep(0.1)
    put = saved._mirror._fs.put
    saved._mirror._fs.put = lambda here, there: (put(here[:3], there[:3]), os.kill(os.getpid(), signal.SIGKILL))
    saved.save({"w": jnp.full(1000, 2.0)}, {"step": 2}, step=2)
"""


def program(tmp_path, s3_server, text):
    (tmp_path / "program.py").write_text(text)
    proxied = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}  # for the storage, and not for each other
    return str(tmp_path / "program.py"), os.environ | s3_server | proxied | {"PYTHONPATH": f"{ROOT}:{SUPPORT}"}


def test_a_kill_leaves_the_earlier_copy(bucket, s3_server, tmp_path):
    file, environment = program(tmp_path, s3_server, KILLED)
    ended = subprocess.run([sys.executable, file, str(tmp_path / "one"), bucket], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert copies(bucket) == {1: True, 2: False}
    tree = {"w": jnp.zeros(1000)}
    with jdp.Checkpoints(tmp_path / "two", mirror=bucket) as fresh:
        assert fresh.restore(tree)[1] == {"step": 1}
    with jdp.Checkpoints(tmp_path / "one", mirror=bucket) as again:
        assert again.restore(tree)[1] == {"step": 2}
    assert copies(bucket) == whole(1, 2)


PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import jdp
from damage import flip
from flax import nnx
from jdp.core.cluster.barrier import meet
from jdp.export import export_safetensors, import_safetensors, llama_names
from jdp.models import GPT, GPTConfig

jdp.initialize(timeout_seconds=60)
folder = sys.argv[1]
config = GPTConfig(vocab_size=48, context=8, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24)
plan = jdp.Plan(jdp.make_mesh(data=4), "zero3", min_shard_size=16)
arguments = (lambda rng: GPT(config, rngs=nnx.Rngs(rng)), optax.sgd(1.0, momentum=0.9), plan)
state = jdp.init_state(*arguments, rng=jax.random.key(0))
target = jdp.abstract_state(*arguments, rng=jax.random.key(1))

def check(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for mine, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, other.data)

def checked(got):
    check((got.params, got.opt_state), (state.params, state.opt_state))
    check(jax.random.key_data(got.rng), jax.random.key_data(state.rng))

jdp.save(f"{folder}/one", state)
jdp.save(f"{folder}/one", state, overwrite=True)
checked(jdp.restore(f"{folder}/one", target))
with jdp.Checkpoints(f"{folder}/many", keep=1, best="loss", mirror=sys.argv[2]) as checkpoints:
    checkpoints.save(state, {"a": 1}, {"loss": 1.0})
    checked(checkpoints.restore(target, "best")[0])
with jdp.Checkpoints(f"{folder}/fetched", mirror=sys.argv[2]) as checkpoints:
    checked(checkpoints.restore(target)[0])
    assert checkpoints.steps == [0]
with jdp.Checkpoints(f"{folder}/back") as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(replace(state, step=jax.device_put(jnp.int32(step), plan.replicated)), {"line": "first"})
    checkpoints.restore(target, 1)
    checkpoints.go_back(1)
    checkpoints.save(replace(state, step=jax.device_put(jnp.int32(2), plan.replicated)), {"line": "second"})
    assert checkpoints.restore(target)[1] == {"line": "second"} and checkpoints.steps == [1, 2]
with jdp.Checkpoints(f"{folder}/flipped") as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(replace(state, step=jax.device_put(jnp.int32(step), plan.replicated)), {"step": step})
    checkpoints.wait()
    if jax.process_index() == 0:  # in files that process 1 wrote, and that the one or the other will check
        for step in (2, 3):
            written = Path(f"{folder}/flipped/{step}/state/ocdbt.process_1").rglob("*")
            flip(max(written, key=lambda file: file.stat().st_size), 100)
    meet("the test, where process 0 damages files")
    restored, record = checkpoints.restore(target)
    assert record == {"step": 1} and int(restored.step) == 1, record
    checkpoints.save(replace(state, step=jax.device_put(jnp.int32(2), plan.replicated)), {"step": "again"})
    assert checkpoints.restore(target)[1] == {"step": "again"} and checkpoints.steps == [1, 2]
for limit in (10**9, 5000):
    path = f"{folder}/exported/model.safetensors"
    export_safetensors(path, state, names=llama_names(config), max_shard_bytes=limit)
    check(import_safetensors(path, target, names=llama_names(config)).params, state.params)
export_safetensors(f"{folder}/plain.safetensors", state)
check(import_safetensors(f"{folder}/plain.safetensors", target).params, state.params)
print("same", jax.process_index(), flush=True)
"""


@pytest.mark.rest
def test_two_processes_save_restore_export_and_import(bucket, s3_server, tmp_path, capfd):
    file, environment = program(tmp_path, s3_server, PROGRAM)
    code = launch([sys.executable, file, str(tmp_path), bucket], 2, devices_per_process=2, environment=environment)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "[0] same 0\n" in out and "[1] same 1\n" in out
    there = {path.name for path in tmp_path.iterdir()} - {"program.py"}
    assert there == {"one", "many", "fetched", "back", "flipped", "exported", "plain.safetensors"}
    assert [found.status for found in check(tmp_path / "flipped")] == ["whole", "whole"]
    assert sorted(path.name for path in (tmp_path / "flipped").glob("[!.]*")) == ["1", "2", "damaged-2", "damaged-3"]
    assert (out + err).count("set aside as damaged-3; 1 is read instead") == 1, out + err
    assert sorted(path.name for path in (tmp_path / "back" / "abandoned-1").iterdir()) == ["2", "3"]
    assert not (tmp_path / "exported" / "model.safetensors").exists()


KILLS = 8
"""Half of them at a moment of the clock, half at a call of the system."""

VISITS = """
import os, signal, sys, threading
import numpy as np
import jax, optax
import jax.numpy as jnp
from dataclasses import replace
import jdp
import orbax.checkpoint  # imported once: each visit is a fork, made before JAX starts its threads
from jdp.checkpoint import check

folder, kills = sys.argv[1], int(sys.argv[2])
WORDS = 300_000  # 1.2 MB


def visit(seed):
    plan = jdp.Plan(jdp.make_mesh(devices=jax.devices()[:1], data=1), "ddp")
    init = lambda rng: {"w": jnp.zeros(WORDS)}
    state = jdp.init_state(init, optax.identity(), plan, rng=jax.random.key(0))
    with jdp.Checkpoints(folder, keep=2) as checkpoints:
        step = 0
        if checkpoints.latest is not None:
            state, record = checkpoints.restore(jdp.abstract_state(init, optax.identity(), plan, rng=jax.random.key(0)))
            step = int(state.step)
            assert record == {"step": step} and (np.asarray(state.params["w"]) == step).all(), (record, step)
        print("visit", seed, "from", step, flush=True)

        def save(step):
            weights = {"w": jax.device_put(np.full(WORDS, step, np.float32), state.params["w"].sharding)}
            checkpoints.save(replace(state, step=jnp.int32(step), params=weights), {"step": step})

        save(step + 1)
        checkpoints.wait()
        rng = np.random.default_rng(seed)
        if seed % 2:  # at a moment of the clock
            threading.Timer(rng.uniform(0, 0.25), os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:  # at one of the calls of the system that Python makes
            left = [int(rng.integers(1, 150))]

            def count(event, arguments):
                if event == "open" or event.startswith(("os.", "shutil.")):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
        for more in range(2, 50):
            save(step + more)
            checkpoints.wait()
    os._exit(3)


for seed in range(kills):
    child = os.fork()
    if child == 0:
        try:
            visit(seed)
        finally:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    assert {found.status for found in check(folder)} == {"whole"}, check(folder)
"""


@pytest.mark.rest
def test_a_kill_loses_nothing_committed(tmp_path):
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = python("-W", "ignore", "-c", VISITS, tmp_path / "run", KILLS, JAX_PLATFORMS="cpu", XLA_FLAGS="", **kept)
    assert done.returncode == 0, done.stderr[-3000:]
    begun = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("visit")]
    assert len(begun) == KILLS and (np.diff(begun) >= 1).all(), "each visit keeps at least the step that it committed"
    assert "set aside" not in done.stderr and "damaged" not in done.stderr, done.stderr[-3000:]
