"""A mirror in object storage, on real servers of S3's and Google's interfaces on this machine."""

import shutil
import threading

import fsspec
import pytest
from storage_servers import copies, storage, whole
from tiny_states import at, target, weight_of

import jdp
from jdp.checkpoint import errors, mirror

pytestmark = pytest.mark.usefixtures("quick_mirror")


def restored(saved):
    state, record = saved.restore(target())
    assert weight_of(state) == record["step"]
    return record["step"]


def train(folder, address, steps, **options):
    """Save these steps in one visit; return the step that it began from."""
    with jdp.Checkpoints(folder, mirror=address, **options) as saved:
        began = None if saved.latest is None else restored(saved)
        for step in steps:
            saved.save(at(step), {"step": step}, {"loss": abs(step - 2)})
    return began


@pytest.fixture(params=["bucket", "google_bucket"])
def address(request):
    return f"{request.getfixturevalue(request.param)}/some/run"


@pytest.mark.default_ids("bucket")
def test_a_fresh_machine_fetches_the_newest_copy(address, tmp_path, capsys):
    options = {"keep": 1, "keep_every": 3, "best": "loss"}
    assert train(tmp_path / "one", address, (1, 2, 3, 4), **options) is None
    assert [train(tmp_path / "reader", address, (), keep=1) for _ in range(2)] == [4, 4]
    assert copies(address) == whole(2, 3, 4), "what is deleted here is deleted there, and nothing by a reader"
    assert train(tmp_path / "two", address, (5,), **options) == 4
    assert f"mirror {address}: fetched checkpoint 4" in capsys.readouterr().err
    assert copies(address) == whole(2, 3, 5), "the directory's policy holds for copies of lost machines"
    assert sorted(path.name for path in (tmp_path / "two").glob("[!.]*")) == ["4", "5"]
    assert [each.status for each in jdp.checkpoint.check(tmp_path / "two")] == ["whole", "whole"]


def test_an_uncommitted_copy_does_not_count(bucket, tmp_path):
    train(tmp_path / "one", bucket, (1, 2))
    fs, root = storage(bucket)
    fs.rm(f"{root}/2/checksums.json")
    assert train(tmp_path / "two", bucket, ()) == 1
    assert train(tmp_path / "one", bucket, ()) == 2
    assert copies(bucket) == whole(1, 2)


