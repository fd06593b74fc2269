"""`jdp` in the tests' own process: runs, runs that are stopped, refusals, and what a run's folder holds."""

import signal
from contextlib import contextmanager

import pytest

from jdp.checkpoint import Checkpoints
from jdp.cli.main import main
from jdp.run import signals
from jdp.run.metrics import read


def train(file, *arguments, name=None, runs="runs"):
    """Train an experiment; return the exit code, and the folder of the run."""
    root, named = file.parent / runs, [] if name is None else ["--name", name]
    return main(["train", str(file), "--run-dir", str(root), *named, *arguments]), root / (name or file.stem)


def refused(capsys, *words):
    """Run a command that must end with 2; return its error, of which there is one, without a traceback.

    Only a run that began has lines on stdout; all others leave it to a program that reads it.
    """
    capsys.readouterr()
    code, (out, error) = main([*map(str, words)]), capsys.readouterr()
    assert code == 2 and error.count("error:") == 1 and "Traceback" not in error, error
    assert words[0] == "train" or not out, out
    return error


@contextmanager
def stopped_at(step, number=signal.SIGINT):
    """Runs in here get a signal while this step is under way. Yields a MonkeyPatch for what else holds in here."""

    def at_step(self, now):
        self.signal = number if now == step else None
        return self.signal is not None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signals.StopRequest, "at_step", at_step)
        yield patched


def rows(folder, *names):
    """Return a run's metrics by step: the value of one name, or a tuple of those of several. No step is there twice."""
    found = [row for row in read(folder / "metrics.jsonl") if names[0] in row]
    values = {row["step"]: row[names[0]] if len(names) == 1 else tuple(map(row.get, names)) for row in found}
    assert len(values) == len(found), "a step twice"
    return values


def saved_steps(folder):
    with Checkpoints(folder / "checkpoints") as saved:
        return saved.steps


def sample_files(folder):
    """Return the files of a run's samples by name, as text."""
    return {path.name: path.read_text() for path in sorted(folder.glob("samples/*"))}
