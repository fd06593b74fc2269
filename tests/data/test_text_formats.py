"""What text comes in: compressed files, rows of JSON, parquet and Arrow, data sets of Hugging Face."""

import gzip
import io
import json
import sys

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from corpora import arrow, arrow_file, parquet, read_corpus
from own_process import python

from jdp.data import text_data
from jdp.data.sources.tables import table_pieces

TEXTS = [f"In chapter {number} of the tale, naïvely — " * 3 for number in range(40)]
DOCUMENTS = tuple(text.encode() for text in TEXTS)
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
TABLE = pyarrow.Table.from_pylist(ROWS)


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=row["id"] % 2 == 0) + "\n" for row in rows).encode()


def zstd(content):
    """Two frames, one after the other, as parallel compressors write them."""
    half = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))


WRITERS = {
    "rows.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "rows.ndjson": lambda path: path.write_bytes(b"\xef\xbb\xbf" + lines(ROWS).replace(b"\n", b"\r\n\r\n")),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=2)),
    "rows.json.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS[:9])) + gzip.compress(lines(ROWS[9:]))),
    "rows.jsonl.zst": lambda path: path.write_bytes(zstd(lines(ROWS))),
    "rows.parquet": lambda path: parquet(path, TABLE),
    "rows.arrow": lambda path: arrow_file(path, TABLE),
    "stream.arrow": lambda path: arrow(path, TABLE),
    "large.arrow": lambda path: arrow(path, TABLE.cast(pyarrow.schema([("id", "int64"), ("text", "large_string")]))),
    "bytes.parquet": lambda path: parquet(path, TABLE.cast(pyarrow.schema([("id", "int64"), ("text", "binary")]))),
    "words.feather": lambda path: arrow_file(path, TABLE.set_column(1, "text", TABLE["text"].dictionary_encode())),
}


datasets.disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_hub")


# --- the same documents ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_each_row_is_a_document(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert read_corpus(tmp_path / name).documents == DOCUMENTS


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_compressed_text_is_text(tmp_path, suffix, compress):
    for number, document in enumerate(DOCUMENTS[:5]):
        (tmp_path / f"{number}.txt{suffix}").write_bytes(compress(document))
    (tmp_path / "5.md").write_bytes(DOCUMENTS[5])
    assert read_corpus(tmp_path).documents == DOCUMENTS[:6]
    assert read_corpus(f"{tmp_path}/*.txt{suffix}").documents == DOCUMENTS[:5]


def test_a_directory_of_rows_is_read_as_rows(tmp_path, notices):
    (tmp_path / "deep").mkdir()
    parquet(tmp_path / "a.parquet", TABLE.slice(0, 10))
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(lines(ROWS[10:20])))
    arrow_file(tmp_path / "deep" / "c.arrow", TABLE.slice(20, 10))
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read_corpus(tmp_path).documents == DOCUMENTS[:30]
    assert "reading 3 files (.arrow, .parquet, .zst), passing over 1 others" in notices.text


def test_a_directory_of_text_and_rows_is_ambiguous(tmp_path):
    (tmp_path / "README.md").write_text("about the rows")
    parquet(tmp_path / "a.parquet", TABLE)
    with pytest.raises(
        ValueError,
        match=r"one kind of data; given .* with 1 such as README.md and 1 such as a.parquet: name .*\*\.parquet",
    ):
        read_corpus(tmp_path)
    assert read_corpus(tmp_path / "*.parquet").documents == DOCUMENTS
    assert read_corpus(tmp_path, suffixes=[".parquet"]).documents == DOCUMENTS
    assert read_corpus(tmp_path, suffixes=[".md"]).documents == (b"about the rows",)


def test_another_field_may_be_the_text(tmp_path):
    parquet(tmp_path / "a.parquet", TABLE.rename_columns(["id", "content"]))
    assert read_corpus(tmp_path / "a.parquet", field="content").documents == DOCUMENTS


