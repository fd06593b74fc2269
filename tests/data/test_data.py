"""What the data promises: one order on any number of processes, nothing lost or repeated, nothing silent."""

import itertools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jdp.data import TextSamples, batch_count, decode, encode, global_batches, sample_index, text_data
from jdp.data.split import content_score, split_documents
from jdp.data.text.documents import read_corpus

SMALL_AND_LARGE = [1, 2, 3, 10, 257, 2**16 + 3]  # the last one takes grain's shuffle, the others the table


class Counted:
    """Samples that are their own index, and a list of the reads."""

    def __init__(self, samples, *, weights=True):
        self.samples, self.weights, self.reads = samples, weights, []

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        assert 0 <= index < self.samples
        self.reads.append(index)
        sample = {"tokens": np.full(3, index, np.int32)}
        return sample | {"weights": np.ones(3, np.float32)} if self.weights else sample


def indices(batches):
    """int [batches, rows]: which sample stands there, -1 for padding."""
    return np.array([np.where(batch["weights"][:, 0] > 0, batch["tokens"][:, 0], -1) for batch in batches])


def first(count, batches):
    iterator = iter(batches)
    taken = [next(iterator) for _ in range(count)]
    iterator.close()
    return taken


def shares(processes, batch_size):
    """The rows of each process, uneven ones where they do not divide."""
    edges = [process * batch_size // processes for process in range(processes + 1)]
    return [range(*edge) for edge in itertools.pairwise(edges)]


def write(folder, **texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def documents_of(side):
    return side.tokens.tobytes().split(b"\0")[:-1]


# --- the order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", SMALL_AND_LARGE)
def test_every_epoch_is_a_permutation(samples):
    epochs = 1 if samples > 1000 else 4
    order = np.array([sample_index(7, samples, position) for position in range(epochs * samples)])
    for epoch in np.split(order, epochs):
        assert np.array_equal(np.sort(epoch), np.arange(samples))


@pytest.mark.parametrize("samples", [257, 2**16 + 3])
def test_epochs_and_seeds_have_orders_of_their_own(samples):
    def order(seed, epoch):
        return tuple(sample_index(seed, samples, epoch * samples + index) for index in range(50))

    orders = {(seed, epoch): order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == len(orders)  # in particular: epoch 1 of seed 0 is not epoch 0 of seed 1


@pytest.mark.parametrize("samples", [3, 7])
def test_shuffles_are_even(samples):
    """Each sample stands at each place equally often: chi-squared over 2,000 epochs, well inside five deviations."""
    epochs = 2000
    counts = np.zeros((samples, samples))
    for epoch in range(epochs):
        for index in range(samples):
            counts[index, sample_index(0, samples, epoch * samples + index)] += 1
    freedom = (samples - 1) ** 2
    chi_squared = ((counts - epochs / samples) ** 2 / (epochs / samples)).sum()
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_of_a_large_shuffle_are_not_correlated():
    samples = 2**16 + 3
    order = [sample_index(1, samples, index) for index in range(samples)]
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(samples)


def test_the_order_is_the_same_for_ever():
    """Runs are resumed under other versions of NumPy and grain: these numbers may not change."""
    assert [sample_index(0, 10, position) for position in range(12)] == [1, 4, 5, 6, 8, 2, 0, 3, 9, 7, 7, 8]
    assert [sample_index(0, 10**6, at) for at in (0, 1, 2, 10**6, 10**6 + 1)] == [874232, 949262, 79955, 996274, 204535]


# --- global batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 5, 12, 50])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_processes_together_read_the_global_batches(samples, processes):
    def batches(**rows):
        return indices(first(6, global_batches(Counted(samples), batch_size=14, seed=3, **rows)))

    parts = [batches(rows=rows) for rows in shares(processes, 14)]
    assert np.array_equal(np.concatenate(parts, axis=1), batches())


@pytest.mark.parametrize("rows", [slice(1, None, 3), [4, 0], np.array([2, 3])])
def test_rows_come_in_the_order_asked_for(rows):
    whole = indices(first(4, global_batches(Counted(20), batch_size=6, seed=3)))
    mine = indices(first(4, global_batches(Counted(20), batch_size=6, seed=3, rows=rows)))
    assert np.array_equal(mine, whole[:, rows])


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_follow_without_a_break(shuffle):
    """Ten samples in batches of four: each sample once an epoch, though batches straddle the epochs."""
    epochs = indices(first(10, global_batches(Counted(10), batch_size=4, seed=0, shuffle=shuffle))).reshape(4, 10)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(10), (4, 1)))
    assert len(np.unique(epochs, axis=0)) == (4 if shuffle else 1)


@pytest.mark.parametrize("start", [0, 1, 5, 17])
def test_a_start_is_the_tail_of_the_whole(start):
    whole = indices(first(20, global_batches(Counted(30), batch_size=8, seed=5)))
    resumed = indices(first(20 - start, global_batches(Counted(30), batch_size=8, seed=5, start=start)))
    assert np.array_equal(resumed, whole[start:])


def test_a_late_start_costs_nothing():
    source = Counted(2**16 + 3)
    [batch] = first(1, global_batches(source, batch_size=4, seed=0, start=10**9))
    assert batch["tokens"][:, 0].tolist() == [sample_index(0, len(source), 4 * 10**9 + row) for row in range(4)]
    assert len(source.reads) <= 4 * 6  # this batch and those read ahead


def test_each_iteration_begins_at_the_start():
    batches = global_batches(Counted(9), batch_size=4, seed=0, start=1, epochs=2)
    assert np.array_equal(indices(batches), indices(batches))


def test_only_own_rows_are_read():
    source = Counted(20)
    list(global_batches(source, batch_size=4, seed=1, rows=[1, 3], epochs=1))
    assert sorted(source.reads) == sorted(sample_index(1, 20, 4 * batch + row) for batch in range(5) for row in (1, 3))


@pytest.mark.parametrize("samples", [1, 4, 10, 12])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_evaluation_sees_every_sample_once_and_ends_together(samples, processes):
    source = Counted(samples)
    parts = []
    for rows in shares(processes, 4):
        batches = list(global_batches(source, batch_size=4, seed=0, rows=rows, epochs=1, shuffle=False))
        assert len(batches) == batch_count(source, batch_size=4)
        assert all(batch["tokens"].shape == batch["weights"].shape == (len(rows), 3) for batch in batches)
        parts.append(indices(batches))
    line = np.concatenate(parts, axis=1).flatten()
    assert line.tolist() == list(range(samples)) + [-1] * (-samples % 4)


def test_samples_may_hold_anything_but_need_weights_to_be_padded():
    source = Counted(6, weights=False)
    assert [batch["tokens"].shape for batch in global_batches(source, batch_size=3, seed=0, epochs=1)] == [(3, 3)] * 2
    with pytest.raises(ValueError, match=r"weight 0, but samples have no \"weights\", only \['tokens'\]"):
        list(global_batches(source, batch_size=4, seed=0, epochs=1))


def test_an_error_of_the_source_reaches_the_loop():
    class Broken(Counted):
        def __getitem__(self, index):
            raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        next(iter(global_batches(Broken(4), batch_size=2, seed=0)))


def test_a_batch_larger_than_the_data_is_allowed_and_said(caplog):
    with caplog.at_level(logging.INFO, "jdp"):
        [batch] = first(1, global_batches(Counted(3), batch_size=7, seed=0))
    assert sorted(batch["tokens"][:3, 0]) == sorted(batch["tokens"][3:6, 0]) == [0, 1, 2]
    assert "batch_size 7 is larger than the data set (3 samples)" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"start": -1}, "start must be a batch of the run, .* got -1"),
        ({"start": 4, "epochs": 1}, "start must be a batch of the run, 0 to 3, got 4"),
        ({"rows": []}, r"at least one row .* got \[\]"),
        ({"rows": [0, 4]}, r"each from 0 to 3, got \[0, 4\]"),
        ({"rows": [-1]}, r"each from 0 to 3, got \[-1\]"),
    ],
)
def test_what_is_wrong_with_a_run_is_said_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        global_batches(Counted(12), **({"batch_size": 4, "seed": 0} | wrong))


