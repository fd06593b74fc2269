"""What else a compiled step tells: signs that it does what nobody meant it to do.

1. Resharding: XLA could not go from one sharding to another and copied a whole tensor to every device.
2. Random numbers: keys or random bits travel between devices, although each could draw its own.
3. The host: the step stops to talk to it (debug prints, callbacks, memory on the host).
4. Donation: a leaf of the state is not updated in place, so that it is held twice.

Each is a sentence that names a parameter or an operation, and a source line where the program tells it.
"""

import math
import re
from collections.abc import Iterator

import jax

from jdp.core.formatting import format_bytes
from jdp.core.sharding.placement import Placement
from jdp.core.sharding.plan import Plan
from jdp.core.state import TrainState
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.program.module import Instruction, Program, array_bytes, shapes
from jdp.foresight.traffic.breaches import listed
from jdp.foresight.traffic.origin import Parameters, Sites, line_of


def symptoms(compiled: Compiled, plan: Plan, state: TrainState) -> tuple[str, ...]:
    """Every sign found, a sentence each; `state` is what the step was compiled for, on the plan's mesh."""
    places: list[Placement] = jax.tree.leaves(plan.param_placements(state.params, state.static))
    parameters = Parameters(tuple(places), dict(plan.mesh.shape))
    found = [
        *_resharded(compiled, parameters),
        *_random(compiled),
        *_host(compiled.program),
        *_held_twice(compiled.program),
    ]
    return tuple(dict.fromkeys(found))


def _at(line: str | None) -> str:
    return f" ({line})" if line else ""


# Resharding.

_OPERATION = re.compile(r"HLO operation:? %?[\w.\-]+ = (\S+)(?:.*?op_name=\"((?:[^\"\\]|\\.)*)\")?")
_CHANGE = re.compile(r"from sharding (\{.*\}) to (\{.*\}) (?:without|efficiently)")
_TILES = re.compile(r"devices=\[([\d,]+)\]")
_MESH = re.compile(r"mesh\[(.*?)\], \[(.*)\]")


def _resharded(compiled: Compiled, parameters: Parameters) -> Iterator[str]:
    """XLA's warnings, told by what and where instead of by HLO."""
    for warning in compiled.warnings:
        operation = _OPERATION.search(warning)
        if "ematerializ" not in warning or operation is None:
            continue
        [(dtype, local), *_] = shapes(operation[1]) or [("", ())]
        change = _CHANGE.search(warning)
        dims = _whole(local, change[1] if change else "")
        like = parameters.like(dims)
        named = f" (the shape of {listed(place.path for place in like)})" if like else ""
        ways = f" to go from {change[1]} to {change[2]}" if change else ""
        line = _copied_at(dims, operation[2] or "", compiled)
        yield (
            f"Resharding: a tensor {dtype}{list(dims)}{named} is copied whole to every device{ways}{_at(line)}. "
            "Constrain it to one sharding on both sides, or go there in two steps, one dimension each."
        )


def _whole(local: tuple[int, ...], sharding: str) -> tuple[int, ...]:
    """The global dimensions of a shard: those of the shard times the tiles.

    jax 0.10 prints `{devices=[4,1,2]<=[8] …}`, jax 0.12 `{mesh['data'=4,'model'=2], [{'data'}, {}]}`.
    """
    if tiles := _TILES.search(sharding):
        pieces = [int(tile) for tile in tiles[1].split(",")]
    elif mesh := _MESH.search(sharding):
        sizes = {axis: int(count) for axis, count in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        named = (re.findall(r"'(\w+)'", axes) for axes in re.findall(r"\{([^}]*)\}", mesh[2]))
        pieces = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in named]
    else:
        pieces = list[int]()
    return tuple(size * (pieces[dim] if dim < len(pieces) else 1) for dim, size in enumerate(local))


def _copied_at(dims: tuple[int, ...], op_name: str, compiled: Compiled) -> str | None:
    """The line of the copy. The warning has none that holds in the program that came out (XLA numbers its stack frames
    anew): so that of a collective that makes the whole tensor, of the same operation or one beside it."""
    parent = op_name.rpartition("/")[0]
    whole = [c for c in compiled.collectives if any(sorted(found) == sorted(dims) for _, found in c.shapes)]
    exact = [c for c in whole if c.op_name == op_name]
    beside = [c for c in whole if (c.op_name or "").rpartition("/")[0] == parent]
    lines = (line_of(c.source_lines) for c in (*exact, *beside, *whole))
    return next((line for line in lines if line), None)


