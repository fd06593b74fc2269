"""A package of one's own has a model, a data set, a loss and an optimizer, and files name them by `make`."""

import importlib
import json
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from own_process import ROOT, python
from paths import EXPERIMENTS
from tiny_experiment import entries, points_text, tables, write_points
from tiny_runs import refused

from jdp.cli.main import main
from jdp.data import global_batches
from jdp.experiment.assembly import Assembly
from jdp.experiment.data import made_data
from jdp.experiment.file import ExperimentError, load, to_toml
from jdp.experiment.schema.experiment import Experiment
from jdp.run.evaluation import Evaluation
from jdp.run.metrics import read

EXAMPLE = EXPERIMENTS / "plugin"
RINGS = str(EXAMPLE / "rings.toml")
SMALL = ("--devices", "none", "--train.steps", "2", "--train.batch_size", "16", "--model.width", "8")
SMALL += ("--data.points", "60", "--data.heldout_fraction", "0.3")


@pytest.fixture(autouse=True)
def found(tmp_path, monkeypatch):
    """Each test finds the example, and packages in its own folder, and leaves none imported."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)
    yield
    for name in [name for name in sys.modules.keys() - modules if name.partition(".")[0] in ("rings", "mine")]:
        del sys.modules[name]


def mine(folder, *lines):
    """Write the package `mine`, with these lines."""
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "__init__.py").write_text("import numpy as np\n" + "\n".join(lines) + "\n")


def loaded(**overrides):
    return load(RINGS, {"plugin": "rings", **{key.replace("__", "."): text for key, text in overrides.items()}})


def test_it_trains_is_recorded_and_resumes(tmp_path, capsys):
    command = ["train", RINGS, "--plugin", "rings", f"--run-dir={tmp_path}", *SMALL, "--optimizer.schedule", "constant"]
    assert main([*command, "--json"]) == 0
    out, said = capsys.readouterr()
    assert json.loads(out)["steps"] == 2
    assert f"plug-in rings ({EXAMPLE / 'rings'}): rings:wave_net, rings:Points, rings:smoothed, rings:signum" in said
    recorded = tmp_path / "rings" / "experiment.toml"
    kept = tomllib.loads(recorded.read_text())
    assert kept["plugin"] == "rings" and kept["model"] == {"make": "rings:wave_net", "learns": "none", "width": 8}
    assert kept["data"]["points"] == 60 and "source" not in kept["data"] and "b1" not in kept["optimizer"]
    named = set().union(*read(tmp_path / "rings" / "metrics.jsonl"))
    assert {"loss", "accuracy", "eval_loss", "eval_accuracy"} <= named
    assert "--plugin rings" in refused(capsys, "train", recorded, f"--run-dir={tmp_path}")
    assert main(["train", str(recorded), "--plugin=rings", "--train.steps=3", f"--run-dir={tmp_path}"]) == 0
    assert "resumed after step 2" in capsys.readouterr().out
    assert "loss.share was None, is 0.2" in refused(capsys, *command, "--loss.share", "0.2")


def test_what_is_written_is_read_back_as_equal(tmp_path):
    experiment = loaded(data__points="60")
    (tmp_path / "again.toml").write_text(to_toml(experiment))
    again = load(tmp_path / "again.toml", {"plugin": "rings"})
    assert again == experiment and again.data.keywords == {"noise": 0.15, "points": 60}
    assert experiment != loaded(data__points="61")
    assert experiment.plugin == "rings" and experiment.eval_metrics == ("eval_loss", "eval_accuracy")
    config = experiment.model.config
    assert (config.width, config.octaves, config.rings) == (64, 3, 3), "with the function's own defaults"
    assert loaded(mesh__model="2").mesh["model"] == 2, "without [rules]: the model may have metadata"


def test_what_is_compiled_for_is_what_is_read():
    """Samples are of 32 bits and have weights; the order is that of jdp's own data, for any number of processes."""
    assembly = Assembly.on_devices(loaded(data__points="60", train__batch_size="16"))
    read_as = {name: (leaf.shape, leaf.dtype) for name, leaf in assembly.inputs.abstract_batch.items()}
    whole = next(iter(global_batches(assembly.inputs.data.train, batch_size=16, seed=0)))
    assert {name: (array.shape, array.dtype) for name, array in whole.items()} == read_as
    assert {str(array.dtype) for array in whole.values()} == {"float32", "int32"}
    rows = next(iter(global_batches(assembly.inputs.data.train, batch_size=16, seed=0, rows=[3, 9])))
    assert np.array_equal(rows["points"], whole["points"][[3, 9]])
    data, leaves = assembly.inputs.data, jax.tree.leaves(assembly.training.abstract_state.params)
    held = {data.heldout[i]["points"].tobytes() for i in range(2)}
    assert held.isdisjoint(data.train[i]["points"].tobytes() for i in range(len(data.train)))
    assert assembly.training.parameter_count == sum(leaf.size for leaf in leaves)


