"""When all processes are started again, and when not. Programs without JAX, so that a start takes no time."""

import re
import sys
from pathlib import Path

import pytest
from own_process import environment

from jdp.launch import launch
from jdp.launch.output import KEPT_LOGS
from jdp.launch.supervisor import Restarts

WHO = """import os, signal, sys, time
rank, restarts = int(os.environ["JDP_PROCESS_ID"]), int(os.environ["JDP_RESTARTS"])
"""
NOTE = "from jdp.base.notices import note_progress\n"


def run(tmp_path, text, **options):
    """Launch a program as two processes."""
    (tmp_path / "program.py").write_text(WHO + text)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    return launch(command, 2, environment=environment(), **options)


FAILURES = {
    "preempted, or a deadline": ("sys.exit(75)", 75, True),
    "a fault of the program": ("sys.exit(70)", 70, True),
    "an exit code of the program's own": ("sys.exit(3)", 3, True),
    "a kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, True),
    "an abort": ("os.abort()", 134, True),
    "an exception before jdp.initialize": ("raise KeyError", 1, False),
    "a mistake": ("sys.exit(2)", 2, False),
    "a mismatch": ("sys.exit(78)", 78, False),
    "Ctrl-C": ("sys.exit(130)", 130, False),
    "an interrupt": ("signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGINT)", 130, False),
}


@pytest.mark.parametrize(("fault", "code", "again"), FAILURES.values(), ids=FAILURES)
def test_what_is_started_again(fault, code, again, tmp_path, capfd):
    text = f"if restarts == 0 and rank == 1: {fault}\nprint('restarts', restarts)"
    assert run(tmp_path, text, max_restarts=1) == (0 if again else code)
    out, err = capfd.readouterr()
    assert ("jdp launch: restart 1 of 1\n" in err) == again
    assert ("restarts 1" in out) == again


def test_restarts_are_counted(tmp_path, capfd):
    assert run(tmp_path, "sys.exit(7 * rank)", max_restarts=2) == 7
    err = capfd.readouterr().err
    assert err.count("jdp launch: restart ") == 2
    assert err.endswith("not started again: 2 restarts of 2 made (--max-restarts)\n")
    with pytest.raises(ValueError, match="0 or more; given -1"):
        run(tmp_path, "", max_restarts=-1)


def test_a_crash_loop_stops_with_its_cause(tmp_path, capfd):
    """It comes further once, and then no more; what it was told to try again is not tried by those above, either."""
    text = NOTE + "note_progress(min(20, 10 + 10 * restarts)); sys.exit(75)"
    assert run(tmp_path, text, max_restarts=9) == 70
    err = capfd.readouterr().err
    assert re.findall(r"jdp launch: restart (\d) of 9, from step (\d+)", err) == [("1", "10"), ("2", "20"), ("3", "20")]
    assert err.endswith("crash loop: failed after checkpoint 20 3 times in a row; not started again\n")
    assert "ended with exit code 75. Its last output:" in err


def test_restarts_count_the_process_behind(tmp_path, capfd):
    """As its part of a copy in memory may be missing; and a process does not go back to an older one in storage."""
    text = NOTE + "note_progress(20 + 2 * rank); note_progress(10); time.sleep(1); sys.exit(70 * (restarts == 0))"
    assert run(tmp_path, text, max_restarts=1) == 0
    assert "jdp launch: restart 1 of 1, from step 20\n" in capfd.readouterr().err


def test_silent_programs_are_no_crash_loop(tmp_path):
    told = Restarts(9, True, tmp_path)
    assert [told.another(70) for _ in range(3)] == [True, True, False]
    silent = Restarts(9, False, tmp_path)
    assert [silent.another(70) for _ in range(10)] == [True] * 9 + [False]


def test_a_signal_ends_all_for_good(tmp_path, capfd):
    text = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(f"{sys.argv[1]}/{rank}", "w").close()
while rank and not os.path.exists(f"{sys.argv[1]}/0"): time.sleep(0.02)
if rank: os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(60)
"""
    assert run(tmp_path, text, max_restarts=3) == 75, "SIGUSR1 is passed on as SIGTERM"
    assert "restart" not in capfd.readouterr().err


def test_early_savers_let_the_others_save(tmp_path, capfd):
    """One that was preempted: the others are stopping at the same step, and may have more to write."""
    assert run(tmp_path, "time.sleep(1.5 * rank); print('saved'); sys.exit(75)") == 75
    assert capfd.readouterr().out.count("saved") == 2


def test_each_process_and_start_has_a_log(tmp_path, capfd):
    logs = tmp_path / "logs"
    text = "print('out', restarts, flush=True); os.write(2, b'err, and no newline')\n"
    text += "sys.exit(70 * (restarts < 11 and rank == 0))"
    assert run(tmp_path, text, max_restarts=11, log_dir=logs) == 0
    names = [f"rank-{rank:05}{number}.log" for rank in (0, 1) for number in ("", *(f".{n}" for n in range(1, 10)))]
    assert KEPT_LOGS == 9 and sorted(file.name for file in logs.iterdir()) == sorted(names), "no more than ten each"
    newest, before = ((logs / name).read_text() for name in ("rank-00000.log", "rank-00000.1.log"))
    assert newest.startswith("out 11\nerr, and no newline") and newest.endswith("process 0 ended with exit code 0\n")
    assert before.startswith("out 10\n") and before.endswith("process 0 ended with exit code 70\n")


def test_unwritable_logs_are_done_without(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert run(tmp_path, "print('ran')", log_dir=tmp_path / "file" / "logs") == 0
    out, err = capfd.readouterr()
    assert out.count("ran") == 2
    assert err.count("cannot be written: Not a directory; the process runs without a log") == 2


def test_two_launchers_do_not_share_a_log(tmp_path, capfd):
    """The second one, started by a process of the first, keeps none."""
    inner = tmp_path / "inner"
    inner.mkdir()
    logs = str(tmp_path / "logs")
    text = f"""
if rank == 0:
    import subprocess
    code = "import pathlib, jdp.launch as l; l.launch(['echo', 'inner'], 1, log_dir=pathlib.Path({logs!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    print("outer", flush=True)
"""
    assert run(tmp_path, text, log_dir=Path(logs)) == 0
    assert "is being written by another jdp launch" in capfd.readouterr().out
    log = (tmp_path / "logs" / "rank-00000.log").read_text()
    assert "[0] inner\n" in log and "outer\n" in log and not (tmp_path / "logs" / "rank-00000.1.log").exists()
