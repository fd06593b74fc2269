"""Experiment files as they come out of slips, of other programs and of broken disks: refused with few words, exit 2."""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_experiment import SMALL

from jdp.cli import main as cli
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import from_table, load
from jdp.guard import memory_check

MOST_CHARACTERS = 1000
"""Of a message, besides the path of the file: what fits on a screen."""


def unreadable(path):
    path.write_text(SMALL)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")


def with_config(write):
    """Write a file whose model is a folder with this config.json."""

    def make(path):
        path.write_text(SMALL.replace("gpt-nano", f"hf:{path.parent}"))
        write(path.parent / "config.json")

    return make


def with_source(line):
    return SMALL.replace("[train]", f"{line}\n[train]")


LONG = "x" * 1_000_000
MALFORMED: dict[str, str | bytes | Callable[[Path], object]] = {
    "500 nested brackets": "x = " + "[" * 500 + "]" * 500 + SMALL,
    "strategy of 1 MB": f'strategy = "{LONG}"\n{SMALL}',
    "100 unknown keys": SMALL + "\n".join(f"k{i} = 1" for i in range(100)),
    "key of 1 MB": f"{LONG} = 1\n{SMALL}",
    "number of 10,000 digits": SMALL + "log_every = " + "9" * 10_000,
    "steps beyond 32 bits": SMALL.replace("= 50", "= 2147483648"),
    "lr too large for float32": SMALL + "[optimizer]\nlr = 1e200",
    "name with a colour code": SMALL.replace('"small"', r'"\u001b[31mred"'),
    "source that is too long": with_source(f'source = "{"y" * 5000}"'),
    "weights of a user who is not": SMALL + 'init_from = "~nosuchuser/run"',
    "vocabulary of 1e9": SMALL.replace('"gpt-nano"', '"gpt-nano"\nvocab_size = 1_000_000_000\nwidth = 16384000'),
    "ResNet of 1e7 blocks": SMALL.replace('"gpt-nano"', '"resnet-digits"\nblocks = [10_000_000, 2]'),
    "config that is nested": with_config(lambda config: config.write_text("[" * 100_000)),
    "config that is a pipe": with_config(os.mkfifo),
    "more than 1 MiB": lambda path: path.write_text("#" * 2**20 + "\n"),
    "unreadable": unreadable,
    "FIFO": os.mkfifo,
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_refused_in_few_words(tmp_path, content, capfd):
    path = tmp_path / "wrong.toml"
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(path, tmp_path, capfd)


def refused(path, folder, capfd, *more):
    """Run `jdp train` on the file; what it says must be an error, short, and of printable characters."""
    runs = folder / "runs"
    code = cli.main(["train", str(path), "--run-dir", str(runs), *more])
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err, shown.err[-2000:]
    assert code == 2, shown.err[-2000:]
    assert not shown.out and shown.err.startswith("error: ")
    message = shown.err.replace(str(folder), "")
    assert len(message) <= MOST_CHARACTERS and message.count("\n") <= 12, message[:2000]
    assert message.replace("\n", "").isprintable(), "no control codes"
    assert not runs.exists()


def test_a_file_of_a_windows_editor_is_read(tmp_path):
    path = tmp_path / "right.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load(path).train.steps == 50


OVERRIDES = {
    "nested": ("train.log_every", "[" * 500 + "]" * 500),
    "number beyond 64 bits": ("train.steps", "9" * 100),
    "bytes that are no text": ("data.source", "\udcff.txt"),
    "tokenizer without a path": ("data.tokenizer", ""),
}


@pytest.mark.parametrize(("key", "text"), OVERRIDES.values(), ids=OVERRIDES)
def test_a_malformed_override_is_refused_in_few_words(tmp_path, key, text, capfd):
    path = tmp_path / "right.toml"
    path.write_text(SMALL)
    refused(path, tmp_path, capfd, f"--{key}={text}")


def test_a_model_that_no_machine_holds_is_refused(tmp_path, capfd):
    sizes = ["--model.width", f"{2**30}", "--model.layers", f"{2**31 - 1}", "--model.scan", "true"]
    path = tmp_path / "x.toml"
    path.write_text(SMALL)
    code = cli.main(["train", str(path), "--run-dir", str(tmp_path / "runs"), *sizes])
    assert code == 2 and "a model has at most 2^50 parameters; given 2" in capfd.readouterr().err


def test_too_little_memory_is_reported_with_the_need(tmp_path, monkeypatch):
    """820,352 parameters in fp32, and AdamW's two moments; on 8 devices that share the memory."""
    experiment = from_table({**tomllib.loads(SMALL), "name": "x"})
    assembly = Assembly.on_devices(experiment)
    state = 12 * 820_352 * 8

    def with_memory(size):
        monkeypatch.setattr(memory_check, "memory_bytes", lambda: size)
        assembly.check_memory()

    with pytest.raises(ValueError, match="its weights and the optimizer's state must fit into the devices' memory"):
        with_memory(state * 0.99)
    with_memory(state * 1.01)
    with pytest.raises(ValueError, match=r"a batch must fit into memory; train\.batch_size = 16 makes 6 KiB"):
        with_memory(16 * 32 * 4 * 3 - 1)  # tokens, targets, weights
