"""Streams of Hugging Face: read once into files, in their own order; then samples like all others, free to resume."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from corpora import read_corpus

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


def test_a_stream_is_tokenised_once(folder, monkeypatch):
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
def test_impossible_ranges_of_a_stream_are_refused(folder, split):
    said = r"a range of a stream must count rows|hf-stream.* must name an existing split"
    with pytest.raises(ValueError, match=said) as caught:
        text_data(f"hf-stream:{folder}:{split}", length=16)
    assert isinstance(caught.value, UserError)
