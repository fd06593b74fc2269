"""What `jdp.guard` does in processes of its own."""

import re
import signal

from own_process import python

from jdp.launch.events import read

HANGS = """
import ctypes, resource, sys
import jdp

libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with jdp.Deadline(1, 60) as deadline:
    for step in range(3):
        deadline.step(step)
    if "exhausted" in sys.argv:
        hoard = [bytes(size) for size in range(1, 500) for _ in range(500)]  # small values take what Python keeps
        resource.setrlimit(resource.RLIMIT_AS, (0, resource.RLIM_INFINITY))
        try:
            while True:
                hoard.append(bytes(len(hoard) % 500))
        except MemoryError:
            pass
    print("hangs", flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def test_a_loop_that_hangs_ends_with_75(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    done = python(tmp_path / "hangs.py")
    assert done.returncode == 75, done.stderr
    assert re.search(r"deadline: After step 2, its next step did not end in 1 seconds\. Stacks of all", done.stderr)
    assert 'hangs.py", line 19 in <module>' in done.stderr


def test_a_process_without_memory_ends_too(tmp_path):
    """No thread can be started then, and any line of Python may raise MemoryError."""
    (tmp_path / "hangs.py").write_text(HANGS)
    assert python(tmp_path / "hangs.py", "exhausted").returncode == 75


HANGING_DISK = """
import os, sys, time
from pathlib import Path
from jdp.guard import deadline, watch
from jdp.launch.events import EventLog

watch.ALIVE_SECONDS, deadline._LAST_RESORT_SECONDS = 0.5, 1.0
os.mkfifo(sys.argv[1])  # a pipe that is full and has no reader hangs like a disk
log, pipe = EventLog(Path(sys.argv[1])), os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK)
try:
    while True:
        os.write(pipe, bytes(4096))
except BlockingIOError:
    pass
limit = deadline.Deadline(2, 60)
loop = watch.Watch(log, limit)
with limit:
    loop.deadline.step(1)
    time.sleep(100)
"""


def test_a_hanging_disk_does_not_silence_the_deadline(tmp_path):
    """Before it has passed, a note that the process is alive hangs in the log."""
    done = python("-c", HANGING_DISK, tmp_path / "log")
    assert done.returncode == 75, done.stderr
    assert "deadline: After step 1, its next step did not end in 2 seconds." in done.stderr
    assert "in event" in done.stderr, "the stacks have the thread that hangs"


def test_what_was_recorded_outlives_sigkill(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from jdp.launch.events import EventLog\n"
        f"log = EventLog(Path({str(tmp_path / 'rank-00000.jsonl')!r}))\n"
        "for step in range(50): log.event('step', step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert python("-c", code).returncode == -signal.SIGKILL
    assert [event["step"] for event in read(tmp_path / "rank-00000.jsonl")] == list(range(50))
