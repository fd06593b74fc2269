"""Places where all processes wait for each other, bounded in time: who does not come is named.

JAX's own barrier (`multihost_utils.sync_global_devices`) is a collective of the devices: with a process missing it
waits for ever, and says nothing. Here they meet in the coordination service, which answers while the devices hang.

A meeting is known by its name and by how often the processes have met under it, so all of them meet in the same order.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jdp.core.cluster import service
from jdp.core.cluster.service import LostPeer

WAIT_SECONDS = 600.0  # one process may prepare data, or load weights, while the others wait for it
_POLL_SECONDS = 0.5  # how often a waiting main thread looks for Python's signal handlers

_T = TypeVar("_T")
_Small = TypeVar("_Small", bool, int, str)

_rounds: Counter[str] = Counter()
_left: list[threading.Event] = []  # waits that a signal handler ended by an exception


def meet(name: str, *, seconds: float = WAIT_SECONDS) -> None:
    """Wait until all processes have come here; with a single process, return at once."""
    from_every_process(name, "", seconds=seconds)


def from_every_process(name: str, value: str, *, seconds: float = WAIT_SECONDS) -> list[str]:
    """Return the values of all processes, by their index, on every process; they wait for each other."""
    if jax.process_count() == 1:
        return [value]
    store = _store(name)
    store.put("here", value)
    store.wait(
        "met",
        seconds,
        lambda missing: (
            f"All processes come to {name} together; in {seconds:g} seconds {missing} did not. Each makes "
            "the same calls, in the same order: see the last output of those that did not come."
        ),
    )
    if store.me == 0:  # all have left the meeting before this one
        store.forget(_prefix(name, _rounds[name] - 1))
    said = store.all("here")
    return [said[process] for process in store.members]


def from_first_process(name: str, value: _Small, *, seconds: float = WAIT_SECONDS) -> _Small:
    """Return process 0's value on every process; the others wait for it, and it does not wait for them."""
    if jax.process_count() == 1:
        return value
    store = _store(name)
    if store.me == 0:
        store.put("value", json.dumps(value))
        return value
    try:
        return json.loads(store.get("value", 0, seconds))
    except jax.errors.JaxRuntimeError as error:
        if not _in_vain(error):
            raise
        raise LostPeer(
            f"Process 0 says {name}, and the others wait for it; in {seconds:g} seconds it did not. See its last "
            "output."
        ) from error


@dataclass(frozen=True)
class Store:
    """Keys of the coordination service's store that begin with one prefix, and barriers of that name.

    Attributes:
        client: JAX's client of the coordination service.
        prefix: what the keys begin with.
        members: the processes that meet here.
        everyone: True if they are all that have joined, of which the service knows more than a process may.
    """

    client: Any
    prefix: str
    members: tuple[int, ...]
    everyone: bool = False

    @property
    def me(self) -> int:
        """Index of this process."""
        joined = service.joined_as()
        return joined[0] if joined else jax.process_index()

    def put(self, kind: str, text: str) -> None:
        """Publish a text of this process."""
        self.client.key_value_set(f"{self.prefix}/{kind}/{self.me}", text)

    def get(self, kind: str, process: int, seconds: float) -> str:
        """Return what a process published, after waiting for it."""
        key = f"{self.prefix}/{kind}/{process}"
        return _interruptible(lambda: self.client.blocking_key_value_get(key, int(seconds * 1000)))

    def all(self, kind: str) -> dict[int, str]:
        """Return what each process has published: process -> text."""
        entries = self.client.key_value_dir_get(f"{self.prefix}/{kind}")
        return {int(key.rpartition("/")[2]): text for key, text in entries}

    def forget(self, prefix: str) -> None:
        """Delete all keys below another prefix, which nobody reads any more."""
        self.client.key_value_delete(prefix)

    def wait(self, name: str, seconds: float, missed: Callable[[str], str], *, arrived: str = "here") -> None:
        """Wait until all members have arrived."""
        barrier, members = f"{self.prefix}/{name}", None if self.everyone else list(self.members)
        try:
            _interruptible(lambda: self.client.wait_at_barrier(barrier, int(seconds * 1000), members))
        except jax.errors.JaxRuntimeError as error:
            missing = sorted({*self.members} - self.all(arrived).keys()) if _in_vain(error) else []
            if not missing:
                raise
            raise LostPeer(missed(named(missing))) from error


def end_waits() -> None:
    """Leave the cluster if threads still wait there, because an exception took the main thread from a meeting.

    They end with JAX's client, and must end before Python does: a thread that comes back from C++ into a Python that is
    ending aborts the process.
    """
    waits = [ended for ended in _left if not ended.is_set()]
    if waits:
        jax.distributed.shutdown()
    for ended in waits:
        ended.wait(service.THREAD_SECONDS)


def named(processes: Sequence[int]) -> str:
    """Return "process 1", "processes 1 and 2" or "processes 0, 1, 2 and 5 more"."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    first, more = [str(process) for process in processes[:3]], len(processes) - 3
    last = f"{more} more" if more > 0 else first.pop()
    return f"processes {', '.join(first)} and {last}"


def _store(name: str) -> Store:
    """Return the store of the next meeting under this name. Raises ValueError."""
    client = service.coordination_client()
    if client is None:
        raise ValueError(
            f"Several processes meet through JAX's coordination service ({name}); given {jax.process_count()} "
            "processes without it. Call jdp.initialize() first."
        )
    _rounds[name] += 1
    return Store(client, _prefix(name, _rounds[name]), tuple(range(jax.process_count())))


def _prefix(name: str, number: int) -> str:
    return f"jdp/meet/{name}/{number}"


def _in_vain(error: Exception) -> bool:
    """Return True if the time was up, and the coordination service itself is alive."""
    return "DEADLINE_EXCEEDED" in str(error)


def _interruptible(call: Callable[[], _T]) -> _T:
    """Return what a call of the service returns or raises; signal handlers of Python run while it waits.

    They run in the main thread only, and not inside of JAX: so it waits in a thread beside it.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[_T] = []
    errors: list[BaseException] = []
    ended = threading.Event()  # not `Thread.join`: interrupted by an exception, it takes the thread for ended

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="jdp meeting", daemon=True).start()
    try:
        while not ended.wait(_POLL_SECONDS):
            pass
    except BaseException:
        _left.append(ended)
        raise
    if errors:
        raise errors[0]
    return results[0]
