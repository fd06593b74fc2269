"""Images in tar files, as WebDataset writes them: the samples are those of other sources; a damaged file is named."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from jdp.cli import main as cli
from jdp.cli.main import main
from jdp.data import global_batches, image_data, mixture
from jdp.data.images import from_tars
from jdp.experiment.data import open_data, open_eval_sets
from jdp.experiment.file import load

TRAIN = "[train]\nsteps = 2\nbatch_size = 8\n"
PIXELS = np.random.default_rng(0).integers(0, 256, (30, 6, 5, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JDP_CACHE_DIR", str(tmp_path / "cache"))


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PNGS = [encoded(values) for values in PIXELS]


def write(path, members, **options):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return path


def sample(number, label=None):
    return [(f"{number:04d}.png", PNGS[number]), (f"{number:04d}.cls", str(label or number % 3).encode())]


@pytest.fixture
def shards(tmp_path):
    for shard in range(3):
        members = [member for number in range(shard * 10, shard * 10 + 10) for member in sample(number)]
        write(
            tmp_path / "shards" / f"{shard:03d}.tar",
            members,
            format=[tarfile.GNU_FORMAT, tarfile.PAX_FORMAT][shard % 2],
        )
    return tmp_path / "shards"


def assert_same(one, other):
    assert one.fingerprint == other.fingerprint and one.classes == other.classes
    for side in ("train", "heldout"):
        for mine, yours in zip(getattr(one, side), getattr(other, side), strict=True):
            assert all(np.array_equal(mine[key], yours[key]) for key in yours)


def test_samples_are_those_of_an_npz(shards, tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"image": PNGS, "label": [number % 3 for number in range(30)]}), tmp_path / "x.parquet"
    )
    table = image_data(tmp_path / "x.parquet", heldout_fraction=0.2)
    assert_same(image_data(shards, heldout_fraction=0.2), table)
    monkeypatch.setattr(from_tars, "_scan", None)  # from here on the index is that of the cache
    assert_same(image_data(f"{shards}/*.tar", heldout_fraction=0.2), table)


def test_labels_may_be_names_or_in_json(tmp_path):
    names = ["ape", "cat"]
    write(tmp_path / "a.tar", [member for number in range(4) for member in sample(number, names[number % 2])])
    assert image_data(tmp_path / "a.tar").classes == ("ape", "cat")
    members = [
        (f"deep/{number}.{ending}", content)
        for number in range(4)
        for ending, content in (
            ("seg.png", PNGS[9]),
            ("jpg.png", PNGS[number]),
            ("json", json.dumps({"label": 7, "kind": number % 2}).encode()),
        )
    ]
    write(tmp_path / "b.tar", members)
    data = image_data(tmp_path / "b.tar", image="jpg.png", label="kind")
    assert data.classes == ("0", "1") and len(data.train) + len(data.heldout) == 4
    with pytest.raises(
        ValueError, match=r"must have one picture .*; given deep/0 in .*b.tar with seg.png, jpg.png, json"
    ):
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
    path = write(tmp_path / "a.tar", [member for number in range(4) for member in sample(number)])
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
    path = write(tmp_path / "a.tar", [member for number in range(4) for member in sample(number)])
    whole = path.read_bytes()
    path.write_bytes(whole + whole)
    assert "other data follow its end mark: join tar files with tar -A" in refusal(path)
    header = whole.index(b"0002.png")
    path.write_bytes(whole[:header] + b"\x7f" * 512 + whole[header + 512 :])
    assert f"byte {header}, after 0001.cls: no header" in refusal(path)
    path.write_bytes(b"this is not a tar file" * 100)
    assert "must be complete" in refusal(path)


def test_what_is_no_sample_is_named(tmp_path):
    write(tmp_path / "a.tar", [("0.png", PNGS[0])])
    assert "must have a label, a whole number or a name in KEY.cls" in refusal(tmp_path / "a.tar")
    write(tmp_path / "a.tar", [("0.cls", b"1"), ("1.png", PNGS[0]), ("0.png", PNGS[0])])
    assert "must have one picture" in refusal(tmp_path / "a.tar")
    write(tmp_path / "a.tar", [("note.txt", b"")][:0])
    assert "must hold samples, as 0001.jpg and 0001.cls; given none" in refusal(tmp_path / "a.tar")
    (tmp_path / "a.tar").rename(tmp_path / "a.tar.gz")
    assert "must not be compressed" in refusal(tmp_path / "a.tar.gz")
    write(tmp_path / "a.tar", [*sample(0), *sample(1), ("2.png", PNGS[2][:40]), ("2.cls", b"1")])
    data = image_data(tmp_path / "a.tar", heldout_fraction=0.4)
    with pytest.raises(ValueError, match=r"images must be readable; given .*a.tar, 2.png \(sample 2 of"):
        [side[index] for side in (data.train, data.heldout) for index in range(len(side))]


def test_a_directory_that_cannot_be_read_is_named(shards, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(shards), "iterdir", refuse)
    assert f"must be readable; given {shards}, Permission denied: fix its permissions" in refusal(shards)


def test_a_mixture_has_one_order_on_any_number_of_processes(shards):
    one, two = image_data(shards / "000.tar"), image_data(f"{shards}/00[12].tar")
    mixed = mixture([(one, 2), (two, 1)], seed=3)

    def batches(start, rows):
        read = iter(global_batches(mixed.train, batch_size=8, seed=1, start=start, rows=rows, threads=1))
        return [next(read) for _ in range(6 - start)]

    whole = batches(0, None)
    for processes in (2, 4):
        parts = [batches(2, slice(rank * 8 // processes, (rank + 1) * 8 // processes)) for rank in range(processes)]
        for step, of_all in enumerate(zip(*parts, strict=True), 2):
            for key, expected in whole[step].items():
                assert np.array_equal(np.concatenate([part[key] for part in of_all]), expected)


@pytest.mark.parametrize("damage", ["a tar cut in half", "an unreadable folder"])
def test_bad_data_of_an_experiment_is_one_error(shards, tmp_path, damage, monkeypatch, capsys):
    (tmp_path / "x.toml").write_text(
        'name = "x"\n[model]\nname = "resnet-digits"\nchannels = 3\n[data]\nsource = "shards"\n' + TRAIN
    )
    if damage == "a tar cut in half":
        path = shards / "001.tar"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        expected = f"a tar file must be complete; given {path} of "
    else:
        iterdir, expected = type(shards).iterdir, f"all of the data must be readable; given {shards}, Permission denied"

        def refuse(self):
            if self == shards:
                raise PermissionError(13, "Permission denied", str(self))
            return iterdir(self)

        monkeypatch.setattr(type(shards), "iterdir", refuse)
    assert main(["train", str(tmp_path / "x.toml"), "--run-dir", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and expected in said and "Traceback" not in said


def test_an_experiment_mixes_images(shards, tmp_path):
    parts = '[data.mixture]\na = {source = "shards/000.tar", weight = 2.0}\nb = {source = "shards/00[12].tar"}\n'
    text = f'name = "x"\n[model]\nname = "resnet-digits"\nchannels = 3\n[data]\nflip = true\n{parts}{TRAIN}'
    (tmp_path / "x.toml").write_text(text)
    experiment = load(tmp_path / "x.toml")
    data = open_data(experiment)
    assert data.classes == ("0", "1", "2") and len(data.parts) == 2
    assert data.train.sample_at(7, 0)["images"].shape == (8, 8, 3)
    assert open_eval_sets(experiment, data).keys() == {"eval", "eval_a", "eval_b"}
    write(
        tmp_path / "shards" / "000.tar", [member for number in range(4) for member in sample(number, "ab"[number % 2])]
    )
    with pytest.raises(ValueError, match=r"data.mixture.b must have the classes that are learnt, 2 \(a, b…\); it has"):
        open_data(experiment)
    with pytest.raises(ValueError, match=r"data\.heldout is for one source"):
        load(tmp_path / "x.toml", {"data.heldout": "elsewhere"})