def test_documents_know_where_they_are_from(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": "third"}\n{"text": "fourth"}\n')
    parquet(tmp_path / "b.parquet", pyarrow.table({"text": ["", "one"]}))
    (tmp_path / "c.txt").write_text("plain")
    corpus = read_corpus([tmp_path / name for name in ("a.jsonl", "b.parquet", "c.txt")])
    assert corpus.documents == (b"third", b"fourth", b"one", b"plain")
    assert [corpus.name_of(document) for document in range(4)] == [
        f"{tmp_path}/a.jsonl, line 3",
        f"{tmp_path}/a.jsonl, line 4",
        f"{tmp_path}/b.parquet, row 1",
        f"{tmp_path}/c.txt",
    ]


def test_rows_are_split_by_their_content_whatever_holds_them(tmp_path):
    """The same texts as files and as rows, in another order: the same ones are held out."""
    (tmp_path / "files").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "files" / f"{number}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS[::-1]))
    parquet(tmp_path / "rows.parquet", TABLE.take(np.random.default_rng(0).permutation(40)))

    def sides(source):
        data = text_data(source, length=16, heldout_fraction=0.3)
        assert data.whole and data.documents == 40
        return [set(side.tokens.tobytes().split(b"\0")[:-1]) for side in (data.train, data.heldout)]

    expected = sides(tmp_path / "files")
    assert expected[0] | expected[1] == set(DOCUMENTS) and not expected[0] & expected[1]
    assert sides(tmp_path / "rows.jsonl") == sides(tmp_path / "rows.parquet") == expected


# --- Hugging Face data sets -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(folder / "saved")
    data.select(range(39, -1, -1)).save_to_disk(folder / "selected")
    both = {"train": data, "test": data.select([3])}
    datasets.DatasetDict(both).save_to_disk(folder / "splits")
    datasets.DatasetDict({"dev": data, "test": data}).save_to_disk(folder / "no_train")
    for name, part in both.items():
        (folder / "files").mkdir(exist_ok=True)
        part.to_parquet(folder / "files" / f"{name}.parquet")
    (folder / "csv").mkdir()
    data.to_csv(folder / "csv" / "rows.csv")
    (folder / "script").mkdir()
    (folder / "script" / "script.py").write_text("raise SystemExit('code of a data set was run')")
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("saved", DOCUMENTS),
        ("selected", DOCUMENTS[::-1]),
        ("splits", DOCUMENTS),
        ("splits:test", DOCUMENTS[3:4]),
        ("files", DOCUMENTS),
        ("files:test", DOCUMENTS[3:4]),
        ("csv", DOCUMENTS),
        ("csv/rows.csv:train[:3]", DOCUMENTS[:3]),
    ],
)
def test_data_sets_on_a_disk(hub, name, expected):
    corpus = read_corpus(f"hf:{hub}/{name}")
    assert corpus.documents == expected
    assert corpus.name == f"hf:{hub}/{name}"


