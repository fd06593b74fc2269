"""Images: which pictures with which labels, what numbers a model gets, and what a damaged file says."""

import itertools
import shutil

import datasets
import numpy as np
import pytest
from picture_files import PIXELS, encoded, folder_of, pixels_of, samples_of, write_pictures

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
