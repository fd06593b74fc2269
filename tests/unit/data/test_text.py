"""What text promises: every token a target once, the same split everywhere, and sources read as they are named."""

import io
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from corpora import read_corpus

from jdp.data import TextSamples, text_data
from jdp.data.held_out import content_score, ends_score


def write(folder, **texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def documents_of(side):
    return side.ids.tobytes().split(b"\0")[:-1]


@pytest.mark.parametrize("size", [2, 9, 10, 11, 16, 17, 18, 100])
def test_every_token_is_a_target_once(size):
    text = np.arange(1, size + 1).astype(np.uint8)
    samples = list(TextSamples(text, length=8))
    assert len(samples) == len(TextSamples(text, length=8))
    for sample in samples:
        assert {value.shape for value in sample.values()} == {(8,)}
        kinds = {key: value.dtype for key, value in sample.items()}
        assert kinds == {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    counted = np.concatenate([sample["weights"] for sample in samples]) == 1
    assert np.array_equal(np.concatenate([sample["targets"] for sample in samples])[counted], text[1:])
    assert np.array_equal(np.concatenate([sample["tokens"] for sample in samples])[counted], text[:-1])
    filling = samples[-1]["weights"] == 0
    assert not samples[-1]["tokens"][filling].any() and not samples[-1]["targets"][filling].any()


def test_one_file_is_split_at_its_tail(tmp_path, notices):
    text = "".join(f"{number:03d} " for number in range(250))
    text_data(write(tmp_path, only=text), length=8, heldout_fraction=0.1)
    data = text_data(tmp_path, length=8, heldout_fraction=0.1)
    assert documents_of(data.train) + documents_of(data.heldout) == [text[:900].encode(), text[900:].encode()]
    assert not data.whole and "the tail of each document" in str(data)
    assert notices.text.count("the tail of each is held out") == 1


def test_the_standard_library():
    data = text_data("stdlib", length=128, heldout_fraction=0.1)
    total = len(data.train.ids) + len(data.heldout.ids)
    assert total > 5e6 and data.documents > 300
    assert 0.02 < len(data.heldout.ids) / total < 0.3
    held, kept = documents_of(data.heldout), documents_of(data.train)
    assert Path(logging.__file__).read_bytes() in held + kept
    assert Path(pytest.__file__).read_bytes() not in held + kept  # beside the library, not of it
    assert not any(b"\nimport pytest" in document for document in kept)
    assert re.search(r"stdlib \(Python 3\.\S+\): [\d,]+ documents, [\d,]+ bytes; train [\d,]+ bytes in", str(data))


def test_files_globs_directories_and_lists_agree(tmp_path, monkeypatch):
    folder = write(tmp_path / "book" / "part", a="first", b="second").parent
    (folder / "part" / "link.txt").symlink_to(folder / "part" / "a.txt")
    expected = (b"first", b"second")
    part = folder / "part"
    assert read_corpus(folder).documents == expected
    assert read_corpus(str(folder)).documents == expected
    assert read_corpus(f"{folder}/**/*.txt").documents == expected
    assert read_corpus(f"{folder}/**").documents == expected
    assert read_corpus((part / "b.txt", part / "a.txt", str(part))).documents == expected
    assert read_corpus(part / "a.txt").documents == expected[:1]
    monkeypatch.chdir(part)
    assert read_corpus(["b.txt", "a.txt"]).documents == expected


def test_a_directory_is_read_by_suffix(tmp_path, notices):
    write(tmp_path, a="text")
    write(tmp_path / ".hidden", b="not seen")
    (tmp_path / ".draft.txt").write_text("not seen")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert read_corpus(tmp_path).documents == (b"text",)
    assert f"{tmp_path}: reading 1 files (.txt, .md, .rst, .py), ignoring 1 others" in notices.text


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("missing.txt", {}, r"exists; given missing.txt, looked for at /.*/missing.txt: fix the path"),
        ("pictures", {}, r"must hold .txt, .* files; given pictures with 1 other files such as a.png: write"),
        ("empty.txt", {}, r"text must not be empty; given empty.txt: 1 empty file"),
        ([], {}, r"source must name some text; given an empty list"),
        ("short.txt", {}, r"length 16 needs 17 tokens; given 10 \(of 12 in short.txt, the others held out\): use a"),
        ("stdlib", {"length": 0}, "length must be at least 1; given 0"),
        ("short.txt", {"heldout_fraction": 0.0}, "heldout_fraction must be between 0 and 1; given 0.0"),
        ("short.txt", {"heldout_fraction": float("nan")}, "heldout_fraction must be between 0 and 1; given nan"),
    ],
)
def test_wrong_sources_and_arguments_are_refused(tmp_path, monkeypatch, source, options, message):
    write(tmp_path, empty="", short="ten bytes!", one="1")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        text_data(source, **{"length": 16} | options)


RNG = np.random.default_rng(0)
CHAPTERS = [f"In chapter {i} of the tale, ".encode() * 5 for i in range(40)]


def split(folder, documents, heldout_fraction):
    """The pieces to train on, those held out, and whether documents are whole."""
    for number, document in enumerate(documents):
        (folder / f"{number:02}.txt").write_bytes(document)
    data = text_data(folder, length=1, heldout_fraction=heldout_fraction)
    return *(side.ids.tobytes().split(b"\0")[:-1] for side in (data.train, data.heldout)), data.whole


def test_more_held_out_keeps_what_was_held_out(tmp_path):
    (_, few, _), (train, many, _) = split(tmp_path, CHAPTERS, 0.2), split(tmp_path, CHAPTERS, 0.4)
    assert set(few) < set(many) and sorted(train + many) == sorted(CHAPTERS)
    assert all(content_score(document) < 0.2 for document in few)


def test_the_split_is_the_same_for_ever():
    """Held-out text must not wander into training between versions."""
    assert content_score(b"abc") == 0.846604635986145


def test_few_documents_on_one_side_are_each_split(tmp_path):
    assert split(tmp_path, [b"abcdefghij", b"x"], 1e-9) == ([b"abcdefghi"], [b"j", b"x"], False)


def test_large_contents_are_distinguished_by_their_ends():
    """Without reading them whole; small ones by every byte."""

    def score(content):
        return ends_score(io.BytesIO(content))

    large = RNG.bytes(2**17)
    middle = large[: 2**16] + b"\0" + large[2**16 + 1 :]
    others = [b"\0" + large[1:], large[:-1] + b"\0", large + b"\0"]
    assert score(large) == score(middle) and len({*map(score, [large, *others])}) == 4
    assert score(large[:65536]) == content_score(large[:65536])
