"""What text comes in: files of text, rows that `datasets` reads, and streams, which are read once into files.

Any other file is told how to be read.
"""

import gzip
import json
import re
import sys

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from corpora import arrow, parquet, read_corpus

from jdp.base.errors import UserError
from jdp.data import global_batches, text_data
from jdp.data.text import documents as reads_text

MANY = [f"In chapter {number} of the tale, naïvely — " * 3 for number in range(60)]
TEXTS = MANY[:40]
DOCUMENTS = tuple(text.encode() for text in TEXTS)
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
TABLE = pyarrow.Table.from_pylist(ROWS)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


WRITERS = {
    "json:rows.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "json:rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "parquet:rows.parquet": lambda path: parquet(path, TABLE),
    "arrow:stream.arrow": lambda path: arrow(path, TABLE),
    "csv:rows.csv": lambda path: TABLE.to_pandas().to_csv(path, index=False),
}


datasets.disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_hub")


@pytest.mark.parametrize("name", WRITERS)
def test_each_row_is_a_document(tmp_path, name):
    builder, _, file = name.partition(":")
    WRITERS[name](tmp_path / file)
    assert read_corpus(f"hf:{builder}:{tmp_path}/{file}").documents == DOCUMENTS


def test_directories_and_globs_are_read_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    parquet(tmp_path / "a.parquet", TABLE.slice(0, 10))
    parquet(tmp_path / "deep" / "b.parquet", TABLE.slice(10, 10))
    (tmp_path / "README.md").write_text("about the rows")
    assert read_corpus(f"hf:parquet:{tmp_path}").documents == DOCUMENTS[:20]
    assert read_corpus(f"hf:parquet:{tmp_path}/**/*.parquet").documents == DOCUMENTS[:20]


def test_rows_are_split_by_content(tmp_path):
    """The same texts as files and as rows, in another order: the same ones are held out."""
    (tmp_path / "files").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "files" / f"{number}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS[::-1]))
    parquet(tmp_path / "rows.parquet", TABLE.take(np.random.default_rng(0).permutation(40)))

    def sides(source):
        data = text_data(source, length=16, heldout_fraction=0.3)
        assert data.whole and data.documents == 40
        return [set(side.ids.tobytes().split(b"\0")[:-1]) for side in (data.train, data.heldout)]

    expected = sides(tmp_path / "files")
    assert expected[0] | expected[1] == set(DOCUMENTS) and not expected[0] & expected[1]
    assert sides(f"hf:json:{tmp_path}/rows.jsonl") == sides(f"hf:parquet:{tmp_path}/rows.parquet") == expected


SPLIT_NAMES = {
    "files": ("train-00000-of-00001.parquet", "test.parquet"),
    "folders": ("train/a.parquet", "test/a.parquet"),
    "below": ("data/my_train.parquet", "data/my_test.parquet"),
}


@pytest.mark.parametrize("names", SPLIT_NAMES.values(), ids=SPLIT_NAMES)
@pytest.mark.parametrize("glob", ["", "/**/*.parquet"])
def test_several_splits_are_named_and_never_mixed(tmp_path, names, glob):
    for name, rows in zip(names, (TABLE.slice(0, 30), TABLE.slice(30)), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        parquet(tmp_path / name, rows)
    source = f"hf:parquet:{tmp_path}{glob}"
    with pytest.raises(ValueError, match=r"is one split; .* has test, train: write one of") as said:
        read_corpus(source)
    assert f'"{source}:test", "{source}:train"' in str(said.value)
    assert read_corpus(f"{source}:train").documents == DOCUMENTS[:30]
    assert read_corpus(f"{source}:test[:5]").documents == DOCUMENTS[30:35]
    with pytest.raises(ValueError, match="must name an existing split, one of test, train"):
        read_corpus(f"{source}:validation")
    parquet(tmp_path / "other.parquet", TABLE)
    with pytest.raises(ValueError, match=r"name a split, or none does.*other.parquet beside test"):
        read_corpus(f"{source}:train")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(folder / "saved")
    data.select(range(39, -1, -1)).save_to_disk(folder / "selected")
    both = {"train": data, "test": data.select([3])}
    datasets.DatasetDict(both).save_to_disk(folder / "splits")
    for name, part in both.items():
        (folder / "files").mkdir(exist_ok=True)
        part.to_parquet(folder / "files" / f"{name}.parquet")
    (folder / "script").mkdir()
    (folder / "script" / "script.py").write_text("raise SystemExit('code of a data set was run')")
    return folder


ON_DISK = {"saved": DOCUMENTS, "selected": DOCUMENTS[::-1], "splits:train": DOCUMENTS, "files:train[:3]": DOCUMENTS[:3]}


@pytest.mark.parametrize("name", ON_DISK)
def test_data_sets_on_a_disk(hub, name):
    corpus = read_corpus(f"hf:{hub}/{name}")
    assert (corpus.documents, corpus.name) == (ON_DISK[name], f"hf:{hub}/{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:{}/nothing", "readable by .datasets.; given hf:.*/nothing: Couldn't find .*; fix its name or its content"),
        ("hf:{}/splits", "a source is one split; .* has train, test: write one of .*splits:train"),
        ("hf:{}/files:dev", 'Unknown split "dev"'),
        ("hf:{}/script", "Dataset scripts are no longer supported"),
        ("hf:json:{}/nothing", "json reads .json, .* files; given .*nothing, looked for at .* there are none"),
        ("hf:nobody/nothing/config:train", r"Couldn't reach 'nobody/nothing' on the Hub"),
    ],
)
def test_an_unreadable_data_set_is_one_line(hub, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_corpus(name.format(hub))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "builder"), [("a.json.gz", "json"), ("a.parquet", "parquet")])
def test_another_file_is_told_how_to_be_read(tmp_path, name, builder):
    (tmp_path / name).write_bytes(b"x")
    for source in (tmp_path / name, f"{tmp_path}/*", tmp_path):
        with pytest.raises(ValueError, match=re.escape(f'write "hf:{builder}:{source}", which `datasets` reads')):
            read_corpus(source)