# Random numbers.

# jax's names of what draws: of primitives (random_bits, threefry2x32) and of the functions around them (_bernoulli).
_DRAWS = re.compile(
    r"random_|threefry|rng_|\b_?(?:bernoulli|uniform|normal|normal_real|truncated_normal|gumbel|categorical|randint|"
    r"shuffle|permutation|dropout)\b"
)


def _random(compiled: Compiled) -> Iterator[str]:
    sites = Sites(compiled.program)
    groups: dict[tuple[str, str | None], int] = {}
    for c in compiled.collectives:
        drawn = c.op_name is not None and _DRAWS.search(c.op_name) is not None
        # Random bits and key words are unsigned; tokens, labels and indices are signed in jax, gradients are floats.
        if c.group_size > 1 and (drawn or c.dtype == "u32"):
            key = (c.kind, next((piece.line for piece in sites.pieces(c) if piece.line), None))
            groups[key] = groups.get(key, 0) + c.payload_bytes * c.count
    for (kind, line), total in groups.items():
        yield (
            f"Random numbers: {kind} of {format_bytes(total)} a step carries keys or random bits{_at(line)}. Draw from "
            "the key that the loss is given, batch dimension first, jax_threefry_partitionable on: each device draws "
            "its own."
        )


# The host.

_CALLBACK = re.compile(r'custom_call_target="([^"]*callback[^"]*)"')
_TRANSFERS = ("infeed", "outfeed", "send", "recv")
_HOST_MEMORY = "S(5)"  # XLA's number of the host's memory space (xla/layout.h)


def _host(program: Program) -> Iterator[str]:
    for step in (step for steps in program.computations.values() for step in steps):
        line = _at(line_of(program.source_lines(step)))
        if callback := _CALLBACK.search(step.line):
            yield (
                f"The host: {_operation(step)} calls back into Python ({callback[1]}){line}, and the step waits. "
                "Take it out, or return what it shows as a metric."
            )
        elif step.opcode in _TRANSFERS:
            channel = "the host" if "is_host_transfer=true" in step.line or "feed" in step.opcode else "a peer"
            if channel == "the host":
                moved = format_bytes(step.result_bytes)
                yield f"The host: {step.opcode} moves {moved} to or from it inside the step{line}."
        elif step.opcode in ("copy", "copy-start") and _HOST_MEMORY in step.type:
            yield f"The host: {format_bytes(max(_sizes(step)))} are copied to or from its memory inside the step{line}."


def _operation(step: Instruction) -> str:
    """The last part of jax's path: "debug_print"."""
    return (step.op_name or step.name).rpartition("/")[2]


def _sizes(step: Instruction) -> list[int]:
    return [array_bytes(dtype, dims) for dtype, dims in step.shapes]


# Donation.

_ALIASES = re.compile(r"input_output_alias=\{(.*?\)) \}")
_ALIASED = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}")
_NUMBER = re.compile(r" parameter\((\d+)\)")
_MENTIONED_BYTES = 1024


def _held_twice(program: Program) -> Iterator[str]:
    """Leaves of the state that XLA gives no place in the result. They were all donated: a step returns them all."""
    aliases = _ALIASES.search(program.header)
    kept = {int(number) for number in _ALIASED.findall(aliases[1])} if aliases else set[int]()
    lost: dict[str, int] = {}
    for step in program[program.entry]:
        number = _NUMBER.search(step.line) if step.opcode == "parameter" else None
        name = step.op_name or ""
        if number is not None and name.startswith("state.") and int(number[1]) not in kept:
            lost[path_of_name(name)] = step.result_bytes
    large = {path: held for path, held in lost.items() if held >= _MENTIONED_BYTES}
    if large:
        first = sorted(large, key=lambda path: -large[path])
        yield (
            f"Donation: {listed(first)} ({format_bytes(sum(large.values()))} a device) cannot be updated in place and "
            "is held twice while the step runs: it does not lie where the plan puts it. Lay the state as the plan does "
            "(jdp.init_state, jdp.restore)."
        )


def path_of_name(name: str) -> str:
    """`state.params['layers']['kernel']` -> params/layers/kernel."""
    parts = re.findall(r"\['?(.*?)'?\]|\.(\w+)", name.removeprefix("state"))
    return "/".join(key or attribute for key, attribute in parts)
