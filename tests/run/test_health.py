"""Steps that go wrong in a run: said, kept, left out and gone back from, with the same bits as if they had never been
there; and devices that compute wrong, which end it. On points of three classes, so that a step is cheap."""

import dataclasses
import json
import socket

import jax
import numpy as np
import pytest
from flipped import flipped
from tiny_experiment import points_text, tables, write_points
from tiny_runs import refused, rows, saved_steps, train

from jdp.checkpoint import Checkpoints
from jdp.experiment import assembly as assemblies
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import load
from jdp.guard.diagnosis import diagnose
from jdp.guard.nonfinite import read_batch
from jdp.report.history import happened
from jdp.run.outputs.history import read_history
from jdp.run.wrong_devices import leave_out

TRAIN = {
    "steps": 12,
    "batch_size": 16,
    "log_every": 1,
    "eval_batches": 1,
    "checkpoint_every": 3,
    "keep_checkpoints": 10,
}
TABLES = tables(optimizer={"name": "sgd", "momentum": 0.9, "lr": 0.01}, train=TRAIN)
NAN = float("nan")


@pytest.fixture
def file(tmp_path):
    return write_points(tmp_path, points_text(TABLES, hidden=256, top='strategy = "zero1"\n'))


def spoil(monkeypatch, steps):
    """Multiply the features of these steps' batches: step -> factor."""
    real = assemblies.global_batches

    def spoilt(source, *, start=0, epochs=None, **given):
        for step, batch in enumerate(real(source, start=start, epochs=epochs, **given), start + 1):
            factor = np.float32(steps.get(step, 1) if epochs is None else 1)
            yield {**batch, "features": batch["features"] * factor}

    monkeypatch.setattr(assemblies, "global_batches", spoilt)


def losses(folder):
    """Step -> loss, as text (NaN equals itself), and skipped steps, as in the metrics."""
    return {step: (repr(loss), skipped) for step, (loss, skipped) in rows(folder, "loss", "skipped").items()}


def final(file, folder, step=12):
    """The leaves of a checkpoint, as NumPy arrays."""
    assembly = Assembly.on_devices(load(file, {}))
    with Checkpoints(folder / "checkpoints") as saved:
        state, record = saved.restore(assembly.abstract_state(), step)
    rng = jax.random.key_data(state.rng)
    return jax.tree.map(np.asarray, dataclasses.replace(state, rng=rng)), record


HAND_MADE = {}


def by_hand(file, out, steps=12):
    """State and losses of a run in which a plain loop leaves these steps out, the spoilt ones among them."""
    if (out := frozenset(out), steps) not in HAND_MADE:
        HAND_MADE[out, steps] = _by_hand(file, out, steps)
    return HAND_MADE[out, steps]


def _by_hand(file, out, steps):
    assembly = Assembly.on_devices(load(file, {}))
    state, seen = assembly.state(), {}
    with assembly.feed(assembly.data.train, seed=0, shuffle=True) as feed:
        for step in range(1, steps + 1):
            batch = next(feed)
            if step in out:
                state = dataclasses.replace(state, skipped=jax.device_put(state.skipped + 1, state.skipped.sharding))
                continue
            state, values = assembly.train_step(state, batch)
            seen[step] = (repr(float(values["loss"])), int(values["skipped"]))
    return jax.tree.map(np.asarray, dataclasses.replace(state, rng=jax.random.key_data(state.rng))), seen


def assert_equal_bits(one, other):
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


def test_a_skipped_step_is_inspected_and_its_batch_kept(file, monkeypatch, capsys):
    spoil(monkeypatch, {4: NAN, 5: NAN, 9: NAN})
    code, folder = train(file)
    shown = capsys.readouterr().out
    assert code == 0
    assert sorted(file.name for file in (folder / "flight").glob("*.npz")) == ["batch-4.npz", "batch-9.npz"]
    for step in (4, 9):  # the first one of each row
        sentences = (
            f"Step {step} is bad: its gradient or update was not finite.",
            f"The batch of step {step} has NaN or infinities: features.",
            f"The loss of step {step} is nan: the forward pass broke.",
            "Of 4 gradients 3 are not finite, in the order of the backward pass first layers/1/bias, layers/1/kernel, "
            "layers/0/kernel.",
            f"Its batch is in {folder / 'flight' / f'batch-{step}.npz'}.",
        )
        assert "\n".join(sentences) in shown
        assert " ".join(sentences) in diagnose(folder).words, "jdp why says it too"
    batch = read_batch(folder / "flight", 4)
    assert np.isnan(batch["features"]).all() and batch["features"].shape == (16, 6) and batch["labels"].shape == (16,)
    assert {step: skipped for step, (_, skipped) in losses(folder).items() if skipped}[12] == 3


def test_an_inspection_changes_nothing_and_can_be_left_out(file, monkeypatch):
    spoil(monkeypatch, {4: NAN})
    (_, first), (_, second) = train(file), train(file, "--guard.inspect_bad_steps", "false", name="plain")
    assert not list((second / "flight").glob("ba*")) and losses(first) == losses(second)
    assert_equal_bits(final(file, first)[0], final(file, second)[0])


