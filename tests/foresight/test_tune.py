"""`jdp plan --tune`: it ends where no single change is better, and what it writes is the experiment with that way."""

import json
import tomllib
from types import SimpleNamespace

import pytest

from jdp.cli import main as cli
from jdp.core.compiling.options import PRESETS
from jdp.experiment.file import load
from jdp.experiment.tune import Tuning
from jdp.foresight.advice.tune import MEASURED, Choice, Dimension, Trial, name_of, overrides_of, search
from jdp.foresight.forecast import Estimate
from jdp.foresight.targets.resolve import target

DIGITS = """
name = "digits"
strategy = "zero1"
[model]
name = "mlp"
hidden = [256]
[data]
source = "digits"
[train]
steps = 10
batch_size = 4096
"""


class Made(Estimate):
    """An estimate of so many seconds and bytes, on a device that holds 100."""

    def __init__(self, seconds, held=50, *, kept=True):
        given = {"memory": SimpleNamespace(total=held), "report": SimpleNamespace(kept=kept)}
        times = {"step_seconds": seconds, "communication_seconds": 0.0, "exposed_seconds": 0.0}
        fitting = SimpleNamespace(**times) if held <= 100 else None
        headroom = SimpleNamespace(fits=held <= 100, available=100)
        super().__init__("ddp", 1, None, timeline=fitting, headroom=headroom, **given)


def dimension(*labels, **settings):
    return Dimension(tuple(Choice(label) for label in labels), **settings)


def found(dimensions, estimates, **settings):
    """Search where `estimates` has the ways by name; return what was found and the names in order."""
    tried = []

    def evaluate(way, best):
        tried.append(name_of(way))
        assert (best is None) == (len(tried) == 1)
        return estimates(name_of(way))

    return search(dimensions, evaluate, **settings), tried


def test_dimensions_are_tried_again_until_nothing_is_better():
    """b pays with y only: the second round finds it, and nothing is compiled twice."""
    seconds = {"a x": 5.0, "b x": 6.0, "a y": 4.0, "b y": 3.0}
    tuned, tried = found([dimension("a", "b"), dimension("x", "y")], lambda name: Made(seconds[name]))
    assert tried == ["a x", "b x", "a y", "b y"] and tuned.best.name == "b y" and tuned.complete
    assert "b y takes 3 s" in tuned.why[1] and "40 % less than a x" in tuned.why[1]


def test_numbers_are_followed_while_they_pay():
    counts = dimension(*"123456789", start=3, ordered=True)
    tuned, tried = found([counts], lambda name: Made(abs(int(name) - 7) + 1.0))
    assert tried == list("45678") and tuned.best.name == "7"
    assert found([counts], lambda name: Made(float(name)))[1] == list("45321")


def test_what_fits_goes_before_what_is_fast():
    made = {"a": Made(1.0, 300), "b": Made(1.0, 200), "c": None, "d": Made(9.0, 90), "e": Made(8.0, 95, kept=False)}
    tuned, _ = found([dimension(*made)], made.get)
    assert tuned.best.name == "d" and len(tuned.trials) == 4 and tuned.why[0] == "4 ways were compiled."
    assert tuned.table()[0][:2] == ("a", "no") and set(tuned.table()[0][3:]) == {"–"}
    nothing, _ = found([dimension("a", "b", "c")], made.get)
    assert not nothing.fits and "the nearest is b, which needs 200 B of 100 B" in nothing.why[1]
    broken = Estimate("ddp", 1, None, error="XLA did not compile this step: x")
    none, _ = found([dimension("a", "b")], lambda name: broken)
    assert none.best is None and none.to_json()["tuned"] is None and "XLA did not compile" in none.why[1]


