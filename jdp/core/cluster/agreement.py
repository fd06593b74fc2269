"""Check that several processes agree before they compute together; if not, all raise the same error.

If keys, shapes or programs differ, results are wrong or a collective hangs, and JAX does not check them. Here each
process publishes a digest of each fact through the coordination service, without the devices. The first process
compares the digests, and the texts of the first fact that differs.

A call with the shapes of the call before it compares nothing. So if the batch of one process alone changes its shape,
that process would wait here for ever, and the others in a collective. A thread on each process looks for a process that
waits at a call that its own process has passed, and reports it.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.base.errors import UserError
from jdp.base.notices import notice
from jdp.base.signals import THREAD_SECONDS
from jdp.base.tree_paths import PACKAGE
from jdp.core.cluster.barrier import WAIT_SECONDS, Store, coordination_client, joined_as, named

ANSWER_SECONDS = 60  # for an answer, once all have arrived
JOINED_SECONDS = 60  # for all to arrive, right after joining
WATCH_SECONDS = 1.0
TEXT_LIMIT = 1_000_000  # characters of a fact that are compared line by line once its digest differs
SHOWN = 160  # characters of a line that an error shows

Group = tuple[int, ...]
"""The indices of the processes that compare facts; () for all processes that have joined."""

# For each group, the number of agreements so far, which all make in the same order, and of calls.
_rounds: Counter[Group] = Counter()
_calls: Counter[Group] = Counter()
_agreed: dict[tuple[Group, str, str], str] = {}
"""(group, caller, name of a fact) -> the text on which all agreed last."""
_watched: set[Group] = set()
_ending = threading.Event()
_refused: dict[Group, str] = {}
"""Group -> why another process refused a call that this one has passed."""


class Mismatch(UserError):
    """Processes differ and must be equal; all raise this, with the same text. A restart alone does not help."""

    exit_code = 78


@dataclass(frozen=True)
class Fact:
    """A fact that must be the same on every process."""

    name: str  # start of a sentence, such as "The key"
    text: str  # the fact in full, one line for each part
    fix: str  # a sentence: the fix if it differs


@functools.lru_cache(maxsize=64)  # every call of a step asks
def processes_of(mesh: Mesh) -> Group:
    """Return the indices of the processes whose devices make up the mesh, in order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def agree(caller: str, facts: Sequence[Fact], mesh: Mesh, *, wait_seconds: float = WAIT_SECONDS) -> None:
    """Compare this process' facts with those of the other processes of a mesh. All of them must call this."""
    members = processes_of(mesh)
    if len(members) > 1:
        _agree(caller, facts, members, members, wait_seconds)


def passed(mesh: Mesh) -> None:
    """Record that this process begins a call of a step or a gradient, after any agreement."""
    group = processes_of(mesh)
    if group in _refused:
        raise Mismatch(_refused[group])
    _calls[group] += 1


def agree_all(caller: str, facts: Sequence[Fact]) -> None:
    """Compare this process' facts with those of all processes, which have just joined, without starting a backend."""
    if joined := joined_as():
        _agree(caller, facts, (), tuple(range(joined[1])), JOINED_SECONDS)


def _agree(caller: str, facts: Sequence[Fact], group: Group, members: tuple[int, ...], wait_seconds: float) -> None:
    client = coordination_client()
    if client is None:
        notice("without JAX's coordination service, jdp does not check that the processes agree")
        return
    facts = [Fact("The place in the program", caller, "Every process makes the same calls, in the same order."), *facts]
    _rounds[group] += 1
    store = Store(client, f"{_prefix(group)}/{_rounds[group]}", members)
    store.put("call", str(_calls[group]))
    store.put("facts", json.dumps([_digest(fact.text.encode()) for fact in facts]))
    if group and group not in _watched:
        _watched.add(group)
        thread = threading.Thread(target=_watch, args=(client, group), name="jdp agreement", daemon=True)
        atexit.register(_end, thread)
        thread.start()
    store.wait("come", wait_seconds, caller, "facts", lambda: _refuse_passed(store, group, caller, facts))
    first = store.me == members[0]
    if first:
        store.forget(f"{_prefix(group)}/{_rounds[group] - 1}")  # all have read it, because they are here
        store.put("verdict", json.dumps(_first_difference(store.all("facts"), facts)))
    differing = json.loads(store.get("verdict", members[0], ANSWER_SECONDS))
    if differing is None:
        _agreed.update({(group, caller, fact.name): fact.text for fact in facts if len(fact.text) < TEXT_LIMIT})
        return
    fact = facts[differing["fact"]]
    if store.me in differing["shown"]:
        store.put("text", fact.text[:TEXT_LIMIT])
    if first:
        texts = [store.get("text", rank, ANSWER_SECONDS) for rank in differing["shown"]]
        store.put("message", _message(caller, fact, differing, texts))
    message = store.get("message", members[0], ANSWER_SECONDS)
    with contextlib.suppress(RuntimeError):  # the first process holds the store: it stays until all have read
        store.wait("read", ANSWER_SECONDS, caller, "facts")
    raise Mismatch(message)


