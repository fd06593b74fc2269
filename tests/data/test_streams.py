"""Streams of Hugging Face: read once into files, in their own order; then samples like all others, free to resume."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from corpora import read_corpus
from tiny_experiment import entries, train_here
from tiny_runs import rows

import jdp
from jdp.base.errors import UserError
from jdp.data import global_batches, text_data
from jdp.data.text import documents as reads_text

TEXTS = [f"In chapter {number} of the tale, naïvely — " * 3 for number in range(60)]


pytestmark = pytest.mark.usefixtures("own_hub")


@pytest.fixture(params=["parquet", "jsonl"])
def folder(tmp_path, request):
    """Two files of a split."""
    (tmp_path / "rows").mkdir()
    for number in range(2):
        rows = [{"text": text, "id": id} for id, text in enumerate(TEXTS[number * 30 : number * 30 + 30])]
        file = tmp_path / "rows" / f"train-{number}.{request.param}"
        if request.param == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=7)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows"


def read_whole(folder):
    """The source that reads the same files at once."""
    return f"hf:{'parquet' if (folder / 'train-0.parquet').exists() else 'json'}:{folder}"


def test_a_stream_is_tokenised_once_and_gives_the_samples_of_its_rows(folder, monkeypatch):
    stream = text_data(f"hf-stream:{folder}", length=16, heldout_fraction=0.2)
    memory = text_data(read_whole(folder), length=16, heldout_fraction=0.2, in_files=False)
    assert stream.folder is not None and stream.fingerprint == memory.fingerprint
    batches = [next(iter(global_batches(data.train, batch_size=8, seed=2, start=5))) for data in (stream, memory)]
    assert all(np.array_equal(batches[0][key], batches[1][key]) for key in batches[1])
    monkeypatch.setattr(reads_text, "_tokenised", None)  # from here on nothing is fetched
    assert text_data(f"hf-stream:{folder}", length=16, heldout_fraction=0.2).fingerprint == stream.fingerprint


@pytest.mark.parametrize(("rows", "expected"), [("", slice(None)), ("[:7]", slice(7)), ("[25:40]", slice(25, 40))])
def test_some_rows_of_a_stream(folder, rows, expected):
    """In a folder of another name than the split's: what follows the last colon is the split."""
    assert read_corpus(f"hf-stream:{folder}:train{rows}").documents == tuple(text.encode() for text in TEXTS[expected])
    name = read_corpus(f"hf-stream:{folder}:train{rows}").names[3]
    assert name.startswith(f"hf-stream:{folder}:train{rows} (split train), row ")


@pytest.mark.parametrize("split", ["train[:10%]", "train[5:5]", "train[:-1]", "test"])
def test_what_a_stream_cannot_do_is_a_users_mistake(folder, split):
    said = r"a range of a stream must count rows|hf-stream.* must name an existing split"
    with pytest.raises(ValueError, match=said) as caught:
        text_data(f"hf-stream:{folder}:{split}", length=16)
    assert isinstance(caught.value, UserError)


def test_a_stream_trains_and_resumes(tmp_path):
    """From an experiment file beside it, mixed with text: 4 steps at once, or 2 and 2 more, end alike."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    model = {"name": "gpt-nano", "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "context": 8}
    mixed = {"mixture": {"a": {"source": "hf-stream:./rows:train", "weight": 2.0}, "b": {"source": "a.txt"}}}
    rule = {"name": "sgd", "schedule": "constant"}
    (tmp_path / "x.toml").write_text(entries({"name": "x", "model": model, "data": mixed, "optimizer": rule}))
    jdp.keep_programs()  # of the first run, for the two others; after this file conftest undoes it
    last = []
    for name, stops in (("once", (4,)), ("twice", (2, 4))):
        for steps in stops:
            settings = {"name": name, "train.steps": str(steps), "train.batch_size": "8", "train.log_every": "1"}
            settings |= {"train.eval_batches": "1", "sample.length": "1"}
            train_here(tmp_path / "x.toml", tmp_path / "runs", settings, devices=1)
        last.append([rows(tmp_path / "runs" / name, key)[4] for key in ("loss", "eval_a_loss")])
    assert last[0] == last[1]
