"""What `jdp.checkpoint` does in processes of its own."""

import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest
from paths import ROOT
from storage_servers import copies, whole

import jdp
from jdp.launch import launch

pytestmark = pytest.mark.usefixtures("quick_mirror")


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
import jdp

with jdp.Checkpoints(sys.argv[1], mirror=sys.argv[2]) as saved:
    saved.save({"w": jnp.full(1000, 1.0)}, {"step": 1}, step=1)
    saved.wait()
    __import__("time").sleep(3)
    put = saved._mirror._fs.put
    saved._mirror._fs.put = lambda here, there: (put(here[:3], there[:3]), os.kill(os.getpid(), signal.SIGKILL))
    saved.save({"w": jnp.full(1000, 2.0)}, {"step": 2}, step=2)
"""


def program(tmp_path, s3_server, text):
    (tmp_path / "program.py").write_text(text)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return str(tmp_path / "program.py"), os.environ | s3_server | {"PYTHONPATH": paths}


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


TWO = """
import sys
import jax, jax.numpy as jnp
import jdp

jdp.initialize(timeout_seconds=60)
plan = jdp.Plan(jdp.make_mesh(data=4), "zero3", min_shard_size=1)
tree = jdp.place({"w": jnp.arange(64.0)}, plan)
for folder in ("one", "two"):
    with jdp.Checkpoints(f"{sys.argv[1]}/{folder}", mirror=sys.argv[2]) as saved:
        if folder == "one":
            saved.save(tree, step=3)
        else:
            read = saved.restore(tree)[0]["w"]
            assert all((mine.data == other.data).all() for mine, other in zip(
                read.addressable_shards, tree["w"].addressable_shards, strict=True))
            print("same", jax.process_index(), saved.steps, flush=True)
"""


@pytest.mark.rest
def test_two_processes_fetch_one_copy(bucket, s3_server, tmp_path, capfd):
    file, environment = program(tmp_path, s3_server, TWO)
    command = [sys.executable, file, str(tmp_path), bucket]
    assert launch(command, 2, devices_per_process=2, environment=environment) == 0
    out = capfd.readouterr().out
    assert out.count("same 0 [3]") == out.count("same 1 [3]") == 1
