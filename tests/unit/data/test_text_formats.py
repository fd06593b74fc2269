"""What text comes in: files of text, rows that `datasets` reads, and streams, which are read once into files.

Any other file is told how to be read; data that names what is not its own is one error, never a wait.
"""

import gzip
import json
import os
import re
import sys

import datasets
import pyarrow
import pytest
from corpora import arrow, parquet, read_corpus

from jdp.base.errors import UserError
from jdp.data import array_data, image_data, open_tokenizer, text_data
from jdp.data.sources import check_files, hub_data
from jdp.data.text import documents as reads_text

TEXTS = [f"In chapter {number} of the tale, naïvely — " * 3 for number in range(40)]
DOCUMENTS = tuple(text.encode() for text in TEXTS)
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
TABLE = pyarrow.Table.from_pylist(ROWS)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


WRITERS = {
    "json:rows.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "json:rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "parquet:rows.parquet": lambda path: parquet(path, TABLE.set_column(1, "text", TABLE["text"].dictionary_encode())),
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
    folder = tmp_path / "rows [1]"
    (folder / "deep").mkdir(parents=True)
    parquet(folder / "a.parquet", TABLE.slice(0, 10))
    parquet(folder / "deep" / "b.parquet", TABLE.slice(10, 10))
    (folder / "README.md").write_text("about the rows")
    assert read_corpus(f"hf:parquet:{folder}").documents == DOCUMENTS[:20]
    assert read_corpus(f"hf:parquet:{folder}/**/*.parquet").documents == DOCUMENTS[:20]


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00001.parquet", "test.parquet"),
        ("train/a.parquet", "test/a.parquet"),
        ("data/my_train.parquet", "data/my_test.parquet"),
    ],
)
@pytest.mark.parametrize("glob", ["", "/**/*.parquet"])
def test_several_splits_are_named_and_never_mixed(tmp_path, names, glob):
    for name, rows in zip(names, (TABLE.slice(0, 30), TABLE.slice(30)), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        parquet(tmp_path / name, rows)
    source = f"hf:parquet:{tmp_path}{glob}"
    for wrong in (source, f"{source}:validation"):
        with pytest.raises(ValueError, match=r"one of its splits, test, train; given .*: end it with one"):
            read_corpus(wrong)
    assert read_corpus(f"{source}:train").documents == DOCUMENTS[:30]
    assert read_corpus(f"{source}:test[:5]").documents == DOCUMENTS[30:35]
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
        ("hf:{}/splits", "a source must be one of its splits, train, test; given .*splits: end it with one"),
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
    """A folder of text and rows is ambiguous."""
    (tmp_path / name).write_bytes(b"x")
    for source in (tmp_path / name, f"{tmp_path}/*", tmp_path):
        with pytest.raises(ValueError, match=re.escape(f'write "hf:{builder}:{source}", which `datasets` reads')):
            read_corpus(source)
    (tmp_path / "README.md").write_text("about the rows")
    with pytest.raises(ValueError, match=f"and no rows; .* with 1 of these and 1 others such as {name}: "):
        read_corpus(tmp_path)
    assert read_corpus(tmp_path / "*.md").documents == (b"about the rows",)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"text": ["a", None]}, r'"text" must be text; given nothing \(null\) in .*a.parquet .*, row 1'),
        ({"body": ["a"], "title": ["b"]}, 'field = "text" must be a column; given .* with body, title: name one'),
        ({"input_ids": [[1]]}, r'field = "text" .* write ids = "input_ids" for token ids'),
        ({"text": ["", ""]}, r"text must not be empty; given .*: add text"),
    ],
)
def test_columns_that_are_not_text(tmp_path, column, message):
    parquet(tmp_path / "a.parquet", pyarrow.table(column))
    with pytest.raises(ValueError, match=message):
        read_corpus(f"hf:parquet:{tmp_path}/a.parquet")


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as Python itself marks what cannot be imported
    said = r"needs the package datasets, which is not installed: pip install '.\[hf\]'"
    with pytest.raises(ValueError, match=said):
        read_corpus("hf:x")


