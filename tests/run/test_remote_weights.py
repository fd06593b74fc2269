"""A model, its weights and tokenizer behind an address, on a real S3 server on this machine."""

import json
import re

import hf_reference
import pytest
from own_process import python
from safetensors.numpy import save_file
from tiny_experiment import points_text, tables, write_points
from tiny_runs import refused, rows

from jdp.base import notices
from jdp.base.bucket import Remote
from jdp.cli.main import main
from jdp.experiment.file import load, to_toml

tokenizers = pytest.importorskip("tokenizers")
STORED = json.loads(hf_reference.FILE.read_text(encoding="utf-8"))
TEXT = """
name = "llama"
seed = 0
[model]
name = "hf:{folder}"
[data]
source = "a.txt"
tokenizer = "{folder}"
length = 8
[optimizer]
lr = 1e-3
[train]
init_from = "{folder}"
init_names = "hf"
steps = 1
batch_size = 8
eval_batches = 1
"""


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """A folder as the hub has it: a tokenizer whose settings name what closes a document, and files nobody reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JDP_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(STORED["llama"]["config"]))
    save_file(hf_reference.weights(STORED["llama"]["shapes"]), folder / "model.safetensors")
    words = [f"w{i}" for i in range(hf_reference.VOCABULARY - 2)]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate([*words, "</s>", "<stop>"])}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    for again in ("pytorch_model.bin", "consolidated.safetensors", "other.json"):
        (folder / again).write_bytes(b"the same again")
    (tmp_path / "a.txt").write_text("\n\n".join(" ".join(words[i : i + 12]) for i in range(20)))
    return folder


def losses(file, name, capsys):
    code = main(["train", str(file), "--run-dir", name])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return [rows(file.parent / name / "llama", key)[1] for key in ("loss", "eval_loss")], printed


def test_a_hugging_face_model_is_all_behind_an_address(bucket, llama, tmp_path, capsys):
    address = f"{bucket}/models/llama"
    Remote(address).send([path.name for path in llama.iterdir()], llama)
    here, there = tmp_path / "here.toml", tmp_path / "there.toml"
    here.write_text(TEXT.format(folder=llama))
    there.write_text(TEXT.format(folder=address).replace(f'tokenizer = "{address}"\n', ""))  # the model's own
    expected, _ = losses(here, "a", capsys)
    found, printed = losses(there, "b", capsys)
    assert found == expected
    assert f"parameters from {address}" in printed.out + printed.err and "<stop> closes a document" in printed.out
    fetched = {path.name for path in (tmp_path / "cache/fetched").rglob("*") if path.is_file()}
    read = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert fetched - {".lock", "fetched.json"} == read
    # One file of weights, in a process that has nothing of it: JAX starts after what is fetched is said.
    one = there.read_text().replace('/llama"\ninit_names', '/llama/model.safetensors"\ninit_names')
    there.with_name("one.toml").write_text(f"devices = 2\n{one}")
    done = python("-m", "jdp", "train", "one.toml", "--run-dir", "c", JDP_CACHE_DIR=str(tmp_path / "cold"))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "llama: 1 files" in done.stderr + done.stdout
    assert rows(tmp_path / "c" / "llama", "loss") == {1: pytest.approx(expected[0], rel=1e-6)}
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("s3")]


def test_a_model_reads_text_by_the_tokenizer_of_its_folder(llama, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(notices, "_said", set())
    caplog.set_level("INFO", "jdp")
    file = tmp_path / "own.toml"
    file.write_text(TEXT.format(folder="llama").replace('tokenizer = "llama"\n', ""))
    assert load(file).data.tokenizer == str(llama) and f'tokenizer = "{llama}"' in to_toml(load(file))
    assert "the model's own" in caplog.text
    assert load(file, {"data.tokenizer": "bytes"}).data.tokenizer == "bytes"
    (llama / "tokenizer.json").unlink()
    assert load(file).data.tokenizer == "bytes" and "text is read as bytes" in caplog.text


def test_a_run_behind_an_address_gives_its_weights(bucket, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = write_points(tmp_path, points_text(tables(train={"steps": 3, "batch_size": 16, "eval_batches": 2})))
    assert main(["train", str(file), "--run-dir", f"{bucket}/runs"]) == 0
    trained = json.loads(Remote(f"{bucket}/runs/points").read("summary.json"))
    again = ["--run-dir", "again", "--train.init_from", f"{bucket}/runs/points", "--optimizer.lr", "1e-30"]
    assert main(["train", str(file), *again, "--train.steps", "1"]) == 0, capsys.readouterr().err
    assert f"parameters from {bucket}/runs/points" in capsys.readouterr().out
    summary = json.loads((tmp_path / "again/points/summary.json").read_text())
    assert summary["final_eval_loss"] == trained["final_eval_loss"]


WRONG = {
    "weights": (["--train.init_from", "{bucket}/none"], "train.init_from must be .*there is no s3://.*/none: fix"),
    "a file": (["--train.init_from", "{bucket}/a/w.safetensors"], "train.init_from must be .*there is no s3://"),
    "a bucket": (["--train.init_from", "s3://no-such-bucket-here/run"], "train.init_from: .*no-such-bucket-here"),
    "a tokenizer": (["--data.tokenizer", "{bucket}/none"], "an address must lead to .*there is nothing: fix"),
    "a model": (["--model.name", "hf:{bucket}/none"], "an address must lead to .*there is nothing: fix"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_what_is_not_there_is_one_clear_error(bucket, llama, tmp_path, capsys, arguments, words):
    file = tmp_path / "here.toml"
    file.write_text(TEXT.format(folder=llama))
    error = " ".join(refused(capsys, "train", file, *(word.format(bucket=bucket) for word in arguments)).split())
    assert re.search(words, error), error
    assert not (tmp_path / "runs").exists()