BACK = ("--guard.roll_back_after", "2")


def test_a_run_that_goes_back_has_the_bits_of_one_that_never_took_those_steps(file, monkeypatch, capsys):
    """Steps 7 and 8 have no finite gradient: 6 to 8 are left out, from checkpoint 3 on (6 is one of those steps)."""
    spoil(monkeypatch, {7: NAN, 8: NAN})
    code, folder = train(file, *BACK)
    assert code == 0
    expected, seen = by_hand(file, {6, 7, 8})
    state, record = final(file, folder)
    assert_equal_bits(state, expected)
    assert losses(folder) == seen and record["bad"]["left_out"] == [6, 7, 8]
    why = "its gradient or update was not finite"
    said = f"2 bad steps in a row, the last one step 8: {why}: back to step 3; of the steps after it"
    assert f"{said} 6 to 8 are left out" in capsys.readouterr().out
    assert saved_steps(folder) == [3, 6, 9, 12]
    history = [json.loads(line)["event"] for line in (folder / "history.jsonl").read_text().splitlines()]
    assert history == ["started", "rolled back", "resumed", "finished"]
    assert json.loads((folder / "summary.json").read_text())["left_out"] == 3


@pytest.mark.parametrize("killed", [4, 8, 10])
def test_a_run_that_goes_back_and_is_killed_anywhere_has_the_same_bits(file, monkeypatch, killed):
    """Killed on the way back (step 4 is taken twice), in the middle of the bad steps, and when they are known."""
    spoil(monkeypatch, {7: NAN, 8: NAN})
    times = {4: 2}.get(killed, 1)
    with monkeypatch.context() as patched:
        step, taken = Assembly.train_step.func, []

        def dies(self):
            real = step(self)

            def call(state, batch):
                number = int(state.consumed) + 1
                taken.append(number)
                if taken.count(killed) == times:
                    raise RuntimeError("killed")
                return real(state, batch)

            return Dying(real, call)

        patched.setattr(Assembly, "train_step", property(lambda self: self.__dict__.setdefault("dying", dies(self))))
        assert train(file, *BACK)[0] == 70
    code, folder = train(file, *BACK)
    assert code == 0
    expected, seen = by_hand(file, {6, 7, 8})
    assert_equal_bits(final(file, folder)[0], expected)
    assert losses(folder) == seen


@dataclasses.dataclass
class Dying:
    """A training step that calls something else first."""

    real: object
    call: object

    def __call__(self, state, batch):
        return self.call(state, batch)

    def __getattr__(self, name):
        return getattr(self.real, name)


def test_without_a_checkpoint_a_run_goes_back_to_its_start(file, monkeypatch):
    spoil(monkeypatch, {2: NAN})
    code, folder = train(file, "--guard.roll_back_after", "1")
    expected, seen = by_hand(file, {1, 2})
    assert code == 0 and losses(folder) == seen
    assert_equal_bits(final(file, folder)[0], expected)


def test_bad_steps_at_the_end_are_gone_back_from_too(file, monkeypatch):
    spoil(monkeypatch, {11: NAN, 12: NAN})
    code, folder = train(file, *BACK)
    expected, seen = by_hand(file, {10, 11, 12})
    assert code == 0 and {step: row for step, row in losses(folder).items() if step < 10} == seen
    assert_equal_bits(final(file, folder)[0], expected)


def test_going_back_again_and_again_ends(file, monkeypatch, capsys):
    spoil(monkeypatch, dict.fromkeys(range(5, 100), NAN))
    error = refused(capsys, "train", file, "--run-dir", file.parent / "runs", *BACK, "--train.steps", "40")
    assert "going back must help; given 2 bad steps in a row" in error and "gone back 3 times" in error


def test_a_spike_is_said_and_gone_back_from(file, monkeypatch, capsys):
    spoil(monkeypatch, {21: 50})
    rule = ("--guard.spike_deviations", "7", "--guard.spike_window", "10", "--train.steps", "24")
    code, folder = train(file, *rule)
    shown = capsys.readouterr().out
    assert code == 0 and "Step 21 is bad: its loss is " in shown and "standard deviations above the running" in shown
    assert np.abs(read_batch(folder / "flight", 21)["features"]).max() > 50
    code, folder = train(file, *rule, "--guard.roll_back_after", "1", name="back")
    expected, seen = by_hand(file, {20, 21}, steps=24)
    assert code == 0 and losses(folder) == seen
    assert_equal_bits(final(file, folder, step=24)[0], expected)


def test_rolling_back_later_than_the_run_stops_is_refused(file, capsys):
    said = "guard.roll_back_after must be at most train.max_skips_in_a_row = 10, after which the run stops; given 11"
    assert said in refused(capsys, "train", file, "--guard.roll_back_after", "11")


