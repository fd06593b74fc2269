"""A run that was resumed says what its saves and restarts took, and `jdp plan --mtbf --measured` goes by it."""

from tiny_experiment import write_tiny

from jdp.cli.main import main
from jdp.cli.plan import Options
from jdp.cli.plan_costs import read_failures
from jdp.guard.flight_recorder import read_ranks
from jdp.guard.save_times import measured


def test_a_run_says_what_its_saves_and_restarts_took(tmp_path):
    tables = '[optimizer]\nschedule = "constant"\n[train]\nsteps = 2\nbatch_size = 8\ncheckpoint_every = 1\n'
    file, runs = write_tiny(tmp_path, tables), tmp_path / "runs"
    for steps in ("1", "2"):
        assert main(["train", str(file), "--run-dir", str(runs), "--train.steps", steps]) == 0
    (events,) = read_ranks(runs / "tiny" / "flight").values()
    found = measured(events)
    assert found.stall and found.restart
    given = read_failures(Options(mtbf="9h", measured=runs / "tiny"))
    assert given is not None and (given.stall, given.restart, given.save) == (found.stall, 30 + found.restart, None)
    assert given.note.startswith(f"measured in {runs / 'tiny'}: a save stalls ")
    given = read_failures(Options(mtbf="9h", measured=runs / "tiny", stall_seconds=5.0))
    assert given is not None and given.stall == 5.0 and "stalls" not in given.note
