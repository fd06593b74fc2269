"""Rows of token ids and their weights: laid as they are, checked to the id, packed and cut as documents are."""

import itertools
import json

import datasets
import numpy as np
import pyarrow
import pytest
from corpora import parquet

from jdp.data import global_batches, text_data

datasets.disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_hub", "own_cache")

ROWS = 60
RNG = np.random.default_rng(0)
IDS = [[row, *RNG.integers(0, 500, RNG.integers(3, 30)).tolist()] for row in range(ROWS)]
MASKS = [[0, *RNG.integers(0, 2, len(ids) - 2).tolist(), 1] for ids in IDS]


def written(path, **columns):
    parquet(path / "a.parquet", pyarrow.table({"input_ids": IDS} | columns))
    return f"hf:parquet:{path}/a.parquet"


def given_weights(path):
    """The same weights in every form: source, and the columns to name."""
    padded, mask, loss = np.zeros((3, ROWS, max(map(len, IDS))), int)
    for row, ids in enumerate(IDS):
        padded[row, : len(ids)], mask[row, : len(ids)], loss[row, : len(ids)] = ids, 1, MASKS[row]
    np.savez(path / "a.npz", input_ids=padded, attention_mask=mask, loss_mask=np.float32(loss))
    labels = [[i if w else -100 for i, w in zip(ids, m, strict=True)] for ids, m in zip(IDS, MASKS, strict=True)]
    source = written(path, loss_mask=MASKS, labels=labels, assistant_masks=[[bool(w) for w in m] for m in MASKS])
    return {
        "weights": (source, {"weights": "loss_mask"}),
        "labels": (source, {"labels": "labels"}),
        "booleans": (source, {"weights": "assistant_masks"}),
        "arrays": (path / "a.npz", {"weights": "loss_mask", "attention_mask": "attention_mask"}),
    }


def targets(data):
    """(target, weight) of every target of all samples, those of padding left out."""
    samples = [side[index] for side in (data.train, data.heldout) for index in range(len(side))]
    there = [sample["segments"] > 0 for sample in samples]
    pairs = (np.stack([each["targets"], each["weights"]], 1)[real] for each, real in zip(samples, there, strict=True))
    return sorted(map(tuple, np.concatenate([*pairs]).tolist()))


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("form", ["weights", "labels", "booleans", "arrays"])
def test_a_weight_belongs_to_its_target(tmp_path, form, in_files):
    source, named = given_weights(tmp_path)[form]
    options = {"length": 32, "packing": "documents", "heldout_fraction": 0.2, "vocab_size": 500, "in_files": in_files}
    data = text_data(source, ids="input_ids", **named, **options)
    rows = zip(IDS, MASKS, strict=True)
    assert targets(data) == sorted((i, float(w)) for ids, m in rows for i, w in zip(ids[1:], m[1:], strict=True))
    assert data.documents == ROWS and data.whole and data.tokenizer is None
    assert (data.folder is None) != in_files


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_ids_are_unchanged_and_resume(tmp_path, packing):
    source = written(tmp_path, loss_mask=MASKS)
    options = {"length": 8, "ids": "input_ids", "weights": "loss_mask", "packing": packing, "heldout_fraction": 0.2}
    data = text_data(source, **options)
    assert data.train.ids.dtype == np.uint16 and data.vocab_size == 1 + max(map(max, IDS))
    bounds = data.train.bounds
    rows = [data.train.ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert rows == [ids for ids in IDS if ids in rows] and 30 < len(rows) < ROWS
    assert "of its tokens count" in str(data)
    batches = iter(global_batches(data.train, batch_size=4, seed=1))
    whole = [next(batches) for _ in range(12)]
    again = text_data(source, **options)
    assert again.fingerprint == data.fingerprint
    for start in (3, 7):
        found = next(iter(global_batches(again.train, batch_size=4, seed=1, start=start)))
        assert all(np.array_equal(found[key], whole[start][key]) for key in found)
    other = written(tmp_path, loss_mask=[[1] * len(ids) for ids in IDS])
    assert text_data(other, **options).fingerprint != data.fingerprint, "weights are of the samples too"


def test_pieces_without_a_target_are_left_out(tmp_path):
    ids = [[*range(1, 21)], [*range(30, 50)]]
    masks = [[0] * 15 + [1] * 5, [0] * 18 + [1, 1]]
    parquet(tmp_path / "a.parquet", pyarrow.table({"input_ids": ids, "loss_mask": masks}))
    source = f"hf:parquet:{tmp_path}/a.parquet"
    data = text_data(source, length=8, ids="input_ids", weights="loss_mask", packing="documents", heldout_fraction=0.5)
    learnt = [t for t, w in targets(data) if w]
    assert learnt == [16, 17, 18, 19, 20, 48, 49] and not [t for t, _ in targets(data) if t < 10]


def test_rows_without_a_target_are_counted(tmp_path, notices):
    rows = [[1, 2, 3], [4, 5], [], [6, 7, 8], [9]]
    masks = [[0, 0, 1], [1, 0], [], [0, 1, 0], [1]]
    parquet(tmp_path / "a.parquet", pyarrow.table({"input_ids": rows, "loss_mask": masks}))
    source = f"hf:parquet:{tmp_path}/a.parquet"
    data = text_data(source, length=2, ids="input_ids", weights="loss_mask", packing="documents", heldout_fraction=0.5)
    assert data.documents == 2 and "3 of 5 rows are left out: none of their tokens counts as a target" in notices.text
    parquet(tmp_path / "b.parquet", pyarrow.table({"input_ids": rows, "loss_mask": [[0] * len(ids) for ids in rows]}))
    with pytest.raises(ValueError, match=r"must have targets; given .*, 5 rows: none of their tokens counts"):
        text_data(f"hf:parquet:{tmp_path}/b.parquet", length=2, ids="input_ids", weights="loss_mask")


def test_unread_columns_are_named(tmp_path, notices):
    masks = [[1] * len(ids) for ids in IDS]
    source = written(tmp_path, labels=IDS, attention_mask=masks, source=["a"] * ROWS)
    text_data(source, length=8, ids="input_ids")
    said = 'labels, attention_mask are not read; to read, write labels = "labels", attention_mask = "attention_mask"'
    assert notices.text.count(said) == 1 and "source" not in notices.text
    text_data(source, length=8, ids="input_ids", labels="labels", attention_mask="attention_mask")
    assert notices.text.count("not read") == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2], [3, 256]], "whole numbers from 0 to 255, below vocab_size 256; given 256 as token 1 of .* row 1"),
        ([[1, 2], [-3]], "given -3 as token 0 of .*a.jsonl .*, row 1"),
        (["text"], r'the column "input_ids" must have a list of numbers a row; given string'),
        ([[1], None], r"must have a list in each row; given null"),
    ],
)
def test_ids_that_cannot_be_name_row_and_id(tmp_path, rows, message):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        text_data(f"hf:json:{tmp_path}/a.jsonl", length=1, ids="input_ids", vocab_size=256)