def test_no_samples_no_run():
    with pytest.raises(ValueError, match="at least one sample, got none"):
        global_batches(Counted(0), batch_size=1, seed=0)


@pytest.mark.parametrize(
    ("seed", "length", "position", "message"),
    [(-1, 3, 0, "seed"), (0, 0, 0, "got 0"), (0, 2**32 + 1, 0, "got 4294967297"), (0, 3, -1, "position")],
)
def test_an_order_that_cannot_be(seed, length, position, message):
    with pytest.raises(ValueError, match=message):
        sample_index(seed, length, position)


def test_an_abandoned_run_ends_in_silence():
    """Reading threads still busy when the program leaves: no hang, no warning, no trace."""
    program = (
        "import numpy as np; from jdp.data import global_batches\n"
        "batches = iter(global_batches([{'x': np.zeros(3)}] * 99, batch_size=4, seed=0)); next(batches)"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# --- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 9, 10, 11, 16, 17, 18, 100])
def test_every_token_but_the_first_is_a_target_once(size):
    text = np.arange(1, size + 1).astype(np.uint8)
    samples = list(TextSamples(text, length=8))
    assert len(samples) == len(TextSamples(text, length=8))
    for sample in samples:
        assert {key: (value.shape, value.dtype) for key, value in sample.items()} == {
            "tokens": ((8,), np.int32),
            "targets": ((8,), np.int32),
            "weights": ((8,), np.float32),
        }
    counted = np.concatenate([sample["weights"] for sample in samples]) == 1
    assert np.array_equal(np.concatenate([sample["targets"] for sample in samples])[counted], text[1:])
    assert np.array_equal(np.concatenate([sample["tokens"] for sample in samples])[counted], text[:-1])
    filling = samples[-1]["weights"] == 0
    assert not samples[-1]["tokens"][filling].any() and not samples[-1]["targets"][filling].any()


def test_samples_are_a_sequence():
    samples = TextSamples(np.arange(10, dtype=np.uint8), length=4)
    assert np.array_equal(samples[-1]["tokens"], samples[2]["tokens"])
    with pytest.raises(IndexError):
        samples[3]


def test_samples_need_a_length_and_a_target():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        TextSamples(np.zeros(9, np.uint8), length=0)
    with pytest.raises(ValueError, match=r"one token and its target, got 1 byte"):
        TextSamples(np.zeros(1, np.uint8), length=4)


def test_text_comes_back():
    text = "naïve — ☃\n"
    assert encode(text).dtype == np.int32
    assert decode(encode(text)) == text
    assert decode(encode("☃")[:2]) == "�"
    assert decode([]) == ""


@pytest.mark.parametrize("token", [-1, 256])
def test_only_bytes_are_decoded(token):
    with pytest.raises(ValueError, match=r"a token is a byte, 0 to 255, got"):
        decode([65, token])


# --- the split ------------------------------------------------------------------------------------------------------


TEXTS = {f"chapter{i}": f"In chapter {i} of the tale, " * 5 for i in range(40)}


def test_the_split_is_whole_disjoint_and_content_based(tmp_path):
    here = text_data(write(tmp_path / "here", **TEXTS), length=16, heldout_fraction=0.25)
    moved = {f"z{name[::-1]}": text for name, text in reversed(TEXTS.items())}
    there = text_data(write(tmp_path / "else" / "where", **moved), length=16, heldout_fraction=0.25)
    train, heldout = set(documents_of(here.train)), set(documents_of(here.heldout))
    assert train | heldout == {text.encode() for text in TEXTS.values()}
    assert not train & heldout and train and heldout and here.whole
    assert (set(documents_of(there.train)), set(documents_of(there.heldout))) == (train, heldout)


def test_more_held_out_keeps_what_was_held_out():
    documents = [text.encode() for text in TEXTS.values()]
    few, many = split_documents(documents, 0.2), split_documents(documents, 0.4)
    assert set(few.heldout) < set(many.heldout)
    assert all(content_score(document) < 0.2 for document in few.heldout)


def test_the_split_is_the_same_for_ever():
    """Held-out text must not wander into training between versions."""
    assert content_score(b"abc") == 0.846604635986145


def test_one_file_is_parted_at_its_tail_and_said_once(tmp_path, caplog):
    text = "".join(f"{number:03d} " for number in range(250))
    with caplog.at_level(logging.INFO, "jdp"):
        text_data(write(tmp_path, only=text), length=8, heldout_fraction=0.1)
        data = text_data(tmp_path, length=8, heldout_fraction=0.1)
    assert documents_of(data.train) + documents_of(data.heldout) == [text[:900].encode(), text[900:].encode()]
    assert not data.whole and "the tail of each document" in str(data)
    assert caplog.text.count("the tail of each is held out") == 1


def test_few_files_on_one_side_are_each_parted():
    documents = [b"abcdefghij", b"x"]
    split = split_documents(documents, 1e-9)
    assert (split.train, split.heldout, split.whole) == ((b"abcdefghi",), (b"j", b"x"), False)


# --- sources --------------------------------------------------------------------------------------------------------


def test_the_standard_library():
    data = text_data("stdlib", length=128, heldout_fraction=0.1)
    total = len(data.train.tokens) + len(data.heldout.tokens)
    assert total > 5e6 and data.documents > 300
    assert 0.02 < len(data.heldout.tokens) / total < 0.3
    held, kept = documents_of(data.heldout), documents_of(data.train)
    assert Path(logging.__file__).read_bytes() in held + kept
    assert Path(pytest.__file__).read_bytes() not in held + kept  # beside the library, not of it
    assert not any(b"\nimport pytest" in document for document in kept)
    assert re.search(
        r"stdlib \(Python 3\.\d+\.\d+\w*\): [\d,]+ documents, [\d,]+ bytes; train [\d,]+ bytes in", str(data)
    )


def test_a_file_a_glob_a_directory_and_a_list_are_the_same_text(tmp_path, monkeypatch):
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


def test_a_path_may_look_like_a_glob(tmp_path):
    write(tmp_path / "data[1]", a="text")
    assert read_corpus(tmp_path / "data[1]").documents == (b"text",)


def test_stdlib_may_stand_in_a_list(tmp_path):
    write(tmp_path, a="my own text")
    corpus = read_corpus(["stdlib", tmp_path / "a.txt"])
    assert b"my own text" in corpus.documents and len(corpus.documents) > 300
    assert corpus.name.endswith("and 1 more")


def test_a_directory_is_read_by_suffix_and_says_what_it_passes_over(tmp_path, caplog):
    write(tmp_path, a="text")
    write(tmp_path / ".hidden", b="not seen")
    (tmp_path / ".draft.txt").write_text("not seen")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with caplog.at_level(logging.INFO, "jdp"):
        assert read_corpus(tmp_path).documents == (b"text",)
    assert f"{tmp_path}: reading 1 files (.txt, .md, .rst, .py), passing over 2 others" in caplog.text
    assert read_corpus(tmp_path, suffixes=[".png"]).documents == (b"\x89PNG",)
    assert read_corpus(tmp_path / "*.png").documents == (b"\x89PNG",)


def test_a_separator_in_the_text_is_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "jdp"):
        text_data(write(tmp_path, utf16="wide text".encode("utf-16")), length=4)
    assert "byte 0, which closes a document, is in 1 of them" in caplog.text


