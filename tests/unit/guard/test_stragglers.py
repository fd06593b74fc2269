"""Stragglers: who is late, what it costs, and that it is said once."""

import json
from types import SimpleNamespace

import pytest
from coordination import Store

from jdp.guard import stragglers
from jdp.guard.stragglers import HostTimes, straggler


@pytest.mark.parametrize(
    ("late", "step", "process", "cost"),
    [
        ({0: 0.01, 1: 0.5, 2: 0.02, 3: 0.01}, 1.0, 1, 0.49),
        ({0: 0.3, 1: 0.0}, 0.25, 0, 1.0),
        ({0: 0.10, 1: 0.14}, 1.0, None, None),  # 4 %
        ({0: 0.3, 1: 0.3, 2: 0.3}, 0.4, None, None),  # all alike: nobody waits for another
        ({0: 0.5}, 1.0, None, None),
        ({0: 0.0, 1: 1.0}, 0.0, None, None),
    ],
)
def test_stragglers_above_5_percent_are_named(late, step, process, cost):
    found = straggler(late, step)
    assert (found and found.process, found and pytest.approx(found.cost)) == (process, cost)


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(stragglers, "coordination_client", lambda: store)
    return store


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(stragglers, "time", clock)
    return clock


def take_steps(times, clock, done, *, host, ready=True):
    """Take three steps of a second, `host` of it before the dispatch; return what is said at the end.

    `ready`: the devices have computed the step before.
    """
    lines = []
    for step in range(done + 1, done + 4):
        times.results()
        clock.now += host
        times.dispatches({"loss": SimpleNamespace(is_ready=lambda: ready)})
        clock.now += 1 - host
        lines.append(times.after(step))
    assert lines[:2] == [None, None]
    return lines[2]


def test_stragglers_and_their_end_are_named_once(store, clock):
    times, said, other = HostTimes(3), {}, [[-1, 0, 0]]
    for number, late in enumerate([0.9, 0.9, 0.9, 0.9, 0.0, 0.0, 0.0, 0.9, 0.0], start=1):
        other = [other[-1], [number, late, 1.0]]
        store["jdp/late/1"] = json.dumps(other)
        said[number] = take_steps(times, clock, 3 * number - 3, host=0.01)
    # a window is compared one later, a straggler is named the second time, and one window alone does not count
    assert [number for number in said if said[number]] == [3, 7]
    assert said[3].startswith("process 1 is late: its host takes 0.9 s before each step of 1 s, the others' 0.01 s")
    assert said[7] == "process 1 is no longer later than the others"
    assert len(store) == 2, "keys are written over"


def test_hosts_ahead_of_devices_are_not_late(store, clock):
    times = HostTimes(3)
    take_steps(times, clock, 0, host=0.9, ready=False)
    take_steps(times, clock, 3, host=0.9)
    ahead, late = json.loads(store["jdp/late/0"])
    assert ahead == [1, 0.0, 1.0] and late == pytest.approx([2, 0.9, 1.0])


def test_what_is_no_step_is_left_out(store, clock):
    times = HostTimes(3)
    clock.now += 100  # an evaluation
    times.restart()
    take_steps(times, clock, 0, host=0.1)
    assert json.loads(store["jdp/late/0"])[1] == pytest.approx([1, 0.1, 1.0])
