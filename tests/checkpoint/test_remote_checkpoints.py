"""Checkpoints behind an address, on a real S3 server on this machine: complete or invisible; never a folder `s3:`."""

import functools
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xxhash
from storage_servers import SENT

import jdp
from jdp.base import bucket as remote_storage
from jdp.base import notices
from jdp.base.bucket import Remote, RemoteError
from jdp.launch import launch

PLAN = jdp.Plan(jdp.make_mesh(data=4, devices=jax.devices()[:4]), "zero3", min_shard_size=1)


@pytest.fixture(scope="module")
def base():
    return jdp.init_state(lambda rng: {"w": jnp.ones((4, 8))}, optax.adam(0.1), PLAN, rng=jax.random.key(0))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Whatever is written by mistake to a folder `s3:` is seen."""
    monkeypatch.chdir(tmp_path)
    notices._said.clear()
    yield
    assert list(Path.cwd().iterdir()) == []


def at(base, step):
    weights = jax.device_put(jnp.full((4, 8), float(step)), base.params["w"].sharding)
    return replace(base, params={"w": weights}, step=jax.device_put(jnp.int32(step), PLAN.replicated))


@functools.cache
def target():
    return jdp.abstract_state(lambda rng: {"w": jnp.zeros((4, 8))}, optax.adam(0.1), PLAN, rng=jax.random.key(0))


def weight(state):
    return float(state.params["w"][0, 0])


def sent(address):
    """The bytes of objects below an address that the server has sent."""
    folder = f"/{address.removeprefix('s3://')}/"
    return sum(size for path, size in SENT.items() if path.startswith(folder))


def tops(address):
    return sorted({name.split("/")[0] for name in Remote(address).files()})


def test_steps_are_kept_restored_and_deleted_as_on_a_disk(bucket, base):
    with jdp.Checkpoints(f"{bucket}/run", keep=2, best="loss") as saved:
        for step, loss in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0)):
            saved.save(at(base, step), {"step": step}, {"loss": loss})
        saved.wait()
        assert saved.steps == [1, 3, 4] and saved.best == 1
        assert weight(saved.restore(target())[0]) == 4
    assert tops(f"{bucket}/run") == ["1", "3", "4"]
    with jdp.Checkpoints(f"{bucket}/run", keep=2, best="loss") as again:
        state, record = again.restore(target(), "best")
        assert weight(state) == 1 and record == {"step": 1}
        np.testing.assert_array_equal(again.restore_params(target()).params["w"], np.full((4, 8), 4.0))
    assert weight(jdp.restore(f"{bucket}/run", target())) == 4 and weight(jdp.restore(f"{bucket}/run/3", target())) == 3
    assert [(each.step, each.status) for each in jdp.checkpoint.check(f"{bucket}/run")] == [
        (1, "whole"),
        (3, "whole"),
        (4, "whole"),
    ]


def test_a_run_that_goes_back_sets_the_later_steps_aside_there_too(bucket, base):
    with jdp.Checkpoints(f"{bucket}/run") as saved:
        for step in (1, 2, 3):
            saved.save(at(base, step))
    with jdp.Checkpoints(f"{bucket}/run") as saved:
        saved.restore(target(), 1)
        saved.save(at(base, 2))
    assert tops(f"{bucket}/run") == ["1", "2", "abandoned-1"]
    assert weight(jdp.restore(f"{bucket}/run/abandoned-1", target())) == 3


def test_a_flipped_bit_is_found_and_the_step_set_aside_there_too(bucket, base, capsys):
    with jdp.Checkpoints(f"{bucket}/run") as saved:
        for step in (1, 2):
            saved.save(at(base, step))
    remote = Remote(f"{bucket}/run")
    largest = max(remote.files("2/state"), key=lambda name: remote.files("2/state")[name].size)
    content = bytearray(remote.read(largest))
    content[len(content) // 2] ^= 1
    remote.write(largest, bytes(content))
    with jdp.Checkpoints(f"{bucket}/run") as saved:
        assert weight(saved.restore(target())[0]) == 1
    assert tops(f"{bucket}/run") == ["1", "damaged-2"]
    said = capsys.readouterr().err
    assert f"{bucket}/run: checkpoint 2 is damaged" in said and "1 is read in its place" in said


def test_parts_of_large_files_are_fetched_and_compared(bucket, tmp_path_factory, monkeypatch):
    state = jdp.init_state(
        lambda rng: {"w": jax.random.normal(rng, (512, 256))}, optax.adam(0.1), PLAN, rng=jax.random.key(0)
    )
    for name in ("saved", "old", "flipped"):
        jdp.save(f"{bucket}/{name}", state)
    remote = Remote(bucket)
    read = jdp.restore_params(f"{bucket}/saved", state.params)
    np.testing.assert_array_equal(read["w"], state.params["w"])
    size = max(each.size for each in remote.files("saved").values())
    assert size > 3 * 2**19 and sent(f"{bucket}/saved") < 0.5 * size, "a third are parameters"

    folder = tmp_path_factory.mktemp("old")
    remote.fetch(list(remote.files("old")), folder)
    table = json.loads((folder / "old" / "checksums.json").read_text())
    assert table.pop("blocks").keys() == {name for name, (size, _) in table["files"].items() if size > 2**16}
    content = json.dumps(table).encode()
    remote.write("old/checksums.json", content)
    remote.write("old/commit_success.txt", f"checksums xxh3_128 {xxhash.xxh3_128_hexdigest(content)}\n".encode())
    jax.tree.map(np.testing.assert_array_equal, jdp.restore(f"{bucket}/old", state).params, state.params)

    with monkeypatch.context() as patched, jdp.Checkpoints(f"{bucket}/run") as many:
        many.save(state)
        many.wait()
        patched.setattr(Remote, "fetch_ranges", lambda *_: (_ for _ in ()).throw(RemoteError("the network is gone")))
        shutil.rmtree(many.directory / "0" / "state" / "ocdbt.process_0" / "d")
        with pytest.raises(jdp.CheckpointError, match="the network is gone"):
            many.restore(state)
        assert many.steps == [0], "it is not damaged"

    largest = max(remote.files("flipped").items(), key=lambda each: each[1].size)[0]
    content = bytearray(remote.read(largest))
    content[len(content) * 5 // 6] ^= 1  # in the parameters
    remote.write(largest, bytes(content))
    name = largest.removeprefix("flipped/")
    with pytest.raises(jdp.CheckpointError, match=f"{bucket}/flipped is damaged: {name} has changed"):
        jdp.restore(f"{bucket}/flipped", state)
    assert [each.problem for each in jdp.checkpoint.check(f"{bucket}/flipped")] == [f"{name} has changed"]
    assert [each.status for each in jdp.checkpoint.check(f"{bucket}/saved")] == ["whole"]


def test_what_was_half_sent_is_invisible_and_removed_by_the_next_save(bucket, base):
    with jdp.Checkpoints(f"{bucket}/run") as saved:
        saved.save(at(base, 1))
        saved.save(at(base, 2))
    remote = Remote(f"{bucket}/run")
    remote.write("2/.unfinished", b"")
    remote.delete(["2/commit_success.txt", "2/checksums.json"])
    remote.write("mine/notes.txt", b"mine")
    with jdp.Checkpoints(f"{bucket}/run") as saved:
        assert saved.steps == [1]
        assert "2" in tops(f"{bucket}/run"), "looking changes nothing"
        saved.save(at(base, 3))
    assert tops(f"{bucket}/run") == ["1", "3", "mine"]
    with jdp.Checkpoints(f"{bucket}/run") as reader, jdp.Checkpoints(f"{bucket}/run") as writer:
        writer.restore(target())
        writer.save(at(base, 4))
        writer.wait()
        assert reader.latest == 4 and weight(reader.restore(target())[0]) == 4, "a reader sees what another saves"


def test_what_is_not_jdps_under_a_number_is_refused(bucket):
    Remote(f"{bucket}/run").write("2024/notes.txt", b"mine")
    with pytest.raises(jdp.CheckpointError, match=rf"{bucket}/run has 2024, which is none"):
        jdp.Checkpoints(f"{bucket}/run")
    assert tops(f"{bucket}/run") == ["2024"]


def test_a_single_checkpoint_is_replaced_only_if_asked(bucket, base):
    address = f"{bucket}/models/one"
    jdp.save(address, at(base, 1))
    with pytest.raises(jdp.CheckpointError, match=rf"{address} holds a checkpoint already.*overwrite=True"):
        jdp.save(address, at(base, 2))
    jdp.save(Path(address), at(base, 2), overwrite=True)
    assert weight(jdp.restore(Path(address), target())) == 2 and tops(f"{bucket}/models") == ["one"]
    Remote(bucket).write("models/text", b"mine")
    Remote(bucket).write("models/other/text", b"mine")
    with pytest.raises(jdp.CheckpointError, match="is there already and is not a checkpoint"):
        jdp.save(f"{bucket}/models/other", at(base, 2), overwrite=True)
    with pytest.raises(jdp.CheckpointError, match=f"{bucket}/models/none is not a checkpoint and holds none"):
        jdp.restore(f"{bucket}/models/none", target())


@pytest.mark.parametrize("losses", [1, 3])
def test_a_file_that_does_not_arrive_is_sent_again_twice(bucket, base, monkeypatch, losses):
    send, lost = Remote.send, []

    def lossy(remote, names, folder, into=""):
        send(remote, names, folder, into)
        if len(lost) < losses:
            lost.append(f"{into}/{names[-1]}")
            remote.delete(lost[-1:])

    monkeypatch.setattr(Remote, "send", lossy)
    if losses == 1:
        jdp.save(f"{bucket}/one", at(base, 1))
        assert weight(jdp.restore(f"{bucket}/one", target())) == 1
    else:
        with pytest.raises(jdp.CheckpointError, match=rf"arrive complete; {bucket}/one/.* bytes: save again"):
            jdp.save(f"{bucket}/one", at(base, 1))
        with pytest.raises(jdp.CheckpointError, match="is not a checkpoint"):
            jdp.restore(f"{bucket}/one", target())
    assert len(lost) == losses


def test_a_save_that_cannot_be_sent_is_an_error_and_the_step_does_not_count(bucket, base):
    saved = jdp.Checkpoints(f"{bucket}/run")
    saved.save(at(base, 1))
    saved.wait()
    remote = Remote(f"{bucket}/run")
    fs, root = remote._opened
    fs.rm(root, recursive=True)
    fs.rmdir(root.split("/")[0])
    with pytest.raises(jdp.CheckpointError, match=r"Checkpoint 2 was not saved .*bucket does not exist"):
        saved.save(at(base, 2))
        saved.wait()
    fs.mkdir(root.split("/")[0])
    saved.save(at(base, 3))
    saved.close()
    assert tops(f"{bucket}/run") == ["3"]


def test_nothing_is_deleted_for_a_step_that_was_not_saved(bucket, base, monkeypatch):
    with jdp.Checkpoints(f"{bucket}/run", keep=1) as saved:
        saved.save(at(base, 1))
    saved = jdp.Checkpoints(f"{bucket}/run", keep=1)
    saved.restore(target())
    with monkeypatch.context() as patched:
        patched.setattr(Remote, "send", lambda *_: (_ for _ in ()).throw(RemoteError("the network is gone")))
        with pytest.raises(jdp.CheckpointError, match=r"Checkpoint 2 was not saved .*the network is gone"):
            saved.save(at(base, 2))
            saved.wait()
    assert saved.steps == [1] and weight(saved.restore(target())[0]) == 1
    saved.save(at(base, 3))
    saved.close()
    assert tops(f"{bucket}/run") == ["3"]


def test_googles_storage_takes_the_same_road(google_bucket, base):
    with jdp.Checkpoints(f"{google_bucket}/run", keep=1) as saved:
        for step in (1, 2):
            saved.save(at(base, step), {"step": step})
    with jdp.Checkpoints(Path(f"{google_bucket}/run"), keep=1) as saved:
        state, record = saved.restore(target())
        assert weight(state) == 2 and record == {"step": 2} and saved.steps == [2]
    wide = {"a": jax.device_put(np.arange(2**17, dtype=np.float32), PLAN.batch_sharding), "b": np.arange(7)}
    jdp.save(f"{google_bucket}/wide", wide)
    jax.tree.map(np.testing.assert_array_equal, jdp.restore(f"{google_bucket}/wide", wide), wide)
    Remote(google_bucket).delete([f"wide/{name}" for name in Remote(f"{google_bucket}/wide").files()])
    jdp.save(f"{google_bucket}/one", at(base, 1))
    jdp.save(f"{google_bucket}/one", at(base, 3), overwrite=True)
    assert weight(jdp.restore(f"{google_bucket}/one", target())) == 3 and tops(google_bucket) == ["one", "run"]
    Remote(google_bucket).write("corpus/a.txt", b"text")
    with pytest.raises(ValueError, match=r"gs://no-such-box.* cannot be listed: .*make that bucket, or fix its name"):
        jdp.Checkpoints("gs://no-such-box/run")


BAD = {
    "s3://no-such-bucket-here/run": r"no-such-bucket-here.* cannot be listed: .*does not exist; make that bucket",
    "s3://": "an address must name a bucket",
    "nosuch://a": "of a kind that fsspec knows.*nosuch:// is none",
    "file:///tmp/x": "file:// is on this one; write the folder itself",
    "memory://x/y": "memory:// is on this one",
    "az://c/x": "needs a package that is not installed.*pip install adlfs",
}

ODD = ("nosuch://a", Path)  # pathlib makes `nosuch:/a` of it, which may be a path


@pytest.mark.parametrize(
    ("address", "kind"), [(address, kind) for address in BAD for kind in (str, Path) if (address, kind) != ODD]
)
def test_an_address_that_leads_nowhere_is_one_error(bucket, base, address, kind):
    for use in (
        jdp.Checkpoints,
        lambda given: jdp.save(given, base),
        lambda given: jdp.restore(given, target()),
        lambda given: jdp.restore_params(given, target()),
        jdp.checkpoint.check,
    ):
        with pytest.raises(jdp.CheckpointError, match=BAD[address]):
            use(kind(address))


PROGRAM = """
import os, signal, sys
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np, optax
import jdp
from jdp.base.bucket import Remote

