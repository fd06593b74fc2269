"""Batch size, length and mixture that change by step: exact after a stop at any step, on any strategy, and reported."""

import json

import pytest
from own_process import python
from tiny_experiment import points_text, tables, write_points, write_tiny
from tiny_runs import refused, rows, stopped_at, train

from jdp.cli.main import main
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.run.outputs.metrics import read

SIZES, LENGTHS, WEIGHT = [[0, 16], [3, 32]], [[0, 4], [5, 8]], [[0, 3], [4, 0]]
TRAIN = {"steps": 7, "batch_size": SIZES, "accumulate": 2, "log_every": 1, "eval_every": 4, "eval_batches": 1}
OPTIMIZER = {"lr": 0.01, "lr_scaling": "linear", "base_batch_size": 16}
MIXTURE = {"code": {"source": "text.txt", "weight": WEIGHT}, "prose": {"source": "prose.txt"}}
NAMES = ("loss", "grad_norm", "weight", "lr", "batch_size", "length", "tokens_seen", "share_code")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    given = tables(train=TRAIN, optimizer=OPTIMIZER, guard={"keep_in_memory": 2})
    file = write_tiny(folder, given, top='strategy = "zero3"\n')
    (folder / "prose.txt").write_text("many words of prose that nobody wrote, " * 200)
    data = {"length": LENGTHS, "heldout_fraction": 0.1, "mixture": MIXTURE}
    text = file.read_text().replace('source = "text.txt"\nheldout_fraction = 0.1\n', "\n".join(entries(data)))
    file.write_text(text)
    return file


def entries(data):
    mixture = [
        f"{name}.{key} = {json.dumps(value)}" for name, part in data["mixture"].items() for key, value in part.items()
    ]
    return [f"length = {data['length']}", "heldout_fraction = 0.1", *(f"mixture.{line}" for line in mixture), ""]


@pytest.fixture(scope="module")
def whole(file):
    code, folder = train(file, runs="whole")
    assert code == 0
    return folder


def test_the_rows_of_metrics_say_what_each_step_had(whole):
    found = rows(whole, *NAMES)
    assert {step: row[4:] for step, row in found.items()} == {
        1: (16, 4, 64, 0.75), 2: (16, 4, 128, 0.75), 3: (16, 4, 192, 0.75), 4: (32, 4, 320, 0.75),
        5: (32, 4, 448, 0.0), 6: (32, 8, 704, 0.0), 7: (32, 8, 960, 0.0),
    }  # fmt: skip
    assert [row[2] for row in found.values()] == [64, 64, 64, 128, 128, 256, 256]  # tokens that the loss counted
    assert [row[3] for row in found.values()] == pytest.approx([0.01] * 3 + [0.02] * 4)  # float32


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """An MLP whose batch grows after step 3 and again after step 5."""
    train = {"steps": 7, "batch_size": [[0, 16], [3, 32], [5, 48]], "log_every": 2, "checkpoint_every": 2}
    given = tables(train=train, optimizer=OPTIMIZER)
    return write_points(tmp_path_factory.mktemp("points"), points_text(given, top='strategy = "zero1"\n'))


@pytest.mark.parametrize("step", [3, 4])
def test_a_batch_that_grows_is_bitwise_the_same_after_a_stop_where_it_does(points, step):
    code, whole = train(points, runs="whole")
    assert code == 0
    with stopped_at(step):
        assert train(points, runs=f"stopped-{step}")[0] == 130
    code, folder = train(points, "--train.log_every", "1", runs=f"stopped-{step}")
    assert code == 0
    names = ("loss", "grad_norm", "lr", "batch_size", "examples_seen")
    expected, found = rows(whole, *names), rows(folder, *names)
    assert expected.items() <= found.items()
    assert {step: row[3:] for step, row in found.items() if step > 4} == {5: (32, 112), 6: (48, 160), 7: (48, 208)}


@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_stop_at_or_beside_a_change_is_bitwise_the_undisturbed_run(whole, file, step):
    """After step 3 the size changes, after 4 the mixture, after 5 the length."""
    runs = f"stopped-{step}"
    with stopped_at(step):
        assert train(file, runs=runs)[0] == 130
    code, folder = train(file, runs=runs)
    assert code == 0
    assert rows(folder, *NAMES) == rows(whole, *NAMES)
    assert rows(folder, "eval_loss", "eval_code_loss") == rows(whole, "eval_loss", "eval_code_loss")


def test_other_devices_and_another_strategy_go_on_with_the_same_rows(whole, file):
    """Bound: float32 sums in another order, as in test_equivalence."""
    with stopped_at(3):
        assert train(file, runs="moved")[0] == 130
    code, folder = train(file, "--strategy", "ddp", "--mesh.data", "4", "--mesh.model", "2", runs="moved")
    assert code == 0
    for now, before in zip(rows(folder, *NAMES).values(), rows(whole, *NAMES).values(), strict=True):
        assert now[2:] == before[2:] and now[:2] == pytest.approx(before[:2], abs=5e-6)