def test_a_data_set_may_stand_beside_files(hub, tmp_path):
    (tmp_path / "z.txt").write_text("mine")
    corpus = read_corpus([f"hf:{hub}/splits:test", tmp_path / "z.txt", f"hf:{hub}/splits:test"])
    assert corpus.documents == (b"mine", DOCUMENTS[3])
    assert corpus.name_of(1) == f"hf:{hub}/splits:test (split test), row 0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:{}/nothing", "must be readable; given hf:.*/nothing: Couldn't find any data file"),
        ("hf:{}/splits:dev", 'unknown split "dev", there are train, test'),
        ("hf:{}/files:dev", 'Unknown split "dev"'),
        ("hf:{}/no_train", "must have the split train, or one only; given dev, test in .* as hf:.*/no_train:dev"),
        ("hf:{}/script", "Dataset scripts are no longer supported"),
        (
            "hf:nobody/nothing/config:train",
            r"given hf:nobody/nothing/config:train: Couldn't reach 'nobody/nothing' on the Hub",
        ),
    ],
)
def test_a_data_set_that_cannot_be_had_is_one_line(hub, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_corpus(name.format(hub))
    assert "\n" not in str(caught.value)


def test_a_column_of_a_data_set_that_is_not_there(hub):
    said = r'the field "body"; given hf:.*saved \(split train\) without it: .* has: id, text'
    with pytest.raises(ValueError, match=said):
        read_corpus(f"hf:{hub}/saved", field="body")


# --- what is wrong --------------------------------------------------------------------------------------------------


def whole(name):
    """The bytes of a good file of this name."""
    file = io.BytesIO()
    WRITERS[name](file)
    return file.getvalue()


def one_letter_changed():
    """A parquet file with checksums (which most writers leave out), and a letter that its checksum does not cover."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(TABLE, file, compression="none", use_dictionary=False, write_page_checksum=True)
    return file.getvalue().replace(b"chapter 17 of", b"chapter 77 of")


BAD = {
    "cut.txt.gz": (
        gzip.compress(DOCUMENTS[0])[:-6],
        "compressed file must be complete; given .*cut.txt.gz: Compressed file ended",
    ),
    "not.txt.gz": (b"plain text", r"must be complete; given .*not.txt.gz: Not a gzipped file"),
    "none.txt.gz": (b"", "must be complete; given .*none.txt.gz: the file is empty"),
    "sum.txt.gz": (gzip.compress(b"text")[:-8] + bytes(8), "must be complete; given .*sum.txt.gz: CRC check failed"),
    "cut.txt.zst": (zstd(DOCUMENTS[0])[:-2], "must be complete; given .*cut.txt.zst: it ends in the middle of a frame"),
    "not.txt.zst": (b"plain text", "must be complete; given .*not.txt.zst: zstd decompress"),
    "cut.jsonl.gz": (gzip.compress(lines(ROWS))[:-30], "must be complete; given .*cut.jsonl.gz"),
    "cut.parquet": (
        whole("rows.parquet")[:-9],
        r"data file must be complete; given .*cut.parquet: Parquet magic bytes .*; fetch",
    ),
    "none.parquet": (b"", "must be complete; given .*none.parquet: Parquet file size is 0"),
    "hole.parquet": (one_letter_changed(), "data file must be complete; given .*hole.parquet: .*CRC checksum"),
    "latin.parquet": (
        whole("rows.parquet").replace(b"\xc3\xafv", b"\xefiv"),
        "must be complete; given .*latin.parquet: .* Invalid UTF8",
    ),
    "cut.arrow": (whole("rows.arrow")[:-9], "must be complete; given .*cut.arrow: Not an Arrow file"),
    "stream.arrow": (whole("stream.arrow")[:-99], "must be complete; given .*stream.arrow: Expected"),
    "none.arrow": (b"", "must be complete; given .*none.arrow"),
    "a.jsonl": (
        b'{"text": "a"}\n{"text": }\n',
        r"JSON must be valid; given b'{\"text\": }' … in .*a.jsonl, line 2: Expecting value",
    ),
    "b.jsonl": (
        b'{"text": "a"}\n\n{"txt": "b", "n": 1}',
        r'the field "text"; given .*b.jsonl, line 3 without it: .* has: txt, n',
    ),
    "c.jsonl": (b'{"text": "a"}\n[1]', r"must be an object, .* given \[1\] in .*c.jsonl, line 2"),
    "d.jsonl": (b'{"text": 7}', r'the field "text" must be text; given 7 in .*d.jsonl, line 1'),
    "e.jsonl": (b'{"text": null}', r"must be text; given null in .*e.jsonl, line 1"),
    "f.jsonl": (b'{"text": "a"}\n{"text": "\xff"}', r"must be UTF-8; given 0xff at byte 10 of .*f.jsonl, line 2"),
    "g.jsonl": (
        b'{"text": "a\\ud800"}',
        r"must be text; given half a surrogate pair at character 1 in .*g.jsonl, line 1",
    ),
    "h.json": (b'[{"text": "a"}, 2]', r"must be an object, .* given 2 in .*h.json, row 1"),
    "i.json": (b'{\n "text": "a"\n}', r"JSON must be valid; given b'{' … in .*i.json, line 1"),
    "j.jsonl": (b'{"text": ""}\n', r"text must not be empty; given .*j.jsonl: 1 empty file\(s\) or row\(s\)"),
    "k.jsonl": (b"[" * 100_000, r"JSON must be valid; given .*k.jsonl, line 1: maximum recursion"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_file_is_reported(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_corpus(tmp_path / name)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"text": ["a", None]}, "must be text; given nothing \\(null\\) in .*a.parquet, row 1"),
        ({"text": pyarrow.nulls(2)}, "given nothing \\(null\\) in .*a.parquet, row 0"),
        ({"text": [1, 2]}, "must be text; given type int64 in .*a.parquet"),
        (
            {"body": ["a"], "title": ["b"]},
            'the field "text"; given .*a.parquet without it: give one that it has: body, title',
        ),
    ],
)
def test_columns_that_are_not_text(tmp_path, column, message):
    parquet(tmp_path / "a.parquet", pyarrow.table(column))
    with pytest.raises(ValueError, match=message):
        read_corpus(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "rows.parquet"), ("zstandard", "rows.jsonl.zst"), ("datasets", "hf:x")]
)
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, package, name):
    source = name if name.startswith("hf:") else tmp_path / name
    if source != name:
        WRITERS[name](source)
    monkeypatch.setitem(sys.modules, package, None)  # as Python itself marks what cannot be imported
    said = rf"needs the package {package}, which is not installed: pip install '.\[hf\]'"
    with pytest.raises(ValueError, match=said):
        read_corpus(source)


def test_nothing_is_imported_before_a_source_needs_it():
    program = (
        "import sys, jdp.data, jdp.data.sources.tables, jdp.data.sources.hub, jdp.data.text.tokenizers\n"
        "print([name for name in ('pyarrow', 'datasets', 'tokenizers', 'PIL') if name in sys.modules])"
    )
    ended = python("-c", program, timeout=60)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


# --- files that are out of all proportion to their content ------------------------------------------------------------

LARGE = "a" * 2**22
BOMBS = {
    "text.txt.gz": lambda path: path.write_bytes(gzip.compress(LARGE.encode())),
    "text.txt.zst": lambda path: path.write_bytes(zstd(LARGE.encode())),
    "rows.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines([{"id": 1, "text": LARGE}]))),
    "rows.json.zst": lambda path: path.write_bytes(zstd(json.dumps([{"text": LARGE}]).encode())),
    "one.parquet": lambda path: pyarrow.parquet.write_table(table_of([LARGE]), path, compression="zstd"),
    "same.parquet": lambda path: pyarrow.parquet.write_table(table_of(["a" * 2**14] * 256), path),
    "dictionary.parquet": lambda path: pyarrow.parquet.write_table(in_dictionary(["a" * 2**14] * 256), path),
    "dictionary.arrow": lambda path: arrow_file(path, in_dictionary(["a" * 2**14] * 256)),
}


def table_of(texts):
    return pyarrow.table({"text": texts})


def in_dictionary(texts):
    return pyarrow.table({"text": pyarrow.array(texts).dictionary_encode()})


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_becomes_large_is_refused(tmp_path, monkeypatch, name):
    BOMBS[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size < 2**15
    assert sum(map(len, read_corpus(tmp_path / name).documents)) == 2**22, "within the bound it is data"
    monkeypatch.setattr("jdp.data.sources.compressed.ALWAYS_READ", 2**20)
    monkeypatch.setattr("jdp.data.sources.compressed.MOST_GROWTH", 2)
    with pytest.raises(ValueError, match=rf"at most 2 times its size, or 1 MiB; given .*{name} of .* uncompressed$"):
        read_corpus(tmp_path / name)


@pytest.mark.parametrize("name", ["many.parquet", "many.arrow"])
def test_few_rows_are_decoded_at_a_time_where_all_share_one_large_value(tmp_path, name):
    write = pyarrow.parquet.write_table if name == "many.parquet" else lambda table, path: arrow_file(path, table)
    write(in_dictionary(["a" * 2**16] * 512), tmp_path / name)
    first = next(table_pieces(tmp_path / name, ["text"]))
    assert len(first.numbers) <= 256
