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
from jdp.models.configs.sizes import SIZES
from jdp.models.lower_bounds import parameter_lower_bound

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
    # not TOML, or hardly
    "empty": "",
    "white space": " \n\t\n",
    "comments only": "# nothing\n",
    "no value": end("x ="),
    "no key": end("= 3"),
    "no equals sign": end("x 3"),
    "two values": end("x = 3 4"),
    "open string": end('x = "abc'),
    "open text block": end('x = """abc'),
    "open array": end("x = [1, 2"),
    "open inline table": end("x = {a = 1"),
    "open heading": end("[optimizer"),
    "empty heading": end("[]"),
    "heading with spaces in it": end("[opti mizer]"),
    "JSON": '{"name": "small", "train": {"steps": 50}}',
    "YAML": "name: small\ntrain:\n  steps: 50\n",
    "Python": "name = 'small'\ntrain = dict(steps=50)\n",
    "INI": "[train]\nsteps: 50\n",
    "XML": "<experiment name='small'/>",
    "a merge's marks": f"<<<<<<< HEAD\n{SMALL}=======\n{SMALL}>>>>>>> other\n",
    "HTML of an error page": "<!DOCTYPE html><html><body>404</body></html>",
    "key twice": end("steps = 3"),
    "table twice": end("[train]\nsteps = 3\nbatch_size = 3"),
    "key and table": end("[name]\nx = 3"),
    "dotted key into a number": end("steps.x = 3"),
    "dotted key and heading": end("optimizer.lr = 0.1\n[train.steps.x]\ny = 1"),
    "array of tables": end("[[optimizer]]\nlr = 0.1"),
    "escape that is none": name(r'"a\qb"'),
    "escape of half a pair": name(r'"\ud800"'),
    "Python's None": end("clip_norm = None"),
    "JSON's null": end("wrt = null"),
    "Python's True": data("shuffle = True"),
    "leading zero": end("log_every = 010"),
    "number with a comma": end("stop_after = 0,5"),
    "tabs and a bare CR": "name = 'small'\rseed = 1\n",
    "bare CRs for line ends": SMALL.replace("\n", "\r"),
    "comments that a bare CR ends": top("# x\rseed = 1"),
    "BOM": b"\xef\xbb\xbf" + b"x = = 3",
    "BOM twice": b"\xef\xbb\xbf" * 2 + SMALL.encode(),
    "UTF-16": SMALL.encode("utf-16"),
    "UTF-16 without a BOM": SMALL.encode("utf-16-le"),
    "Latin-1": top("# Gr\u00f6\u00dfe").encode("latin-1"),
    "a cut UTF-8 character": SMALL.encode() + b"# \xe2\x82",
    "NUL bytes": b"\0" * 4096,
    "NUL in a comment": top("# a\0b"),
    "NUL in a string": name('"a\0b"'),
    "random bytes": bytes(range(256)) * 16,
    "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + b"\xab" * 100,
    "a picture": b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
    "500 nested brackets": top("x = " + "[" * 500 + "]" * 500),
    "500 brackets that stay open": top("x = " + "[" * 500),
    "100,000 nested brackets": top("x = " + "[" * 100_000),
    "500 nested inline tables": top("x = " + "{a = " * 500 + "1" + "}" * 500),
    "90 nested brackets": top("x = " + "[" * 90 + "]" * 90),
    "90 brackets where a number stands": end("log_every = " + "[" * 90 + "]" * 90),
    "dotted key of 2000 parts": top(f"{DEEP} = 1"),
    "heading of 2000 parts": end(f"[{DEEP}]\nx = 1"),
    "dotted key of 90 parts": end("optimizer." + ".".join(["a"] * 90) + " = 1"),
    "bad line of 1 MB": end(f"x = {LONG}"),
    # long values, keys and lists
    "name of 10 MB": name(f'"{LONGER}"'),
    "name of 300 characters": name(f'"{"x" * 300}"'),
    "name of 200 two-byte characters": name(f'"{"é" * 200}"'),
    "strategy of 1 MB": top(f'strategy = "{LONG}"'),
    "number of 1 MB of text": end(f'log_every = "{LONG}"'),
    "array of 100 bad entries": end(f"log_every = {[1] * 100}"),
    "100 wrong entries, each": model(f"name2 = 1\nhidden = {['x'] * 100}").replace("gpt-nano", "mlp"),
    "20,000 wrong entries": SMALL.replace("gpt-nano", "mlp").replace("[data]", f"hidden = {['x'] * 20_000}\n[data]"),
    "100 bad patterns": end(f"wrt = {[3] * 100}"),
    "100 bad sources": data(f"source = {[3] * 100}"),
    "100 bad axes": top("") + "[mesh]\n" + "\n".join(f"a{i} = 0" for i in range(100)),
    "100 unknown keys": end("\n".join(f"k{i} = 1" for i in range(100))),
    "100 unknown tables": end("\n".join(f"[t{i}]\nx = 1" for i in range(100))),
    "100 bad rules": end("[rules]\n" + "\n".join(f'"p{i}" = 3' for i in range(100))),
    "100 bad evaluation sets": end("\n".join(f"[eval.e{i}]\nx = 1" for i in range(100))),
    "a rule of 100 axes that are not": end(f'[rules]\n"*" = [{[f"a{i}" for i in range(100)]}]'),
    "key of 1 MB": top(f"{LONG} = 1"),
    "key of the model of 1 MB": model(f"{LONG} = 1"),
    "evaluation set with a name of 1 MB": end(f"[eval.{LONG}]\nsource = 'x'"),
    "evaluation set with odd characters": end("[eval.'a/../../b']\nsource = 'x'"),
    "axis with a name of 1 MB": end(f"[mesh]\n{LONG} = 0"),
    "pattern of 1 MB": end(f'[rules]\n"{LONG}" = ["model"]'),
    "metric of 1 MB": end(f'keep_best = "{LONG}"'),
    "source of 1 MB": data(f'source = "{LONG}"'),
    "sources of 1 MB": data(f'source = ["{LONG}", "{LONG}"]'),
    "tokenizer of 1 MB": data(f'tokenizer = "{LONG}"'),
    "pictures of 1 MB": pictures(f'"{LONG}"'),
    # numbers
    "number of 10,000 digits": end("log_every = " + "9" * 10_000),
    "steps of 10,000 digits": SMALL.replace("= 50", "= " + "9" * 10_000),
    "steps below TOML's integers": SMALL.replace("= 50", "= -9223372036854775809"),
    "steps beyond 64 bits": SMALL.replace("= 50", "= 9223372036854775808"),
    "steps beyond 32 bits": SMALL.replace("= 50", "= 2147483648"),
    "batch beyond 64 bits": SMALL.replace("= 16", "= 18446744073709551616"),
    "batch beyond any memory": SMALL.replace("= 16", "= 1000000000000"),
    "seed beyond 32 bits": top("seed = 4294967296"),
    "negative seed": top("seed = -1"),
    "hexadecimal float": end("[optimizer]\nlr = 0x1p-3"),
    "lr nan": end("[optimizer]\nlr = nan"),
    "lr inf": end("[optimizer]\nlr = inf"),
    "lr too small for a float": end("[optimizer]\nlr = 1e-400"),
    "lr too large for a float": end("[optimizer]\nlr = 1e400"),
    "lr too large for float32": end("[optimizer]\nlr = 1e200"),
    "clip_norm nan": end("[optimizer]\nclip_norm = nan"),
    "fraction beyond 1": data("heldout_fraction = 1.5"),
    "steps inf": SMALL.replace("= 50", "= inf"),
    "vocabulary inf": model("vocab_size = inf"),
    "layers nan": model("layers = nan"),
    "layers a fraction": model("layers = 1.5"),
    "devices beyond any machine": top("devices = 1000000000"),
    "mesh beyond any machine": end("[mesh]\ndata = 1000000000000000000000"),
    "accumulate beyond 64 bits": end("accumulate = 99999999999999999999"),
    # values of other kinds
    "date for a name": name("2024-01-01"),
    "date for a number": end("log_every = 2024-01-01T00:00:00Z"),
    "time for a number": end("log_every = 07:32:00"),
    "dates in an array": data("source = [2024-01-01]"),
    "date for a table": "optimizer = 2024-01-01\n" + SMALL,
    "date in a rule": end('[rules]\n"*" = [2024-01-01]'),
    "table for a name": name("{a = 1}"),
    "table for a source": data("source = {a = 1}"),
    "array for a table": "optimizer = [1, 2]\n" + SMALL,
    "array for a name": name('["a", "b"]'),
    "empty name": name('""'),
    "name of blanks": name('"   "'),
    "name that is a path": name('"/tmp/x"'),
    "name that leaves": name('"../x"'),
    "name with a line end": name('"a\\nb"'),
    "name with a trailing line end": name('"small\\n"'),
    "name with a NUL": name(r'"a\u0000b"'),
    "name with a backslash": name(r'"a\\b"'),
    "name with a colour code": name(r'"\u001b[31mred"'),
    "empty source": data('source = ""'),
    "no sources": data("source = []"),
    "empty key": top('"" = 1'),
    "empty evaluation name": end('[eval.""]\nsource = "x"'),
    "empty axis": end('[mesh]\n"" = 2'),
    "key with a NUL": top(r'"a\u0000b" = 1'),
    "empty model": SMALL.replace('name = "gpt-nano"\n', ""),
    "model of another kind's fields": model("image_size = 8"),
    # paths
    "source with a NUL": data(r'source = "a\u0000b"'),
    "sources with a NUL": data(r'source = ["stdlib", "a\u0000b"]'),
    "source that is too long": data(f'source = "{"y" * 5000}"'),
    "source with a part that is too long": data(f'source = "{"y" * 300}/a.txt"'),
    "glob that is too long": data(f'source = "{"y" * 5000}/*.txt"'),
    "source of a user who is not": data('source = "~nosuchuser/text.txt"'),
    "source of one of two users who are not": data('source = ["stdlib", "~nosuchuser/text.txt"]'),
    "hub source of a user who is not": data('source = "hf:~nosuchuser/text"'),
    "evaluation set of a user who is not": end('[eval.a]\nsource = "~nosuchuser/x"'),
    "tokenizer of a user who is not": data('tokenizer = "~nosuchuser/t.json"'),
    "tokenizer with a NUL": data(r'tokenizer = "a\u0000b"'),
    "tokenizer that is too long": data(f'tokenizer = "{"y" * 5000}"'),
    "weights of a user who is not": end('init_from = "~nosuchuser/run"'),
    "weights with a NUL": end(r'init_from = "a\u0000b"'),
    "weights whose path is too long": end(f'init_from = "{"y" * 5000}"'),
    "arrays with a NUL": data(r'source = "a\u0000b.npz"'),
    "arrays whose path is too long": data(f'source = "{"y" * 5000}.npz"'),
    "source that is a device": data('source = "/dev/null"'),
    "source below a file": data('source = "/etc/passwd/x.txt"'),
    "hub source with a NUL": data('source = "hf:./\\u0000"'),
    "pictures with a NUL": pictures(r'"a\u0000b"'),
    "pictures of a user who is not": pictures("'~nobody-/x'"),
    "pictures whose path is too long": pictures(f"'{'y' * 5000}'"),
    "model of a user who is not": SMALL.replace("gpt-nano", "hf:~nosuchuser/x"),
    "model with a NUL": SMALL.replace("gpt-nano", r"hf:a\u0000b"),
    "model whose path is too long": SMALL.replace("gpt-nano", f"hf:{'y' * 5000}"),
    "model of nothing": SMALL.replace("gpt-nano", "hf:"),
    "model of 1 MB": SMALL.replace("gpt-nano", LONG),
    "model that is a device": SMALL.replace("gpt-nano", "hf:/dev/zero"),
    # models beyond any memory
    "vocabulary of 1e9": model("vocab_size = 1_000_000_000\nwidth = 4096"),
    "vocabulary of 1e30": model("vocab_size = 1_000_000_000_000_000_000_000_000_000_000"),
    "1e7 layers": model("layers = 10_000_000"),
    "1e18 layers": model("layers = 1_000_000_000_000_000_000"),
    "width of 1e12": model("width = 1_000_000_000_000"),
    "context of 1e12": model("context = 1_000_000_000_000\npositions = 'learned'"),
    "MLP of width 1e12": pictures('"digits"', model='"mlp"\nhidden = [1_000_000_000_000]'),
    "ResNet of 1e7 blocks": pictures('"digits"', model='"resnet-digits"\nblocks = [10_000_000, 2]'),
    "ResNet of 300 stages": pictures('"digits"', model=f'"resnet-digits"\nblocks = {[1] * 300}'),
    "pictures of 1e9 pixels": pictures('"digits"', model='"vit-digits"\nimage_size = 1_000_000_000'),
    "ViT of 1e7 layers": pictures('"digits"', model='"vit-digits"\nlayers = 10_000_000'),
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
    "empty": b"",
    "array": b"[1]",
    "not UTF-8": b"\xff\xfe",
    "digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 10_000 + b"}",
    "1 MB of text": b'{"model_type": "' + LONG.encode() + b'"}',
    "sizes beyond memory": b'{"model_type": "gpt2", "n_embd": 1073741824, "n_head": 1, "n_layer": 2147483647}',
    "nested type": b'{"model_type": {"a": [1]}}',
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


def huge(path):
    with path.open("wb") as file:
        file.truncate(2**40)


NOT_FILES: dict[str, Callable[[Path], None]] = {
    "directory": Path.mkdir,
    "more than 1 MiB": lambda path: path.write_text("#" * 2**20 + "\n"),
    "unreadable": unreadable,
    "dangling": lambda path: path.symlink_to(path.with_name("nowhere")),
    "circle": lambda path: path.symlink_to(path),
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "file of a terabyte": huge,
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
    "too long": "y" * 5000,
    "nobody's": "~nosuchuser/x.toml",
    "empty": "",
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
    "long key": (LONG, "1"),
    "deep": (DEEP, "1"),
    "nested": ("train.log_every", "[" * 500 + "]" * 500),
    "number beyond 64 bits": ("train.steps", "9" * 100),
    "number of 10,000 digits": ("train.steps", "9" * 10_000),
    "source of a user who is not": ("data.source", "~nosuchuser/x"),
    "NUL": ("data.source", "a\0b"),
    "bytes that are no text": ("data.source", "\udcff.txt"),
    "bytes that are no prompt": ("sample.prompt", "\udcff"),
    "name too long": ("name", "x" * 300),
    "empty": ("data.source", ""),
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