MISTAKES = {
    "an unknown keyword": (["--model.widht=3"], "model: rings:wave_net has no keyword widht; did you mean width?"),
    "no function": (["--loss.make=rings:smothed"], "rings has no function smothed; did you mean smoothed?"),
    "no module": (["--loss.make=rings.losses:smoothed"], "and there is no rings.losses. Install it"),
    "another package": (["--loss.make=json:dumps"], "'json:dumps' is code, which an experiment file alone does not"),
    "too few arguments": (["--loss.make=rings:Points"], "must take model, batch, rng first; it takes rings, points"),
    "no data": (["--data.make=none", "--data.noise=none"], "data.noise is not a key of [data]"),
    "another metric": (["--train.keep_best=eval_acuracy"], "did you mean eval_accuracy?"),
    "another set": (["--eval.x.source=stdlib"], "[eval] is for data that jdp reads, not data.make: remove it"),
    "text": (["--sample.length=3"], "[sample] is for a GPT and text"),
    "a kind without its sizes": (["--model.learns=text"], "learns text and lacks the keywords vocab_size, context"),
}


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_reported_as_in_any_table(arguments, expected, capsys):
    error = refused(capsys, "train", RINGS, "--plugin=rings", *arguments)
    assert expected in error and len(error.splitlines()) <= 4, error


