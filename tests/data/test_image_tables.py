"""Images in arrays, tables and Hugging Face data sets: the same samples wherever they are; what a damaged one says."""

import shutil

import datasets
import numpy as np
import pyarrow
import pytest
from corpora import arrow, arrow_file, parquet
from picture_files import CLASSES, LABELS, PIXELS, PNGS, pixels_of, samples_of, write_pictures

from jdp.cli import main as cli
from jdp.data import global_batches
from jdp.data.images.from_folders import FilePictures
from jdp.data.images.samples import image_data

pytestmark = pytest.mark.usefixtures("own_hub")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


# --- arrays and tables ----------------------------------------------------------------------------------------------


def test_an_npz_of_images(tmp_path):
    np.savez(tmp_path / "x.npz", images=PIXELS[..., 0], labels=np.arange(30) % 3)
    data = image_data(tmp_path / "x.npz")
    assert data.shape == (6, 5, 1) and data.classes == ("0", "1", "2")
    row = data.train.rows[0]
    assert np.array_equal(pixels_of(data.train[0])[..., 0], PIXELS[row, ..., 0])
    assert image_data(tmp_path / "x.npz", channels=3).train[0]["images"].shape == (6, 5, 3)
    np.savez(tmp_path / "rgb.npz", images=PIXELS, labels=np.arange(30) % 3)
    assert image_data(tmp_path / "rgb.npz", size=4).shape == (4, 4, 3)
    with pytest.raises(ValueError, match="its 3 channels cannot become 1: give channels = 3"):
        image_data(tmp_path / "rgb.npz", channels=1)
    np.savez(tmp_path / "x.npz", images=PIXELS / 255, labels=np.arange(30))
    with pytest.raises(ValueError, match=r"images must be uint8 .* given float64 \[30, 6, 5, 3\]"):
        image_data(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x=PIXELS)
    with pytest.raises(ValueError, match=r"must have images and labels; given x in .*missing: images, labels"):
        image_data(tmp_path / "x.npz")


def table(**columns):
    return pyarrow.table({"image": PNGS, "label": LABELS} | columns)


def hub_table(names=CLASSES, **more):
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
    columns = {"image": [{"bytes": png, "path": None} for png in PNGS], "label": LABELS}
    extra = {key: datasets.Value("string") for key in more}
    return datasets.Dataset.from_dict(columns | more, features=datasets.Features(kinds | extra))


def assert_are_the_pictures(data, classes=CLASSES):
    assert data.classes == classes and data.shape == (6, 5, 3)
    found = {pixels_of(sample).tobytes(): int(sample["labels"]) for sample in samples_of(data)}
    assert found == {values.tobytes(): number % 3 for number, values in enumerate(PIXELS)}


def test_tables(tmp_path):
    parquet(tmp_path / "one.parquet", table())
    assert_are_the_pictures(image_data(tmp_path / "one.parquet"), ("0", "1", "2"))
    named = table(label=[CLASSES[number % 3] for number in range(30)])
    for name, write in {"named.parquet": parquet, "stream.arrow": arrow, "file.arrow": arrow_file}.items():
        write(tmp_path / name, named)
        assert_are_the_pictures(image_data(tmp_path / name))
    parts = tmp_path / "parts"
    parts.mkdir()
    parquet(parts / "0.parquet", named[:11])
    parquet(parts / "1.parquet", named[11:])
    assert_are_the_pictures(image_data(parts))
    data = image_data(f"{parts}/*.parquet", heldout=parts)
    assert_are_the_pictures(data)
    assert [data.train.pictures.name_of(row) for row in (0, 10, 11, 29)] == [
        f"{parts}/{file}.parquet, row {row}" for file, row in ((0, 0), (0, 10), (1, 0), (1, 18))
    ]


def test_tables_whose_metadata_describes_their_columns(tmp_path):
    """As `datasets` writes them: a picture is bytes and a path, classes have names, other columns may be text."""
    saved = hub_table(CLASSES[::-1], caption=["a picture"] * 30)
    saved.to_parquet(tmp_path / "x.parquet")
    assert_are_the_pictures(image_data(tmp_path / "x.parquet"), CLASSES[::-1])


