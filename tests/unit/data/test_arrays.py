"""Arrays as samples: whose rows, in what dtypes, on which side; and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdp.base.errors import UserError
from jdp.data import text_data
from jdp.data.arrays import array_data, read_arrays

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(200, 3))
LABELS = RNG.integers(0, 4, 200)
TOKENS = RNG.integers(0, 90, (50, 9)).astype(np.uint16)


def sides(data, key="features"):
    """Both sides' rows of one array, as sets of bytes."""
    return tuple({side[index][key].tobytes() for index in range(len(side))} for side in (data.train, data.heldout))


def test_a_sample_is_a_row_and_weight():
    data = array_data({"features": FEATURES, "labels": LABELS, "mask": FEATURES > 0}, heldout_fraction=0.1)
    assert 5 <= len(data.heldout) <= 40
    kinds = {"features": ((3,), "float32"), "labels": ((), "int32"), "mask": ((3,), "bool"), "weights": ((), "float32")}
    for side in (data.train, data.heldout):
        for index, row in enumerate(side.rows):
            sample = side[index]
            assert {key: (value.shape, value.dtype.name) for key, value in sample.items()} == kinds
            np.testing.assert_array_equal(sample["features"], FEATURES[row].astype(np.float32))
            assert (sample["labels"], sample["weights"]) == (LABELS[row], 1)
    assert sorted([*data.train.rows, *data.heldout.rows]) == list(range(200))
    assert (data.shape, data.classes) == ((3,), ("0", "1", "2", "3"))
    assert "200 samples" in str(data) and "4 classes" in str(data) and "\n" not in str(data)


def test_names_are_kept_or_given():
    kept = array_data({"x": FEATURES, "y": LABELS, "weights": np.linspace(0, 1, 200)})
    assert sorted(kept.train[0]) == ["weights", "x", "y"] and kept.classes == ()
    assert kept.train[1]["weights"] == np.float32(kept.train.rows[1] / 199)
    named = array_data({"x": FEATURES, "y": LABELS}, features="x", labels="y")
    assert sorted(named.train[0]) == ["features", "labels", "weights"]
    np.testing.assert_array_equal(named.train.arrays["labels"], LABELS)
    names = np.array(["zebra", "ape", "cat"])[LABELS % 3]
    data = array_data({"features": FEATURES, "labels": names})
    assert data.classes == ("ape", "cat", "zebra")
    assert [data.classes[number] for number in data.train.arrays["labels"]] == names.tolist()


def test_dtypes_are_what_devices_hold():
    wide = {"uint32": "int32", "int64": "int32", "uint64": "int32", "float64": "float32"}
    kinds = {kind: kind for kind in ("uint8", "int16", "float16", "float32", "bool")} | wide
    sample = array_data({kind: np.array([0, 1, 1], kind) for kind in kinds} | {"id": np.arange(3)}).train[0]
    for kind, expected in kinds.items():  # nothing is changed on the way to a device
        assert jnp.asarray(sample[kind]).dtype == sample[kind].dtype == expected


def test_tokens_become_tokens_targets_and_weights():
    data = array_data({"tokens": TOKENS}, vocab_size=90)
    sample, row = data.train[0], TOKENS[data.train.rows[0]]
    kinds = {"tokens": ((8,), "int32"), "targets": ((8,), "int32"), "weights": ((8,), "float32")}
    assert {key: (value.shape, value.dtype.name) for key, value in sample.items()} == kinds
    assert np.array_equal(sample["tokens"], row[:-1]) and np.array_equal(sample["targets"], row[1:])
    assert data.vocab_size == TOKENS.max() + 1 and data.shape == (8,)


