"""Data that is damaged, not what its name says, or names what is not its own: one error with the file's name, or a
notice; never a traceback, an endless wait, or the memory of the machine."""

import io
import json
import os
import random
import struct
import zipfile
from pathlib import Path

import datasets
import numpy as np
import pytest
from corpora import read_corpus

from jdp.base.errors import UserError
from jdp.data import array_data, text_data
from jdp.data.images.samples import image_data
from jdp.data.sources import array_files as reads_arrays
from jdp.data.sources.array_files import read_arrays
from jdp.data.sources.hub import _check_files, hub_data
from jdp.data.text.tokenizers import open_tokenizer

LONGEST = 600
"""Characters of an error, besides the path."""


def refusal(read, path):
    """What `read(path)` says in the one error it must raise, which the command line would show without a traceback."""
    with pytest.raises(ValueError) as caught:
        read(path)
    assert isinstance(caught.value, UserError), repr(caught.value)
    message = str(caught.value)
    assert os.fspath(path) in message and len(message.replace(os.fspath(path), "")) < LONGEST
    return message


def read_ids(path):
    text_data(path, length=1, ids="features")


def npz(save=np.savez, **arrays):
    made = io.BytesIO()
    save(made, **arrays)
    return made.getvalue()


def member(content):
    """An .npz whose one member has these bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("features.npy", content)
    return made.getvalue()


def header(words):
    """The beginning of an .npy file, without any numbers after it."""
    words = words.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(words)) + words


ARRAYS = npz(features=np.arange(60.0).reshape(20, 3), labels=np.arange(20) % 2)
CLAIM = header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (550000000000,), }")
DAMAGED_ARRAYS = {
    "truncated": (ARRAYS[:400], "not a zip file"),
    "4 TB claimed": (member(CLAIM), r"features.npy claims [550000000000] float64, 4 TiB, and has 128 B"),
    "objects": (npz(features=np.array([{}, []], object)), "Object arrays cannot be loaded"),
    "one byte changed": (ARRAYS[:300] + bytes([ARRAYS[300] ^ 1]) + ARRAYS[301:], "Bad CRC-32"),
}


@pytest.mark.parametrize(("content", "expected"), DAMAGED_ARRAYS.values(), ids=DAMAGED_ARRAYS)
@pytest.mark.parametrize("read", [read_arrays, read_ids], ids=["arrays", "token ids"])
def test_a_damaged_npz_is_one_error(tmp_path, content, expected, read):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    said = refusal(read, path)
    assert expected in said and "arrays must be readable; given " in said


def test_arrays_that_unpack_to_more_than_the_memory_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    path.write_bytes(npz(np.savez_compressed, features=np.zeros((1000, 1000))))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(reads_arrays, "memory_bytes", lambda: 8_000_000)
    assert "its arrays have 7.63 MiB, and this machine has 7.63 MiB of memory" in refusal(read_arrays, path)
    monkeypatch.setattr(reads_arrays, "memory_bytes", lambda: 8_000_200)
    assert read_arrays(path)[0]["features"].shape == (1000, 1000)


FORMATS = {
    "npz": ("x.npz", ARRAYS, read_arrays),
    "npz compressed": ("x.npz", npz(np.savez_compressed, features=np.arange(60.0).reshape(20, 3)), read_arrays),
}
"""A file's name, its bytes when whole, and who reads it."""


@pytest.mark.parametrize("kind", FORMATS)
def test_whatever_bytes_are_damaged_a_file_is_read_or_is_one_error(tmp_path, kind):
    """40 damages by a fixed seed: cut off, or bytes changed, at the ends more often, where formats keep what they mean.
    In 12,000 others by hand these readers raised nothing else."""
    name, content, read = FORMATS[kind]
    path, draw = tmp_path / name, random.Random(kind)
    refused = 0
    for _ in range(40):
        path.write_bytes(damaged(content, draw))
        try:
            read(path)
        except ValueError as error:
            assert isinstance(error, UserError), repr(error)
            assert len(str(error)) < LONGEST + len(str(path))
            refused += 1
    assert refused > 10


