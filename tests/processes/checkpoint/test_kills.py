"""A process that is killed while it saves leaves every earlier checkpoint whole, and the next one goes on from it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from paths import ROOT

# Kills at many moments of a run; `test_checkpoint.py` has half-written checkpoints.
pytestmark = pytest.mark.rest


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


def test_a_kill_loses_nothing_committed(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),  # compiled by the first visit
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-W", "ignore", "-c", VISITS, str(tmp_path / "run"), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    begun = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("visit")]
    assert len(begun) == KILLS and (np.diff(begun) >= 1).all(), "each visit keeps at least the step that it committed"
    assert "set aside" not in done.stderr and "damaged" not in done.stderr, done.stderr[-3000:]