jdp.initialize(timeout_seconds=60)
plan = jdp.Plan(jdp.make_mesh(data=4), "zero3", min_shard_size=1)
make = lambda rng: {"w": jax.random.normal(rng, (8, 16))}
state = jdp.init_state(make, optax.sgd(1.0, momentum=0.9), plan, rng=jax.random.key(0))
target = jdp.abstract_state(make, optax.sgd(1.0, momentum=0.9), plan, rng=jax.random.key(1))

def check(got):
    for a, b in zip(jax.tree.leaves((got.params, got.opt_state)), jax.tree.leaves((state.params, state.opt_state))):
        for mine, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, other.data)

def at(step):
    return replace(state, step=jax.device_put(jnp.int32(step), plan.replicated))

address = sys.argv[1]
jdp.save(f"{address}/one", state)
jdp.save(f"{address}/one", state, overwrite=True)
check(jdp.restore(f"{address}/one", target))
with jdp.Checkpoints(f"{address}/many", keep=1) as saved:
    for step in (1, 2, 3):
        saved.save(at(step), {"step": step})
    check(saved.restore(target, 3)[0])
with jdp.Checkpoints(f"{address}/many", keep=2) as saved:
    assert saved.restore(target)[1] == {"step": 3} and saved.steps == [3]
    saved.save(at(4), {"step": 4})
    assert saved.restore(target)[1] == {"step": 4}