def test_each_gain_is_told_with_what_its_simulated_time_rests_on():
    """y saves a second, z two more; d goes where nothing was known before, as nothing fitted."""
    choices = (Choice("x"), Choice("y", basis="a guess"), Choice("z", basis="a guess"))
    seconds = {"a": 9.0, "b": 7.0, "x": 0.0, "y": -1.0, "z": -3.0}
    dimensions = [dimension("a", "b"), Dimension(choices)]
    tuned, _ = found(dimensions, lambda name: Made(sum(seconds[each] for each in name.split())))
    assert {choice.label: saved for choice, saved in tuned.gains.items()} == {"b": 2.0, "z": 3.0}
    assert tuned.why[2:] == (f"b (2 s): {MEASURED}.", "z (3 s): a guess.")
    made = {"c": Made(1.0, 300), "d": Made(9.0)}
    assert found([dimension(*made)], made.get)[0].why[2:] == (f"d (what makes it fit): {MEASURED}.",)


def test_options_of_the_compiler_are_added_to_a_preset_and_to_each_other():
    preset, other = Choice("", (("compiler", "overlap"),), preset="overlap"), Choice("x", (("k", "v"),))
    assert overrides_of((preset, other)) == {"compiler": "overlap", "k": "v"}
    written = overrides_of((preset, Choice("", options=(("a", 1),)), other, Choice("", options=(("b", False),))))
    options = tomllib.loads(f"t = {written.pop('compiler')}")["t"]
    assert written == {"k": "v"} and options == {**PRESETS["overlap"], "a": 1, "b": False}


def test_where_memory_is_not_known_that_is_said():
    class OnThisMachine(Made):
        fits = None

    tuned, _ = found([dimension("a")], lambda name: OnThisMachine(1.0))
    assert "holds 50 B, and whether that fits is not known" in tuned.why[1]


def test_it_ends_when_the_time_is_up():
    left = iter([True, False])
    tuned, tried = found([dimension(*"abcd")], lambda name: Made(1.0 / ord(name)), more=lambda: next(left))
    assert tried == ["a", "b"] and not tuned.complete and tuned.best.name == "b" and "time was up" in tuned.why[0]


# The command.


