"""Images in folders, arrays and what `datasets` reads: which pictures with which labels, what numbers a model gets, and
what a damaged one says.
"""

import io
import itertools
import shutil
import tarfile

import datasets
import numpy as np
import pyarrow
import pytest
from corpora import arrow_file, parquet
from picture_files import CLASSES, LABELS, PIXELS, PNGS, encoded, folder_of, pixels_of, samples_of, write_pictures

import jdp
from jdp.base.errors import UserError
from jdp.data import global_batches
from jdp.data.images.decode import Frame
from jdp.data.images.samples import image_data

datasets.disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_hub")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def test_digits_are_all_there():
    from sklearn.datasets import load_digits

    data = image_data("digits", heldout_fraction=0.2)
    assert data.shape == (8, 8, 1) and data.classes == tuple("0123456789")
    assert str(data).startswith("digits: 1,797 images of 8x8x1 in 10 classes; train 1,4")
    known = load_digits()
    for side in (data.train, data.heldout):
        for index in range(0, len(side), 50):
            sample, row = side[index], side.rows[index]
            kinds = {key: (value.shape, value.dtype.name) for key, value in sample.items()}
            assert kinds == {"images": ((8, 8, 1), "float32"), "labels": ((), "int32"), "weights": ((), "float32")}
            # Rounding of one multiplication and one subtraction in float32.
            np.testing.assert_allclose(sample["images"][..., 0], known.images[row] / 8 - 1, atol=1e-6)
            assert (sample["labels"], sample["weights"]) == (known.target[row], 1)
    assert sorted([*data.train.rows, *data.heldout.rows]) == list(range(1797))


def test_the_held_out_digits_never_change():
    data = image_data("digits", heldout_fraction=0.2)
    assert len(data.heldout) == 321 and data.heldout.rows[:5].tolist() == [6, 8, 10, 12, 18]
    assert data.fingerprint == "db3db80df15d274e"


def test_a_held_out_set_by_name(pictures, tmp_path):
    other = write_pictures(tmp_path / "other", 255 - PIXELS)
    data = image_data(folder_of(pictures), heldout=folder_of(other))
    assert (len(data.train), len(data.heldout)) == (30, 30)
    (other / "dog").mkdir()
    shutil.copy(other / "cat" / "001.png", other / "dog")
    with pytest.raises(ValueError, match=r"one of the 3 classes \(ape, cat, zebra\); given 'dog' for sample 20 of"):
        image_data(folder_of(pictures), heldout=folder_of(other))