NAMES = {
    "no flag": ([], "is code, which an experiment file alone does not run. Add --plugin rings if you trust it"),
    "no identifier": (["--plugin=ring-s"], "by which Python imports a package, such as my_package"),
    "another": (["--plugin=json"], "Add --plugin rings if you trust it"),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_file_alone_imports_nothing(case, capsys, tmp_path):
    arguments, expected = NAMES[case]
    for command in ("train", "plan", "verify", "prove"):
        assert expected in refused(capsys, command, RINGS, *arguments)
    (tmp_path / "rings.toml").write_text('plugin = "rings"\n' + Path(RINGS).read_text())
    assert 'given plugin = "rings" without --plugin' in refused(capsys, "train", tmp_path / "rings.toml")
    assert "rings" not in sys.modules


BROKEN = {
    "an error": (["def f():", "    return [][1]", "f()"], ["return [][1]", "IndexError: list index out of range"]),
    "a syntax error": (["def"], ["    def", "SyntaxError: invalid syntax"]),
    "it leaves": (["raise SystemExit(3)"], ["SystemExit: 3"]),
}


@pytest.mark.parametrize(("lines", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_failed_import_shows_the_packages_error(lines, expected, tmp_path):
    mine(tmp_path, *lines)
    with pytest.raises(ExperimentError) as error:
        load(write_made(tmp_path, model={"make": "mine:net"}), {"plugin": "mine"})
    said = str(error.value)
    assert "mine does not import; its own error" in said
    assert [line for line in expected if line not in said] == [], said


def test_an_exception_shows_only_the_users_lines(tmp_path, capsys):
    mine(tmp_path, "from rings import *", "from flax import nnx", "net = lambda rng: nnx.Linear(2, 'three', rngs=1)")
    file = made_by_mine(tmp_path, model="net")
    error = refused(capsys, "train", file, "--plugin=mine", f"--run-dir={tmp_path / 'runs'}")
    assert "mine:net raised an exception:" in error and "nnx.Linear(2, 'three'" in error
    assert error.count('File "') == 1 and "AttributeError" in error, error
    assert not (tmp_path / "runs").exists()


def write_made(folder, **changes):
    """Write the example's file with other tables; return its path."""
    table = tomllib.loads(Path(RINGS).read_text()) | changes
    table = {**table, "devices": "none", "train": {"steps": 1, "batch_size": 8}}
    (folder / "made.toml").write_text(entries(table))
    return folder / "made.toml"


def made_by_mine(folder, **names):
    """Write the example's file with what `mine` passes on, but for these names; return its path."""
    names = {"model": "wave_net", "data": "Points", "loss": "smoothed", "optimizer": "signum"} | names
    return write_made(folder, **{table: {"make": f"mine:{name}"} for table, name in names.items()})


WRONG = {
    "a model that is None": ("model", "lambda rng: None", "returns an nnx.Module, or a pytree of arrays; given None"),
    "a model that is text": ("model", "lambda rng: {'a': 'b'}", "a pytree of arrays; given 'b': return one"),
    "no optimizer": ("optimizer", "lambda schedule: 0.1", "returns an optax.GradientTransformation; given 0.1"),
    "no width": ("model", "lambda rng, *, width: 3", "mine:wrong needs width: add width = … beside make"),
    "no data": ("data", "lambda: 3", "returns an object with len and [index], or two of them"),
    "empty data": ("data", "lambda: []", "returns samples; given a side without any"),
    "no samples": ("data", "lambda: [3, 4]", "is a dict of arrays; given 3"),
    "words": ("data", "lambda: [{'x': 'a'}]", "holds numbers; given x: <U1"),
    "no loss": ("loss", "lambda model, batch, rng: None", "A loss function returns jdp.Loss"),
}


@pytest.mark.parametrize(("key", "made", "message"), WRONG.values(), ids=WRONG)
def test_what_a_function_returns_is_checked(key, made, message, tmp_path, capsys):
    """Exit 2 and one error, before a folder of a run is made."""
    mine(tmp_path, "from rings import *", f"wrong = {made}")
    file = made_by_mine(tmp_path, **{key: "wrong"})
    error = refused(capsys, "train", file, "--plugin=mine", f"--run-dir={tmp_path / 'runs'}")
    assert message in error, error
    assert not (tmp_path / "runs").exists() or key == "loss"


def test_each_goes_with_jdps_own(tmp_path, capsys):
    """A pytree for a model, whose data, loss and optimizer are jdp's; a loss, and data, for a model of jdp's."""
    mine(
        tmp_path,
        "import jax",
        "def linear(rng, *, features_in, features_out=3):",
        "    return {'kernel': jax.random.normal(rng, (features_in, features_out))}",
        "def squares(model, batch, rng):",
        "    logits = batch['features'] @ model['kernel'] if isinstance(model, dict) else model(batch['features'])",
        "    return ((logits.sum(-1) - batch['labels']) ** 2).mean()",
        "row = lambda i: {'features': [1.0, i], 'labels': 6 // (99 - i)}",
        "rows = lambda: [row(i) for i in range(50)]",
        "few = lambda: [{'features': [1.0, i]} for i in range(9)]",
        "late = lambda: type('Late', (list,), {'__getitem__': lambda self, i: row(90 + i)})(range(20))",
    )
    file = write_points(tmp_path, points_text(tables(train={"steps": 2, "batch_size": 8})))
    text = file.read_text()
    linear = text.replace('name = "mlp"', 'make = "mine:linear"\nlearns = "features"').replace("hidden = [8]\n", "")
    for changed in (text, linear):
        file.write_text(changed)
        experiment = load(file, {"plugin": "mine", "loss.make": "mine:squares"})
        assert (experiment.kind, experiment.eval_metrics) == ("features", ("eval_loss",))
        assembly = Assembly.on_devices(experiment)
        batch = next(iter(assembly.inputs.train_feed(0, 0)))
        assert np.isfinite(float(assembly.training.step(assembly.training.state(), batch)[1]["loss"]))
    made = {"model": {"name": "mlp", "features_in": 2, "features_out": 7}, "loss": {}, "optimizer": {"name": "sgd"}}
    for name, code, words in (("rows", 0, "accuracy"), ("few", 2, "lacks labels"), ("late", 70, "in <lambda>(9):\n ")):
        file = write_made(tmp_path, **made, data={"make": f"mine:{name}"})
        assert main(["train", str(file), "--plugin=mine", "--json", f"--run-dir={tmp_path / name}"]) == code
        assert words in "".join(capsys.readouterr())


def data_of(given, **keys):
    table = tomllib.loads(Path(RINGS).read_text())
    importlib.import_module("rings").own = lambda: given
    table["data"] = {"make": "rings:own", **keys}
    return made_data(Experiment.model_validate(table, context="rings").data)


def test_two_sides_keep_their_samples_and_order(fresh_notices, capsys):
    class Backwards(list):
        def sample_at(self, position, seed):
            return self[-1 - position % len(self)]

    sides = Backwards({"x": np.array(i)} for i in range(5)), [{"x": np.array(9)}]
    data = data_of(sides)
    assert len(data.train) == 5 and data.heldout[0]["x"] == 9 and data.train[0]["weights"] == 1
    assert next(iter(global_batches(data.train, batch_size=3, seed=0)))["x"].tolist() == [4, 3, 2]
    assert data.fingerprint == data_of(sides).fingerprint != data_of((sides[0], [{"x": np.array(8)}])).fingerprint
    with pytest.raises(ExperimentError, match="has its own order"):
        data_of(sides[0])
    whole = [{"x": np.array(float(i)), "labels": np.array(0)} for i in range(100)]
    others = data_of(whole, heldout_fraction=0.2), data_of([each | {"labels": np.array(1)} for each in whole])
    assert data_of(whole).fingerprint not in [other.fingerprint for other in others]
    assert "read" not in capsys.readouterr().err and data_of(101 * whole).fingerprint
    assert "all 10,100 samples are read at each start" in capsys.readouterr().err


def test_samples_may_be_drawn_anew_in_every_epoch():
    class Drawn(list):
        def sample_in_epoch(self, index, epoch):
            return {"x": np.array([self[index]["x"][0], epoch])}

    side = Drawn({"x": np.array([index, 0.0])} for index in range(4))
    data = data_of((side, side))
    assert str(data) == "rings:own: 8 samples of x float32[2], weights float32; train 4, held out 4 (as given)"
    second = [batch["x"] for batch in global_batches(data.train, batch_size=4, seed=0, epochs=2)][1]
    assert sorted(second.tolist()) == [[index, 1] for index in range(4)]


def test_a_metric_missing_from_the_loss_is_named():
    metrics = '["accuracy", "margin"]'
    experiment = loaded(data__points="60", train__batch_size="16", train__eval_batches="1", loss__metrics=metrics)
    assembly = Assembly.on_devices(experiment)
    with pytest.raises(ExperimentError, match="given eval_loss, eval_accuracy, without eval_margin: add it"):
        Evaluation(assembly).of(assembly.training.state())


def test_a_metric_is_averaged_by_its_own_weight(monkeypatch):
    """The weight of one row is not 0; a batch without it does not count."""
    rings = importlib.import_module("rings")

    def loss(model, batch, rng):
        own = batch["weights"] * (batch["points"][:, 0] == largest[0])
        metrics = {"height": ((batch["points"][:, 1] * own).sum(), own.sum())}
        return replace(plain(model, batch, rng), metrics=metrics)

    plain = rings.smoothed
    monkeypatch.setattr(rings, "smoothed", loss)
    assembly = Assembly.on_devices(loaded(data__points="60", train__batch_size="8", loss__metrics='["height"]'))
    heldout = assembly.inputs.data.heldout
    largest = max((heldout[i]["points"] for i in range(len(heldout))), key=lambda point: point[0])
    row = Evaluation(assembly).of(assembly.training.state())
    assert row.keys() == {"eval_loss", "eval_height"} and row["eval_height"] == pytest.approx(largest[1], rel=1e-6)


def test_a_package_that_starts_jax_is_refused(tmp_path):
    mine(tmp_path, "import jax.numpy as jnp", "TABLE = jnp.arange(3)", "net = print")
    path = os.pathsep.join((str(tmp_path), str(ROOT), str(EXAMPLE)))
    file = write_made(tmp_path, model={"make": "mine:net"})
    result = python("-m", "jdp", "train", str(file), "--plugin=mine", cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 2
    assert "mine starts JAX when it is imported, before processes and devices are chosen" in result.stderr


def test_an_unknown_plug_in_is_refused_without_make(tmp_path):
    with pytest.raises(ExperimentError, match=r"--plugin names a package that Python finds; given \"nosuchpkg\""):
        load("quickstart", {"plugin": "nosuchpkg"})