def _prefix(group: Group) -> str:
    return f"jdp/agree/{_digest(repr(group).encode())}"


def _refuse_passed(store: Store, group: Group, caller: str, facts: Sequence[Fact]) -> None:
    """Raise Mismatch if another process has passed this call: then the facts changed on this process alone."""
    if not (others := sorted(store.all("passed"))):
        return
    before = {fact.name: _agreed.get((group, caller, fact.name), fact.text) for fact in facts}
    fact = next((fact for fact in facts if before[fact.name] != fact.text), facts[0])
    texts = [before[fact.name] if before[fact.name] != fact.text else "a later call", fact.text]
    message = _message(caller, fact, {"differ": [store.me], "shown": [others[0], store.me]}, texts)
    store.put("message", message)
    raise Mismatch(message)


def _watch(client: Any, group: Group) -> None:
    """Tell processes that wait at a call that this process has passed, and report the first one's message."""
    failures = 0
    while failures < 3 and not _ending.wait(WATCH_SECONDS * max(1, len(group) / 256)):  # 256 questions a second
        number = _rounds[group] + 1
        store = Store(client, f"{_prefix(group)}/{number}", group)
        try:
            waiting = [process for process, call in store.all("call").items() if int(call) < _calls[group]]
            if waiting and number == _rounds[group] + 1:
                store.put("passed", "")
                _refused[group] = client.blocking_key_value_get(f"{store.prefix}/message/{min(waiting)}", 10_000)
                print(f"jdp: {_refused[group]}", file=sys.stderr, flush=True)  # the main thread may be in a collective
                break
            failures = 0
        except RuntimeError:  # the service or that process has ended
            failures += 1


def _end(thread: threading.Thread) -> None:
    """Wait for a thread at the end of Python: a thread that returns from JAX while Python ends aborts the process."""
    _ending.set()
    thread.join(THREAD_SECONDS)


def _first_difference(published: dict[int, str], facts: Sequence[Fact]) -> dict[str, Any] | None:
    """Return the first fact that differs, the minority of processes, and two that publish their text; or None."""
    digests = {process: json.loads(text) for process, text in sorted(published.items())}
    for number in range(len(facts)):
        groups: defaultdict[str | None, list[int]] = defaultdict(list)
        for process, own in digests.items():
            groups[own[number] if number < len(own) else None].append(process)
        if len(groups) > 1:
            common, *others = sorted(groups.values(), key=lambda group: (-len(group), group[0]))
            differ = sorted(process for group in others for process in group)
            return {"fact": number, "differ": differ, "shown": [common[0], differ[0]]}
    return None


def _message(caller: str, fact: Fact, differing: dict[str, Any], texts: Sequence[str]) -> str:
    """Return the error as one line: the rule, the processes that differ, their difference, the fix."""
    shown, lines = differing["shown"], [[line.strip() for line in text.splitlines()] for text in texts]
    pairs = enumerate(zip(*lines, strict=False))
    number, pair = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (None, None))
    if pair is None:
        difference = f"process {shown[0]} has {len(lines[0])} lines of it and process {shown[1]} has {len(lines[1])}"
    else:
        line = f" (line {number + 1})" if number else ""
        excerpts = zip(shown, _around(*pair), strict=True)
        difference = ", ".join(f"process {rank} has {excerpt}" for rank, excerpt in excerpts) + line
    who = named(differing["differ"])
    verb = "differs" if len(differing["differ"]) == 1 else "differ"
    at = "" if fact.text == caller else f", at {caller}"
    return f"{fact.name} must be the same on every process{at}; {who} {verb}: {difference}. {fact.fix}"


