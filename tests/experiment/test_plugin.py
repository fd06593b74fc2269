"""A package of one's own registers a model, a data set, a loss and an optimizer, and files name them."""

import json
import os
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from own_process import ROOT, python
from tiny_experiment import entries, points_text, tables, write_points
from tiny_runs import refused

from jdp.cli.main import main
from jdp.data import global_batches
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, describe, load, to_toml
from jdp.experiment.plugin_data import plugin_data
from jdp.experiment.plugins import PluginError, register_dataset, register_loss, register_model, register_optimizer
from jdp.experiment.schema.chosen import TABLES
from jdp.experiment.schema.data import DATASETS, Data
from jdp.run.evaluation import evaluate
from jdp.run.outputs.metrics import read

EXAMPLE = ROOT / "experiments" / "plugin"
RINGS = str(EXAMPLE / "rings.toml")
SMALL = ("--devices", "none", "--train.steps", "2", "--train.batch_size", "16", "--model.width", "8")
SMALL += ("--data.points", "60", "--data.heldout_fraction", "0.3")


@pytest.fixture(autouse=True)
def nothing_registered_stays(tmp_path, monkeypatch):
    """A plug-in is one of a process: each test begins without, finds the example, and packages in its own folder."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    kept, modules = [dict(table.entries) for table in TABLES], set(sys.modules)
    yield
    for table, before in zip(TABLES, kept, strict=True):
        table.entries.clear()
        table.entries.update(before)
    for name in [name for name in sys.modules.keys() - modules if name.partition(".")[0] in ("rings", "mine")]:
        del sys.modules[name]


def mine(folder, *lines):
    """Write the package `mine`, with these lines after its imports."""
    head = "import numpy as np\nfrom jdp.plugin import *\n"
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "__init__.py").write_text(head + "\n".join(lines) + "\n")


def loaded(**overrides):
    return load(RINGS, {"plugin": "rings", **{key.replace("__", "."): text for key, text in overrides.items()}})


def test_it_trains_is_recorded_and_resumes(tmp_path, capsys):
    command = ["train", RINGS, "--plugin", "rings", f"--run-dir={tmp_path}", *SMALL, "--optimizer.schedule", "constant"]
    assert main([*command, "--json"]) == 0
    out, said = capsys.readouterr()
    assert json.loads(out)["steps"] == 2
    assert f"plug-in rings ({EXAMPLE / 'rings'}): model wave-net, data rings, loss smoothed, optimizer signum" in said
    kept = tomllib.loads((tmp_path / "rings" / "experiment.toml").read_text())
    assert (kept["plugin"], kept["model"]["octaves"], kept["loss"]["share"]) == ("rings", 3, 0.1)
    named = set().union(*read(tmp_path / "rings" / "metrics.jsonl"))
    assert {"loss", "accuracy", "eval_loss", "eval_accuracy"} <= named
    recorded = tmp_path / "rings" / "experiment.toml"
    assert "--plugin rings" in refused(capsys, "train", recorded, f"--run-dir={tmp_path}")
    more = ["--plugin=rings", "--train.steps=3", f"--run-dir={tmp_path}"]
    assert main(["train", str(recorded), *more]) == 0
    assert "resumed after step 2" in capsys.readouterr().out
    assert "loss.share was 0.1, is 0.2" in refused(capsys, *command, "--loss.share", "0.2")


def test_what_is_written_is_read_back_as_equal(tmp_path):
    experiment = loaded(data__points="60")
    (tmp_path / "again.toml").write_text(to_toml(experiment))
    assert load(tmp_path / "again.toml", {"plugin": "rings"}) == experiment
    assert experiment.plugin == "rings" and experiment.eval_metrics == ("eval_loss", "eval_accuracy")


def test_what_is_compiled_for_is_what_is_read():
    """Samples are of 32 bits and have weights; the order is that of jdp's own data, for any number of processes."""
    assembly = Assembly.on_devices(loaded(data__points="60", train__batch_size="16"))
    read_as = {name: (leaf.shape, leaf.dtype) for name, leaf in assembly.abstract_batch().items()}
    whole = next(iter(global_batches(assembly.data.train, batch_size=16, seed=0)))
    assert {name: (array.shape, array.dtype) for name, array in whole.items()} == read_as
    assert {str(array.dtype) for array in whole.values()} == {"float32", "int32"}
    mine = next(iter(global_batches(assembly.data.train, batch_size=16, seed=0, rows=[3, 9])))
    assert np.array_equal(mine["points"], whole["points"][[3, 9]])
    held = {sample["points"].tobytes() for sample in map(assembly.data.heldout.__getitem__, range(2))}
    assert held.isdisjoint(assembly.data.train[i]["points"].tobytes() for i in range(len(assembly.data.train)))
    assert assembly.parameter_count == sum(leaf.size for leaf in jax.tree.leaves(assembly.abstract_state().params))