def test_two_processes_go_on_where_one_was_stopped_at_a_change(whole, file):
    """Bound: as above; Gloo adds in an order of its own."""
    with stopped_at(5):
        assert train(file, runs="two")[0] == 130
    launch = ("launch", "-n", "2", "--devices-per-process", "4", "--", str(file), "--run-dir", str(file.parent / "two"))
    done = python("-m", "jdp", *launch, cwd=file.parent)
    assert done.returncode == 0, done.stderr
    found = rows(file.parent / "two" / "tiny", *NAMES)
    for now, before in zip(found.values(), rows(whole, *NAMES).values(), strict=True):
        assert now[2:] == before[2:] and now[:2] == pytest.approx(before[:2], abs=5e-6)


def test_each_program_is_compiled_once_and_told_to_the_recorder(whole):
    events = [json.loads(line) for line in (whole / "flight" / "rank-00000.jsonl").read_text().splitlines()]
    compiled = [event["step"] for event in events if event.get("doing") == "compile"]
    assert compiled == [1, 4, 6]


def test_speeds_count_the_tokens_of_each_step(whole):
    for row in [row for row in read(whole / "metrics.jsonl") if "loss" in row]:
        tokens = row["batch_size"] * row["length"]
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(tokens)


BAD = {
    "a size that does not divide": (("--train.batch_size", "[[0, 16], [3, 24]]"), "train.batch_size", "given 24"),
    "steps that do not ascend": (("--train.batch_size", "[[0, 16], [3, 16], [3, 32]]"), "steps that ascend from 0"),
    "a size that is none": (
        ("--train.batch_size", "[[0, 16], [3, 0]]"),
        "--train.batch_size",
        "whole numbers of 1 or more; given [[0, 16], [3, 0]]",
    ),
    "a length that does not divide": (
        ("--data.length", "[[0, 3], [3, 8]]"),
        "divide the longest, 8",
        "given 3: take 1",
    ),
    "a length beyond the context": (("--data.length", "[[0, 8], [3, 16]]"), "at most model.context = 8; given 16"),
    "a weight below 0": (
        ("--data.mixture.code.weight", "[[0, 1], [3, -1]]"),
        "--data.mixture.code.weight",
        "numbers of 0 or more",
    ),
    "no weight at all": (("--data.mixture.prose.weight", "[[0, 1], [4, 0]]"), "given none after 4 steps"),
    "an order of which each epoch is the first": (("--data.shuffle", "false"), "data.shuffle", "change by step"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_follow_is_refused_in_a_sentence(file, capsys, case):
    given, *words = BAD[case]
    error = refused(capsys, "train", file, "--run-dir", file.parent / "refused", *given)
    assert all(word in error for word in words), error


def test_an_evaluation_reads_whole_samples_in_a_batch_that_is_trained_on(file):
    """128 rows of 2 tokens are more than 32 of 8, and 128 of 8 tokens would be four times what any step holds."""
    sizes, lengths = "[[0, 128], [5, 16], [6, 32]]", "[[0, 2], [5, 8]]"
    given = load(file, {"train.batch_size": sizes, "data.length": lengths})
    assert Assembly.on_devices(given).eval_batch_size == 32


def test_a_plan_has_what_each_phase_holds_and_sends(points, capsys):
    asked = ("--target", "cpu:8", "--strategy", "zero1", "--no-cache", "--json")
    assert main(["plan", str(points), "--train.batch_size", "[[0, 16], [3, 2048], [99, 8]]", *asked]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second = report["phases"]
    assert [(each["start"], each["end"], each["batch"]) for each in report["phases"]] == [
        (0, 3, "16 × 6 features"),
        (3, 7, "2048 × 6 features"),
    ]
    assert first["bytes_per_device"] < second["bytes_per_device"] == report["strategies"][0]["bytes_per_device"]
    assert first["wire_bytes_per_device"] == second["wire_bytes_per_device"] > 0
    assert "are for the largest" in report["notes"][0]


def test_a_change_that_the_run_never_reaches_is_reported(points, capsys):
    given = ("--train.batch_size", "[[0, 16], [5, 32]]", "--train.steps", "2", "--name", "short")
    assert train(points, *given)[0] == 0
    assert "not reached in 2 steps: the last change of train.batch_size after 5" in capsys.readouterr().out


def test_a_changed_schedule_is_another_run(points, capsys):
    assert train(points, "--train.batch_size", "16", "--train.steps", "1", runs="other")[0] == 0
    error = refused(capsys, "train", points, "--run-dir", points.parent / "other")
    assert "train.batch_size was 16, is [[0, 16], [3, 32], [5, 48]]" in error
