"""A run that was resumed says what its saves and restarts took, and `jdp plan --mtbf --measured` goes by it."""

from tiny_experiment import tables, write_tiny
from tiny_runs import train

from jdp.cli.plan import Options
from jdp.cli.plan_costs import read_failures
from jdp.guard.flight_recorder import read_ranks
from jdp.guard.save_times import measured


def test_a_run_says_what_its_saves_and_restarts_took(tmp_path):
    settings = tables(optimizer={"schedule": "constant"}, train={"steps": 2, "batch_size": 8, "checkpoint_every": 1})
    file = write_tiny(tmp_path, settings)
    for steps in ("1", "2"):
        code, run = train(file, "--train.steps", steps)
        assert code == 0
    (events,) = read_ranks(run / "flight").values()
    found = measured(events)
    assert found.stall and found.restart
    given = read_failures(Options(mtbf="9h", measured=run))
    assert given is not None and (given.stall, given.restart, given.save) == (found.stall, 30 + found.restart, None)
    assert given.note.startswith(f"measured in {run}: a save stalls ")
    given = read_failures(Options(mtbf="9h", measured=run, stall_seconds=5.0))
    assert given is not None and given.stall == 5.0 and "stalls" not in given.note
