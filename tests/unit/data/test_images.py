"""Images in folders, arrays and what `datasets` reads: which pictures with which labels, what numbers a model gets.

Augmented: the same pixels on any mesh and after a resume, other ones in another epoch, evenly drawn.
"""

import io
import itertools
import shutil
import tarfile
from collections import Counter
from itertools import islice

import datasets
import numpy as np
import pyarrow
import pytest
from corpora import arrow_file, parquet
from picture_files import CLASSES, LABELS, PIXELS, PNGS, encoded, folder_of, pixels_of, samples_of, write_pictures

import jdp
from jdp.base.errors import UserError
from jdp.data import augmented, global_batches, image_data, mixture
from jdp.data.pictures import Frame
from jdp.experiment.data import open_data, open_eval_sets
from jdp.experiment.file import from_table

datasets.disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_hub")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def test_digits_are_all_there():
    from sklearn.datasets import load_digits

    data, known = image_data("digits", heldout_fraction=0.2), load_digits()
    assert data.shape == (8, 8, 1) and data.classes == tuple("0123456789")
    assert str(data).startswith("digits: 1,797 images of 8x8x1 in 10 classes; train 1,4")
    for side in (data.train, data.heldout):
        for index in range(0, len(side), 50):
            sample, row = side[index], side.rows[index]
            kinds = {key: (value.shape, value.dtype.name) for key, value in sample.items()}
            assert kinds == {"images": ((8, 8, 1), "float32"), "labels": ((), "int32"), "weights": ((), "float32")}
            # Rounding of one multiplication and one subtraction in float32.
            np.testing.assert_allclose(sample["images"][..., 0], known.images[row] / 8 - 1, atol=1e-6)
            assert (sample["labels"], sample["weights"]) == (known.target[row], 1)
    assert sorted([*data.train.rows, *data.heldout.rows]) == list(range(1797))
    assert len(data.heldout) == 321 and data.heldout.rows[:5].tolist() == [6, 8, 10, 12, 18]  # never changes
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


GREY = np.full((4, 4), 200, np.uint8)
COLOUR = np.full((4, 4, 3), (10, 20, 30), np.uint8)