def damaged(content, draw):
    if draw.random() < 0.2:
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        end = min(300, len(content))
        at = draw.choice([draw.randrange(len(content)), draw.randrange(end), len(content) - 1 - draw.randrange(end)])
        changed[at] = draw.choice([0, 255, draw.randrange(256), changed[at] ^ 1])
    return bytes(changed)


@pytest.mark.parametrize("source", ["{}", "hf:json:{}", "hf:parquet:{}", "hf:imagefolder:{}"])
def test_a_pipe_in_a_folder_of_data_is_refused_and_not_waited_for(tmp_path, own_hub, source):
    (tmp_path / "a").mkdir()
    for name in ("x.txt", "x.jsonl", "x.parquet", "a/x.png"):
        if Path(name).suffix.strip(".") in {"{}": "txt", "hf:json:{}": "jsonl", "hf:parquet:{}": "parquet"}.get(
            source, "png"
        ):
            os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="it is a pipe or a device"):
        read_corpus(source.format(tmp_path))


def read_text(path):
    text_data(path, length=8)


NAMES = {"a NUL": "a\0b", "too long": "y" * 300, "nobody's": "~nosuchuser/x", "no UTF-8": "\udcff"}
READERS = {"text": read_text, "arrays": array_data, "images": image_data, "tokenizer": open_tokenizer}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("suffix", ["", ".npz", "/*.txt"])
def test_a_name_that_no_file_can_have_is_one_error(read, name, suffix):
    with pytest.raises(ValueError, match="a path must ") as caught:
        read(f"{name}{suffix}")
    assert isinstance(caught.value, UserError) and len(str(caught.value)) < LONGEST


CARD = "---\nconfigs:\n- config_name: default\n  {}\n---\n"


@pytest.fixture
def offline(own_hub, tmp_path):
    return tmp_path


def card_folder(folder, names):
    own = folder / "own"
    own.mkdir()
    (folder / "other.txt").write_text("not its own\n")
    (own / "own.txt").write_text("its own\n")
    (own / "README.md").write_text(CARD.format(names.replace("FOLDER", str(folder))))
    return own


OUTSIDE = {
    "up": "data_files: ../other.txt",
    "absolute": "data_files: FOLDER/other.txt",
    "by a glob": "data_files: ../o*.txt",
}


@pytest.mark.parametrize("names", OUTSIDE.values(), ids=OUTSIDE)
def test_a_data_set_whose_card_names_files_outside_is_refused(offline, names):
    own = card_folder(offline, names)
    (own / "sub").mkdir()
    said = r"must name its own files; given .*other\.txt, which is outside of the folder"
    with pytest.raises(ValueError, match=said):
        hub_data(f"hf:{own}")


@pytest.mark.parametrize("names", ["data_files: own.txt", "data_files: FOLDER/own/own.txt", "data_files: '*.txt'"])
def test_a_data_set_whose_card_names_its_own_files_is_read(offline, names):
    own = card_folder(offline, names)
    assert hub_data(f"hf:{own}")[1].to_list() == [{"text": "its own"}]


def test_a_saved_data_set_that_names_files_outside_is_refused(offline):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(offline / "own")
    assert hub_data(f"hf:{offline / 'own'}")[1].num_rows == 1
    (offline / "own" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../other.arrow"}]}))
    with pytest.raises(ValueError, match=r"other\.arrow, which is outside of the folder"):
        hub_data(f"hf:{offline / 'own'}")
    both = offline / "both"
    both.mkdir()
    (both / "dataset_dict.json").write_text('{"splits": ["../own"]}')
    with pytest.raises(ValueError, match="which is outside of the folder"):
        hub_data(f"hf:{both}")


def test_a_data_set_on_the_hub_names_no_file_of_this_disk():
    _check_files(["hf://datasets/owner/name@main/a.txt", "zip://a.txt::https://host/b.zip"], None)
    for file in ("/etc/passwd", "file:///etc/passwd", "zip://a.txt::/etc/b.zip"):
        with pytest.raises(ValueError, match="which is on this disk"):
            _check_files([file], None)
