"""Checkpoints and safetensors files of several processes, each of which holds a part of every array."""

import os
import sys

import pytest
from paths import ROOT, SUPPORT

from jdp.checkpoint import check
from jdp.launch import launch

# Two processes; `test_checkpoint.py` restores onto any plan in one.
pytestmark = pytest.mark.rest


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
with jdp.Checkpoints(f"{folder}/many", keep=1, best="loss") as checkpoints:
    checkpoints.save(state, {"a": 1}, {"loss": 1.0})
    checked(checkpoints.restore(target, "best")[0])
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


def test_two_processes_save_restore_export_and_import(tmp_path, capfd):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{SUPPORT}", "http_proxy": "http://127.0.0.1:9"}
    code = launch([sys.executable, str(program), str(tmp_path)], 2, devices_per_process=2, environment=environment)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "[0] same 0\n" in out and "[1] same 1\n" in out
    there = {path.name for path in tmp_path.iterdir()} - {"program.py"}
    assert there == {"one", "many", "back", "flipped", "exported", "plain.safetensors"}
    assert [found.status for found in check(tmp_path / "flipped")] == ["whole", "whole"]
    assert sorted(path.name for path in (tmp_path / "flipped").glob("[!.]*")) == ["1", "2", "damaged-2", "damaged-3"]
    assert (out + err).count("set aside as damaged-3; 1 is read instead") == 1, out + err
    assert sorted(path.name for path in (tmp_path / "back" / "abandoned-1").iterdir()) == ["2", "3"]
    assert not (tmp_path / "exported" / "model.safetensors").exists()
