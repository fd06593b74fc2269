"""Several processes agree before they compute together, or every one of them says in what they differ.

JAX takes other keys, other shapes and other programs on another process in silence: the results are wrong, or a
collective hangs. The coordination service that the processes joined compares them instead; no device takes part.

1. Each process publishes a digest of each fact, and waits at a barrier: who does not come is named.
2. The first process compares, and publishes its verdict. For the first fact that differs, two processes publish its
   text, and the first says where the texts part.
3. Every process reads the same verdict, and raises the same error.
"""

import contextlib
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.core import distributed
from jdp.core.notices import notice

WAIT_SECONDS = 600  # one process may prepare data, or load weights, while the others wait for it
ANSWER_SECONDS = 60  # once all have come, each has an answer ready
TEXT_LIMIT = 1_000_000  # characters of a fact that are compared line by line once its digest differs
SHOWN = 160  # characters of a line that an error shows

# Of each group of processes, how many agreements there were: all make them in the same order, and none is made twice.
_rounds: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class Fact:
    """What must be the same on every process.

    Attributes:
        name: "The key", say: the start of a sentence.
        text: the whole of it, a line for each part.
        fix: what to write instead, where it differs.
    """

    name: str
    text: str
    fix: str

    @property
    def digest(self) -> str:
        return _digest(self.text.encode())


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes whose devices make up the mesh, in order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def agree(place: str, facts: Sequence[Fact], mesh: Mesh, *, wait_seconds: float = WAIT_SECONDS) -> None:
    """Hold this process' facts against those of the other processes of the mesh. All of them call it.

    Args:
        place: where in the program this is, for the errors.
        facts: in the order in which one explains the next: the first that differs is reported.
        mesh: whose processes must agree; nothing is done for a single one.
        wait_seconds: how long the others may take to come here.

    Raises:
        ValueError: a fact differs; on every process, with the same words.
        RuntimeError: a process did not come; on those that did.
    """
    members = processes_of(mesh)
    if len(members) == 1:
        return
    client = distributed.coordination_client()
    if client is None:
        notice("several processes without JAX's coordination service: whether they agree is not checked")
        return
    facts = [Fact("The place in the program", place, "Every process makes the same calls, in the same order."), *facts]
    _rounds[members] += 1
    store = _Store(client, f"jdp/agree/{_digest(repr(members).encode())}/{_rounds[members]}", members)
    store.put("facts", json.dumps([fact.digest for fact in facts]))
    store.meet("come", wait_seconds, place)
    first = store.me == members[0]
    if first:
        store.put("verdict", json.dumps(_first_difference(store.all("facts"), facts)))
    differing = json.loads(store.get("verdict", members[0]))
    if differing is None:
        return
    fact = facts[differing["fact"]]
    if store.me in differing["shown"]:
        store.put("text", fact.text[:TEXT_LIMIT])
    if first:
        store.put("message", _message(place, fact, differing, [store.get("text", rank) for rank in differing["shown"]]))
    message = store.get("message", members[0])
    with contextlib.suppress(RuntimeError):  # the store is the first process': it stays until all have read
        store.meet("read", ANSWER_SECONDS, place)
    raise ValueError(message)


@dataclass(frozen=True)
class _Store:
    """The coordination service's key-value store, below one prefix."""

    client: Any
    prefix: str
    members: tuple[int, ...]

    @property
    def me(self) -> int:
        return jax.process_index()

    def put(self, kind: str, text: str) -> None:
        self.client.key_value_set(f"{self.prefix}/{kind}/{self.me}", text)

    def get(self, kind: str, process: int) -> str:
        return self.client.blocking_key_value_get(f"{self.prefix}/{kind}/{process}", ANSWER_SECONDS * 1000)

    def all(self, kind: str) -> dict[int, str]:
        """What each process has put."""
        found = self.client.key_value_dir_get(f"{self.prefix}/{kind}")
        return {int(key.rpartition("/")[2]): text for key, text in found}

    def meet(self, name: str, seconds: float, place: str) -> None:
        try:
            self.client.wait_at_barrier(f"{self.prefix}/{name}", int(seconds * 1000), list(self.members))
        except jax.errors.JaxRuntimeError as error:
            missing = sorted({*self.members} - self.all("facts").keys())
            if not missing:
                raise
            raise RuntimeError(
                f"All processes come to {place} together; in {seconds:g} seconds {_named(missing)} did not. Each makes "
                "the same calls with batches of the same shapes: look at the last words of those that did not come."
            ) from error


