"""What text promises: every token a target once, cut or packed; the same split everywhere; sources read as named."""

import io
import itertools
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from corpora import read_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.data import TextSamples, text_data
from jdp.data.held_out import content_score, ends_score
from jdp.data.text.samples import best_fit


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


def test_few_documents_are_split_at_their_tails(tmp_path, notices):
    text = "".join(f"{number:03d} " for number in range(250))
    data = text_data(write(tmp_path, only=text), length=8, heldout_fraction=0.1)
    assert documents_of(data.train) + documents_of(data.heldout) == [text[:900].encode(), text[900:].encode()]
    assert not data.whole and "the tail of each document" in str(data)
    assert notices.text.count("the tail of each is held out") == 1
    few = text_data(write(tmp_path / "few", a="abcdefghij", b="x"), length=1, heldout_fraction=1e-9)
    assert (documents_of(few.train), documents_of(few.heldout), few.whole) == ([b"abcdefghi"], [b"j", b"x"], False)


def test_the_standard_library():
    data = text_data("stdlib", length=128, heldout_fraction=0.1)
    total = len(data.train.ids) + len(data.heldout.ids)
    assert total > 5e6 and data.documents > 300
    assert 0.02 < len(data.heldout.ids) / total < 0.3
    held, kept = documents_of(data.heldout), documents_of(data.train)
    assert Path(logging.__file__).read_bytes() in held + kept
    assert Path(pytest.__file__).read_bytes() not in held + kept  # beside the library, not of it
    assert not any(b"\nimport pytest" in document for document in kept)
    said = r"stdlib \(Python 3\.\S+\): [\d,]+ documents, [\d,]+ tokens by bytes .*; train [\d,]+ tok"
    assert re.search(said, str(data))


def test_files_globs_directories_and_lists_agree(tmp_path, monkeypatch):
    part = write(tmp_path / "book [1]" / "part", a="first", b="second")
    (part / "link.txt").symlink_to(part / "a.txt")
    monkeypatch.chdir(part)
    folder, listed = part.parent, (part / "b.txt", part / "a.txt", str(part))
    for source in (folder, str(folder), f"{folder}/**/*.txt", f"{folder}/**", listed, ["b.txt", "a.txt"]):
        assert read_corpus(source).documents == (b"first", b"second")
    assert read_corpus(part / "a.txt").documents == (b"first",)


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
        ("missing.txt", {}, r"that exists, .*; given missing.txt, looked for at /.*/missing.txt: fix the path"),
        ("pictures", {}, r"must hold .txt, .*; given pictures with 0 of these and 1 others such as a.png: write"),
        ("empty.txt", {}, r"text must not be empty; given empty.txt: add text"),
        ([], {}, r"source must name some text; given an empty list"),
        ("short.txt", {}, r"length 16 needs 17 tokens; given 10 \(of 12 in short.txt, the others held out\): use a"),
        ("stdlib", {"length": 0}, "length must be at least 1; given 0"),
        ("short.txt", {"heldout_fraction": 0.0}, "heldout_fraction must be between 0 and 1; given 0.0"),
    ],
)
def test_wrong_sources_and_arguments_are_refused(tmp_path, monkeypatch, source, options, message):
    write(tmp_path, empty="", short="ten bytes!")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        text_data(source, **{"length": 16} | options)


def test_more_held_out_keeps_what_was_held_out(tmp_path):
    """Held-out text must not wander into training, also between versions."""
    folder = write(tmp_path, **{f"{i:02}": f"In chapter {i} of the tale, " * 5 for i in range(40)})
    few, many = (text_data(folder, length=1, heldout_fraction=fraction) for fraction in (0.2, 0.4))
    held = documents_of(many.heldout)
    assert set(documents_of(few.heldout)) < set(held)
    assert sorted(documents_of(many.train) + held) == sorted(file.read_bytes() for file in folder.glob("*.txt"))
    assert all(content_score(document) < 0.2 for document in documents_of(few.heldout))
    assert content_score(b"abc") == 0.846604635986145


def test_large_contents_are_distinguished_by_their_ends():
    """Without reading them whole; small ones by every byte."""

    def score(content):
        return ends_score(io.BytesIO(content))

    large = np.random.default_rng(0).bytes(2**17)
    middle = large[: 2**16] + b"\0" + large[2**16 + 1 :]
    others = [b"\0" + large[1:], large[:-1] + b"\0", large + b"\0"]
    assert score(large) == score(middle) and len({*map(score, [large, *others])}) == 4
    assert score(large[:65536]) == content_score(large[:65536])


def packed(sizes, length):
    """Documents of these sizes whose tokens are all different: 0, 1, 2, … in order."""
    bounds = np.array(list(itertools.accumulate(sizes, initial=0)), np.int64)
    return TextSamples(np.arange(bounds[-1], dtype=np.uint32), length, bounds, packing="documents")


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40).filter(lambda sizes: max(sizes) > 1),
    length=st.integers(1, 20),
)
def test_every_packed_token_is_a_target_once(sizes, length):
    """And a segment is a piece of one document."""
    samples = packed(sizes, length)
    firsts = set(samples.bounds[:-1].tolist())
    rows = [samples[index] for index in range(len(samples))]
    targets = np.concatenate([row["targets"][row["weights"] == 1] for row in rows])
    assert sorted(targets.tolist()) == [token for token in range(sum(sizes)) if token not in firsts]
    assert samples.waste == pytest.approx(1 - len(targets) / (len(rows) * length))
    for row in rows:
        tokens, segments, counted = row["tokens"], row["segments"], row["weights"] == 1
        assert counted[0] and not np.diff(counted.astype(int)).clip(0).any()  # what is empty is at the end
        assert np.array_equal(counted, segments > 0) and not any([*tokens[~counted], *row["targets"][~counted]])
        assert np.array_equal(row["targets"][counted], tokens[counted] + 1)  # never the next document's
        assert segments[0] == 1 and set(np.diff(segments[counted]).tolist()) <= {0, 1}
        for segment in range(1, segments.max() + 1):
            piece = tokens[segments == segment]
            documents = np.searchsorted(samples.bounds, piece, side="right")
            assert (np.diff(piece) == 1).all() and len(set(documents.tolist())) == 1


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 17), max_size=60))
def test_rows_are_few(sizes):
    """No two rows would fit into one, so none or one is less than half full."""
    rows = best_fit(sorted(sizes, reverse=True), 17)
    filled = np.bincount(rows, weights=sorted(sizes, reverse=True)) if rows else np.zeros(0)
    assert (filled <= 17).all() and (filled > 0).all()
    assert all(a + b > 17 for a, b in itertools.combinations(filled.tolist(), 2))


def test_text_is_packed_whole(tmp_path):
    texts = [f"chapter {number} {'and so on ' * (number % 7)}" for number in range(60)]
    write(tmp_path, **{str(number): text for number, text in enumerate(texts)})
    sizes = {"length": 96, "heldout_fraction": 0.3}
    packed, stream = (text_data(tmp_path, **sizes, packing=packing) for packing in ("documents", "stream"))
    assert sorted(documents_of(packed.train) + documents_of(packed.heldout)) == sorted(map(str.encode, texts))
    assert np.array_equal(packed.train.ids, stream.train.ids)  # the split does not depend on the packing
    assert packed.fingerprint != stream.fingerprint and " of them empty, held out " in str(packed)
    for row in map(packed.train.__getitem__, range(len(packed.train))):
        first = packed.tokenizer.decode(row["targets"][row["segments"] == 1])
        assert first.endswith("\0")  # the separator is a target too
