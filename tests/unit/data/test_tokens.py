"""Tokens of text, by a tokenizer's file, and rows of ids and weights, kept as they are and checked to the id.

And tokens in files: the same samples as from memory, written once by one process, and no memory that grows with them.
"""

import itertools
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
import tokenizers
from corpora import parquet, word_tokenizer
from guide_folders import trained_tokenizer

from jdp.base.errors import UserError
from jdp.data import TextSamples, mixture, open_tokenizer, text_data
from jdp.data.text import documents as reads_text
from jdp.data.text.tokens import MappedTokens

datasets.disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_hub")

ROWS = 60
RNG = np.random.default_rng(0)
IDS = [[row, *RNG.integers(0, 500, RNG.integers(3, 30)).tolist()] for row in range(ROWS)]
MASKS = [[0, *RNG.integers(0, 2, len(ids) - 2).tolist(), 1] for ids in IDS]


def written(path, ids=IDS, **columns):
    parquet(path / "a.parquet", pyarrow.table({"input_ids": ids} | columns))
    return f"hf:parquet:{path}/a.parquet"


def given_weights(path):
    """The same weights in every form: source, and the columns to name."""
    padded, mask, loss = np.zeros((3, ROWS, max(map(len, IDS))), int)
    for row, ids in enumerate(IDS):
        place = slice(len(ids)) if row % 2 else slice(-len(ids), None)  # padding at either end
        padded[row, place], mask[row, place], loss[row, place] = ids, 1, MASKS[row]
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
    pairs = [np.stack([row["targets"], row["weights"]], 1)[row["segments"] > 0] for row in samples]
    return sorted(map(tuple, np.concatenate(pairs).tolist()))


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


def test_ids_are_unchanged(tmp_path):
    options = {"length": 8, "ids": "input_ids", "weights": "loss_mask", "heldout_fraction": 0.2}
    data = text_data(written(tmp_path, loss_mask=MASKS), **options)
    assert data.train.ids.dtype == np.uint16 and data.vocab_size == 1 + max(map(max, IDS))
    rows = [data.train.ids[a:b].tolist() for a, b in itertools.pairwise(data.train.bounds)]
    assert rows == [ids for ids in IDS if ids in rows] and 30 < len(rows) < ROWS
    assert "of its tokens count" in str(data)
    other = text_data(written(tmp_path, loss_mask=[[1] * len(ids) for ids in IDS]), **options)
    assert other.fingerprint != data.fingerprint, "weights are of the samples too"


def test_pieces_without_a_target_are_left_out(tmp_path):
    ids, masks = [[*range(1, 21)], [*range(30, 50)]], [[0] * 15 + [1] * 5, [0] * 18 + [1, 1]]
    source = written(tmp_path, ids, loss_mask=masks)
    data = text_data(source, length=8, ids="input_ids", weights="loss_mask", packing="documents", heldout_fraction=0.5)
    learnt = [t for t, w in targets(data) if w]
    assert learnt == [16, 17, 18, 19, 20, 48, 49] and not [t for t, _ in targets(data) if t < 10]


def test_rows_without_a_target_are_counted(tmp_path, notices):
    rows = [[1, 2, 3], [4, 5], [], [6, 7, 8], [9]]
    masks = [[0, 0, 1], [1, 0], [], [0, 1, 0], [1]]
    source, options = written(tmp_path, rows, loss_mask=masks), {"ids": "input_ids", "weights": "loss_mask"}
    data = text_data(source, length=2, packing="documents", heldout_fraction=0.5, **options)
    assert data.documents == 2 and "3 of 5 rows are left out: none of their tokens counts as a target" in notices.text
    source = written(tmp_path, rows, loss_mask=[[0] * len(ids) for ids in rows])
    with pytest.raises(ValueError, match=r"must have targets; given .*, 5 rows: none of their tokens counts"):
        text_data(source, length=2, **options)


def test_unread_columns_are_named(tmp_path, notices):
    masks = [[1] * len(ids) for ids in IDS]
    source = written(tmp_path, labels=IDS, attention_mask=masks, source=["some text"] * ROWS)
    text_data(source, length=8, ids="input_ids")
    said = 'labels, attention_mask; to read them, write labels = "labels", attention_mask = "attention_mask"'
    assert notices.text.count(said) == 1 and "source" not in notices.text
    text_data(source, length=8, ids="input_ids", labels="labels", attention_mask="attention_mask")
    assert notices.text.count("not read") == 1
    (tmp_path / "both").mkdir()
    both = written(tmp_path / "both", loss_mask=masks, assistant_masks=masks)
    text_data(both, length=8, ids="input_ids")
    assert 'loss_mask, assistant_masks; to read them, write weights = "loss_mask"' in notices.text
    text_data(source, length=8, field="source")
    assert "not read: input_ids, " + said.replace("write", 'write ids = "input_ids",') in notices.text


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
        ({"ids": [[5, 6, 7]], "m": [[1, 0, 1]]}, {"attention_mask": "m"}, "in one stretch .* 0 as token 1 of .* row 0"),
        ({}, {"weights": "a", "labels": "b"}, "weights and labels both set the weights"),
    ],
)
def test_weights_that_cannot_be_name_row_and_token(tmp_path, columns, named, message):
    with pytest.raises(ValueError, match=message):
        text_data(written(tmp_path, **{"ids": [[5, 6], [7, 8]], **columns}), length=1, ids="input_ids", **named)