def _first_difference(published: dict[int, str], facts: Sequence[Fact]) -> dict[str, Any] | None:
    """Which fact, which processes differ from most, and the two that show theirs; None: they agree."""
    digests = {process: json.loads(text) for process, text in sorted(published.items())}
    for number in range(len(facts)):
        groups: defaultdict[str | None, list[int]] = defaultdict(list)
        for process, own in digests.items():
            groups[own[number] if number < len(own) else None].append(process)
        if len(groups) > 1:
            common, *others = sorted(groups.values(), key=lambda group: (-len(group), group[0]))
            return {
                "fact": number,
                "differ": sorted(process for group in others for process in group),
                "shown": [common[0], min(group[0] for group in others)],
            }
    return None


def _message(place: str, fact: Fact, differing: dict[str, Any], texts: Sequence[str]) -> str:
    """The rule, who differs from whom and in what, the fix: one line."""
    pairs = zip(*(_lines(text) for text in texts), strict=False)
    number, pair = next(((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), (None, None))
    shown = differing["shown"]
    if pair is None:
        lengths = [len(_lines(text)) for text in texts]
        parts = f"process {shown[0]} has {lengths[0]} lines of it and process {shown[1]} has {lengths[1]}"
    else:
        at = f" (line {number + 1})" if number else ""
        parts = ", ".join(f"process {rank} has {line}" for rank, line in zip(shown, _around(*pair), strict=True)) + at
    who = _named(differing["differ"])
    verb = "differs" if len(differing["differ"]) == 1 else "differ"
    where = "" if fact.text == place else f", at {place}"
    return f"{fact.name} must be the same on every process{where}; {who} {verb}: {parts}. {fact.fix}"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def _around(one: str, other: str) -> tuple[str, str]:
    """Two lines that differ, shortened to where they do."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = 0 if same < SHOWN // 2 else same - SHOWN // 4
    return _cut(one, start), _cut(other, start)


def _cut(line: str, start: int) -> str:
    return ("…" if start else "") + line[start : start + SHOWN] + ("…" if len(line) > start + SHOWN else "")


def _named(processes: Sequence[int]) -> str:
    """ "process 1", "processes 1 and 2", "processes 0, 1, 2 and 5 more"."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    head, rest = [str(process) for process in processes[:3]], len(processes) - 3
    last = f"{rest} more" if rest > 0 else head.pop()
    return f"processes {', '.join(head)} and {last}"


# The facts.

_LARGE_CONSTANT = re.compile(r'dense<"0x([0-9A-Fa-f]+)">')


def key_fact(key: jax.Array, name: str) -> Fact:
    """A random key, as its numbers."""
    text = f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"
    return Fact(name, text, "Make it of one number that all processes know: jax.random.key(0).")


def program_fact(lowered: jax.stages.Lowered) -> Fact:
    """A lowered program and its constants."""
    text = _LARGE_CONSTANT.sub(lambda found: f"dense<#{_digest(found[1].encode())}>", lowered.as_text())
    # JAX may keep constants beside the text (jax_use_simplified_jaxpr_constants), and no public name says which.
    hoisted = getattr(lowered._lowering, "const_args", ())  # pyright: ignore[reportPrivateUsage]
    constants = [f"constant {x.dtype}{list(x.shape)} #{_digest(_bytes(x))}" for x in hoisted]
    fix = (
        "What differs comes of numpy's or Python's own random numbers, of a file that differs, or of a branch on "
        "jax.process_index(): draw from `rng`, and build the same on every process."
    )
    return Fact("The program (its constants too)", "\n".join([text, *constants]), fix)


def _bytes(array: Any) -> bytes:
    """An array's values; of one that lies on several processes, the part that is here and everywhere the same."""
    if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(array.addressable_data(0)).tobytes() if array.is_fully_replicated else b""
    return np.asarray(array).tobytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