def test_a_directory_of_text_and_rows_is_ambiguous(tmp_path):
    (tmp_path / "README.md").write_text("about the rows")
    parquet(tmp_path / "a.parquet", TABLE)
    with pytest.raises(ValueError, match=r"one kind of data; .* 1 files such as README.md and 1 such as a.parquet: "):
        read_corpus(tmp_path)
    assert read_corpus(tmp_path / "*.md").documents == (b"about the rows",)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"text": ["a", None]}, r'"text" must be text; given nothing \(null\) in .*a.parquet .*, row 1'),
        ({"body": ["a"], "title": ["b"]}, 'field = "text" must be a column; given .* with body, title: name one'),
        ({"input_ids": [[1]]}, r'field = "text" .* write ids = "input_ids" for token ids'),
        ({"text": ["", ""]}, r"text must not be empty; given .*: 2 empty file\(s\) or row\(s\)"),
    ],
)
def test_columns_that_are_not_text(tmp_path, column, message):
    parquet(tmp_path / "a.parquet", pyarrow.table(column))
    with pytest.raises(ValueError, match=message):
        read_corpus(f"hf:parquet:{tmp_path}/a.parquet")


def test_unread_ids_are_reported(tmp_path, notices):
    parquet(tmp_path / "a.parquet", pyarrow.table({"text": ["a"], "input_ids": [[1]], "labels": [[1]]}))
    assert read_corpus(f"hf:parquet:{tmp_path}/a.parquet").documents == (b"a",)
    assert 'input_ids, labels are not read; to read, write ids = "input_ids", labels = "labels"' in notices.text


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as Python itself marks what cannot be imported
    said = r"needs the package datasets, which is not installed: pip install '.\[hf\]'"
    with pytest.raises(ValueError, match=said):
        read_corpus("hf:x")


@pytest.fixture(params=["parquet", "jsonl"])
def folder(tmp_path, request):
    """Two files of a split."""
    (tmp_path / "rows").mkdir()
    for number in range(2):
        rows = [{"text": text, "id": id} for id, text in enumerate(MANY[number * 30 : number * 30 + 30])]
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
    assert read_corpus(f"hf-stream:{folder}:train{rows}").documents == tuple(text.encode() for text in MANY[expected])
    name = read_corpus(f"hf-stream:{folder}:train{rows}").names[3]
    assert name.startswith(f"hf-stream:{folder}:train{rows} (split train), row ")


@pytest.mark.parametrize("split", ["train[:10%]", "train[5:5]", "train[:-1]", "test"])
def test_impossible_ranges_of_a_stream_are_refused(folder, split):
    said = r"a range of a stream must count rows|hf-stream.* must name an existing split"
    with pytest.raises(ValueError, match=said) as caught:
        text_data(f"hf-stream:{folder}:{split}", length=16)
    assert isinstance(caught.value, UserError)
