"""Augmented images: the same pixels on any mesh and after a resume, other ones in another epoch, evenly drawn."""

import itertools
from collections import Counter

import numpy as np
import pytest
from tiny_runs import refused

from jdp.data import augmented, global_batches, image_data, mixture
from jdp.experiment.assembly import Assembly
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


def first(count, batches):
    iterator = iter(batches)
    taken = [next(iterator) for _ in range(count)]
    iterator.close()
    return taken


def rows(count, *, batch_size, **options):
    """The first `count` rows of a run: a list of (label, bytes of the image)."""
    batches = global_batches(SOURCE, batch_size=batch_size, seed=SEED, **options)
    pairs = (zip(batch["labels"], batch["images"], strict=True) for batch in first(-(-count // batch_size), batches))
    return [(int(label), image.tobytes()) for label, image in itertools.chain(*pairs)][:count]


# --- the same anywhere: on any processes and after a resume in `test_order_properties.py` ---------------------------


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"batch_size": 45}, {"batch_size": 6, "threads": 4}], ids=str)
def test_pixels_do_not_depend_on_batch_size_or_threads(options):
    assert rows(90, **options) == rows(90, batch_size=1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_draws_anew(shuffle):
    epochs = [dict(rows(4 * N, batch_size=N, shuffle=shuffle)[e * N : (e + 1) * N]) for e in range(4)]
    assert all(epoch.keys() == set(range(N)) for epoch in epochs)
    for a, b in itertools.combinations(epochs, 2):  # 50 draws equally likely: about 0.6 of 30 alike
        assert sum(a[label] == b[label] for label in a) < N / 4


def test_seeds_draw_differently_and_only_the_images():
    other = augmented(Pictures(), crop_padding=2, flip=True, seed=SEED + 1)
    pairs = [(SOURCE[i], other[i]) for i in range(N)]
    assert sum(np.array_equal(a["images"], b["images"]) for a, b in pairs) < N / 4
    assert all(a["labels"] == b["labels"] == i and a["weights"] == 1 for i, (a, b) in enumerate(pairs))


def test_the_draws_are_those_of_the_first_release():
    """A change of the stream would change what a resumed run reads."""
    drawn = [int(SOURCE.sample_in_epoch(i, e)["images"][2, 2, 0]) % 100 for e in range(2) for i in range(8)]
    assert drawn == [5, 9, 11, 9, 0, 37, 7, 11, 5, 19, 0, 25, 31, 0, 35, 15]


# --- what is drawn --------------------------------------------------------------------------------------------------


def test_every_crop_is_a_window_of_the_padded_image_and_all_occur():
    source = augmented(Pictures(), crop_padding=2, fill=(-1, -2), seed=SEED)
    image = Pictures()[4]["images"]
    padded = np.empty((9, 8, 2), np.float32)
    padded[...] = (-1, -2)
    padded[2:7, 2:6] = image
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


def test_images_of_a_data_set_are_padded_with_black():
    """An image of `image_data` is normalised: black is -mean / std."""
    digits = image_data("digits", mean=0.2, std=0.4)
    drawn = np.stack([augmented(digits.train, crop_padding=7)[i]["images"] for i in range(20)])
    assert drawn.min() == digits.train.black == np.float32(-0.5)


# --- of an experiment -----------------------------------------------------------------------------------------------


def experiment(**data):
    model = {"name": "resnet-digits", "blocks": [1], "width": 4}
    train = {"steps": 2, "batch_size": 8}
    return from_table({"name": "a", "model": model, "data": {"source": "digits", **data}, "train": train})


def test_only_what_is_trained_on_is_augmented():
    table = experiment(crop_padding=1, flip=True)
    plain, data = open_data(experiment()), open_data(table)
    assert len(plain.train) == len(data.train) and data.fingerprint != plain.fingerprint
    assert any((plain.train[i]["images"] != data.train[i]["images"]).any() for i in range(5))
    sets = open_eval_sets(table, data)
    assert all(np.array_equal(sets["eval"][i]["images"], plain.heldout[i]["images"]) for i in range(5))
    assert "cropped after padding by 1, flipped half the time" in str(data)
    again = open_data(experiment(crop_padding=1, flip=True))
    assert again.fingerprint == data.fingerprint


def test_a_run_is_fed_the_same_pixels_on_eight_devices_and_after_a_resume():
    assembly = Assembly.on_devices(experiment(crop_padding=2, flip=True))
    source = assembly.data.train
    alone = first(4, global_batches(source, batch_size=8, seed=assembly.experiment.seed))
    with assembly.feed(source, seed=assembly.experiment.seed, shuffle=True, start=2) as resumed:
        for batch in alone[2:]:
            assert np.array_equal(next(resumed)["images"], batch["images"])


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED = {
    "negative": ({"crop_padding": -1}, "crop_padding must be 0 or more and less than the image's height and width, 5"),
    "as large as the image": ({"crop_padding": 4}, "5 and 4, so that each crop shows some of it; given 4"),
    "half a pixel": ({"crop_padding": 1.5}, "given 1.5: give for example 1"),
    "seed": ({"seed": -1}, r"seed must be 0 to 2\*\*64 - 1; given -1"),
    "fill of three channels": ({"fill": (0, 0, 0)}, "fill must be one number, or one a channel of 5x4x2"),
}


@pytest.mark.parametrize(("options", "expected"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        augmented(Pictures(), **options)


def test_samples_without_images_and_mixtures_are_refused():
    with pytest.raises(ValueError, match='samples must have "images"'):
        augmented([{"tokens": np.zeros(3)}], flip=True)
    digits = image_data("digits")
    with pytest.raises(ValueError, match="augment the sources, then mix them"):
        augmented(mixture([(digits, 1), (digits, 2)]).train, flip=True)


KEYS = {
    "negative": ("resnet-digits", "digits", "crop_padding = -1", "data.crop_padding must be 0 or more; given -1"),
    "larger": ("vit-digits", "digits", "crop_padding = 8", "must be less than model.image_size = 8; given 8: lower it"),
    "text": ("gpt-nano", "stdlib", "flip = true", "data.flip is not used by model.name = 'gpt-nano', as a GPT learns"),
    "features": ("mlp", "digits", "crop_padding = 1", "data.crop_padding is not used by model.name = 'mlp', as an MLP"),
}


@pytest.mark.parametrize(("model", "source", "key", "expected"), KEYS.values(), ids=KEYS)
def test_a_wrong_key_is_one_error(tmp_path, capsys, model, source, key, expected):
    (tmp_path / "a.toml").write_text(
        f'name = "a"\nmodel.name = "{model}"\ntrain = {{steps = 1, batch_size = 8}}\n[data]\nsource = "{source}"\n{key}'
    )
    assert expected in refused(capsys, "train", tmp_path / "a.toml", "--run-dir", tmp_path)
