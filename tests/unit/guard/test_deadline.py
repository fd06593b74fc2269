"""The deadline: how long, who is named, and that it ends a process whose main thread cannot."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from coordination import Store

import jdp
from jdp.core.cluster.initialize import HEARTBEAT_SECONDS
from jdp.data.batches import sample_at
from jdp.guard import deadline as module
from jdp.guard.deadline import DEVICES, Deadline, Position, set_xla_timeout, whereabouts


def at(step, doing=DEVICES, when=100.0):
    return Position(step, doing, when)


WORDS = {
    "behind": (
        {rank: at(4211, "waiting for data") if rank == 17 else at(4212) for rank in range(32)},
        f"Process 17 is at step 4,211 (waiting for data); processes 0, 1, 2 and 28 more are at step 4,212 ({DEVICES}).",
        [17],
    ),
    "busy": (
        {0: at(5), 1: at(5), 2: at(5, "saving")},
        f"Process 2 is at step 5 (saving); processes 0 and 1 are at step 5 ({DEVICES}).",
        [2],
    ),
    "nobody": (
        {0: at(5), 1: at(5)},
        f"Processes 0 and 1 are at step 5 ({DEVICES}). The devices hang, or the network between them.",
        [],
    ),
    "silent": (
        {0: at(9), 2: at(9)},
        "Process 1 does not answer: 12 seconds ago it was at step 8, evaluating. Process 3 does not answer: it never "
        f"reported its position. Processes 0 and 2 are at step 9 ({DEVICES}).",
        [1, 3],
    ),
}


@pytest.mark.parametrize(("answers", "words", "behind"), WORDS.values(), ids=WORDS)
def test_who_is_behind(answers, words, behind):
    before, count = {0: at(8), 1: at(8, "evaluating", when=88.0)}, max(*answers, *behind, 0) + 1
    assert whereabouts(count, answers, before, now=100.0) == (words, behind)


def test_how_long_a_step_may_take(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    limits = Deadline(300, 3600)
    assert limits.limit == 3600, "the first step compiles"
    for step in range(1, 12):
        now[0] += 50.0
        limits.step(step)
    assert limits.limit == 500.0, "ten median steps"
    with limits.during("saving"):
        assert limits.limit == 3600
        limits.beat("saving")
        assert limits.limit == 500.0, "after its first batch an evaluation has a step's time"
    assert limits.limit == 500.0
    assert Deadline(0, 0).limit is None
    with pytest.raises(ValueError, match=r"given seconds=-1, first_seconds=3600\.0\. Give 300"):
        jdp.Deadline(-1)


def test_the_reader_of_a_sample_is_shown_while_the_loop_waits_for_data():
    class Samples(list):
        def __getitem__(self, index):
            return {doing: " ".join(module.stuck_stack(doing)) for doing in ("waiting for data", DEVICES)}

    with ThreadPoolExecutor(1) as pool:
        waiting, stepping = pool.submit(sample_at, Samples([0]), 0, 0).result().values()
    assert "in __getitem__ jdp/data/batches.py" in waiting and "batches.py" not in stepping


@pytest.mark.parametrize("other", ["stopped", "saving", "left", "lives"])
def test_process_0_notices_silence_before_jax(monkeypatch, other):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    service = Store()
    first, second = (module._Peers(service, me, 2, 1) for me in (0, 1))
    second.publish(at(3), once=other == "saving")
    if other == "left":
        second.leave()
    silent = []
    for _ in range(30):
        now[0] += 1
        if other == "lives":
            second.publish(at(3, when=now[0]), once=False)
        first.publish(at(3, when=now[0]), once=False)
        silent.append(first.silent)
    assert silent == [other == "stopped" and second > module.SILENT_SECONDS for second in range(30)]
    assert 1.2 * module.SILENT_SECONDS < HEARTBEAT_SECONDS / 2
    now[0] += 60  # process 0 itself is stopped for a minute: the others have their time again
    first.publish(at(3, when=now[0]), once=False)
    assert not first.silent


def test_xlas_timeout_is_set_on_gpus_only(monkeypatch):
    flag = "--xla_gpu_execution_terminate_timeout"
    environment = {"XLA_FLAGS": "--one"}
    monkeypatch.setattr(module, "visible_gpus", lambda environment: [])
    assert set_xla_timeout(environment, 60) is None and environment == {"XLA_FLAGS": "--one"}
    monkeypatch.setattr(module, "visible_gpus", lambda environment: ["0"])
    assert f"60 seconds ({flag} in XLA_FLAGS)" in (set_xla_timeout(environment, 60) or "")
    assert environment == {"XLA_FLAGS": f"--one {flag}=60s"}
    assert set_xla_timeout(environment, 90) is None and environment == {"XLA_FLAGS": f"--one {flag}=60s"}