def test_files_that_are_not_rows_of_ids(tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.zeros((2, 2, 2), int))
    with pytest.raises(ValueError, match=r"rows of ids are numbers \[n\] or \[rows, n\]; given int64 \[2, 2, 2\]"):
        text_data(tmp_path / "a.npz", length=1, ids="input_ids")
    for name, fix in (("a.jsonl", 'write "hf:json:'), ("a.txt", "experiments/prepare/text_to_ids.py converts text")):
        with pytest.raises(ValueError, match=f"rows of ids are in .npz files that exist, .* {fix}"):
            text_data(tmp_path / name, length=1, ids="input_ids")
    with pytest.raises(ValueError, match=r'weights require rows of ids; .* ids = "input_ids"'):
        text_data("stdlib", length=1, weights="loss_mask")


TEXTS = [f"In chapter {number} of the tale, naïvely told: ☃ " * (1 + number % 5) for number in range(60)]
END = "<|endoftext|>"


@pytest.fixture(autouse=True)
def folders(own_cache):
    """All folders of tokens."""
    return lambda: [path for path in (own_cache / "token_files").iterdir() if path.is_dir()]


@pytest.fixture
def rows(tmp_path):
    lines = [json.dumps({"text": text, "input_ids": list(text.encode())}) + "\n" for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    return f"hf:json:{tmp_path}/rows.jsonl"


@pytest.fixture
def words(tmp_path):
    fillers = (f"filler{number}" for number in range(2, 400))
    return word_tokenizer(tmp_path / "tokenizer.json", "?", "<|endoftext|>", *fillers, "tale", "chapter")


def assert_same(one, other):
    for ours, theirs in ((one.train, other.train), (one.heldout, other.heldout)):
        assert len(ours) == len(theirs) > 0
        for mine, yours in zip(ours, theirs, strict=True):
            assert mine.keys() == yours.keys()
            for key in mine:
                np.testing.assert_array_equal(mine[key], yours[key], strict=True)
    assert one.fingerprint == other.fingerprint
    assert (one.documents, one.whole, one.vocab_size) == (other.documents, other.whole, other.vocab_size)


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("tokens", ["bytes", "words", "ids"])
def test_samples_are_those_from_memory(rows, words, folders, tokens, packing):
    by = {"bytes": {"vocab_size": 256}, "words": {"tokenizer": words}, "ids": {"ids": "input_ids", "vocab_size": 402}}
    options = {"length": 16, "packing": packing, "heldout_fraction": 0.2, **by[tokens]}
    files, memory = (text_data(rows, in_files=in_files, **options) for in_files in (True, False))
    assert_same(files, memory)
    assert files.folder in folders() and memory.folder is None
    assert "in files)" in str(files)
    assert_same(text_data(rows, in_files=True, **options), memory)


def test_text_is_read_once(rows, folders, monkeypatch):
    first = text_data(rows, length=16, in_files=True)
    with monkeypatch.context() as patched:
        patched.setattr(reads_text, "text_documents", None)
        patched.setattr(TextSamples, "__getitem__", None)
        again = text_data(rows, length=16, in_files=True)
        assert again.fingerprint == first.fingerprint
    [folder] = folders()
    (folder / "train.tokens").write_bytes((folder / "train.tokens").read_bytes()[:-1])
    assert_same(text_data(rows, length=16, in_files=True), text_data(rows, length=16, in_files=False))
    file = Path(rows.removeprefix("hf:json:"))
    file.write_text(file.read_text().replace("tale", "tail"))
    assert "tail" in (changed := text_data(rows, length=16, in_files=True)).tokenizer.decode(changed.train.ids[:200])
    assert len(folders()) == 2


def test_one_process_writes_and_the_others_wait(rows, folders, monkeypatch):
    asked, readers, tokenised = threading.Barrier(4), [], reads_text._tokenised

    def slowly(*given):  # a generator: only who writes runs it
        readers.append(threading.current_thread())
        time.sleep(0.2)
        yield from tokenised(*given)

    def fingerprint(_):
        asked.wait(60)
        return text_data(rows, length=16, in_files=True).fingerprint

    monkeypatch.setattr(reads_text, "_tokenised", slowly)
    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(fingerprint, range(4))}) == len(readers) == len(folders()) == 1