@pytest.fixture
def plan(tmp_path, monkeypatch, capfd):
    """Run `jdp plan` on digits; (exit code, stdout, stderr)."""
    (tmp_path / "digits.toml").write_text(DIGITS)

    def run(*arguments):
        code = cli.main(["plan", str(tmp_path / "digits.toml"), *arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def test_what_it_writes_is_the_experiment_with_the_best_way(plan, tmp_path):
    tuned = tmp_path / "tuned.toml"
    given = (
        "--target",
        "h100:1x2",
        "--tune",
        "--strategy",
        "ddp,zero1",
        "--accumulate",
        "1,3,2",
        "--compiler",
        "overlap",
        "--overlap",
        "true",
    )
    code, out, err = plan(*given, "-o", str(tuned), "--json")
    report = json.loads(out)
    names = [trial["name"] for trial in report["trials"]]
    assert code == 0 and {"zero1", "ddp"} < {*names} and names[0] == "zero1", "from what the experiment has"
    assert not any("K=3" in name or "compiler" in name for name in names), "does not divide; is given"
    best = min(report["trials"], key=lambda trial: trial["step_seconds"])
    assert report["tuned"]["name"] == best["name"] and report["complete"] and report["nearest"] is None
    assert all(gain["measured"] == (gain["name"] not in ("ddp", "zero1")) for gain in report["gains"])
    written, own = load(tuned), load(tmp_path / "digits.toml")
    assert written.compiler == "overlap" and written.strategy == best["overrides"]["strategy"]
    assert (written.train.batch_size, written.optimizer) == (own.train.batch_size, own.optimizer)
    assert f"wrote {tuned}" in err and [*tmp_path.glob(".*")] == []
    for each in report["untimed"]:  # beside what was given; none is ranked
        (tmp_path / "untimed.toml").write_text(DIGITS.replace("[model]", f"{each['line']}\n[model]", 1))
        options = load(tmp_path / "untimed.toml").compiler
        assert options.items() > PRESETS["overlap"].items() and "xla_gpu_enable_command_buffer" in options
    assert len(report["untimed"]) == 2 and not any("command_buffer" in name for name in names)

    code, out, _ = plan(*given)
    assert code == 0 and "what is learnt does not change" in out
    assert 'xla_gpu_enable_command_buffer = ""}  # no CUDA graphs' in out.partition("To try on the machine")[2]
    assert f"digits.toml --devices none --compiler overlap --overlap true --strategy {written.strategy}" in out


def test_options_are_added_to_what_auto_stands_for_on_the_mesh(tmp_path):
    (tmp_path / "digits.toml").write_text(DIGITS)
    for mesh, preset in (({}, "overlap"), ({"mesh.data": "1", "mesh.model": "2"}, "default")):
        tuning = Tuning(tmp_path / "digits.toml", mesh, target("h100:1x2"), ["zero1"], [1])
        dimensions = tuning.dimensions()
        start = tuple(each.choices[each.start] for each in dimensions)
        assert "compiler" not in overrides_of(start)
        [at] = [i for i, each in enumerate(dimensions) if "triton" in each.choices[-1].label]
        written = overrides_of((*start[:at], dimensions[at].choices[-1], *start[at + 1 :]))["compiler"]
        options = tomllib.loads(f"t = {written}")["t"]
        assert options == {**PRESETS[preset], "xla_gpu_enable_triton_gemm": False}
        [line, _] = tuning.untimed(Trial(start, None))
        assert tomllib.loads(line[0])["compiler"].items() >= PRESETS[preset].items()
        labels = {choice.label for each in dimensions for choice in each.choices}
        assert f"compiler={preset}" not in labels and {"compiler=overlap", "compiler=default"} & labels


@pytest.mark.parametrize(
    ("on", "overrides", "tried"),
    [
        (
            "h100:1x2",
            {},
            {"overlap=true", "overlap=false", "compiler=default", "compiler=pipelined", "compiler=doubled"}
            | {"enable_triton_gemm=false", "memory_limit_slop_factor=200"},
        ),
        ("h100:1x2", {"compiler": "overlap", "overlap": "true"}, set()),
        ("h100:1x1", {"compiler": "{xla_gpu_enable_triton_gemm = true}"}, set()),
        ("cpu:2", {}, set()),
    ],
)
def test_how_steps_are_compiled_is_tried_where_it_can_matter(tmp_path, on, overrides, tried):
    """Not on a CPU, not one device's collectives, not what is given on the command line."""
    (tmp_path / "digits.toml").write_text(DIGITS)
    dimensions = Tuning(tmp_path / "digits.toml", overrides, target(on), ["zero1"], [1]).dimensions()
    labels = {choice.label for each in dimensions for choice in each.choices}
    assert labels - {"", "zero1"} == tried


def test_where_nothing_fits_the_nearest_is_told(plan, tmp_path):
    given = ("--target", "h100:1x2", "--strategy", "ddp", "--train.batch_size", str(2**29), "--tune-minutes", "1e-9")
    code, out, _ = plan(*given, "--tune", "-o", str(tmp_path / "tuned.toml"))
    assert code == 1 and "None fits; the nearest is ddp, which needs" in out and "the time was up" in out
    assert not (tmp_path / "tuned.toml").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--tune",), "given no --target"),
        (("--tune", "--target", "h100:1x2", "--max-batch"), "goes without --max-batch"),
        (("--tune", "--target", "h100:1x2", "--tune-minutes", "0"), "more than 0; given 0"),
        (("--tune", "--target", "h100:1x2", "-o", "/no/such/folder/x"), "there is no folder"),
        (("--tune", "--target", "h100:1x3"), "train.batch_size must divide by data=3"),
        (("--tune-minutes", "3"), "--tune-minutes is for --tune"),
        (("-o", "x.toml"), "-o is for --tune"),
    ],
)
def test_mistakes(plan, given, said):
    code, out, err = plan(*given)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