large = {}
for strategy in ("zero1", "zero3"):
    wide = jdp.Plan(jdp.make_mesh(data=4), strategy)
    make_wide = lambda rng: {"w": jax.random.normal(rng, (512, 1024)), "bias": jnp.ones(512)}
    large[strategy] = jdp.init_state(make_wide, optax.sgd(1.0, momentum=0.9), wide, rng=jax.random.key(2))
    jdp.save(f"{address}/{strategy}", large[strategy])
try:
    jdp.save(f"{address}/one", state)
except jdp.CheckpointError as error:
    print("refused", error, flush=True)
os.environ["JDP_CACHE_DIR"] += f"/host-{jax.process_index()}"  # as on two hosts, from here on
check(jdp.restore(f"{address}/one", target))
for strategy, saved in large.items():
    read = jdp.restore(f"{address}/{strategy}", saved)
    for a, b in zip(jax.tree.leaves(read.params), jax.tree.leaves(saved.params), strict=True):
        for mine, other in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(mine.data, other.data)
try:
    jdp.save(f"{address}/two", state)
except jdp.CheckpointError as error:
    print("apart", error, flush=True)
print("same", jax.process_index(), flush=True)
"""


def test_two_processes_save_and_restore(bucket, s3_server, tmp_path_factory, capfd):
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    here = Path(__file__).parents[2]
    paths = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | s3_server | {"PYTHONPATH": paths}
    code = launch(
        [sys.executable, str(folder / "program.py"), bucket], 2, devices_per_process=2, environment=environment
    )
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out.count("same") == 2 and out.count(f"refused {bucket}/one holds a checkpoint already") == 2
    assert out.count(f"apart Processes that save to {bucket}/two must see one folder") == 2
    assert tops(f"{bucket}/many") == ["3", "4"] and tops(bucket) == ["many", "one", "zero1", "zero3"]
    for strategy in ("zero1", "zero3"):  # both processes, as on two hosts, fetch their own shards only
        size = sum(each.size for each in Remote(f"{bucket}/{strategy}").files().values())
        assert size > 2 * 512 * 1024 * 4 and sent(f"{bucket}/{strategy}") < 1.1 * size
    scratch = Path(os.environ["JDP_CACHE_DIR"], "storage")
    assert not list(scratch.glob("*/*/many")), "nothing stays on this host"


def test_what_pathlib_makes_of_an_address_is_one_and_what_cannot_be_is_refused(bucket, base):
    box = bucket.removeprefix("s3://")
    jdp.save(Path(f"S3://{box}/ck"), at(base, 3))
    assert weight(jdp.restore(f"{bucket}/ck", target())) == 3
    for given in (Path("oss://mine/ck"), Path("no-such.kind://mine/ck"), "s3:mine/ck", Path("S3:mine")):
        with pytest.raises(ValueError, match=r"ossfs|that fsspec knows|two slashes"):
            jdp.save(given, base)
    with pytest.raises(jdp.CheckpointError, match=rf"given {bucket}\. Write {bucket}/NAME\."):
        jdp.save(bucket, base)


def test_storage_that_does_not_answer_is_named_once_while_it_is_waited_for(bucket, monkeypatch, capsys):
    monkeypatch.setattr(remote_storage, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(remote_storage, "_answered", set())
    fs, _ = Remote(bucket)._opened
    with monkeypatch.context() as patched:
        patched.setattr(fs, "find", lambda *_, **__: time.sleep(0.5) or (_ for _ in ()).throw(TimeoutError("no route")))
        for _ in range(2):
            with pytest.raises(RemoteError, match="no route"):
                Remote(bucket).files()
    assert capsys.readouterr().err.count(f"{bucket}: s3:// has not answered for 0 s; it is waited for") == 1
    notices._said.clear()
    monkeypatch.setattr(remote_storage, "SILENT_SECONDS", 60)
    assert Remote(bucket).files() == {}
    monkeypatch.setattr(remote_storage, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(fs, "find", lambda *_, **__: time.sleep(0.3) or {})
    assert Remote(bucket).files() == {}, "a long listing, of storage that has answered before"
    assert capsys.readouterr().err == ""


def test_moving_nothing_does_nothing(bucket):
    Remote(bucket).move([], "one", "two")
    assert tops(bucket) == []


def test_a_folder_that_is_here_is_one_whatever_its_name(base, tmp_path):
    folder = tmp_path / "notes:"
    folder.mkdir()
    jdp.save("notes:/ck", at(base, 2))
    assert weight(jdp.restore(Path("notes:/ck"), target())) == 2
    shutil.rmtree(folder)