def test_a_damaged_copy_is_left_out(bucket, tmp_path, capsys):
    train(tmp_path / "one", bucket, (1, 2))
    fs, root = storage(bucket)
    name = max(fs.find(f"{root}/2/state"), key=fs.size)
    content = bytearray(fs.cat_file(name))
    content[len(content) // 2] ^= 1
    fs.pipe_file(name, bytes(content))
    assert train(tmp_path / "two", bucket, ()) == 1
    assert f"mirror {bucket}: checkpoint 2 is damaged (state/" in capsys.readouterr().err


def test_going_back_takes_copies_back(bucket, tmp_path):
    with jdp.Checkpoints(tmp_path / "one", mirror=bucket) as saved:
        for step in (1, 2, 3):
            saved.save(at(step), {"step": step})
        saved.restore(target(), 1)
        saved.go_back(1)
        saved.save(at(2, 7.0), {"step": 7})
    assert copies(bucket) == whole(1, 2)
    with jdp.Checkpoints(tmp_path / "two", mirror=bucket) as saved:
        assert restored(saved) == 7


def test_the_copy_of_a_damaged_newest_stays(bucket, tmp_path):
    train(tmp_path / "one", bucket, (1, 2, 3))
    manifest = tmp_path / "one" / "3" / "state" / "manifest.ocdbt"
    manifest.unlink()
    assert train(tmp_path / "one", bucket, ()) == 2
    assert copies(bucket) == whole(1, 2, 3)
    assert train(tmp_path / "one", bucket, ()) == 3
    manifest.unlink()
    assert train(tmp_path / "one", bucket, ()) == 2
    with jdp.Checkpoints(tmp_path / "one") as killed:  # no mirror: no copy is deleted
        killed.go_back(2)
    assert copies(bucket) == whole(1, 2, 3)
    assert train(tmp_path / "one", bucket, ()) == 2, "an abandoned copy is not fetched"
    assert copies(bucket) == whole(1, 2)


def test_files_that_do_not_arrive_are_sent_again(bucket, tmp_path, monkeypatch):
    fs, lost = storage(bucket)[0], []
    put = fs.put

    def lossy(here, there):
        put(here, there)
        if len(lost) < 2:
            lost.append(there[-1])
            fs.rm(there[-1])

    monkeypatch.setattr(fs, "put", lossy)
    train(tmp_path / "one", bucket, (1,))
    assert len(lost) == 2
    assert train(tmp_path / "two", bucket, ()) == 1


@pytest.fixture
def outage(bucket, monkeypatch):
    """Return what takes the storage away, and what brings it back."""
    kind = type(storage(bucket)[0])
    call = kind._call_s3

    async def away(self, *arguments, **options):
        raise ConnectionError("no route to host")

    return lambda: monkeypatch.setattr(kind, "_call_s3", away), lambda: monkeypatch.setattr(kind, "_call_s3", call)


def test_an_outage_is_reported_once_and_made_up(bucket, tmp_path, outage, capsys):
    goes, comes = outage
    with jdp.Checkpoints(tmp_path / "one", mirror=bucket, keep=2) as saved:
        saved.save(at(1), {"step": 1})
        saved.wait()
        goes()
        for step in (2, 3, 4):
            saved.save(at(step), {"step": step})
            saved.wait()
        comes()
    assert copies(bucket) == whole(3, 4)
    assert capsys.readouterr().err.count("no route to host; retrying for") == 1


def test_a_long_outage_ends_no_run(bucket, tmp_path, outage, capsys, monkeypatch):
    goes, comes = outage
    train(tmp_path / "one", bucket, (4,))
    goes()
    monkeypatch.setattr(mirror, "LAST_SECONDS", 0.5)
    monkeypatch.setattr(errors, "PATIENCE_SECONDS", 0.2)
    assert train(tmp_path / "one", bucket, (5,)) == 4, "what is here is taken"
    said = capsys.readouterr().err
    assert said.count("it cannot be read (ConnectionError('no route to host')); using the checkpoints in") == 1
    assert said.count(f"mirror {bucket}: the last checkpoints were not uploaded; they are in {tmp_path / 'one'}") == 1
    with pytest.raises(jdp.CheckpointError, match=rf"a mirror must be readable; {bucket} is not: .*no route"):
        jdp.Checkpoints(tmp_path / "two", mirror=bucket)
    for thread in threading.enumerate():
        if thread.name == "jdp mirror":  # it may be about to try once more
            thread.join(60)
    comes()
    assert train(tmp_path / "two", bucket, ()) == 4


def test_storage_without_credentials_starts_no_run_at_once(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    kind = fsspec.get_filesystem_class("s3")
    kind.clear_instance_cache()
    with pytest.raises(jdp.CheckpointError, match="a mirror must be readable; s3://box/run is not: NoCredentialsError"):
        jdp.Checkpoints(tmp_path / "one", mirror="s3://box/run")
    kind.clear_instance_cache()


@pytest.mark.rest
def test_newer_copies_from_elsewhere_stay(bucket, tmp_path, outage):
    train(tmp_path / "one", bucket, (1, 8, 9))
    shutil.copytree(tmp_path / "one" / "1", tmp_path / "old" / "1")
    goes, comes = outage
    goes()
    with jdp.Checkpoints(tmp_path / "old", mirror=bucket) as saved:
        comes()
        restored(saved)
        saved.save(at(2), {"step": 2})
    assert copies(bucket) == whole(1, 2, 8, 9)


BAD = {
    "file:///tmp/x": "a mirror must be the address of a folder in storage, given .*write s3://bucket/run",
    "http://x/run": "a mirror must be the address of a folder in storage",
    "az://c/x": r"a mirror must be readable; az://c/x is not: .*adlfs",
    "s3://no-such-bucket-here/run": "a mirror must be readable; s3://no-such-bucket-here/run is not: .*bucket",
}


@pytest.mark.parametrize("given", BAD)
def test_an_address_that_leads_nowhere_is_one_error(bucket, tmp_path, given):
    with pytest.raises(ValueError, match=BAD[given]):
        jdp.Checkpoints(tmp_path / "one", mirror=given)
