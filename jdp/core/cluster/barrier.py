"""Barriers of all processes, bounded in time, which name the processes that do not arrive.

JAX's own barrier (`multihost_utils.sync_global_devices`) is a collective of the devices: if a process is missing, it
waits for ever, without a message. These barriers use the coordination service, which answers even if the devices hang.
A barrier has a name and the number of earlier ones of that name, so all processes must come to them in the same order.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax._src.distributed import global_state  # nothing public says who we are without starting a backend

from jdp.base.errors import UserError
from jdp.base.signals import THREAD_SECONDS


class LostPeer(RuntimeError):
    """A process did not come to a barrier, or did not send a value; the message names it."""


def joined_as() -> tuple[int, int] | None:
    """Return (process id, number of processes) in the joined cluster, or None, without starting JAX's devices."""
    return (global_state.process_id, global_state.num_processes) if jax.distributed.is_initialized() else None


def coordination_client() -> Any:
    """Return the client of JAX's coordination service: barriers and a key-value store; None outside of a cluster."""
    return global_state.client


WAIT_SECONDS = 600.0  # one process may prepare data, or load weights, while the others wait for it
_POLL_SECONDS = 0.5  # how often a waiting main thread looks for Python's signal handlers
_THREAD = "jdp barrier"
PLURAL = {"process": "processes", "node": "nodes"}

_T = TypeVar("_T")
_Small = TypeVar("_Small", bool, int, str)

_rounds: Counter[str] = Counter()


def meet(name: str, *, seconds: float = WAIT_SECONDS) -> None:
    """Wait until all processes have come here."""
    from_every_process(name, "", seconds=seconds)


def from_every_process(name: str, value: str, *, seconds: float = WAIT_SECONDS) -> list[str]:
    """Return the values of all processes in the order of their indices; all wait for each other."""
    if jax.process_count() == 1:
        return [value]
    store = _store(name)
    store.put("here", value)
    store.wait("met", seconds, name)
    if store.me == 0:  # all have left the barrier before this one
        store.forget(_prefix(name, _rounds[name] - 1))
    said = store.all("here")
    return [said[process] for process in store.members]


def from_first_process(name: str, value: _Small, *, seconds: float = WAIT_SECONDS) -> _Small:
    """Return process 0's value on every process; the others wait for process 0, which does not wait for them."""
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
        raise LostPeer(f"Process 0 did not send {name} in {seconds:g} seconds. See its last output.") from error


@dataclass(frozen=True)
class Store:
    """Keys of the coordination service's store with one prefix, and barriers of that name."""

    client: Any  # JAX's client of the coordination service
    prefix: str  # the beginning of the keys
    members: tuple[int, ...]  # the processes that take part

    @property
    def me(self) -> int:
        joined = joined_as()
        return joined[0] if joined else jax.process_index()

    def put(self, kind: str, text: str) -> None:
        """Publish a text of this process."""
        self.client.key_value_set(f"{self.prefix}/{kind}/{self.me}", text)

    def get(self, kind: str, process: int, seconds: float) -> str:
        """Return a process' text, after waiting for it."""
        key = f"{self.prefix}/{kind}/{process}"
        return _interruptible(lambda: self.client.blocking_key_value_get(key, int(seconds * 1000)))

    def all(self, kind: str) -> dict[int, str]:
        """Return the published texts: process -> text."""
        entries = self.client.key_value_dir_get(f"{self.prefix}/{kind}")
        return {int(key.rpartition("/")[2]): text for key, text in entries}

    def forget(self, prefix: str) -> None:
        """Delete all keys below another prefix, which no process needs any more."""
        self.client.key_value_delete(prefix)

    def wait(
        self, name: str, seconds: float, caller: str, arrived: str = "here", look: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until all members have come to `caller`; `look` is called meanwhile, and may raise."""
        barrier = f"{self.prefix}/{name}", int(seconds * 1000), list(self.members)
        try:
            _interruptible(lambda: self.client.wait_at_barrier(*barrier), look)
        except jax.errors.JaxRuntimeError as error:
            missing = sorted({*self.members} - self.all(arrived).keys()) if _in_vain(error) else []
            if not missing:
                raise
            raise LostPeer(
                f"All processes come to {caller} together; in {seconds:g} seconds {named(missing)} did not. Each makes "
                "the same calls, in the same order, with batches of the same shapes: see the last output of the "
                "missing processes."
            ) from error


def end_threads() -> None:
    """Wait at the end of Python for jdp's threads: a thread that returns from C++ while Python ends aborts it.

    A thread still waits in a barrier if an exception, such as a signal handler's, interrupted the main thread. The wait
    ends with JAX's client, so this process leaves the cluster first.
    """
    if _alive(_THREAD):
        jax.distributed.shutdown()
    end = time.monotonic() + THREAD_SECONDS
    while _alive("jdp ") and time.monotonic() < end:
        time.sleep(0.01)


def _alive(prefix: str) -> bool:
    """Return True if a thread with such a name has not ended; `Thread.is_alive` is wrong after an interrupted join."""
    return any(thread.name.startswith(prefix) for thread in threading.enumerate())


def named(processes: Sequence[int], unit: str = "process") -> str:
    """Return "process 1", "processes 1 and 2" or "processes 0, 1, 2 and 5 more"; `unit` may be "node"."""
    if len(processes) == 1:
        return f"{unit} {processes[0]}"
    first, more = [str(process) for process in processes[:3]], len(processes) - 3
    last = f"{more} more" if more > 0 else first.pop()
    return f"{PLURAL[unit]} {', '.join(first)} and {last}"


def _store(name: str) -> Store:
    """Return the store of the next barrier under this name."""
    client = coordination_client()
    if client is None:
        raise UserError(
            f"{jax.process_count()} processes need JAX's coordination service ({name}), and did not join it. Call "
            "jdp.initialize() first."
        )
    _rounds[name] += 1
    return Store(client, _prefix(name, _rounds[name]), tuple(range(jax.process_count())))


def _prefix(name: str, number: int) -> str:
    return f"jdp/meet/{name}/{number}"


def _in_vain(error: Exception) -> bool:
    """Return True if the time is up; False if the coordination service itself failed."""
    return "DEADLINE_EXCEEDED" in str(error)


def _interruptible(call: Callable[[], _T], look: Callable[[], None] = lambda: None) -> _T:
    """Call the service in another thread: signal handlers run in the main thread, and not while it is inside JAX."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    result = futures.Future[_T]()  # not `Thread.join`: interrupted by an exception, it takes the thread for ended

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=_THREAD, daemon=True).start()
    while not futures.wait([result], _POLL_SECONDS).done:
        look()
    return result.result()