@pytest.mark.parametrize(
    ("content", "channels", "expected"),
    [
        (encoded(GREY), 1, [200]),
        (encoded(COLOUR), 1, [(299 * 10 + 587 * 20 + 114 * 30) // 1000]),  # ITU-R 601-2, as Pillow documents it
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


def test_a_folder_is_told_how_to_be_read(tmp_path):
    with pytest.raises(ValueError, match=f'"digits", an .npz file .* write "hf:imagefolder:{tmp_path}"'):
        image_data(tmp_path)


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
    data = image_data(tmp_path / "rgb.npz", mean=(0.1, 0.2, 0.3), std=[1, 2, 4])
    expected = (PIXELS[data.train.rows[0]] / 255 - [0.1, 0.2, 0.3]) / [1, 2, 4]
    np.testing.assert_allclose(data.train[0]["images"], expected, atol=1e-6)  # two roundings in float32
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


def table(**changed):
    return datasets.Dataset.from_dict(COLUMNS | changed).cast_column("image", datasets.Image())


def hub_table(names=CLASSES):
    return table().cast_column("label", datasets.ClassLabel(names=list(names)))


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
    hub_table(CLASSES[::-1]).add_column("caption", ["a picture"] * 30).to_parquet(tmp_path / "x.parquet")
    assert_are_the_pictures(image_data(f"hf:parquet:{tmp_path}/x.parquet"), CLASSES[::-1])
    hub_table().shuffle(seed=0).save_to_disk(str(tmp_path / "saved"))
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
    with pytest.raises(ValueError, match=r'images must be named, .*, kind, other: name it, image = "…" \(.*data.field'):
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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": ["x"] * 29 + [None]}, "every row must have a label; given none in row 29 of"),
        ({"image": [*COLUMNS["image"][1:], None]}, "every row must have a picture; given none in row 29 of"),
        ({"labels": [1] * 30}, "a column of labels must be named, .* given label, labels, in"),
        ({"label": [2**40] * 30}, "of classes, 10,000,000; given 1099511627776 for sample 0"),
    ],
)
def test_tables_that_cannot_be(tmp_path, changed, message):
    table(**changed).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=message):
        image_data(f"hf:parquet:{tmp_path}/x.parquet")


def test_a_corrupt_picture_is_one_error(pictures, tmp_path):
    """Found when it is read, in a thread of a thread; it comes out as the user's mistake that it is: exit 2."""
    folder = shutil.copytree(pictures, tmp_path / "set")
    bad = folder / "cat" / "010.png"
    bad.write_bytes(bad.read_bytes()[:-40])
    images = [*COLUMNS["image"][:7], {"bytes": b"<html>404</html>", "path": None}, *COLUMNS["image"][8:]]
    table(image=images).to_parquet(tmp_path / "x.parquet")
    names = {folder_of(folder): rf"{bad} \(sample 13", f"hf:parquet:{tmp_path}/x.parquet": r"row 7 \(sample 7"}
    for source, name in names.items():
        loader = global_batches(image_data(source, heldout=source).train, batch_size=8, seed=0)
        feed = jdp.shard_batches(loader, jdp.Plan(jdp.make_mesh()))
        with feed, pytest.raises(UserError, match=rf"images must be readable; given {name} of {source} ") as caught:
            list(itertools.islice(feed, 4))
        assert "\n" not in str(caught.value) and str(caught.value).endswith("; fix it, or leave it out")


def test_a_picture_whose_bytes_cannot_be_read(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(PNGS[0])
    (tmp_path / "dog" / "2.png").symlink_to("/proc/self/mem")  # opens, but reading fails
    with pytest.raises(UserError, match=r"all of the data must be readable; given .*2.png, .*: fix its permissions"):
        image_data(folder_of(tmp_path))


N, SEED = 30, 3


class Pictures:
    """Images [5, 4, 2] of N samples, in which each pixel has a value of its own, all positive."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        images = np.arange(1, 41, dtype=np.float32).reshape(5, 4, 2) + 100 * index
        return {"images": images, "labels": np.int32(index), "weights": np.float32(1)}


SOURCE = augmented(Pictures(), crop_padding=2, flip=True, seed=SEED)


def rows(count, *, batch_size, **options):
    """The first `count` rows of a run: a list of (label, bytes of the image)."""
    batches = global_batches(SOURCE, batch_size=batch_size, seed=SEED, **options)
    pairs = (zip(batch["labels"], batch["images"], strict=True) for batch in islice(batches, -(-count // batch_size)))
    return [(int(label), image.tobytes()) for label, image in itertools.chain(*pairs)][:count]


def test_batch_size_and_threads_change_no_pixel():
    for options in ({"batch_size": 7}, {"batch_size": 45}, {"batch_size": 6, "threads": 4}):
        assert rows(90, **options) == rows(90, batch_size=1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_draws_anew(shuffle):
    epochs = [dict(rows(4 * N, batch_size=N, shuffle=shuffle)[e * N : (e + 1) * N]) for e in range(4)]
    assert all(epoch.keys() == set(range(N)) for epoch in epochs)
    for a, b in itertools.combinations(epochs, 2):  # 50 draws equally likely: about 0.6 of 30 alike
        assert sum(a[label] == b[label] for label in a) < N / 4


def test_the_draws_are_those_of_the_first_release():
    """A change of the stream would change what a resumed run reads."""
    drawn = [int(SOURCE.sample_in_epoch(i, e)["images"][2, 2, 0]) % 100 for e in range(2) for i in range(8)]
    assert drawn == [5, 9, 11, 9, 0, 37, 7, 11, 5, 19, 0, 25, 31, 0, 35, 15]


def test_crops_are_all_windows_of_the_image():
    source = augmented(Pictures(), crop_padding=2, seed=SEED)
    padded = np.pad(Pictures()[4]["images"], ((2, 2), (2, 2), (0, 0)))
    windows = {padded[y : y + 5, x : x + 4].tobytes() for y in range(5) for x in range(5)}
    seen = Counter(source.sample_in_epoch(4, epoch)["images"].tobytes() for epoch in range(1000))
    assert seen.keys() == windows
    chi_squared = sum((count - 1000 / 25) ** 2 / (1000 / 25) for count in seen.values())
    assert chi_squared < 24 + 5 * 48**0.5  # five deviations of a chi-squared with 24 degrees of freedom


def test_half_of_the_images_are_flipped():
    source = augmented(Pictures(), flip=True, seed=SEED)
    image, draws = Pictures()[0]["images"], 2000
    drawn = [source.sample_in_epoch(0, epoch)["images"].tobytes() for epoch in range(draws)]
    assert {*drawn} == {image.tobytes(), image[:, ::-1].tobytes()}
    assert abs(drawn.count(image.tobytes()) - draws / 2) < 4 * (draws / 4) ** 0.5  # four deviations of a binomial


GRADIENT = np.stack(np.broadcast_arrays(np.arange(90)[:, None], np.arange(0, 240, 2)[None], 7), -1).astype(np.uint8)
"""A picture [90, 120, 3] whose pixels tell where they are: red is the row, green twice the column."""


def shown(sample):
    """The first and last row and column that a crop of the gradient shows, to half a pixel."""
    values = (sample["images"] * 0.5 + 0.5) * 255
    rows, columns = values[:, 12, 0], values[12, :, 1] / 2
    ends = [(axis[0] - step, axis[-1] + step) for axis in (rows, columns) for step in [(axis[2] - axis[1]) / 2]]
    return [edge for pair in ends for edge in pair]


def test_resized_crops_are_drawn_as_torchvisions(tmp_path):
    """`RandomResizedCrop`: area even from 8 to 100 %, proportions 3:4 to 4:3; what does not fit is drawn again."""
    gradients = image_data(folder_of(write_pictures(tmp_path, [GRADIENT] * 6 + [255 - GRADIENT] * 6)), size=24)
    source, seen = augmented(gradients.train, resized_crop=0.08, seed=SEED), []
    index = next(i for i in range(len(source)) if gradients.train[i]["images"][0, 0, 0] < 0)
    for epoch in range(600):
        top, bottom, left, right = shown(source.sample_in_epoch(index, epoch))
        assert -2 < top < bottom < 92 and -2 < left < right < 122  # one pixel, and the rounding of ends
        seen.append(((bottom - top) * (right - left) / GRADIENT[..., 0].size, (right - left) / (bottom - top)))
    areas, proportions = np.array(seen).T
    assert 0.07 < areas.min() < 0.12 and 0.85 < areas.max() < 1.1
    assert 0.7 < proportions.min() < 0.8 and 1.25 < proportions.max() < 1.45
    # Large parts fit less often, so the means are not (0.08 + 1) / 2 and 0. Those of torchvision's rule, by 100,000
    # draws with Python's `random`: 0.435, with standard deviation 0.218, and 0.031 with 0.16. Four deviations:
    assert areas.mean() == pytest.approx(0.435, abs=4 * 0.218 / 600**0.5)
    assert np.log(proportions).mean() == pytest.approx(0.031, abs=4 * 0.16 / 600**0.5)


def experiment(**data):
    model, train = {"name": "resnet-digits", "blocks": [1], "width": 4}, {"steps": 2, "batch_size": 8}
    return from_table({"name": "a", "model": model, "data": {"source": "digits", **data}, "train": train})


def test_only_what_is_trained_on_is_augmented():
    table = experiment(augment="crop")
    plain, data = open_data(experiment()), open_data(table)
    assert len(plain.train) == len(data.train) and data.fingerprint != plain.fingerprint
    assert any((plain.train[i]["images"] != data.train[i]["images"]).any() for i in range(5))
    sets = open_eval_sets(table, data)
    assert all(np.array_equal(sets["eval"][i]["images"], plain.heldout[i]["images"]) for i in range(5))
    assert "cropped after padding by 1, flipped half the time" in str(data)
    assert open_data(experiment(augment="crop")).fingerprint == data.fingerprint
    crops = open_data(experiment(augment="resized_crop"))
    assert "crops of 0.08 of the area or more, flipped half the time" in str(crops)
    assert crops.fingerprint not in (data.fingerprint, plain.fingerprint)


DIGITS = image_data("digits")


@pytest.mark.parametrize(
    ("samples", "options", "expected"),
    [
        (Pictures(), {"crop_padding": -1}, "crop_padding must be 0 or more, .* height and width of images .5, "),
        (DIGITS.train, {"resized_crop": 0.5, "crop_padding": 1}, "no crop_padding; given 0.5 with crop_padding 1"),
        (Pictures(), {"resized_crop": 0.5}, "resized_crop requires pictures from image_data.* for Pictures"),
        ([{"tokens": np.zeros(3)}], {"flip": True}, 'samples must have "images"'),
        (mixture([(DIGITS, 1), (DIGITS, 2)]).train, {"flip": True}, "augment the sources, then mix them"),
    ],
)
def test_what_cannot_be_augmented_is_refused(samples, options, expected):
    with pytest.raises(ValueError, match=expected):
        augmented(samples, **options)
