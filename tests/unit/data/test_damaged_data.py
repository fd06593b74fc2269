"""Data that is damaged, or names what is not its own: one error with the file's name; never a traceback or a wait."""

import json
import os

import datasets
import numpy as np
import pytest
from corpora import read_corpus

from jdp.base.errors import UserError
from jdp.data import array_data, image_data, open_tokenizer, text_data
from jdp.data.sources.array_files import read_arrays
from jdp.data.sources.hub import check_files, hub_data


def read_text(path):
    text_data(path, length=8)


def read_ids(path):
    text_data(path, length=1, ids="features")


@pytest.mark.parametrize("read", [read_arrays, read_ids], ids=["arrays", "token ids"])
@pytest.mark.parametrize(("objects", "bytes_left"), [(False, 400), (True, None)], ids=["truncated", "objects"])
def test_a_damaged_npz_is_one_error(tmp_path, objects, bytes_left, read):
    path = tmp_path / "x.npz"
    np.savez(path, features=np.array([{}, []], object) if objects else np.arange(60.0))
    path.write_bytes(path.read_bytes()[:bytes_left])
    with pytest.raises(UserError, match=rf"arrays must be readable; given {path}: .*; write the file again"):
        read(path)


@pytest.mark.parametrize(
    ("source", "name"), [("{}", "x.txt"), ("hf:json:{}", "x.jsonl"), ("hf:imagefolder:{}", "x.png")]
)
def test_a_pipe_is_not_waited_for(tmp_path, own_hub, source, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="it is a pipe or a device"):
        read_corpus(source.format(tmp_path))


READERS = {"text": read_text, "arrays": array_data, "images": image_data, "tokenizer": open_tokenizer}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_an_impossible_name_is_one_error(read):
    with pytest.raises(UserError, match="a path must "):
        read("a\0b.npz")


def test_hub_data_names_no_local_file():
    check_files(["hf://datasets/owner/name@main/a.txt", "zip://a.txt::https://host/b.zip"], None)
    for file in ("/etc/passwd", "file:///etc/passwd", "zip://a.txt::/etc/b.zip"):
        with pytest.raises(UserError, match="which is on this disk"):
            check_files([file], None)


@pytest.mark.parametrize("named", ["own.txt", "../o*.txt", "FOLDER/other.txt"])
def test_a_card_names_files_of_its_folder(own_hub, tmp_path, named):
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


def test_a_saved_set_names_its_own_files(own_hub, tmp_path):
    own, both = tmp_path / "own", tmp_path / "both"
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(own)
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"]})).save_to_disk(both)
    assert hub_data(f"hf:{own}")[1].num_rows == hub_data(f"hf:{both}")[1].num_rows == 1
    (both / "dataset_dict.json").write_text('{"splits": ["../own"]}')
    (own / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../other.arrow"}]}))
    for folder in (own, both):
        with pytest.raises(UserError, match=r"other\.arrow, which is outside of the folder"):
            hub_data(f"hf:{folder}")