def test_fields_are_in_the_help_with_types_limits_and_defaults(capsys, tmp_path):
    for command in ("train", "plan", "verify", "prove", "manifest"):
        assert main([command, "--plugin", "rings", "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert '[model] fields of name = "wave-net", of the plug-in rings --model.width int >= 1 (default 32)' in shown
        assert "--optimizer.momentum float >= 0 < 1 (default 0.9)" in shown
        assert "standard deviation of the distance" in shown
    assert main(["train", "--help"]) == 0
    assert "wave-net" not in capsys.readouterr().out, "what is kept of the help has no plug-in"
    assert describe()[0][0] == "top level"


MISTAKES = {
    "an unknown key": (["--model.widht=3"], "--model.widht is not a key of [model]; did you mean --model.width?"),
    "a wrong type": (["--data.noise=x"], '--data.noise must be a number; given "x"'),
    "out of range": (["--loss.share=1"], "--loss.share must be less than 1; given 1"),
    "no such word": (["--model.activation=rely"], 'must be one of relu, tanh; given "rely"; did you mean relu?'),
    "a rule of its own": (["--data.points=5"], "--data: points must be two a ring or more; given 5 for 3: raise it"),
    "no such name": (
        ["--loss.name=smothed"],
        'smoothed, the only one there is; given "smothed"; did you mean smoothed?',
    ),
    "no such optimizer": (["--optimizer.name=sgn"], "lars, rmsprop, adagrad, muon, signum; given"),
    "a key of jdp's data": (["--data.flip=true"], "data.flip is not used by data.name = 'rings'; given True"),
    "a key of other optimizers": (["--optimizer.b1=0.5"], "optimizer.b1 is not used by signum"),
    "data twice": (["--data.source=stdlib"], "data.name = 'rings' is in place of data.source; given both: remove one"),
    "no data": (["--data.name=none"], "data.noise is not a key of [data]"),
    "no loss": (["--loss.name=none"], "'wave-net' has a plug-in's loss; given none: name it, loss.name = 'smoothed'"),
    "another metric": (["--train.keep_best=eval_acuracy"], "did you mean eval_accuracy?"),
    "another set": (["--eval.x.source=stdlib"], "[eval.NAME] is read by jdp; given beside data.name = 'rings'"),
    "text": (["--sample.length=3"], "[sample] is text written by a GPT; model.name = 'wave-net' writes none"),
}


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_reported_as_in_any_table(arguments, expected, capsys):
    error = refused(capsys, "train", RINGS, "--plugin=rings", *arguments)
    assert expected in error and len(error.splitlines()) <= 3


NAMES = {
    "no flag": ([], 'an experiment file alone does not run; given plugin = "rings" in it without --plugin: add'),
    "no identifier": (
        ["--plugin=ring-s"],
        "by which Python imports a package, such as my_package (did you mean ring_s?); given",
    ),
    "a keyword": (["--plugin=class"], "plugin must be the name by which Python imports a package"),
    "a path": (["--plugin=./rings"], "plugin must be the name by which Python imports a package"),
    "not there": (["--plugin=ringz"], "a plug-in must be a package that Python finds; given ringz, and there is no"),
    "not in there": (["--plugin=rings.no"], "given rings.no, and there is no rings.no: install it"),
    "registers nothing": (["--plugin=json"], "a plug-in must register something when it is imported; given json"),
}


@pytest.mark.parametrize("case", NAMES)
def test_which_package_may_be_a_plugin(case, capsys):
    arguments, expected = NAMES[case]
    for command in ("train", "plan", "verify", "prove"):
        error = refused(capsys, command, RINGS, *arguments)
        assert expected in error and len(error.splitlines()) == 1
    assert "rings" not in sys.modules or case == "not in there"


BROKEN = {
    "a package that is not there": (["import not_there_at_all"], ["ModuleNotFoundError: No module named 'not_there"]),
    "an error": (["def f():", "    return [][1]", "f()"], ["return [][1]", "IndexError: list index out of range"]),
    "a syntax error": (["def"], ["    def", "SyntaxError: invalid syntax"]),
    "it leaves": (["raise SystemExit(3)"], ["SystemExit: 3"]),
}


@pytest.mark.parametrize(("lines", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_plugin_that_does_not_import_shows_its_own_error(lines, expected, tmp_path, capsys):
    mine(tmp_path, "register_model('half')(print)", *lines)
    assert main(["train", RINGS, "--plugin=mine"]) == 2
    error = capsys.readouterr().err
    assert "plug-in mine does not import; its own error:" in error and "mine/__init__.py" in error
    assert [line for line in expected if line not in error] == []
    assert not [word for word in ("importlib", "plugins.py", "jdp/cli") if word in error]
    assert not any("half" in table.entries for table in TABLES), "half a plug-in is none"


@dataclass(frozen=True)
class Width:
    width: int = 4


@dataclass(frozen=True)
class Listed:
    sizes: list[int]


@dataclass(frozen=True)
class Rate:
    lr: float = 1.0


REFUSED = {
    "a name of jdp's": (lambda: register_model("gpt-nano")(print), "'gpt-nano' must be new; given one that jdp itself"),
    "an optimizer of jdp's": (lambda: register_optimizer("adamw")(print), "'adamw' must be new; given one that jdp"),
    "a name that is taken": (lambda: [register_loss("a")(print) for _ in range(2)], "'a' must be new; given one that"),
    "no name": (lambda: register_loss("a b"), "loss.name is letters, digits, dots, dashes and underscores"),
    "none": (lambda: register_dataset("none"), "data.name is letters"),
    "no dataclass": (lambda: register_model("a", dict), "the fields of model 'a' are a dataclass; given <class"),
    "a list": (lambda: register_model("a", Listed), "given sizes: list[int] of model 'a': change it"),
    "a key of jdp's": (lambda: register_optimizer("a", Rate), "optimizer.lr is jdp's own key; given as a field of 'a'"),
    "no function": (lambda: register_loss("a")(3), "loss.name = 'a' is a function's; given 3: decorate a function"),
    "a kind of its own": (lambda: register_model("a", learns="sound"), "learns is one of text, images, features"),
    "without its sizes": (lambda: register_model("a", Width, learns="features"), "has features_in, features_out"),
}


@pytest.mark.parametrize(("register", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_registered(register, message):
    with pytest.raises(PluginError, match=re.escape(message)):
        register()


def test_the_rule_is_named_when_the_package_is_imported(tmp_path, capsys):
    mine(tmp_path, "register_model('gpt-nano')(print)")
    error = refused(capsys, "train", RINGS, "--plugin=mine")
    assert "plug-in mine: model.name = 'gpt-nano' must be new" in error


WRONG = {
    "a model that is None": ("model", "lambda fields, rngs: None", "must be made an nnx.Module, or a pytree of arrays"),
    "a model that is text": ("model", "lambda fields, rngs: {'a': 'b'}", "a pytree of arrays; given 'b': return one"),
    "no optimizer": (
        "optimizer",
        "lambda fields, schedule: 0.1",
        "must be made an optax.GradientTransformation; given",
    ),
    "no data": ("dataset", "lambda fields: 3", "must be made an object with len and [index], or two of them"),
    "three sides": ("dataset", "lambda fields: ([{}], [{}], [{}])", "must be made an object with len and [index]"),
    "empty data": ("dataset", "lambda fields: []", "must have samples; given a side without any"),
    "no samples": ("dataset", "lambda fields: [3, 4]", "must be a dict of arrays; given 3 at index 0"),
    "words": ("dataset", "lambda fields: [{'x': 'a'}]", "must hold numbers; given x: <U1 at index 0"),
    "other shapes": (
        "dataset",
        "lambda fields: [{'x': np.zeros(n)} for n in (2, 3)]",
        "the arrays of the first, x float32[2], weights float32; given x float32[3], weights float32 in sample 1",
    ),
    "no loss": ("loss", "lambda fields, model, batch, rng: None", "A loss function returns jdp.Loss"),
}


@pytest.mark.parametrize(("kind", "made", "message"), WRONG.values(), ids=WRONG)
def test_what_a_plugin_makes_is_checked(kind, made, message, tmp_path, capsys):
    """Exit 2 and one error, before a folder of a run is made."""
    mine(tmp_path, "import rings", f"register_{kind}('wrong')({made})")
    key = {"dataset": "data"}.get(kind, kind)
    table = tomllib.loads(Path(RINGS).read_text())
    table[key] = {"name": "wrong"} | ({"lr": 0.1} if key == "optimizer" else {})
    table = {**table, "plugin": "mine", "devices": "none", "train": {"steps": 1, "batch_size": 8}}
    (tmp_path / "wrong.toml").write_text(entries(table))
    runs = f"--run-dir={tmp_path / 'runs'}"
    assert message in refused(capsys, "train", tmp_path / "wrong.toml", "--plugin=mine", runs)
    assert not (tmp_path / "runs").exists() or kind == "loss"


@dataclass(frozen=True)
class Linear:
    """A linear map.

    Fields:
        features_in, features_out: sizes.
    """

    features_in: int
    features_out: int = 3


def test_each_goes_with_jdps_own(tmp_path):
    """A pytree for a model, whose data, loss and optimizer are jdp's; a loss for a model of jdp's."""

    @register_model("linear", Linear, learns="features")
    def linear(fields, rngs):
        return {"kernel": jax.random.normal(rngs.params(), (fields.features_in, fields.features_out))}

    @register_loss("squares")
    def squares(fields, model, batch, rng):
        logits = batch["features"] @ model["kernel"] if isinstance(model, dict) else model(batch["features"])
        return ((logits.sum(-1) - batch["labels"]) ** 2).mean()

    del linear, squares
    file = write_points(tmp_path, points_text(tables(train={"steps": 2, "batch_size": 8})))
    ours = {"plugin": __name__, "loss.name": "squares"}
    step, text = {}, file.read_text()
    for name in ("mlp", "linear"):
        file.write_text(text if name == "mlp" else text.replace('"mlp"', '"linear"').replace("hidden = [8]\n", ""))
        experiment = load(file, ours)
        assert (experiment.kind, experiment.eval_metrics) == ("features", ("eval_loss",))
        assembly = Assembly.on_devices(experiment)
        batch = next(iter(assembly.feed(assembly.data.train, seed=0, shuffle=True)))
        step[name] = float(assembly.train_step(assembly.state(), batch)[1]["loss"])
    assert all(map(np.isfinite, step.values())) and step["mlp"] != step["linear"]
    assert assembly.parameter_count == 18
    with pytest.raises(ExperimentError, match=r"model.features_in must be the features of a sample, 6"):
        _ = Assembly.on_devices(load(file, {**ours, "model.features_in": "5"})).data


class Drawn:
    """Samples that are drawn anew in every epoch."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.sample_in_epoch(index, 0)

    def sample_in_epoch(self, index, epoch):
        return {"x": np.array([index, epoch], float)}


class Ordered(Drawn):
    def sample_at(self, position, seed):
        return {"x": np.array([position, seed], float)}


def made(**keys):
    return plugin_data(DATASETS.section("drawn", Data)(name="drawn", **keys))


def test_sides_epochs_and_an_order_can_be_the_plugins_own():
    register_dataset("drawn")(lambda fields: (Drawn(), Ordered()))
    data = made()
    assert str(data) == "drawn: 8 samples of x float32[2], weights float32; train 4, held out 4 (as given)"
    assert data.fingerprint == made().fingerprint
    second = [batch["x"] for batch in global_batches(data.train, batch_size=4, seed=0, epochs=2)][1]
    assert sorted(second.tolist()) == [[index, 1] for index in range(4)]
    [ordered] = global_batches(data.heldout, batch_size=4, seed=7, epochs=1)
    assert ordered["x"].tolist() == [[position, 7] for position in range(4)]
    with pytest.raises(ExperimentError, match=r"heldout_fraction is not used by data.name = 'drawn', which holds out"):
        made(heldout_fraction=0.5)
    DATASETS.entries.clear()
    register_dataset("drawn")(lambda fields: Ordered())
    with pytest.raises(ExperimentError, match=r"has its own order \(sample_at\), and jdp cannot hold out a part of it"):
        made()
    DATASETS.entries.clear()
    register_dataset("drawn")(lambda fields: ([{"x": 1.0}], [{"x": 1}]))
    with pytest.raises(ExperimentError, match="alike samples; given x float32, weights float32 and x int32, weights"):
        _ = made().train


def test_a_metric_that_the_loss_does_not_give_is_named(monkeypatch):
    experiment = loaded(data__points="60", train__batch_size="16", train__eval_batches="1")
    assembly = Assembly.on_devices(experiment)
    entry = next(table for table in TABLES if table.key == "loss").entries["smoothed"]
    object.__setattr__(entry, "metrics", ("accuracy", "margin"))
    with pytest.raises(ExperimentError, match="given eval_loss, eval_accuracy, without eval_margin: add it"):
        evaluate(assembly, assembly.state())


def test_a_plugin_that_starts_jax_is_refused(tmp_path):
    mine(tmp_path, "import jax.numpy as jnp", "TABLE = jnp.arange(3)", "register_loss('late')(print)")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    result = python("-m", "jdp", "train", RINGS, "--plugin=mine", cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 2
    assert "must compute nothing with JAX when it is imported" in result.stderr and "given mine" in result.stderr


def test_another_plugins_names_are_refused():
    loaded()
    said = "model.name = 'wave-net' is registered by rings; given no --plugin rings: add it"
    with pytest.raises(ExperimentError, match=said):
        load(RINGS, {"plugin": "none"})


def test_a_manifest_and_a_sweep_pass_the_flag_on(tmp_path, capsys):
    where = ["--nodes", "2", "--per-node", "2", "--plugin", "rings"]
    assert main(["manifest", "kubernetes", RINGS, *where, "--image", "registry/jdp:1", "--claim", "runs"]) == 0
    assert "- --plugin=rings" in capsys.readouterr().out
    assert main(["manifest", "slurm", RINGS, *where]) == 0
    assert "--plugin=rings" in capsys.readouterr().out