def corrupt(monkeypatch, at, *, leaf="bias", device=5, once=False):
    """Flip a bit in a device's copy of a small leaf, which zero1 replicates, after step `at`."""
    step, done = Assembly.train_step.func, []

    def wrong(self):
        real = step(self)

        def call(state, batch):
            state, values = real(state, batch)
            if int(state.consumed) == at and not (once and done):
                done.append(at)
                paths = jax.tree.leaves_with_path(state.params)
                path = next(path for path, x in paths if leaf in jax.tree_util.keystr(path))
                flip = lambda p, x: flipped(x, jax.devices()[device], bit=9) if p == path else x  # noqa: E731
                state = dataclasses.replace(state, params=jax.tree.map_with_path(flip, state.params))
            return state, values

        return Dying(real, call)

    monkeypatch.setattr(Assembly, "train_step", property(lambda self: self.__dict__.setdefault("wrong", wrong(self))))


def test_a_run_with_a_flipped_bit_goes_back_and_has_the_bits_of_one_without(file, monkeypatch, capsys):
    """Found at the save after step 6, four steps after it happened: all have steps of the wrong copy by then."""
    corrupt(monkeypatch, at=4, once=True)
    code, folder = train(file)
    said = "after step 6 device 5 (cpu, number 5 of process 0) differs from device 0 (cpu, number 0 of process 0), "
    assert code == 0 and said in (shown := capsys.readouterr().out)
    assert "/bias" in shown and f"on host {socket.gethostname()}: back to step 3; the steps after it are taken" in shown
    expected, seen = by_hand(file, {})
    assert_equal_bits(final(file, folder)[0], expected)
    assert losses(folder) == seen and saved_steps(folder) == [3, 6, 9, 12]
    assert any(words.startswith("After step 6 device 5 (cpu, ") for words in diagnose(folder).words)
    history = read_history(folder / "history.jsonl")
    assert [event["event"] for event in history] == ["started", "rolled back", "resumed", "finished"]
    assert history[1]["wrong_devices"] == [{"device": 5, "host": socket.gethostname(), "number": 5}]
    assert any(one.words.startswith("went back: after step 6 device 5 ") for one in happened([], history))


def test_a_device_that_differs_twice_ends_the_run_before_it_is_saved(file, monkeypatch, capsys):
    corrupt(monkeypatch, at=4)
    often = ("--guard.check_replicas_every", "2")
    for visit in (1, 2):
        code, folder = train(file, *often)
        error = capsys.readouterr().err
        assert code == 78 and "Traceback" not in error and saved_steps(folder) == [3]
        said = "error: A device must not compute wrong twice; given, for the second time, after step 4 device 5 (cpu, "
        assert error.startswith(said)
        host = socket.gethostname()
        assert f"It is device 5 of the only host, {host}: run on another, or without it (CUDA_VISIBLE_DEV" in error
        returns = [event["event"] for event in read_history(folder / "history.jsonl")].count("rolled back")
        assert returns == 1, f"visit {visit}: the first one's return counts in the second"
    monkeypatch.undo()
    assert train(file, *often)[0] == 0
    assert_equal_bits(final(file, folder)[0], by_hand(file, {})[0])


def test_of_two_copies_that_differ_none_is_believed(file, monkeypatch, capsys):
    corrupt(monkeypatch, at=4, leaf="kernel")
    two = ("--strategy", "zero3", "--mesh.replica", "2", "--train.checkpoint_every", "0")
    assert train(file, *two, "--guard.check_replicas_every", "2")[0] == 70
    error = capsys.readouterr().err
    assert "the state after step 4 must be equal" in error and "differ from one another in params/" in error
    assert train(file, *two, "--guard.check_replicas_every", "0", name="never")[0] == 0


LINES = {
    "slurm": ({"SLURM_JOB_ID": "7"}, ["a", "b"], "Leave host b out: sbatch --exclude=b JOB.sh"),
    "kubernetes": ({"JOB_COMPLETION_INDEX": "0"}, ["a", "b"], "Leave host b out: kubectl cordon b"),
    "mpi": ({"OMPI_COMM_WORLD_SIZE": "4"}, ["a", "a", "b", "b"], "Leave host b out: mpirun --host with the 1 others"),
    "launch": ({}, ["a", "b", "c"], "Leave host b out: jdp launch --nodes 2, on the others alone"),
}


@pytest.mark.parametrize(("environment", "hosts", "line"), LINES.values(), ids=LINES)
def test_the_line_that_leaves_a_host_out(environment, hosts, line):
    assert leave_out("b", 1, hosts, environment).startswith(line)


def test_a_step_that_is_taken_twice_shows_what_is_replicated_nowhere(file, monkeypatch, capsys):
    assert train(file, "--guard.replay_every", "2", name="whole")[0] == 0
    corrupt(monkeypatch, at=6, leaf="kernel", once=True)
    replay = ("--guard.replay_every", "2", "--strategy", "zero3")
    assert train(file, *replay, name="replayed")[0] == 70
    error = capsys.readouterr().err
    assert "The same step on the same state and batch must return equal bits; its second time differs" in error
    assert " on device 5 (cpu, number 5 of process 0) in params/" in error
