"""What text that was tokenised before comes in: rows and arrays of token ids, laid as they are, checked to the id."""

import json

import numpy as np
import pyarrow
import pytest
from corpora import arrow, parquet, read_token_ids

from jdp.data import text_data
from jdp.data.sources.tables import table_pieces

IDS = [[5, 6, 300], [7], [], [8, 9]]


def ids_file(path):
    kinds = {".parquet": pyarrow.list_(pyarrow.uint16()), ".arrow": pyarrow.large_list(pyarrow.int64())}
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS))
        case suffix:
            table = pyarrow.table({"input_ids": pyarrow.array(IDS, kinds[suffix])})
            (parquet if suffix == ".parquet" else arrow)(path, table)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_rows_of_token_ids_are_documents(tmp_path, name):
    corpus = read_token_ids(ids_file(tmp_path / name))
    assert [document.tolist() for document in corpus.documents] == [[5, 6, 300], [7], [8, 9]]
    assert corpus.name_of(2).endswith(f"{name}, line 4" if name == "a.jsonl" else f"{name}, row 3")


def test_arrays_of_token_ids_are_documents(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    np.savez(tmp_path / "b.npz", input_ids=np.arange(6).reshape(2, 3), other=np.zeros(3))
    corpus = read_token_ids(tmp_path)
    assert [document.tolist() for document in corpus.documents] == [list(range(10)), [0, 1, 2], [3, 4, 5]]
    assert [corpus.name_of(document) for document in (0, 2)] == [f"{tmp_path}/a.npy", f"{tmp_path}/b.npz, row 1"]


def test_token_ids_are_laid_as_they_are(tmp_path):
    rows = [[number, number + 1, 999] for number in range(100)]
    parquet(tmp_path / "a.parquet", pyarrow.table({"input_ids": rows}))
    data = text_data(tmp_path / "a.parquet", length=4, tokenizer="none", heldout_fraction=0.2)
    assert data.train.tokens.dtype == np.uint16 and data.vocab_size == 1000
    both = [side.tokens.reshape(-1, 3).tolist() for side in (data.train, data.heldout)]
    assert sorted(both[0] + both[1]) == rows and both[0] and both[1]
    assert "300 tokens (600 B in memory)" in str(data)
    with pytest.raises(ValueError, match=r'by a tokenizer only; given "none" with .*a.parquet: take'):
        data.decode([1])
    assert (
        text_data(tmp_path / "a.parquet", length=4, tokenizer="none", vocab_size=2**17).train.tokens.dtype == np.uint32
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [[1, 2], [3, 256]],
            "must be 0 to 255, below vocab_size 256; given 256 as token 1 of .*a.jsonl, line 2 .ids from 1 to 256",
        ),
        ([[1, 2], [-3]], "given -3 as token 0 of .*a.jsonl, line 2"),
        ([[2**31]], "given 2147483648 as token 0 of"),
        ([[1, 2], [2**63]], "as token 0 of .*a.jsonl, line 2"),
        ([[1.5]], r'the field "input_ids" must be lists of token ids; given \[1.5\] in .*a.jsonl, line 1'),
        ([[[1], [2, 3]]], r"must be lists of token ids; given \[\[1\], \[2, 3\]\]"),
        (["text"], r"must be lists of token ids; given .text. in"),
        ([[True]], r"must be lists of token ids; given \[true\]"),
    ],
)
def test_ids_out_of_range_name_file_row_and_id(tmp_path, rows, message):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        text_data(tmp_path / "a.jsonl", length=1, tokenizer="none", vocab_size=256)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pyarrow.array([[1], None]), r"given nothing \(null\) in .*a.parquet, row 1"),
        (pyarrow.array([[1, 2], [3], [4, None]]), r"given a list with nothing \(null\) in it in .*a.parquet, row 2"),
        (pyarrow.array([[1.5]]), "given type list<.*double> in .*a.parquet"),
        (pyarrow.array(["a"]), "given type string in .*a.parquet"),
    ],
)
def test_columns_that_are_not_token_ids(tmp_path, column, message):
    parquet(tmp_path / "a.parquet", pyarrow.table({"input_ids": column}))
    with pytest.raises(ValueError, match=message):
        text_data(tmp_path / "a.parquet", length=1, tokenizer="none")


def test_arrays_that_are_not_token_ids(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"must be whole numbers \[n\] or \[rows, n\]; given float64 \[3\] in .*a.npy"):
        read_token_ids(tmp_path / "a.npy")
    np.savez(tmp_path / "b.npz", x=np.zeros(3, int))
    with pytest.raises(ValueError, match=r'the field "input_ids"; given .*b.npz without it: give one that it has: x'):
        read_token_ids(tmp_path / "b.npz")
    (tmp_path / "d.txt").write_text("text")
    said = r"token ids must be in .parquet, .*\.npy files; given .*d.txt: name a tokenizer"
    with pytest.raises(ValueError, match=said):
        read_token_ids(tmp_path / "d.txt")


def test_slices_and_fixed_lists_are_read(tmp_path):
    fixed = pyarrow.array([[1, 2], [3, 4], [5, 6]], pyarrow.list_(pyarrow.int32(), 2)).slice(1)
    parquet(tmp_path / "a.parquet", pyarrow.table({"input_ids": fixed}))
    [table] = table_pieces(tmp_path / "a.parquet", ["input_ids"])
    assert [ids.tolist() for ids in table.integer_lists("input_ids")] == [[3, 4], [5, 6]]
    assert table.name_of(1) == f"{tmp_path}/a.parquet, row 1"