def test_what_cannot_be_read_leaves_nothing(rows, folders, own_cache):
    file = Path(rows.removeprefix("hf:json:"))
    whole = file.read_text()
    file.write_text(whole + '{"text": null, "input_ids": []}\n')
    with pytest.raises(ValueError, match=r"must be text; given nothing \(null\) in .*, row 60") as caught:
        text_data(rows, length=16, in_files=True)
    assert isinstance(caught.value, UserError)
    assert not folders()
    (leftover := own_cache / "token_files" / "leftover").mkdir()
    file.write_text(whole)
    killed = text_data(rows, length=16, in_files=True).folder
    assert {*folders()} == {killed, leftover}


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_process_does_not_grow(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**29)
    samples = TextSamples(MappedTokens(tmp_path / "sparse", np.dtype("<u2")), length=1024)
    order, before, most = np.random.default_rng(0).permutation(len(samples))[:30_000], resident(), 0
    for turn, index in enumerate(order.tolist()):
        samples[index]
        most = max(most, resident()) if turn % 1000 == 0 else most
    assert most - before < 2**26  # of 30,000 pages of 4 KiB at least, 117 MiB, were read


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE of 300 tokens, the last of which closes a document."""
    bpe = trained_tokenizer([END], TEXTS)
    assert bpe.token_to_id(END) == 299
    return bpe


@pytest.fixture
def file(trained, tmp_path):
    folder = tmp_path / "bpe"
    folder.mkdir()
    trained.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_documents_become_the_tokens_of_the_file(trained, file, rows):
    data = text_data(rows, length=16, heldout_fraction=0.3, tokenizer=str(file))
    plain = text_data(rows, length=16, heldout_fraction=0.3)
    assert data.vocab_size == 300 and data.train.ids.dtype == np.uint16
    decode = data.tokenizer.decode
    sides = [decode(side.ids).split(END)[:-1] for side in (data.train, data.heldout)]
    assert sorted(sides[0] + sides[1]) == sorted(TEXTS)
    # Which text is held out does not depend on the tokenizer.
    for side, other in zip(sides, (plain.train, plain.heldout), strict=True):
        assert [text.encode() for text in side] == other.ids.tobytes().split(b"\0")[:-1]
    expected = trained.encode(sides[0][0]).ids
    assert data.train[0]["tokens"].tolist() == expected[:16] and data.train[0]["targets"].tolist() == expected[1:17]
    assert data.train[0]["tokens"].dtype == np.int32
    assert f"tokens by {file} (300 tokens, {END} closes a document) (" in str(data) and " in memory)" in str(data)


@pytest.mark.parametrize("kind", ["bytes", "byte level", "metaspace"])
def test_text_is_decoded_token_by_token(kind, trained, file):
    """Characters of several tokens are never cut; a space that opens the text is not lost after other text."""
    if kind == "metaspace":  # whose decoder drops the first space
        words = {"<eos>": 0, "▁a": 1, "▁": 2, "b": 3, "ï": 4, "☃": 5}
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<eos>"))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        bpe.decoder = tokenizers.decoders.Metaspace()
        bpe.save(str(file))
    tokenizer = open_tokenizer("bytes" if kind == "bytes" else str(file))
    before, text = tokenizer.encode("b b").tolist(), " ☃ ï☃☃☃ bbï"
    tokens = tokenizer.encode(f"b b{text}").tolist()[len(before) :]
    parts = [*tokenizer.decode_stream(iter(tokens), after=before)]
    assert "".join(parts) == text and len(parts) > 8 and "\ufffd" not in parts
    torn = [*tokenizer.decode_stream([0xE2, 0x98])] if kind == "bytes" else ["\ufffd"]
    assert torn == ["\ufffd"]  # what is not complete at the end is shown as it is


def test_a_files_truncation_and_padding_are_off(trained, file, tmp_path, rows):
    saved = tokenizers.Tokenizer.from_str(trained.to_str())
    saved.enable_truncation(5)
    saved.enable_padding(length=50)
    saved.post_processor = tokenizers.processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 299)])
    saved.save(str(tmp_path / "cut.json"))
    tokens = [text_data(rows, length=16, tokenizer=str(path)).train.ids for path in (file, tmp_path / "cut.json")]
    assert np.array_equal(*tokens)


def test_the_configuration_names_what_closes_a_document(trained, file):
    for config, token in (('"t"', "t"), ('{"content": "t"}', "t"), ("null", END)):
        (file.parent / "tokenizer_config.json").write_text(f'{{"eos_token": {config}}}')
        assert open_tokenizer(str(file)).separator == trained.token_to_id(token)
    (file.parent / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ValueError, match=r"tokenizer_config.json names <end>, which is not in its vocabulary"):
        open_tokenizer(str(file))


BOS = {"bos_token": "t"}


@pytest.mark.parametrize(
    ("processed", "settings", "bos"),
    [
        (END, {}, END),
        (END, BOS | {"add_bos_token": False}, None),
        ("", BOS, None),
        ("", BOS | {"add_bos_token": True}, "t"),
    ],
)
def test_documents_and_prompts_open_as_the_tokenizer_says(trained, file, rows, processed, settings, bos, capsys):
    """By `add_bos_token`; where it is not said, as transformers does by the file itself."""
    saved = tokenizers.Tokenizer.from_str(trained.to_str())
    if processed:
        saved.post_processor = tokenizers.processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, 299)])
    saved.save(str(file))
    (file.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    opened, added = open_tokenizer(str(file)), [] if bos is None else [trained.token_to_id(bos)]
    text = trained.encode("In chapter").ids
    assert opened.opened(opened.encode("In chapter")).tolist() == added + text
    assert opened.opened(np.array([*added, *text])).tolist() == added + text, "once"
    data = text_data(rows, length=16, heldout_fraction=0.3, tokenizer=str(file))
    assert data.train.ids[:2].tolist() == (added + trained.encode(TEXTS[0]).ids)[:2]
    assert (", t opens it" in str(data)) == (bos == "t") and (opened.byte_counts()[added] == 0).all()
    assert "are they text" not in capsys.readouterr().err, "the separator that opens them is no doubt"


def test_a_text_ends_as_its_model_says(trained, file):
    named = [trained.token_to_id(token) for token in "abc"]
    assert open_tokenizer(str(file)).ends == (299,) and open_tokenizer("bytes").ends == (0,)
    (file.parent / "config.json").write_text(json.dumps({"eos_token_id": named[0]}))
    assert open_tokenizer(str(file)).ends == (299, named[0])
    (file.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": named[1:]}))
    assert open_tokenizer(str(file)).ends == (299, *named[1:])


def test_a_mixture_has_one_tokenizer(file, rows):
    same = [text_data(rows, length=16, tokenizer=str(file)) for _ in range(2)]
    assert mixture([(same[0], 1), (same[1], 2)]).vocab_size == 300
    np.savez(file.parent / "ids.npz", input_ids=np.arange(200))
    ids = text_data(file.parent / "ids.npz", length=16, ids="input_ids")
    assert mixture([(ids, 1), (same[0], 1)]).tokenizer is same[0].tokenizer
    with pytest.raises(ValueError, match="must share a tokenizer; given different ones for"):
        mixture([(same[0], 1), (text_data(rows, length=16), 2)])


def test_a_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    word_tokenizer(tmp_path / "words.json", "a", "b")
    rules = {
        "none": r'must be "bytes", .*; given {}, looked for at /',
        "a.json": "must be a file of Hugging Face tokenizers; given {}: ",
        "words.json": r"closes documents; given {}: none of <\|endoftext\|>, .* is in its",
    }
    for name, rule in rules.items():
        with pytest.raises(ValueError, match=rule.format(tmp_path / name)) as caught:
            open_tokenizer(str(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_is_named(file, tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"must be UTF-8 for a tokenizer; given 0xe9 at byte 3 of .*b.txt: convert it"):
        text_data(tmp_path / "*.txt", length=2, tokenizer=str(file))


def test_a_tokenizer_must_fit_the_model(file, rows):
    with pytest.raises(ValueError, match=r"given vocab_size 299 and 300 in .*: set vocab_size to 300 \(importing"):
        text_data(rows, length=4, tokenizer=str(file), vocab_size=299)
    assert text_data(rows, length=4, tokenizer=str(file), vocab_size=512).vocab_size == 300


def test_tokens_of_text_have_its_bytes(trained, file):
    """The bytes of the pieces are those of the text, and the token that closes a document has none."""
    tokenizer = open_tokenizer(str(file))
    counts = tokenizer.byte_counts()
    assert counts.shape == (300,) and counts[299] == 0
    for text in (*TEXTS[:3], "☃", "plain"):
        assert counts[tokenizer.encode(text)].sum() == len(text.encode())
    assert open_tokenizer("bytes").byte_counts().tolist() == [0, *[1] * 255]
