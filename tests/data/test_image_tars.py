"""Images in tar files, as WebDataset writes them: the samples are those of other sources; a damaged file is named."""

import json
import tarfile

import numpy as np
import pyarrow
import pytest
from corpora import parquet
from picture_files import LABELS, PNGS, members, samples_of, write_tar
from tiny_experiment import entries
from tiny_runs import refused

from jdp.cli import main as cli
from jdp.data import image_data
from jdp.data.images import from_tars
from jdp.experiment.data import open_data, open_eval_sets
from jdp.experiment.file import load

MODEL = {"name": "resnet-digits", "channels": 3}
EXPERIMENT = {"name": "x", "model": MODEL, "train": {"steps": 2, "batch_size": 8}}
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def shards(tmp_path):
    for shard, kind in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        numbers = range(shard * 10, shard * 10 + 10)
        write_tar(tmp_path / "shards" / f"{shard:03d}.tar", members(numbers), format=kind)
    return tmp_path / "shards"


def assert_same(one, other):
    assert one.fingerprint == other.fingerprint and one.classes == other.classes
    for side in ("train", "heldout"):
        for mine, yours in zip(getattr(one, side), getattr(other, side), strict=True):
            assert all(np.array_equal(mine[key], yours[key]) for key in yours)


def test_samples_are_those_of_an_npz(shards, tmp_path, monkeypatch):
    parquet(tmp_path / "x.parquet", pyarrow.table({"image": PNGS, "label": LABELS}))
    table = image_data(tmp_path / "x.parquet", heldout_fraction=0.2)
    assert_same(image_data(shards, heldout_fraction=0.2), table)
    monkeypatch.setattr(from_tars, "_scan", None)  # from here on the index is that of the cache
    assert_same(image_data(f"{shards}/*.tar", heldout_fraction=0.2), table)


def test_labels_may_be_names_or_in_json(tmp_path):
    names = ["ape", "cat"]
    write_tar(tmp_path / "a.tar", members(range(4), lambda number: names[number % 2]))
    assert image_data(tmp_path / "a.tar").classes == ("ape", "cat")
    deep = []
    for number in range(4):
        note = json.dumps({"label": 7, "kind": number % 2}).encode()
        parts = {"seg.png": PNGS[9], "jpg.png": PNGS[number], "json": note}
        deep += [(f"deep/{number}.{ending}", content) for ending, content in parts.items()]
    write_tar(tmp_path / "b.tar", deep)
    data = image_data(tmp_path / "b.tar", image="jpg.png", label="kind")
    assert data.classes == ("0", "1") and len(data.train) + len(data.heldout) == 4
    said = r"must have one picture .*; given deep/0 in .*b.tar with seg.png, jpg.png, json"
    with pytest.raises(ValueError, match=said):
        image_data(tmp_path / "b.tar")
    with pytest.raises(ValueError, match=r'"sort" in KEY.json; given deep/0 in .*b.tar'):
        image_data(tmp_path / "b.tar", image="jpg.png", label="sort")


def refusal(source):
    with pytest.raises(ValueError) as caught:
        image_data(source)
    assert cli._is_users_mistake(caught.value), repr(caught.value)
    assert str(source) in str(caught.value)
    return str(caught.value)


def test_a_tar_that_is_cut_is_refused_wherever(tmp_path):
    """Cut in a picture, in its padding, in a header, after a sample, and in the end mark."""
    path = write_tar(tmp_path / "a.tar", members(range(4)))
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0"))
    for size in [len(whole) // 2, 512 + 10, 512, 100, 700, 0, end, (end // 512 + 1) * 512, *range(37, end, 517)]:
        path.write_bytes(whole[:size])
        said = refusal(path)
        assert said.startswith("a tar file must be complete; given ") and "fetch or write it again" in said
        assert f"of {size} bytes" in said
    path.write_bytes(whole[: 512 + 40])
    assert f"it breaks off in 0000.png, which ends at byte {512 + len(PNGS[0])}" in refusal(path)


def test_a_tar_with_other_bytes_is_refused(tmp_path):
    path = write_tar(tmp_path / "a.tar", members(range(4)))
    whole = path.read_bytes()
    path.write_bytes(whole + whole)
    assert "other data follow its end mark: join tar files with tar -A" in refusal(path)
    header = whole.index(b"0002.png")
    path.write_bytes(whole[:header] + b"\x7f" * 512 + whole[header + 512 :])
    assert f"byte {header}, after 0001.cls: no header" in refusal(path)
    path.write_bytes(b"this is not a tar file" * 100)
    assert "must be complete" in refusal(path)


def test_what_is_no_sample_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", [("0.png", PNGS[0])])
    assert "must have a label, a whole number or a name in KEY.cls" in refusal(tmp_path / "a.tar")
    write_tar(tmp_path / "a.tar", [("0.cls", b"1"), ("1.png", PNGS[0]), ("0.png", PNGS[0])])
    assert "must have one picture" in refusal(tmp_path / "a.tar")
    write_tar(tmp_path / "a.tar", [("note.txt", b"")][:0])
    assert "must hold samples, as 0001.jpg and 0001.cls; given none" in refusal(tmp_path / "a.tar")
    (tmp_path / "a.tar").rename(tmp_path / "a.tar.gz")
    assert "must not be compressed" in refusal(tmp_path / "a.tar.gz")
    write_tar(tmp_path / "a.tar", [*members(range(2)), ("2.png", PNGS[2][:40]), ("2.cls", b"1")])
    data = image_data(tmp_path / "a.tar", heldout_fraction=0.4)
    with pytest.raises(ValueError, match=r"images must be readable; given .*a.tar, 2.png \(sample 2 of"):
        samples_of(data)


def test_a_directory_that_cannot_be_read_is_named(shards, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(shards), "iterdir", refuse)
    assert f"must be readable; given {shards}, Permission denied: fix its permissions" in refusal(shards)


def test_an_unreadable_folder_of_an_experiment_is_one_error(shards, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.toml").write_text(entries(EXPERIMENT | {"data": {"source": "shards"}}))
    iterdir, expected = type(shards).iterdir, f"all of the data must be readable; given {shards}, Permission denied"

    def refuse(self):
        if self == shards:
            raise PermissionError(13, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(type(shards), "iterdir", refuse)
    assert expected in refused(capsys, "train", tmp_path / "x.toml", "--run-dir", tmp_path / "runs")


def test_an_experiment_mixes_images(shards, tmp_path):
    parts = {"a": {"source": "shards/000.tar", "weight": 2.0}, "b": {"source": "shards/00[12].tar"}}
    (tmp_path / "x.toml").write_text(entries(EXPERIMENT | {"data": {"flip": True, "mixture": parts}}))
    experiment = load(tmp_path / "x.toml")
    data = open_data(experiment)
    assert data.classes == ("0", "1", "2") and len(data.parts) == 2
    assert data.train.sample_at(7, 0)["images"].shape == (8, 8, 3)
    assert open_eval_sets(experiment, data).keys() == {"eval", "eval_a", "eval_b"}
    write_tar(tmp_path / "shards" / "000.tar", members(range(4), lambda number: "ab"[number % 2]))
    with pytest.raises(ValueError, match=r"data.mixture.b must have the classes that are learnt, 2 \(a, b…\); it has"):
        open_data(experiment)
    with pytest.raises(ValueError, match=r"data\.heldout is for one source"):
        load(tmp_path / "x.toml", {"data.heldout": "elsewhere"})