def test_the_fingerprint_is_of_the_samples(pictures, tmp_path):
    copy = shutil.copytree(pictures, tmp_path / "copy")
    prints = [image_data(folder_of(folder)).fingerprint for folder in (pictures, copy)]
    assert prints[0] == prints[1]
    prints += [image_data(folder_of(pictures), **one).fingerprint for one in ({"size": 4}, {"heldout_fraction": 0.5})]
    (copy / "cat" / "001.png").write_bytes(encoded(PIXELS[1] // 2))
    prints.append(image_data(folder_of(copy)).fingerprint)
    (copy / "cat" / "001.png").rename(copy / "zebra" / "001.png")
    prints.append(image_data(folder_of(copy)).fingerprint)
    assert len(set(prints)) == len(prints) - 1


@pytest.mark.parametrize(
    ("constants", "expected"),
    [
        ({}, PIXELS[0] / 127.5 - 1),
        ({"mean": 0, "std": 1}, PIXELS[0] / 255),
        ({"mean": (0.1, 0.2, 0.3), "std": [1, 2, 4]}, (PIXELS[0] / 255 - [0.1, 0.2, 0.3]) / [1, 2, 4]),
    ],
)
def test_normalisation(pictures, constants, expected):
    data = image_data(folder_of(pictures), **constants)
    plain = [pixels_of(sample).tobytes() for sample in samples_of(image_data(folder_of(pictures)))]
    image = samples_of(data)[plain.index(PIXELS[0].tobytes())]["images"]
    np.testing.assert_allclose(image, expected, atol=1e-6)  # two roundings in float32


GREY = np.full((4, 4), 200, np.uint8)
COLOUR = np.full((4, 4, 3), (10, 20, 30), np.uint8)
LUMA = (299 * 10 + 587 * 20 + 114 * 30) // 1000  # ITU-R 601-2, as Pillow documents it


@pytest.mark.parametrize(
    ("content", "channels", "expected"),
    [
        (encoded(GREY), 1, [200]),
        (encoded(COLOUR), 1, [LUMA]),
        (encoded(np.dstack([COLOUR, GREY + 55]), mode="P"), 3, [10, 20, 30]),
        (encoded(GREY.astype(np.uint16) * 256 + 99), 3, [200] * 3),
        (encoded(COLOUR, "BMP"), 3, [10, 20, 30]),
    ],
)
def test_files_of_every_kind(content, channels, expected):
    values = Frame(None, channels).decode(content)
    assert values.dtype == np.uint8 and values.shape == (4, 4, channels)
    # A palette of GIF's own making, and rounding in CMYK: two steps.
    np.testing.assert_allclose(values.astype(int), np.broadcast_to(expected, values.shape), atol=2)


def test_a_size_takes_the_largest_centred_part():
    wide = np.zeros((4, 10, 3), np.uint8)
    wide[:, 3:7] = RNG.integers(0, 256, (4, 4, 3))
    assert np.array_equal(Frame((4, 4), 3).decode(encoded(wide)), wide[:, 3:7])
    assert np.array_equal(Frame((4, 4), 3).decode(encoded(wide.swapaxes(0, 1))), wide[:, 3:7].swapaxes(0, 1))
    assert np.array_equal(Frame((4, 10), 3).decode(encoded(wide)), wide)


def test_a_smaller_size_averages():
    """A ramp stays a ramp: bilinear, antialiased, so every pixel counts."""
    ramp = np.repeat(np.arange(0, 256, 2, dtype=np.uint8)[None], 128, axis=0)
    for kind in ("PNG", "JPEG"):
        small = Frame((16, 16), 1).decode(encoded(ramp, kind))[..., 0].astype(int)
        # 8 pixels in one, 2 a pixel; the ends lean inwards, and JPEG loses a little.
        np.testing.assert_allclose(small[:, 1:-1], np.tile(np.arange(16) * 16 + 7, (16, 1))[:, 1:-1], atol=3)
    noise = RNG.integers(0, 256, (64, 64), dtype=np.uint8)
    assert Frame((4, 4), 1).decode(encoded(noise)).std() < noise.std() / 4


DAMAGES = {"cut": lambda content: content[:-40], "no picture": lambda _: b"<html>404</html>"}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_corrupt_picture_is_one_error(pictures, tmp_path, damage):
    """Found when it is read, in a thread of a thread; it comes out as the user's mistake that it is: exit 2."""
    folder = shutil.copytree(pictures, tmp_path / "set")
    bad = folder / "cat" / "010.png"
    bad.write_bytes(damage(bad.read_bytes()))
    data = image_data(folder_of(folder), heldout=folder_of(pictures))
    loader = global_batches(data.train, batch_size=8, seed=0)
    message = rf"images must be readable; given {bad} \(sample 13 of hf:imagefolder:{folder} "
    feed = jdp.shard_batches(loader, jdp.Plan(jdp.make_mesh()))
    with feed, pytest.raises(ValueError, match=message) as caught:
        list(itertools.islice(feed, 4))
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("; fix it, or leave it out")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "imagefolder reads .png, .* there are none"),
        (("1.png", "2.png"), "a column of labels must be named, .* given none that is known"),
        (("cat/1.png", "dog/1.png"), "two different samples, .* given 2 equal"),
        (("train/cat/1.png", "extra/cat/1.png"), "name a split, or none .* with 1 such as .*extra/cat/1.png"),
    ],
)
def test_directories_that_cannot_be(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encoded(PIXELS[0]))
    with pytest.raises(ValueError, match=message):
        image_data(folder_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "builder"), [("a", "imagefolder"), ("a.tar", "webdataset"), ("a.parquet", "parquet"), ("a.arrow", "arrow")]
)
def test_other_sources_are_told_how_to_be_read(tmp_path, name, builder):
    (tmp_path / name).write_bytes(b"") if "." in name else (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f'"digits", an .npz file .* write "hf:{builder}:{tmp_path}/{name}"'):
        image_data(tmp_path / name)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size must be at least 1 pixel high and wide; given 0"),
        ({"channels": 2}, "channels must be 1 .* given 2"),
        ({"std": 0}, "std must be positive numbers, one or 3 .* given 0"),
        ({"heldout": "nowhere"}, 'images must be "digits", an .npz file .* given nowhere, looked for at /'),
    ],
)
def test_arguments_that_cannot_be(pictures, wrong, message):
    with pytest.raises(ValueError, match=message):
        image_data(folder_of(pictures), **wrong)


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