def test_the_same_pictures_are_the_same_samples_wherever_they_are(pictures, tmp_path):
    order = sorted(pictures.glob("*/*"))
    labels = [path.parent.name for path in order]
    parquet(tmp_path / "x.parquet", table(image=[path.read_bytes() for path in order], label=labels))
    assert image_data(tmp_path / "x.parquet").fingerprint == image_data(pictures).fingerprint


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ({"label": ["x"] * 29 + [None]}, {}, "every row must have a label; given none for sample 29 of"),
        ({"image": [*PNGS[:-1], None]}, {}, r"every row must have a picture; given .*x.parquet, row 29: .*missing"),
        (
            {"mask": PNGS},
            {},
            'a column of images; given 2 that may be it in .*columns are image, label, mask: .* image = "…"',
        ),
        ({"mask": PNGS}, {"image": "picture"}, 'a column of images; given "picture" in'),
        ({"label": [0.5] * 30}, {}, r"one class a sample, .* given float64 \[30\]"),
        ({"labels": [1] * 30}, {}, "a column of labels; given 2 that may be it"),
        ({"label": [-1] * 30}, {}, "a class number must count from 0; given -1 for sample 0"),
    ],
)
def test_tables_that_cannot_be(tmp_path, columns, arguments, message):
    parquet(tmp_path / "x.parquet", table(**columns))
    with pytest.raises(ValueError, match=message):
        image_data(tmp_path / "x.parquet", **arguments)


def test_a_column_by_name(tmp_path):
    parquet(tmp_path / "x.parquet", table(mask=PNGS[::-1], labels=[1] * 30))
    assert_are_the_pictures(image_data(tmp_path / "x.parquet", image="image", label="label"), ("0", "1", "2"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda _: b"no table", lambda _: b""])
def test_a_corrupt_table_is_one_error(tmp_path, suffix, damage):
    path = tmp_path / f"x.{suffix}"
    {"parquet": parquet, "arrow": arrow_file}[suffix](path, table())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"a data file must be complete; given {path}: ") as caught:
        image_data(path)
    assert cli._is_users_mistake(caught.value)


def test_a_corrupt_picture_in_a_table_is_named_by_its_row(tmp_path):
    parquet(tmp_path / "x.parquet", table(image=[*PNGS[:7], PNGS[7][:-30], *PNGS[8:]]))
    data = image_data(tmp_path / "x.parquet", heldout=tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"images must be readable; given .*x.parquet, row 7 \(sample 7 of"):
        list(global_batches(data.train, batch_size=5, seed=0, epochs=1))


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def test_a_saved_data_set(tmp_path, notices):
    saved = hub_table()
    saved.save_to_disk(str(tmp_path / "one"))
    assert_are_the_pictures(image_data(f"hf:{tmp_path / 'one'}"))
    parts = {"train": saved.select(range(20)), "test": saved.select([25, 21, 29]), "spare": saved.select([20])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "split"))
    data = image_data(f"hf:{tmp_path / 'split'}")
    assert "not reading the splits spare" in notices.text
    assert (len(data.train), len(data.heldout)) == (20, 3) and "a set of its own" in str(data)
    assert [np.array_equal(pixels_of(data.heldout[i]), PIXELS[n]) for i, n in enumerate((25, 21, 29))] == [True] * 3


def test_a_split_by_name(tmp_path):
    saved = hub_table()
    datasets.DatasetDict({"easy": saved, "hard": saved.select([4, 5])}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ValueError, match=r"split train, or one only; given easy, hard in hf:.*as hf:.*two:easy"):
        image_data(f"hf:{tmp_path / 'two'}")
    assert_are_the_pictures(image_data(f"hf:{tmp_path / 'two'}:easy"))
    assert len(image_data(f"hf:{tmp_path / 'two'}:hard", heldout_fraction=0.5).train) == 1


def test_a_directory_that_datasets_reads(tmp_path, pictures):
    """Here its own reader of folders of pictures, which leaves them where they are, and notes their paths."""
    folder = shutil.copytree(pictures, tmp_path / "set")
    data = image_data(f"hf:{folder}")
    assert_are_the_pictures(data)
    assert not isinstance(data.train.pictures, FilePictures)


def test_a_data_set_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=f"a Hugging Face data set must be readable; given hf:{tmp_path}/none: "):
        image_data(f"hf:{tmp_path}/none")