def _around(one: str, other: str) -> tuple[str, str]:
    """Return two lines that differ, shortened to the characters around the first difference."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = 0 if same < SHOWN // 2 else same - SHOWN // 4

    def excerpt(text: str) -> str:
        return ("…" if start else "") + text[start : start + SHOWN] + ("…" if len(text) > start + SHOWN else "")

    return excerpt(one), excerpt(other)


_LARGE_CONSTANT = re.compile(r'dense<"0x([0-9A-Fa-f]+)">')


def key_fact(key: jax.Array, name: str) -> Fact:
    """Return a random key as a fact; `name` starts a sentence, such as "The key"."""
    text = f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"
    return Fact(name, text, "Make it from a number that all processes know: jax.random.key(0).")


def program_fact(lowered: jax.stages.Lowered) -> Fact:
    """Return a lowered program and its constants as a fact; large constants are replaced by digests."""
    text = _LARGE_CONSTANT.sub(lambda match: f"dense<#{_digest(match[1].encode())}>", lowered.as_text())
    # JAX may keep constants beside the text (jax_use_simplified_jaxpr_constants), and no public name says which.
    hoisted = getattr(lowered._lowering, "const_args", ())  # pyright: ignore[reportPrivateUsage]
    constants = [f"constant {x.dtype}{list(x.shape)} #{_digest(_bytes(x))}" for x in hoisted]
    fix = (
        "Causes are numpy's or Python's own random numbers, a file that differs, or a branch on jax.process_index(): "
        "draw from `rng`, and build the same on every process."
    )
    return Fact("The program (its constants too)", "\n".join([text, *constants]), fix)


def _bytes(array: Any) -> bytes:
    """Return an array's values; b"" if it is sharded over several processes."""
    if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(array.addressable_data(0)).tobytes() if array.is_fully_replicated else b""
    return np.asarray(array).tobytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


_PACKAGES = ("jax", "jaxlib", "numpy")


def check_environment() -> None:
    """Compare this process' versions with all others', right after joining."""
    install = "Install the same on every machine, and start every process from the same environment."
    versions = [Fact("Python's version", ".".join(platform.python_version_tuple()[:2]), install)]
    versions += [Fact(f"The version of {name}", importlib.metadata.version(name), install) for name in _PACKAGES]
    source = Fact("jdp's source", _source(PACKAGE), f"One process has another copy of jdp. {install}")
    agree_all("jdp.initialize", [*versions, source])


def check_device_counts() -> None:
    """Check that every process has as many devices as the others."""
    have = Counter(device.process_index for device in jax.devices())
    counts = {process: have[process] for process in range(jax.process_count())}
    groups = Counter(counts.values())
    if len(groups) == 1:
        return
    usual = max(groups, key=lambda count: (groups[count], count == counts[0]))
    differ = [process for process, count in counts.items() if count != usual]
    raise Mismatch(
        f"Every process must have as many devices as the others; given {named(differ)} with "
        f"{', '.join(str(counts[process]) for process in differ[:3])}, the others with {usual}. Give all the same "
        "--devices-per-process, or as many GPUs (CUDA_VISIBLE_DEVICES, --gpus-per-task)."
    )


def check_experiment(text: str, *, plugin: Path | None = None) -> None:
    """Compare the experiment that this process will run with all others'."""
    fix = "Start every process with the same file and the same options."
    facts = [Fact("The experiment", text, fix)]
    if plugin is not None:
        facts.append(Fact("The plug-in's source", _source(plugin), "Install the same plug-in on every machine."))
    agree_all("jdp train", facts)


def _source(package: Path) -> str:
    """Return a digest of a package's Python files, or of one file: copies of one version may differ."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(package.rglob("*.py")) if package.is_dir() else [package]:
        digest.update(f"{file.relative_to(package)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