@pytest.mark.parametrize(
    ("columns", "named", "message"),
    [
        ({"w": [[1, 1], [1]]}, {"weights": "w"}, "must be of the same lengths; given 2 and 1 in .* row 1"),
        ({"w": [[1.0, float("nan")], [1, 1]]}, {"weights": "w"}, "must be numbers from 0 to 1; given nan as token 1"),
        ({"labels": [[6, 5], [7, 8]]}, {"labels": "labels"}, "must be the ids, or -100 .* given 6 as token 0"),
        ({"m": [[1, 2], [1, 1]]}, {"attention_mask": "m"}, "must be 0 or 1; given 2 as token 1"),
        ({}, {"weights": "a", "labels": "b"}, "weights and labels both set the weights"),
    ],
)
def test_weights_that_cannot_be_name_row_and_token(tmp_path, columns, named, message):
    parquet(tmp_path / "a.parquet", pyarrow.table({"input_ids": [[5, 6], [7, 8]]} | columns))
    with pytest.raises(ValueError, match=message):
        text_data(f"hf:parquet:{tmp_path}/a.parquet", length=1, ids="input_ids", **named)


def test_padding_is_at_the_ends_of_rows(tmp_path):
    ids, mask = [[0, 5, 6, 7], [8, 9, 1, 0]], [[0, 1, 1, 1], [1, 1, 1, 0]]
    np.savez(tmp_path / "a.npz", input_ids=ids, attention_mask=mask)
    options = {"length": 2, "ids": "input_ids", "attention_mask": "attention_mask", "heldout_fraction": 0.5}
    data = text_data(tmp_path / "a.npz", **options)
    assert sorted([*data.train.ids.tolist(), *data.heldout.ids.tolist()]) == [1, 5, 6, 7, 8, 9]
    np.savez(tmp_path / "a.npz", input_ids=ids, attention_mask=[[1, 0, 1, 1], [1, 1, 1, 0]])
    with pytest.raises(ValueError, match=r"must be 1 in one stretch of a row, .* given 0 as token 1 of .*a.npz, row 0"):
        text_data(tmp_path / "a.npz", **options)


def test_files_that_are_not_rows_of_ids(tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.zeros((2, 2, 2), int))
    with pytest.raises(ValueError, match=r"rows of ids are numbers \[n\] or \[rows, n\]; given int64 \[2, 2, 2\]"):
        text_data(tmp_path / "a.npz", length=1, ids="input_ids")
    for name, fix in (("a.jsonl", 'write "hf:json:'), ("a.txt", "with experiments/prepare/text_to_ids.py")):
        with pytest.raises(ValueError, match=f"rows of ids are in .npz files, .* {fix}"):
            text_data(tmp_path / name, length=1, ids="input_ids")
    with pytest.raises(ValueError, match=r'attention_mask require rows of ids; .* ids = "input_ids"'):
        text_data("stdlib", length=1, weights="loss_mask")
