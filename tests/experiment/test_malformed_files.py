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
from jdp.models import parameter_count
from jdp.models.sizes import SIZES, parameter_lower_bound

MOST_CHARACTERS = 1000
"""Of a message, besides the path of the file: what fits on a screen."""


def top(text):
    return f"{text}\n{SMALL}"


def end(text):
    return f"{SMALL}{text}\n"


def model(text):
    return SMALL.replace('"gpt-nano"\n', f'"gpt-nano"\n{text}\n')


def data(text):
    return SMALL.replace("length = 32\n", f"length = 32\n{text}\n")


def name(text):
    return SMALL.replace('"small"', text)


def pictures(source, *, model='"vit-digits"'):
    return SMALL.replace('"gpt-nano"', model).replace("length = 32", f"source = {source}")


LONG = "x" * 1_000_000
LONGER = "x" * 10_000_000
DEEP = ".".join(["a"] * 2000)
MALFORMED: dict[str, str | bytes] = {
    "empty": "",
    "JSON": '{"name": "small", "train": {"steps": 50}}',
    "a merge's marks": f"<<<<<<< HEAD\n{SMALL}=======\n{SMALL}>>>>>>> other\n",
    "key twice": end("steps = 3"),
    "UTF-16": SMALL.encode("utf-16"),
    "NUL in a string": name('"a\0b"'),
    "500 nested brackets": top("x = " + "[" * 500 + "]" * 500),
    "100,000 nested brackets": top("x = " + "[" * 100_000),
    "dotted key of 2000 parts": top(f"{DEEP} = 1"),
    "bad line of 1 MB": end(f"x = {LONG}"),
    "name of 10 MB": name(f'"{LONGER}"'),
    "name of 300 characters": name(f'"{"x" * 300}"'),
    "strategy of 1 MB": top(f'strategy = "{LONG}"'),
    "20,000 wrong entries": SMALL.replace("gpt-nano", "mlp").replace("[data]", f"hidden = {['x'] * 20_000}\n[data]"),
    "100 unknown keys": end("\n".join(f"k{i} = 1" for i in range(100))),
    "100 bad rules": end("[rules]\n" + "\n".join(f'"p{i}" = 3' for i in range(100))),
    "key of 1 MB": top(f"{LONG} = 1"),
    "evaluation set with odd characters": end("[eval.'a/../../b']\nsource = 'x'"),
    "source of 1 MB": data(f'source = "{LONG}"'),
    "number of 10,000 digits": end("log_every = " + "9" * 10_000),
    "steps beyond 32 bits": SMALL.replace("= 50", "= 2147483648"),
    "batch beyond any memory": SMALL.replace("= 16", "= 1000000000000"),
    "negative seed": top("seed = -1"),
    "lr nan": end("[optimizer]\nlr = nan"),
    "lr too large for float32": end("[optimizer]\nlr = 1e200"),
    "fraction beyond 1": data("heldout_fraction = 1.5"),
    "steps inf": SMALL.replace("= 50", "= inf"),
    "layers a fraction": model("layers = 1.5"),
    "devices beyond any machine": top("devices = 1000000000"),
    "mesh beyond any machine": end("[mesh]\ndata = 1000000000000000000000"),
    "date for a name": name("2024-01-01"),
    "date in a rule": end('[rules]\n"*" = [2024-01-01]'),
    "table for a source": data("source = {a = 1}"),
    "array for a table": "optimizer = [1, 2]\n" + SMALL,
    "empty name": name('""'),
    "name that leaves": name('"../x"'),
    "name with a NUL": name(r'"a\u0000b"'),
    "name with a colour code": name(r'"\u001b[31mred"'),
    "empty source": data('source = ""'),
    "empty axis": end('[mesh]\n"" = 2'),
    "empty model": SMALL.replace('name = "gpt-nano"\n', ""),
    "model of another kind's fields": model("image_size = 8"),
    "source with a NUL": data(r'source = "a\u0000b"'),
    "source that is too long": data(f'source = "{"y" * 5000}"'),
    "source of a user who is not": data('source = "~nosuchuser/text.txt"'),
    "tokenizer of a user who is not": data('tokenizer = "~nosuchuser/t.json"'),
    "weights of a user who is not": end('init_from = "~nosuchuser/run"'),
    "arrays with a NUL": data(r'source = "a\u0000b.npz"'),
    "source that is a device": data('source = "/dev/null"'),
    "pictures of a user who is not": pictures("'~nobody-/x'"),
    "model of a user who is not": SMALL.replace("gpt-nano", "hf:~nosuchuser/x"),
    "model that is a device": SMALL.replace("gpt-nano", "hf:/dev/zero"),
    "vocabulary of 1e9": model("vocab_size = 1_000_000_000\nwidth = 4096"),
    "1e18 layers": model("layers = 1_000_000_000_000_000_000"),
    "MLP of width 1e12": pictures('"digits"', model='"mlp"\nhidden = [1_000_000_000_000]'),
    "ResNet of 1e7 blocks": pictures('"digits"', model='"resnet-digits"\nblocks = [10_000_000, 2]'),
    "pictures of 1e9 pixels": pictures('"digits"', model='"vit-digits"\nimage_size = 1_000_000_000'),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_refused_in_few_words(tmp_path, content, capfd):
    path = tmp_path / "wrong.toml"
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


CONFIGS = {
    "nested": b"[" * 100_000,
    "text": b"x",
    "digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 10_000 + b"}",
    "sizes beyond memory": b'{"model_type": "gpt2", "n_embd": 1073741824, "n_head": 1, "n_layer": 2147483647}',
}


