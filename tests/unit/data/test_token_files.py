"""Text in files: the same samples as from memory, written once by one process, and no memory that grows with it."""

import json
import os
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
from corpora import word_tokenizer

from jdp.base.errors import UserError
from jdp.data import TextSamples, global_batches, text_data
from jdp.data.text import documents as reads_text
from jdp.data.text.token_array import MappedTokens

TEXTS = [f"In chapter {number} of the tale, naïvely — " * (1 + number % 5) for number in range(60)]


datasets.disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_hub")


@pytest.fixture(autouse=True)
def cache(own_cache):
    return own_cache / "token_files"


@pytest.fixture
def rows(tmp_path):
    lines = [json.dumps({"text": text, "input_ids": list(text.encode())}) + "\n" for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    return f"hf:json:{tmp_path}/rows.jsonl"


@pytest.fixture
def words(tmp_path):
    fillers = (f"filler{number}" for number in range(2, 400))
    return word_tokenizer(tmp_path / "tokenizer.json", "?", "<|endoftext|>", *fillers, "tale", "chapter")


def folders(cache):
    return [path for path in cache.iterdir() if path.is_dir()]


def assert_same(one, other):
    for side in ("train", "heldout"):
        ours, theirs = getattr(one, side), getattr(other, side)
        assert len(ours) == len(theirs) > 0
        for mine, yours in zip(ours, theirs, strict=True):
            assert mine.keys() == yours.keys()
            assert all(np.array_equal(mine[key], yours[key]) and mine[key].dtype == yours[key].dtype for key in mine)
    assert one.fingerprint == other.fingerprint
    assert (one.documents, one.whole, one.vocab_size) == (other.documents, other.whole, other.vocab_size)


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("tokens", ["bytes", "words", "ids"])
def test_samples_are_those_from_memory(rows, words, cache, tokens, packing):
    by = {"bytes": {"vocab_size": 256}, "words": {"tokenizer": words}, "ids": {"ids": "input_ids", "vocab_size": 402}}
    options = {"length": 16, "packing": packing, "heldout_fraction": 0.2, **by[tokens]}
    files, memory = (text_data(rows, in_files=in_files, **options) for in_files in (True, False))
    assert_same(files, memory)
    assert files.folder in folders(cache) and memory.folder is None
    assert "in files)" in str(files)
    again = text_data(rows, in_files=True, **options)
    batches = [next(iter(global_batches(data.train, batch_size=4, seed=3, start=7))) for data in (again, memory)]
    assert all(np.array_equal(batches[0][key], batches[1][key]) for key in batches[1])


def test_text_is_read_once(rows, cache, monkeypatch):
    first = text_data(rows, length=16, in_files=True)
    with monkeypatch.context() as patched:
        patched.setattr(reads_text, "_tokenised", None)
        patched.setattr(TextSamples, "__getitem__", None)
        again = text_data(rows, length=16, in_files=True)
        assert again.fingerprint == first.fingerprint
    [folder] = folders(cache)
    (folder / "train.tokens").write_bytes((folder / "train.tokens").read_bytes()[:-1])
    assert_same(text_data(rows, length=16, in_files=True), text_data(rows, length=16, in_files=False))
    file = Path(rows.removeprefix("hf:json:"))
    file.write_text(file.read_text().replace("tale", "tail"))
    assert "tail" in (changed := text_data(rows, length=16, in_files=True)).tokenizer.decode(changed.train.ids[:200])
    assert len(folders(cache)) == 2


def test_one_process_writes_and_the_others_wait(rows, cache, monkeypatch):
    asked, found, readers, tokenised = threading.Barrier(5), [], [], reads_text._tokenised

    def slowly(*given, **options):  # a generator: only who writes runs it
        readers.append(threading.current_thread())
        time.sleep(0.2)
        yield from tokenised(*given, **options)

    def open_text():
        asked.wait(10)
        found.append(text_data(rows, length=16, in_files=True))

    monkeypatch.setattr(reads_text, "_tokenised", slowly)
    threads = [threading.Thread(target=open_text) for _ in range(4)]
    for thread in threads:
        thread.start()
    asked.wait(10)
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(readers) == 1
    assert len({data.fingerprint for data in found}) == 1
    assert len(folders(cache)) == 1


def test_what_cannot_be_read_leaves_nothing(rows, cache):
    file = Path(rows.removeprefix("hf:json:"))
    whole = file.read_text()
    file.write_text(whole + '{"text": null, "input_ids": []}\n')
    with pytest.raises(ValueError, match=r"must be text; given nothing \(null\) in .*, row 60") as caught:
        text_data(rows, length=16, in_files=True)
    assert isinstance(caught.value, UserError)
    assert not folders(cache)
    (cache / "leftover").mkdir()
    file.write_text(whole)
    killed = text_data(rows, length=16, in_files=True).folder
    assert {folder.name for folder in folders(cache)} == {killed.name, "leftover"}


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
