"""Where a run's time went, over its visits: useful once, and everything counted once."""

from dataclasses import asdict

import pytest

from jdp.guard.time_account import account


def visit(began, resumed, steps, *, left=None, compiles=5.0, seconds=1.0):
    """A visit that starts for 10 seconds, of which it restores 4, and takes these steps."""
    events = [
        {"time": began + 2, "event": "start", "began": began},
        {"time": began + 7, "event": "end", "doing": "restore", "seconds": 4.0},
        {"time": began + 10, "event": "resumed", "step": resumed},
    ]
    time = began + 10
    for i, step in enumerate(steps):
        length = compiles if i == 0 else seconds
        time += length
        events.append({"time": time, "event": "step", "step": step, "seconds": length, "data": 0.25})
    return [*events, *([{"time": time, "event": left}] if left else [])]


def test_a_calm_visit():
    spent = account([*visit(100.0, 0, range(1, 12)), {"time": 127.0, "event": "end", "doing": "eval", "seconds": 2.0}])
    assert spent.total == 27.0
    assert (spent.start, spent.restore, spent.compile, spent.eval) == (6.0, 4.0, 4.75, 2.0)
    assert (spent.steps, spent.data, spent.step_count) == (7.5, 2.75, 10)
    assert sum(spent.parts.values()) == pytest.approx(spent.total)
    assert spent.goodput == pytest.approx(9.5 / 27)
    assert spent.words().startswith("goodput 35 % of 27 s; starting 22 %, compiling 18 %, making or restoring")


def test_lost_steps_are_not_useful_time():
    """Killed at step 11; the second visit resumes from 8 and is born 60 seconds later."""
    spent = account([*visit(100.0, 0, range(1, 12)), *visit(185.0, 8, range(9, 14), left="finished")])
    assert (spent.visits, spent.idle) == (2, 60.0)
    assert spent.lost == pytest.approx(3 * 0.75)
    assert spent.step_count == 10 - 3 + 4
    assert spent.steps == pytest.approx(spent.step_count * 0.75)
    assert sum(spent.parts.values()) == pytest.approx(spent.total)


def test_visits_with_nothing_to_do_are_left_out():
    calm = visit(100.0, 0, range(1, 12), left="finished")
    looked = [
        {"time": 9000.0, "event": "start", "began": 8990.0},
        {"time": 9005.0, "event": "end", "doing": "restore", "seconds": 4.0},
        {"time": 9006.0, "event": "nothing to do"},
    ]
    assert account([*calm, *looked]) == account(calm)


def test_following_files_continue_the_account():
    events = [*visit(100.0, 0, range(1, 12)), *visit(185.0, 8, range(9, 14), left="finished")]
    for cut in range(1, len(events)):
        before = {"time": 0.0, "event": "before", **asdict(account(events[:cut]))}
        whole, joined = account(events), account([before, *events[cut:]])
        assert asdict(joined) == pytest.approx(asdict(whole)), cut