def test_empty_files_hold_no_document(tmp_path):
    write(tmp_path, a="", b="text", c="")
    assert read_corpus(tmp_path).documents == (b"text",)


def test_the_fingerprint_tells_texts_and_lengths_apart(tmp_path):
    def fingerprint(text, length=4):
        return text_data(write(tmp_path, a=text), length=length).fingerprint

    assert fingerprint("some text to read") == fingerprint("some text to read")
    assert (
        len({fingerprint("some text to read"), fingerprint("some text to reap"), fingerprint("some text to read", 5)})
        == 3
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.txt", r"exists, got missing.txt, looked for at /.*/missing.txt: mend the path"),
        ("*.text", r"a glob must match at least one file, got \*.text"),
        ("pictures", r"must hold text files \(.txt, .md, .rst, .py\), got pictures with 1 other file"),
        ("empty.txt", r"text must not be empty, got empty.txt: 1 empty file"),
        (["empty.txt", "missing.txt"], r"got missing.txt"),
        ([], r"source must name some text, got an empty list"),
        ("short.txt", r"length 16 needs 17 bytes, got 10 \(of 12 in short.txt, the rest held out\): give more"),
        ("one.txt", r"length 16 needs 17 bytes, got 0"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(tmp_path, monkeypatch, source, message):
    write(tmp_path, empty="", short="ten bytes!", one="1")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        text_data(source, length=16)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, locked="text") / "locked.txt"

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=rf"must be readable, got {path}, Permission denied: mend its permissions"):
        text_data(path, length=4)


def test_a_directory_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=rf"must be readable, got {tmp_path}, Permission denied"):
        read_corpus(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"heldout_fraction": 0.0}, "heldout_fraction must lie between 0 and 1, got 0.0"),
        ({"heldout_fraction": 1.0}, "heldout_fraction must lie between 0 and 1, got 1.0"),
        ({"heldout_fraction": float("nan")}, "heldout_fraction must lie between 0 and 1, got nan"),
        ({"suffixes": ["txt"]}, r"suffixes must each begin with a dot, got \['txt'\]"),
        ({"suffixes": []}, r"suffixes must each begin with a dot, got \[\]"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        text_data(write(tmp_path, **TEXTS), **({"length": 8} | wrong))
