"""Data behind an address, on a real S3 server on this machine: the samples of files on a disk, fetched once."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from corpora import parquet
from picture_files import members, write_tar
from tiny_experiment import points_text, tables, write_points
from tiny_runs import refused

from jdp.base import notices
from jdp.base.bucket import Remote, RemoteError
from jdp.data import array_data, image_data, text_data
from jdp.data.sources.in_bucket import local_path


@pytest.fixture(autouse=True)
def here(own_cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notices._said.clear()
    yield
    assert not [path for path in tmp_path.iterdir() if ":" in path.name]


EXPERIMENT = points_text(tables(train={"steps": 1, "batch_size": 8}))


def upload(bucket, folder):
    files = [path.relative_to(folder.parent).as_posix() for path in folder.rglob("*") if path.is_file()]
    Remote(bucket).send(files, folder.parent)
    return f"{bucket}/{folder.name}"


def texts(folder):
    folder.mkdir()
    for number in range(4):
        (folder / f"part-{number}.txt").write_text(f"text {number} " * 50)
    (folder / "deeper").mkdir()
    (folder / "deeper" / "part-9.txt").write_text("further down " * 50)
    return folder


def shards(folder):
    for shard in range(2):
        write_tar(folder / f"shard-{shard}.tar", members(range(shard * 6, shard * 6 + 6)))
    return folder


def same(one, other):
    assert one.fingerprint == other.fingerprint and len(one.train) == len(other.train)
    for index in range(len(one.train)):
        for name, array in one.train[index].items():
            np.testing.assert_array_equal(array, other.train[index][name])


@pytest.mark.parametrize("pattern", ["", "/part-1.txt", "/*.txt", "/**/part-*.txt"])
def test_texts_are_those_of_a_disk(bucket, tmp_path, pattern, capsys):
    folder = texts(tmp_path / "corpus")
    address = upload(bucket, folder)
    options = {"length": 16, "heldout_fraction": 0.1}
    same(text_data(f"{address}{pattern}", **options), text_data(f"{folder}{pattern}", **options))
    said = [line for line in capsys.readouterr().err.splitlines() if "fetched" in line]
    assert len(said) == 1 and f"jdp: {address}" in said[0] and "are fetched once" in said[0]
    text_data(f"{address}{pattern}", **options)
    assert "fetched" not in capsys.readouterr().err


def test_tars_arrays_and_tables_are_those_of_a_disk(bucket, tmp_path):
    folder = shards(tmp_path / "pictures")
    address = upload(bucket, folder)
    same(image_data(f"{address}/*.tar", heldout_fraction=0.2), image_data(f"{folder}/*.tar", heldout_fraction=0.2))
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    np.savez(arrays / "points.npz", features=np.arange(60.0).reshape(20, 3), labels=np.arange(20) % 2)
    rows = [f"row {number} of a table " * 20 for number in range(20)]
    parquet(arrays / "rows.parquet", pyarrow.table({"text": rows}))
    address = upload(bucket, arrays)
    same(*(array_data(f"{each}/points.npz", heldout_fraction=0.2) for each in (address, arrays)))
    same(*(text_data(f"{each}/rows.parquet", length=16, heldout_fraction=0.2) for each in (address, arrays)))


def test_what_has_changed_is_fetched_anew_and_what_was_cut_short_is_finished(bucket, tmp_path):
    address = upload(bucket, texts(tmp_path / "corpus"))
    first = local_path(address)
    again = local_path(Path(address))
    assert again == first and (first / "part-1.txt").read_text() == "text 1 " * 50
    (first.parent / "fetched.json").unlink()  # as after a kill in the middle
    (first / "part-1.txt").write_text("text")
    (first / "part-2.txt").unlink()
    assert local_path(address) == first
    assert (first / "part-1.txt").read_text() == "text 1 " * 50 and (first / "part-2.txt").exists()
    Remote(bucket).write("corpus/part-1.txt", b"other 1" * 50)
    assert local_path(address) != first and (first / "part-1.txt").read_text() == "text 1 " * 50


def test_a_tar_cut_in_half_is_one_error_that_names_its_address(bucket, tmp_path, capsys):
    folder = shards(tmp_path / "pictures")
    whole = (folder / "shard-1.tar").read_bytes()
    (folder / "shard-1.tar").write_bytes(whole[: len(whole) // 2 - 100])
    address = upload(bucket, folder)
    file = write_points(tmp_path, EXPERIMENT.replace("points.npz", address))
    before = sorted(path.name for path in tmp_path.iterdir())
    error = " ".join(refused(capsys, "train", file, "--run-dir", f"{bucket}/runs", "--model.features_in", "90").split())
    assert f"{address}/shard-1.tar" in error and "complete" in error, error
    assert sorted(path.name for path in tmp_path.iterdir()) in (before, sorted([*before, "cache"]))
    assert not Remote(f"{bucket}/runs").files()


BAD = {
    "s3://no-such-bucket-here/corpus": "make that bucket",
    "{bucket}/nothing": "where there is nothing: fix the address",
    "{bucket}/nothing/*.txt": "where there is nothing: fix the address",
    "memory://x": "that other machines reach",
    "nosuch://x/y": "of a kind that fsspec knows",
}


@pytest.mark.parametrize("source", BAD)
def test_what_is_not_there_is_one_error(bucket, tmp_path, capsys, source):
    address = source.format(bucket=bucket)
    for read in (partial(text_data, length=8), array_data, image_data):
        with pytest.raises(ValueError, match=BAD[source]):
            read(address, heldout_fraction=0.1)
    file = write_points(tmp_path, EXPERIMENT.replace("points.npz", address))
    error = refused(capsys, "train", file, "--run-dir", tmp_path / "runs")
    assert BAD[source] in " ".join(error.split()) and not (tmp_path / "runs").exists()


def test_a_bucket_that_may_not_be_read_is_said_so(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    fs, _ = Remote(f"{bucket}/x")._opened
    type(fs).clear_instance_cache()
    try:
        with pytest.raises(RemoteError, match="Unable to locate credentials; give this process credentials that may"):
            local_path(f"{bucket}/x")
    finally:
        type(fs).clear_instance_cache()
