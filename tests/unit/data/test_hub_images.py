"""Images in arrays, and in what `datasets` reads: the same samples wherever they are; what a damaged one says."""

import io
import shutil
import tarfile

import datasets
import numpy as np
import pyarrow
import pytest
from corpora import arrow_file, parquet
from picture_files import CLASSES, LABELS, PIXELS, PNGS, folder_of, pixels_of, samples_of, write_pictures

from jdp.data import global_batches
from jdp.data.images.decode import Frame
from jdp.data.images.samples import image_data

datasets.disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_hub")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def test_an_npz_of_images(tmp_path):
    np.savez(tmp_path / "x.npz", images=PIXELS[..., 0], labels=np.arange(30) % 3)
    data = image_data(tmp_path / "x.npz")
    assert data.shape == (6, 5, 1) and data.classes == ("0", "1", "2")
    row = data.train.rows[0]
    assert np.array_equal(pixels_of(data.train[0])[..., 0], PIXELS[row, ..., 0])
    assert image_data(tmp_path / "x.npz", channels=3).train[0]["images"].shape == (6, 5, 3)
    np.savez(tmp_path / "rgb.npz", images=PIXELS, labels=np.arange(30) % 3)
    assert image_data(tmp_path / "rgb.npz", size=4).shape == (4, 4, 3)
    with pytest.raises(ValueError, match="its 3 channels cannot become 1: set channels = 3"):
        image_data(tmp_path / "rgb.npz", channels=1)
    np.savez(tmp_path / "x.npz", images=PIXELS / 255, labels=np.arange(30))
    with pytest.raises(ValueError, match=r"images must be uint8 .* given float64 \[30, 6, 5, 3\]"):
        image_data(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x=PIXELS)
    with pytest.raises(ValueError, match=r"must have images and labels; given x in .*: rename the arrays"):
        image_data(tmp_path / "x.npz")


def test_channels_of_an_array_are_resized_separately():
    """A fourth is not taken for opacity, and nothing is rounded to whole numbers."""
    values = np.random.default_rng(0).integers(0, 17, (2, 2, 4), np.uint8)
    for have, channels in ((4, 4), (3, 3), (1, 3)):
        mean = np.broadcast_to(values[..., :have].mean((0, 1)), channels)
        np.testing.assert_allclose(Frame((1, 1), channels).fit(values[..., :have])[0, 0], mean, rtol=1e-6)
    for have, channels in ((2, 1), (2, 3), (1, 4)):
        with pytest.raises(ValueError, match=f"its {have} channels cannot become {channels}"):
            Frame((1, 1), channels).fit(values[..., :have])


COLUMNS = {"image": [{"bytes": png, "path": None} for png in PNGS], "label": LABELS}


def hub_table(names=CLASSES, **more):
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
    extra = {key: datasets.Value("string") for key in more}
    return datasets.Dataset.from_dict(COLUMNS | more, features=datasets.Features(kinds | extra))


def write_tar(path):
    with tarfile.open(path, "w") as archive:
        for number, png in enumerate(PNGS):
            for name, content in ((f"{number:04d}.png", png), (f"{number:04d}.cls", str(number % 3).encode())):
                header = tarfile.TarInfo(name)
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))


def assert_are_the_pictures(data, classes=CLASSES):
    assert data.classes == classes and data.shape == (6, 5, 3)
    found = {pixels_of(sample).tobytes(): int(sample["labels"]) for sample in samples_of(data)}
    assert found == {values.tobytes(): number % 3 for number, values in enumerate(PIXELS)}


def test_folders_tables_and_tars_hold_the_same_pictures(pictures, tmp_path):
    """Columns are found by their types, or their usual names; a picture is bytes in a row, or a file."""
    hub_table(CLASSES[::-1], caption=["a picture"] * 30).to_parquet(tmp_path / "x.parquet")
    assert_are_the_pictures(image_data(f"hf:parquet:{tmp_path}/x.parquet"), CLASSES[::-1])
    hub_table().save_to_disk(str(tmp_path / "saved"))
    assert_are_the_pictures(image_data(f"hf:{tmp_path}/saved"))
    assert_are_the_pictures(image_data(folder_of(pictures)))
    write_tar(tmp_path / "a.tar")
    assert_are_the_pictures(image_data(f"hf:webdataset:{tmp_path}/a.tar"), ("0", "1", "2"))
    hub = shutil.copytree(pictures, tmp_path / "set")
    assert_are_the_pictures(image_data(f"hf:{hub}"))


def test_a_column_of_bytes_by_name(tmp_path):
    table = pyarrow.table({"picture": PNGS, "kind": [CLASSES[number % 3] for number in range(30)], "other": LABELS})
    for builder, write in {"parquet": parquet, "arrow": arrow_file}.items():
        write(tmp_path / f"x.{builder}", table)
        source = f"hf:{builder}:{tmp_path}/x.{builder}"
        assert_are_the_pictures(image_data(source, image="picture", label="kind"))
    with pytest.raises(ValueError, match=r"a column of images must be named, .* picture, kind, other: name it"):
        image_data(source)
    with pytest.raises(ValueError, match=r'a column of labels must be named, .* given no column "x"'):
        image_data(source, image="picture", label="x")


def test_splits_are_numbered_by_the_same_classes(tmp_path):
    """The held-out split counts its classes in another order."""
    hub_table().to_parquet(tmp_path / "train.parquet")
    hub_table(CLASSES[::-1]).select(range(9)).to_parquet(tmp_path / "test.parquet")
    source = f"hf:parquet:{tmp_path}"
    data = image_data(f"{source}:train", heldout=f"{source}:test")
    assert (len(data.train), len(data.heldout)) == (30, 9) and data.classes == CLASSES
    assert [int(data.heldout[index]["labels"]) for index in range(3)] == [2, 1, 0]


def rows(**changed):
    return datasets.Dataset.from_dict(COLUMNS | changed).cast_column("image", datasets.Image())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": ["x"] * 29 + [None]}, "every row must have a label; given none in row 29 of"),
        ({"image": [*COLUMNS["image"][1:], None]}, "every row must have a picture; given none in row 29 of"),
        ({"labels": [1] * 30}, "a column of labels must be named, .* given several: label, labels"),
        ({"label": [2**40] * 30}, "of classes, 10,000,000; given 1099511627776 for sample 0"),
    ],
)
def test_tables_that_cannot_be(tmp_path, changed, message):
    rows(**changed).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=message):
        image_data(f"hf:parquet:{tmp_path}/x.parquet")


def test_a_corrupt_picture_is_named_by_its_row(tmp_path):
    images = COLUMNS["image"]
    rows(image=[*images[:7], {"bytes": PNGS[7][:-30], "path": None}, *images[8:]]).to_parquet(tmp_path / "x.parquet")
    source = f"hf:parquet:{tmp_path}/x.parquet"
    data = image_data(source, heldout=source)
    with pytest.raises(ValueError, match=rf"must be readable; given row 7 \(sample 7 of {source}"):
        list(global_batches(data.train, batch_size=5, seed=0, epochs=1))
