"""The command line: complete help, one clear error and exit 2 for a user's mistake, JSON alone on stdout; an address is
refused in words wherever a path enters.
"""

import importlib
import inspect
import io
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import jax
import pytest
from tiny_experiment import SMALL, points_text, write_points
from tiny_runs import refused

import jdp
from jdp.base import machine
from jdp.cli import main as cli
from jdp.cli.options import USUAL_KEYS, UsageError, write_file
from jdp.core.cluster.initialize import is_lost_peer
from jdp.core.cluster.schedulers import find_cluster
from jdp.experiment.file import describe
from jdp.export import export_safetensors, gpt_config_from_hf, import_safetensors


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, line in cli.COMMANDS.items():
        assert f"\n  {name} " in text
        assert line == importlib.import_module(f"jdp.cli.{name}").Options.__doc__.splitlines()[0]
    assert cli.main([]) == 2
    assert tuple(capsys.readouterr()) == ("", text)
    assert (cli.main(["--help-all"]), cli.main(["launch", "--help-all"])) == (0, 0)


def test_letters_outside_the_outputs_encoding_are_escaped(monkeypatch):
    monkeypatch.setattr("sys.stdout", stream := io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert cli.main(["--help"]) == 0
    stream.seek(0)
    assert stream.readline() == "usage: jdp COMMAND \\u2026\n"


def test_the_help_of_train_lists_the_usual_keys(capsys):
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "(default" not in text and "…" not in text
    heading, *keys = text[text.index("The usual keys") :].rstrip().splitlines()
    assert "--help-all has every key" in heading
    assert [line.split()[0] for line in keys if line.startswith("  --")] == [f"--{name}" for name in USUAL_KEYS]
    assert "--strategy Sharding over the data axis: ddp, zero1, zero2, zero3." in " ".join(text.split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_lists_every_option(name, capsys):
    """With the whole of its docstring, in lines of at most 120 letters."""
    source = inspect.getsource(importlib.import_module(f"jdp.cli.{name}").Options)
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    docs = re.findall(r'"""(.*?)"""', source.replace(r"\\", "\\"), re.DOTALL)
    assert docs and [doc for doc in docs if " ".join(doc.split()) not in " ".join(text.split())] == []


def test_help_all_lists_every_key(capsys):
    assert cli.main(["train", "--help-all"]) == 0
    text = capsys.readouterr().out
    for option in ("--run-dir DIR", "--json", "FILE", "--profile "):
        assert option in text
    for _, keys in describe():
        for key in keys:
            assert f"--{key.name}  {key.type}  (" in text
            assert key.description.split()[0] in text
    assert "--train.accumulate  int >= 1  (default 1)" in text


def test_version_shows_what_an_error_report_needs(tmp_path, monkeypatch, capsys):
    for package, version in (("jax_cuda13_plugin", "0.9"), ("nvidia_cudnn_cu13", "9.8.7"), ("nvidia_nccl_cu13", "2.3")):
        info = tmp_path / f"{package}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["--version"]) == 0
    own = [f"jdp {jdp.__version__}", f"Python {platform.python_version()}", f"jax {jax.__version__}"]
    cuda = ["jax-cuda13-plugin 0.9", "cuDNN 9.8.7", "NCCL 2.3"]
    assert capsys.readouterr().out.splitlines() == [*own, f"jaxlib {metadata.version('jaxlib')}", *cuda]


TWO_NODES = ("--nodes", "2", "--node-rank", "0", "--coordinator", "h:1")
MISTAKES = {
    "unknown command": (["trian", "x.toml"], "jdp has no command 'trian'; did you mean train?"),
    "no command at all": (["version"], "jdp has no command 'version'; did you mean --version?"),
    "no file": (["train"], "Missing from jdp train: FILE Experiment: a TOML file, or the name of a shipped"),
    "two files": (["train", "a", "b"], "Unrecognized options: b; see jdp train --help"),
    "not a number": (["launch", "-n", "x", "--", "a.py"], "Error parsing -n/--processes: invalid literal for int()"),
    "no such file": (["train", "nowhere.toml"], "nowhere.toml: there is no such file"),
    "another command's option": (["prove", "FILE", "--no-cache"], "there is no option --no-cache here; see --help"),
    "an unknown option": (["plan", "FILE", "--compare", "zero3"], "--compare is not a key of the top level; --help "),
    "without keys": (["generate", "RUN", "--promt", "x"], "Unrecognized options: --promt, x; did you mean --prompt?"),
    "a key without dashes": (["train", "FILE", "train.steps=3"], "options: train.steps=3: write --KEY=VALUE; see jdp"),
    "a table": (["train", "FILE", "--mesh=4"], "--mesh must be a table; given 4: set its keys one by one"),
    "launch of a misspelt name": (["launch", "-n", "2", "--", "quickstrat"], "'quickstrat'; did you mean quickstart?"),
    "another library's key": (["train", "FILE", "--learning-rate=1"], "; did you mean --optimizer.lr?"),
    "a key of another table": (["train", "FILE", "--tokenizer=gpt2"], "; did you mean --data.tokenizer?"),
    "misspelt option": (["train", "FILE", "--run-dri", "x"], "there is no option --run-dri; did you mean --run-dir?"),
    "wrong type": (["train", "FILE", "--train.steps", "many"], "--train.steps must be a whole number"),
    "a flag for a value": (["train", "FILE", "--train.steps", "--json"], "--train.steps needs a value"),
    "an option twice": (["plan", "FILE", "--target", "cpu:2", "--target=cpu:4"], "--target is given twice: keep one"),
    "mesh": (["train", "FILE", "--mesh.data", "3"], "data=3, but there are 8 devices"),
    "run dir": (["train", "FILE", "--run-dir", "/dev/null/x"], "/dev/null/x/small cannot be written: Not a directory"),
    "nothing to launch": (["launch", "-n", "2", "x.toml"], "an experiment or a program comes after --; given no --"),
    "launch of none": (["launch", "-n", "0", "--", "x.py"], "-n must be 1 or more; given 0"),
    "launch of a wrong file": (["launch", "-n", "2", "--", "FILE", "--strategy", "zero4"], "did you mean zero3?"),
    "launch with wrong steps": (["launch", "-n", "2", "--", "FILE", "--profile", "60:70"], "from 1 to train.steps"),
    "no place": (["launch", "-n", "2", "--nodes", "2", "--", "x.py"], "given --nodes 2 without --node-rank and --c"),
    "launch of too few devices on all nodes": (
        ["launch", "-n", "2", *TWO_NODES, "--devices-per-process", "2", "--", "FILE", "--mesh.data", "3"],
        "data=3, but there are 8 devices",
    ),
    "run dir of a program": (["launch", "-n2", "--run-dir", "x", "--", "-m", "json"], "--run-dir is for experiments"),
}


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_error_and_exit_2(file, arguments, expected, capfd):
    error = refused(capfd, *[file if word == "FILE" else word for word in arguments])
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1


def test_write_file_keeps_links_and_devices(tmp_path):
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    file.write_text("before")
    link.symlink_to(file)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, pipe):
        write_file(path, "after")
    assert file.read_text() == "after" and link.is_symlink() and os.read(reader, 100) == b"after"
    os.close(reader)
    with pytest.raises(UsageError, match="/dev/full cannot be written: No space left on device; choose another file"):
        write_file(Path("/dev/full"), "x")
    assert sorted(tmp_path.iterdir()) == [file, link, pipe] and Path("/dev/full").is_char_device()


def test_json_is_all_there_is_on_stdout(file, tmp_path, monkeypatch, capfd):
    def run(experiment, *, quiet, profile, **_):
        assert quiet and profile == range(2, 5) and experiment.train.steps == 5
        print("from Python")
        os.write(1, b"from C++\n")
        return {"name": experiment.name, "final_loss": float("nan")}

    monkeypatch.setattr("jdp.run.loop.run", run)
    assert cli.main(["train", "--train.steps=5", file, "--json", "--run-dir", str(tmp_path), "--profile", "2:4"]) == 0
    shown = capfd.readouterr()
    expected = {"name": "small", "final_loss": None, "nonfinite": {"final_loss": "nan"}}
    assert json.loads(shown.out) == expected and shown.out.count("\n") == 1
    assert "from Python" in shown.err and "from C++" in shown.err


def raising(error):
    def run(*_, **__):
        raise error

    return run


def python_mistake_inside_jdp(*_, **__):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMPI_COMM_WORLD_SIZE", "three")
        find_cluster()


ENDS = {  # a fault of the program keeps its traceback; a UserError is one line
    "an error outside jdp": (raising(ValueError("outside jdp")), 70, "error: your code raised an exception:\n    File"),
    "Python's error inside jdp": (python_mistake_inside_jdp, 70, "Traceback"),
    "jdp's error": (lambda *_, **__: jdp.make_mesh(data=3), 2, "error: The mesh must multiply"),
    "Ctrl-C": (raising(KeyboardInterrupt()), 130, ""),
    "a code": (raising(SystemExit(75)), 75, ""),
    "an exit": (raising(SystemExit()), 0, ""),
    "words": (raising(SystemExit("no")), 1, ""),
}


@pytest.mark.parametrize(("run", "code", "begins"), ENDS.values(), ids=ENDS)
def test_a_run_ends_with_its_exit_code(file, tmp_path, monkeypatch, run, code, begins, capsys):
    monkeypatch.setattr("jdp.run.loop.run", run)
    assert cli.main(["train", file, "--run-dir", str(tmp_path)]) == code
    error = capsys.readouterr().err
    assert error.startswith(begins) and ("Traceback" in error) == (begins == "Traceback")


CUDA = "jax_cuda13_plugin"


@pytest.mark.parametrize(
    ("installed", "environment", "chosen"),
    [
        ([CUDA], {}, [("jax_platforms", "cpu")]),
        ([], {}, []),
        ([CUDA, "libtpu"], {}, []),
        ([CUDA], {"TPU_LIBRARY_PATH": "/libtpu.so"}, []),
        ([CUDA], {"JAX_PLATFORMS": "tpu"}, []),
    ],
)
def test_a_cuda_plugin_needs_a_gpu(monkeypatch, installed, environment, chosen):
    """Without a GPU, CPUs are chosen, unless there are TPUs, or the user chose; with one, nothing is."""
    monkeypatch.setattr(machine, "find_spec", lambda name: True if name in installed else None)
    for name in ("JAX_PLATFORMS", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    updates = list[tuple[str, str]]()
    monkeypatch.setattr(jax.config, "update", lambda *setting: updates.append(setting))
    for has_nvidia in (True, False):
        monkeypatch.setattr(machine, "has_nvidia", lambda found=has_nvidia: found)
        machine.choose_platform(None)
    assert updates == chosen


def test_visible_gpus_are_those_of_the_environment(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-abc"}) == ["2", "GPU-abc"]
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}) == []
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cuda,cpu"}) == ["0"]
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == [], "JAX could not use it"


def test_a_lost_peer_differs_from_own_faults(monkeypatch):
    """What JAX says of Gloo is from a run of two processes, one of which met a damaged image."""
    said = "FAILED_PRECONDITION: Gloo AllReduce failed: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    gone = jax.errors.JaxRuntimeError(said)
    assert not is_lost_peer(gone), "a process on its own has no peers"
    monkeypatch.setattr("jdp.core.cluster.initialize.joined_as", lambda: (0, 2))
    assert is_lost_peer(gone)
    assert not is_lost_peer(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not is_lost_peer(ConnectionResetError("Connection reset by peer")), "a data server's, not a process's"
    barrier = TimeoutError("Timed out while waiting for async_write_complete barrier.")
    assert not is_lost_peer(barrier), "not of the coordination service"
    barrier.__cause__ = jax.errors.JaxRuntimeError("INTERNAL: …")
    assert is_lost_peer(barrier), "as Orbax tells it"


WORDS = r"must be on a disk of this machine, given .*(gs|s3):.*: mount it .*outside\.md.*train\.mirror"
ADDRESSED = {
    "runs": ["train", "FILE", "--run-dir", "s3://bucket/runs"],
    "data": ["train", "FILE", "--data.source", "gs://bucket/points.npz"],
    "an experiment": ["train", "s3://bucket/points.toml"],
    "a target": ["plan", "FILE", "--target", "s3://bucket/mine.toml:1x8"],
    "a run": ["doctor", "s3://bucket/runs/points"],
}


@pytest.fixture
def points(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_points(tmp_path, points_text("[train]\nsteps = 1\nbatch_size = 8\n"))
    before = sorted(tmp_path.iterdir())
    yield path
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("what", ADDRESSED)
def test_a_command_refuses_it(points, capsys, what):
    error = refused(capsys, *[points if word == "FILE" else word for word in ADDRESSED[what]])
    assert "s3:" in error or "gs:" in error


@pytest.mark.parametrize("address", ["gs://bucket/x", Path("s3://bucket/x")])
def test_a_function_for_disks_refuses_it(points, address, monkeypatch):
    monkeypatch.setenv("JDP_CACHE_DIR", "s3://bucket/cache")
    for use in (jdp.save, jdp.restore, export_safetensors, import_safetensors):
        with pytest.raises(ValueError, match=WORDS):
            use(address, {"w": jax.numpy.ones(2)})
    for use in (jdp.Checkpoints, gpt_config_from_hf, jdp.keep_programs, lambda _: jdp.keep_programs()):
        with pytest.raises(ValueError, match=WORDS):
            use(address)
