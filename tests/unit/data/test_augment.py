"""Augmented images: the same pixels on any mesh and after a resume, other ones in another epoch, evenly drawn."""

import itertools
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from picture_files import folder_of, write_pictures

from jdp.data import augmented, global_batches, image_data, mixture
from jdp.experiment.data import open_data, open_eval_sets
from jdp.experiment.file import from_table

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


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"batch_size": 45}, {"batch_size": 6, "threads": 4}], ids=str)
def test_batch_size_and_threads_change_no_pixel(options):
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
    image = Pictures()[4]["images"]
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    windows = {padded[y : y + 5, x : x + 4].tobytes(): (y, x) for y in range(5) for x in range(5)}
    epochs = 1000
    seen = Counter(windows[source.sample_in_epoch(4, epoch)["images"].tobytes()] for epoch in range(epochs))
    assert len(seen) == 25
    expected = epochs / 25
    chi_squared = sum((count - expected) ** 2 / expected for count in seen.values())
    assert chi_squared < 24 + 5 * 48**0.5  # five deviations of a chi-squared with 24 degrees of freedom


def test_half_of_the_images_are_flipped():
    source = augmented(Pictures(), flip=True, seed=SEED)
    image, flipped, draws = Pictures()[0]["images"], 0, 2000
    for epoch in range(draws):
        drawn = source.sample_in_epoch(0, epoch)["images"]
        is_flipped = np.array_equal(drawn, image[:, ::-1])
        assert is_flipped or np.array_equal(drawn, image)
        flipped += is_flipped
    assert abs(flipped - draws / 2) < 4 * (draws / 4) ** 0.5  # four deviations of a binomial


GRADIENT = np.stack(np.broadcast_arrays(np.arange(90)[:, None], np.arange(0, 240, 2)[None], 7), -1).astype(np.uint8)
"""A picture [90, 120, 3] whose pixels tell where they are: red is the row, green twice the column."""


@pytest.fixture
def gradients(tmp_path, own_hub):
    return image_data(folder_of(write_pictures(tmp_path, [GRADIENT] * 6 + [255 - GRADIENT] * 6)), size=24)


def shown(sample):
    """The first and last row and column that a crop of the gradient shows, to half a pixel."""
    values = (sample["images"] * 0.5 + 0.5) * 255
    rows, columns = values[:, 12, 0], values[12, :, 1] / 2
    ends = [(axis[0] - step, axis[-1] + step) for axis in (rows, columns) for step in [(axis[2] - axis[1]) / 2]]
    return [edge for pair in ends for edge in pair]


def test_resized_crops_are_drawn_as_torchvisions(gradients):
    """`RandomResizedCrop`: area even from 8 to 100 %, proportions 3:4 to 4:3; what does not fit is drawn again."""
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
    model = {"name": "resnet-digits", "blocks": [1], "width": 4}
    train = {"steps": 2, "batch_size": 8}
    return from_table({"name": "a", "model": model, "data": {"source": "digits", **data}, "train": train})


def test_only_what_is_trained_on_is_augmented():
    table = experiment(augment="crop")
    plain, data = open_data(experiment()), open_data(table)
    assert len(plain.train) == len(data.train) and data.fingerprint != plain.fingerprint
    assert any((plain.train[i]["images"] != data.train[i]["images"]).any() for i in range(5))
    sets = open_eval_sets(table, data)
    assert all(np.array_equal(sets["eval"][i]["images"], plain.heldout[i]["images"]) for i in range(5))
    assert "cropped after padding by 1, flipped half the time" in str(data)
    again = open_data(experiment(augment="crop"))
    assert again.fingerprint == data.fingerprint
    crops = open_data(experiment(augment="resized_crop"))
    assert "crops of 0.08 of the area or more, flipped half the time" in str(crops)
    assert crops.fingerprint not in (data.fingerprint, plain.fingerprint)


def mixed_digits():
    digits = image_data("digits")
    return mixture([(digits, 1), (digits, 2)]).train


REFUSED = {
    "negative": (Pictures, {"crop_padding": -1}, "crop_padding must be 0 or more, .* height and width of images .5, 4"),
    "both": (Pictures, {"resized_crop": 0.5, "crop_padding": 1}, "resized_crop and crop_padding both crop; given 0.5"),
    "arrays": (Pictures, {"resized_crop": 0.5}, "resized_crop requires pictures from image_data; given Pictures"),
    "no images": (lambda: [{"tokens": np.zeros(3)}], {"flip": True}, 'samples must have "images"'),
    "a mixture": (mixed_digits, {"flip": True}, "augment the sources, then mix them"),
}


@pytest.mark.parametrize(("samples", "options", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_augmented_is_refused(samples, options, expected):
    with pytest.raises(ValueError, match=expected):
        augmented(samples(), **options)