@pytest.fixture(params=["parquet", "json"])
def folder(tmp_path, request):
    """Two files of a split, in a folder that has the builder's name."""
    (folder := tmp_path / request.param).mkdir()
    for number, rows in enumerate((ROWS[:20], ROWS[20:])):
        file = folder / f"train-{number}.{request.param}"
        parquet(file, pyarrow.Table.from_pylist(rows)) if request.param == "parquet" else file.write_bytes(lines(rows))
    return folder


def test_a_stream_is_tokenised_once(folder, monkeypatch):
    stream = text_data(f"hf-stream:{folder}", length=16, heldout_fraction=0.2)
    memory = text_data(f"hf:{folder.name}:{folder}", length=16, heldout_fraction=0.2, in_files=False)
    assert stream.folder is not None and stream.fingerprint == memory.fingerprint
    monkeypatch.setattr(reads_text, "text_documents", None)  # from here on nothing is fetched
    assert text_data(f"hf-stream:{folder}", length=16, heldout_fraction=0.2).fingerprint == stream.fingerprint


@pytest.mark.parametrize(("rows", "expected"), [("", slice(None)), ("[:7]", slice(7)), ("[15:30]", slice(15, 30))])
def test_some_rows_of_a_stream(folder, rows, expected):
    """In a folder of another name than the split's: what follows the last colon is the split."""
    corpus = read_corpus(f"hf-stream:{folder}:train{rows}")
    assert corpus.documents == DOCUMENTS[expected]
    assert corpus.names[3].startswith(f"hf-stream:{folder}:train{rows} (split train), row ")


@pytest.mark.parametrize("split", ["train[:10%]", "train[5:5]", "train[:-1]", "test"])
def test_impossible_ranges_of_a_stream_are_refused(folder, split):
    said = r"a range of a stream must count rows|must be one of its splits, train; given hf-stream"
    with pytest.raises(ValueError, match=said) as caught:
        text_data(f"hf-stream:{folder}:{split}", length=16)
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    ("source", "name"), [("{}", "x.txt"), ("hf:json:{}", "x.jsonl"), ("hf:imagefolder:{}", "x.png")]
)
def test_a_pipe_is_not_waited_for(tmp_path, source, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="it is a pipe or a device"):
        read_corpus(source.format(tmp_path))


@pytest.mark.parametrize("read", [read_corpus, array_data, image_data, open_tokenizer])
def test_an_impossible_name_is_one_error(read):
    with pytest.raises(UserError, match="a path must "):
        read("a\0b.npz")


def test_hub_data_names_no_local_file():
    check_files(["hf://datasets/owner/name@main/a.txt", "zip://a.txt::https://host/b.zip"], None)
    for file in ("/etc/passwd", "file:///etc/passwd", "zip://a.txt::/etc/b.zip"):
        with pytest.raises(UserError, match="which is on this disk"):
            check_files([file], None)


@pytest.mark.parametrize("named", ["own.txt", "../o*.txt", "FOLDER/other.txt"])
def test_a_card_names_files_of_its_folder(tmp_path, named):
    """Also by an absolute path; files outside are refused."""
    own = tmp_path / "own"
    own.mkdir()
    for file in (own / "own.txt", tmp_path / "other.txt"):
        file.write_text(f"{file.stem}\n")
    card = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
    (own / "README.md").write_text(card.format(named.replace("FOLDER", str(tmp_path))))
    if named == "own.txt":
        assert hub_data(f"hf:{own}")[1].to_list() == [{"text": "own"}]
        return
    with pytest.raises(UserError, match=r"given .*other\.txt, which is outside of the folder"):
        hub_data(f"hf:{own}")


def test_a_saved_set_names_its_own_files(tmp_path):
    own, both = tmp_path / "own", tmp_path / "both"
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(own)
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]})).save_to_disk(both)
    assert hub_data(f"hf:{own}")[1].num_rows == hub_data(f"hf:{both}")[1].num_rows == 1
    (both / "dataset_dict.json").write_text('{"splits": ["../own"]}')
    (own / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../other.arrow"}]}))
    for folder in (own, both):
        with pytest.raises(UserError, match=r"other\.arrow, which is outside of the folder"):
            hub_data(f"hf:{folder}")