def test_tokens_in_one_dimension_are_cut_into_samples(tmp_path, notices):
    """As nanoGPT and others keep a corpus; every token is a target once, but the first and those that are left out."""
    line = np.arange(1003, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", line)
    data = array_data(tmp_path / "tokens.npy", length=10)
    assert "the last 2 of 1,003 tokens do not fill a sample of 10 and are left out" in notices.text
    samples = [side[index] for side in (data.train, data.heldout) for index in range(len(side))]
    assert sorted(np.concatenate([sample["targets"] for sample in samples])) == list(range(1, 1001))
    assert all(np.array_equal(sample["tokens"] + 1, sample["targets"]) for sample in samples)
    assert data.vocab_size == 1001 and data.shape == (10,)
    assert np.shares_memory(data.train.arrays["tokens"][3], data.train.arrays["tokens"][4])


def test_files_are_the_dict_of_their_arrays(tmp_path, notices):
    arrays = {"features": FEATURES.astype(np.float32), "labels": LABELS}
    given = array_data(arrays)
    np.savez(tmp_path / "data.npz", **arrays)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    for name, array in arrays.items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    for path in (tmp_path / "data.npz", tmp_path / "folder"):
        data = array_data(path)
        assert data.name == str(path) and data.fingerprint == given.fingerprint
        np.testing.assert_equal(dict(data.train[5]), dict(given.train[5]))
    assert "reading 2 .npy files, ignoring 1 others" in notices.text
    assert isinstance(data.train.arrays["features"].base, np.memmap)
    assert isinstance(data.train[0]["features"].base.base, np.memmap)  # not even a row is copied
    assert sides(array_data(tmp_path / "folder" / "features.npy")) == sides(given)


@pytest.mark.parametrize("read", [read_arrays, lambda path: text_data(path, length=1, ids="features")])
@pytest.mark.parametrize(("objects", "bytes_left"), [(False, 400), (True, None)], ids=["truncated", "objects"])
def test_a_damaged_npz_is_one_error(tmp_path, objects, bytes_left, read):
    path = tmp_path / "x.npz"
    np.savez(path, features=np.array([{}, []], object) if objects else np.arange(60.0))
    path.write_bytes(path.read_bytes()[:bytes_left])
    with pytest.raises(UserError, match=rf"arrays must be readable; given {path}: .*; write the file again"):
        read(path)


XY = {"x": FEATURES, "labels": LABELS}


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({}, {}, "data must have arrays .*; given none in the arrays given"),
        ({"x": FEATURES, "y": LABELS[:-1]}, {}, r"same number of samples, .*; given x \[200, 3\], y \[199\]"),
        ({"x": np.where(FEATURES[17, 2] == FEATURES, np.nan, FEATURES)}, {}, "finite .*; given nan in x of sample 17"),
        ({"x": np.array([1, 2**31])}, {}, "must fit in 32 bits, .* given 2147483648 in x of sample 1"),
        ({"x": FEATURES, "labels": FEATURES[:, 0]}, {}, r"one class a sample, .* given float64 \[200\]"),
        ({"x": FEATURES, "labels": LABELS - 1}, {}, "a label must be a number from 0, .*; given -1 for sample"),
        (XY, {"features": "z"}, 'features = "z" must name an array, .*; given x, labels in the arrays given'),
        (XY | {"features": FEATURES}, {"features": "x"}, 'features = "x" must .* and no other be "features"'),
        (XY, {"heldout": {"x": FEATURES}}, "names and shapes of the training arrays"),
        (XY, {"heldout": {"x": FEATURES, "labels": LABELS + 1}}, "below the number of classes, 4; given 4"),
        ({"tokens": TOKENS[0]}, {}, r"whole numbers \[samples, length \+ 1\]; given uint16 \[9\]"),
        ({"tokens": TOKENS[0]}, {"length": 9}, r"length \+ 1 tokens; given 9 with length 9 in"),
        ({"tokens": TOKENS.astype(int) - 50}, {}, r"tokens must be from 0 to .*; given -\d+ in tokens of sample 0"),
        (
            {"tokens": TOKENS + 80 * (TOKENS[7, 3] == TOKENS)},
            {"vocab_size": 90},
            "to 89, .*; given .* in tokens of sam",
        ),
        ({"tokens": TOKENS, "segments": TOKENS}, {}, "packed tokens, with segments, require targets"),
    ],
)
def test_wrong_arrays_and_arguments_are_refused(arrays, options, message):
    with pytest.raises(ValueError, match=message):
        array_data(arrays, **options)


def test_the_split_is_by_content():
    order = RNG.permutation(200)
    here = array_data({"features": FEATURES, "labels": LABELS}, heldout_fraction=0.2)
    there = array_data({"labels": LABELS[order], "features": FEATURES[order]}, heldout_fraction=0.2)
    assert sides(here) == sides(there) and not set.intersection(*sides(here))
    assert here.fingerprint != there.fingerprint  # the samples are the same, their order is not
    more = array_data({"features": FEATURES}, heldout_fraction=0.4)
    assert sides(here)[1] < sides(more)[1]


def test_a_held_out_set_may_be_given_or_none():
    """A set with an evaluation set of its own elsewhere is trained on in full."""
    none = array_data({"features": np.ones((3, 2))}, heldout_fraction=0.0)
    assert (len(none.train), len(none.heldout)) == (3, 0)
    data = array_data({"x": FEATURES, "labels": LABELS}, heldout={"x": FEATURES[:10] + 1, "labels": LABELS[:10] * 0})
    assert (len(data.train), len(data.heldout), len(data.classes)) == (200, 10, 4) and "as given" in str(data)


def test_the_fingerprint_is_of_every_sample():
    given = {"features": FEATURES, "labels": LABELS, "weights": np.ones(200)}
    prints = {array_data(given).fingerprint}
    assert prints == {array_data({key: array.copy() for key, array in given.items()}).fingerprint}
    for key in given:
        changed = given[key].copy()
        changed[150] = 0 if key != "labels" else (changed[150] + 1) % 4
        prints.add(array_data(given | {key: changed}).fingerprint)
    prints.add(array_data(given, heldout_fraction=0.1).fingerprint)
    prints.add(array_data(given, heldout=given).fingerprint)
    prints.add(array_data({"other": FEATURES, "labels": LABELS, "weights": np.ones(200)}).fingerprint)
    assert len(prints) == 1 + 3 + 3 and all(len(value) == 16 for value in prints)