@pytest.mark.parametrize("content", [*CONFIGS.values(), None], ids=[*CONFIGS, "pipe"])
def test_a_malformed_config_of_hugging_face_is_refused_in_few_words(tmp_path, content, capfd):
    path, config = tmp_path / "wrong.toml", tmp_path / "config.json"
    path.write_text(SMALL.replace("gpt-nano", f"hf:{tmp_path}"))
    if content is None:
        os.mkfifo(config)
    else:
        config.write_bytes(content)
    refused(path, tmp_path, capfd)


def unreadable(path):
    path.write_text(SMALL)
    path.chmod(0)


NOT_FILES: dict[str, Callable[[Path], None]] = {
    "directory": Path.mkdir,
    "more than 1 MiB": lambda path: path.write_text("#" * 2**20 + "\n"),
    "unreadable": unreadable,
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
def test_what_is_no_file_is_refused(tmp_path, make, capfd):
    path = tmp_path / "wrong.toml"
    make(path)
    if make is unreadable and os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    refused(path, tmp_path, capfd)


NO_NAMES = {
    "NUL": "a\0b.toml",
    "nobody's": "~nosuchuser/x.toml",
    "surrogate": "\udcff.toml",
}


@pytest.mark.parametrize("given", NO_NAMES.values(), ids=NO_NAMES)
def test_a_name_that_no_file_can_have_is_refused(tmp_path, given, capfd):
    refused(Path(given), tmp_path, capfd)


def test_a_file_with_the_mark_of_an_editor_of_windows_is_read(tmp_path):
    path = tmp_path / "right.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load(path).train.steps == 50


OVERRIDES = {
    "long": ("strategy", LONG),
    "nested": ("train.log_every", "[" * 500 + "]" * 500),
    "number beyond 64 bits": ("train.steps", "9" * 100),
    "bytes that are no text": ("data.source", "\udcff.txt"),
}


@pytest.mark.parametrize(("key", "text"), OVERRIDES.values(), ids=OVERRIDES)
def test_a_malformed_override_is_refused_in_few_words(tmp_path, key, text, capfd):
    path = tmp_path / "right.toml"
    path.write_text(SMALL)
    refused(path, tmp_path, capfd, f"--{key}={text}")


@pytest.mark.parametrize("size", SIZES)
def test_what_a_model_has_at_least_is_counted_without_tracing_it(size):
    """The matrices: a fifth of a small ResNet are first blocks and norms, which are left out."""
    assert 0.8 <= parameter_lower_bound(SIZES[size]) / parameter_count(SIZES[size]) <= 1


def test_memory_that_is_too_small_is_said_with_what_is_needed(tmp_path, monkeypatch):
    """820,352 parameters in fp32, and AdamW's two moments; on 8 devices that share the memory."""
    experiment = from_table({**tomllib.loads(SMALL), "name": "x"})
    assembly = Assembly.on_devices(experiment)
    weights, state = 4 * 820_352 * 8, 12 * 820_352 * 8

    def with_memory(size):
        monkeypatch.setattr(memory_check, "memory_bytes", lambda: size)
        assembly.check_memory()

    both = "its weights and the optimizer's state must"
    for size, said in ((weights * 0.9, "its weights must"), (state * 0.99, both)):
        with pytest.raises(ValueError, match=f"{said} fit into the devices' memory"):
            with_memory(size)
    with_memory(state * 1.01)
    monkeypatch.setattr("jdp.experiment.assembly.parameter_lower_bound", lambda config: 0)
    with pytest.raises(ValueError, match=r"a batch must fit into memory; train\.batch_size = 16 makes 6 KiB"):
        with_memory(16 * 32 * 4 * 3 - 1)  # tokens, targets, weights
