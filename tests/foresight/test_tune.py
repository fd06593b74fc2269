"""`jdp plan --tune`: it ends where no single change is better, and what it writes is the experiment with that way."""

import json
from types import SimpleNamespace

import pytest

from jdp.cli import main as cli
from jdp.experiment.file import load
from jdp.foresight.advice.tune import Choice, Dimension, name_of, search
from jdp.foresight.forecast import Estimate

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
    )
    code, out, err = plan(*given, "-o", str(tuned), "--json")
    report = json.loads(out)
    names = [trial["name"] for trial in report["trials"]]
    assert code == 0 and {"zero1", "ddp"} < {*names} and names[0] == "zero1", "from what the experiment has"
    assert not any("K=3" in name or "compiler" in name for name in names), "does not divide; is given"
    best = min(report["trials"], key=lambda trial: trial["step_seconds"])
    assert report["tuned"]["name"] == best["name"] and report["complete"] and report["nearest"] is None
    written, own = load(tuned), load(tmp_path / "digits.toml")
    assert written.compiler == "overlap" and written.strategy == best["overrides"]["strategy"]
    assert (written.train.batch_size, written.optimizer) == (own.train.batch_size, own.optimizer)
    assert f"wrote {tuned}" in err and [*tmp_path.glob(".*")] == []

    code, out, _ = plan(*given)
    assert code == 0 and "what is learnt does not change" in out
    assert f"digits.toml --devices none --compiler overlap --strategy {written.strategy}" in out


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
