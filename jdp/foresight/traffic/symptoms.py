"""Signs that a compiled step does something unintended, a sentence each, with a source line if the program has it.

A tensor is copied whole to every device because XLA could not go from one sharding to another. Keys or random bits
travel between devices. The step waits for the host. A donated leaf is not updated in place, so it is held twice.
"""

import math
import re
from collections.abc import Iterator, Mapping

from jdp.base.formatting import format_bytes, listed
from jdp.foresight.memory import path_of_name
from jdp.foresight.program.compiled import Compiled
from jdp.foresight.program.module import HOST_MEMORY, Instruction, Program, array_bytes, shapes
from jdp.foresight.traffic.origin import Parameters, Reading, line_of

AS_PLANNED = "its placement differs from the plan's. Place the state by the plan (jdp.init_state, jdp.restore)."
"""Why a leaf of a training step's state is not updated in place, and the fix."""


def symptoms(reading: Reading, placing: str = AS_PLANNED) -> tuple[str, ...]:
    """Return every sign once, a sentence each; `placing`: why a donated argument may be held twice."""
    program = reading.compiled.program
    sentences = [
        *_resharded(reading.compiled, reading.parameters),
        *_random(reading),
        *_host(program, offloads=reading.offloads),
        *_held_twice(program, reading.donated, placing),
    ]
    return tuple(dict.fromkeys(sentences))


def _at(line: str | None) -> str:
    return f" ({line})" if line else ""


_OPERATION = re.compile(r"HLO operation:? %?[\w.\-]+ = (\S+)(?:.*?op_name=\"((?:[^\"\\]|\\.)*)\")?")
_CHANGE = re.compile(r"from sharding (\{.*\}) to (\{.*\}) (?:without|efficiently)")
_TILES = re.compile(r"devices=\[([\d,]+)\]")
_MESH = re.compile(r"mesh\[(.*?)\], \[(.*)\]")


def _resharded(compiled: Compiled, parameters: Parameters) -> Iterator[str]:
    for warning in compiled.warnings:
        operation = _OPERATION.search(warning)
        if "ematerializ" not in warning or operation is None:
            continue
        [(dtype, local), *_] = shapes(operation[1]) or [("", ())]
        change = _CHANGE.search(warning)
        dims = _global_dims(local, change[1] if change else "")
        like = parameters.like(dims)
        named = f" (the shape of {listed(placement.path for placement in like)})" if like else ""
        shardings = f" to go from {change[1]} to {change[2]}" if change else ""
        line = _copied_at(dims, operation[2] or "", compiled)
        yield (
            f"Resharding: a tensor {dtype}{list(dims)}{named} is copied whole to every device{shardings}{_at(line)}. "
            "Constrain it to one sharding on both sides, or change one dimension at a time."
        )


def _global_dims(local: tuple[int, ...], sharding: str) -> tuple[int, ...]:
    """Return a shard's dimensions times the tiles of its sharding, printed as by jax 0.10 (`devices=`) or 0.12."""
    if tiles := _TILES.search(sharding):
        counts = [int(tile) for tile in tiles[1].split(",")]
    elif mesh := _MESH.search(sharding):
        sizes = {axis: int(count) for axis, count in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        named = (re.findall(r"'(\w+)'", axes) for axes in re.findall(r"\{([^}]*)\}", mesh[2]))
        counts = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in named]
    else:
        counts = list[int]()
    return tuple(size * (counts[dim] if dim < len(counts) else 1) for dim, size in enumerate(local))


def _copied_at(dims: tuple[int, ...], op_name: str, compiled: Compiled) -> str | None:
    """Return the line of a collective that makes the whole tensor; the warning's own is invalid in the program."""
    parent = op_name.rpartition("/")[0]
    same_shape = [c for c in compiled.collectives if any(sorted(shape) == sorted(dims) for _, shape in c.shapes)]
    exact = [c for c in same_shape if c.op_name == op_name]
    siblings = [c for c in same_shape if (c.op_name or "").rpartition("/")[0] == parent]
    lines = (line_of(c.source_lines) for c in (*exact, *siblings, *same_shape))
    return next((line for line in lines if line), None)


# jax's names for random draws: primitives (random_bits, threefry2x32) and the functions around them (_bernoulli).
_DRAWS = re.compile(
    r"random_|threefry|rng_|\b_?(?:bernoulli|uniform|normal|normal_real|truncated_normal|gumbel|categorical|randint|"
    r"shuffle|permutation|dropout)\b"
)


def _random(reading: Reading) -> Iterator[str]:
    groups: dict[tuple[str, str | None], int] = {}
    for c in reading.compiled.collectives:
        drawn = c.op_name is not None and _DRAWS.search(c.op_name) is not None
        # Random bits and key words are unsigned; tokens, labels and indices are signed in jax, gradients are floats.
        if c.group_size > 1 and (drawn or c.dtype == "u32"):
            key = (c.kind, next((piece.source_line for piece in reading.sites.pieces(c) if piece.source_line), None))
            groups[key] = groups.get(key, 0) + c.payload_bytes * c.count
    for (kind, line), total in groups.items():
        yield (
            f"Random numbers: {kind} of {format_bytes(total)} a step carries keys or random bits{_at(line)}. Draw from "
            "the key that the loss is given, batch dimension first, jax_threefry_partitionable on: each device draws "
            "its own."
        )


_CALLBACK = re.compile(r'custom_call_target="([^"]*callback[^"]*)"')
_TRANSFERS = ("infeed", "outfeed", "send", "recv")


def _host(program: Program, *, offloads: bool) -> Iterator[str]:
    """Yield a sentence for each transfer to or from the host in the step; with `offloads`, copies are intended."""
    for step in (step for steps in program.computations.values() for step in steps):
        if callback := _CALLBACK.search(step.line):
            operation = (step.op_name or step.name).rpartition("/")[2]
            yield (
                f"The host: {operation} calls back into Python ({callback[1]}){_line(program, step)}, and the step "
                "waits. Remove it, or return its values as metrics."
            )
        elif step.opcode in _TRANSFERS and ("feed" in step.opcode or "is_host_transfer=true" in step.line):
            moved = format_bytes(step.result_bytes)
            yield f"The host: {step.opcode} moves {moved} to or from it inside the step{_line(program, step)}."
        elif step.opcode in ("copy", "copy-start") and HOST_MEMORY in step.type and not offloads:
            copied = max(array_bytes(dtype, dims) for dtype, dims in step.shapes)
            moved, line = format_bytes(copied), _line(program, step)
            yield f"The host: {moved} are copied to or from its memory inside the step{line}."


def _line(program: Program, step: Instruction) -> str:
    return _at(line_of(program.source_lines(step)))


_MENTIONED_BYTES = 1024


def donated_state(program: Program) -> dict[int, str]:
    """Return number -> path of the leaves of a training step's state, which are all donated."""
    named = program.argument_bytes.items()
    return {number: path_of_name(name) for number, (name, _) in named if name.startswith("state.")}


def _held_twice(program: Program, donated: Mapping[int, str], placing: str) -> Iterator[str]:
    held, large = donated.keys() - {number for _, number, _ in program.written_into}, dict[str, int]()
    for step in program[program.entry]:
        number = step.parameter_number
        if number is not None and number in held and step.result_bytes >= _MENTIONED_BYTES:
            large[donated[number]] = step.result_bytes
    if large:
        first = sorted(large, key=lambda path: -large[path])
        yield (
            f"Donation: {listed(first)} ({format_bytes(sum(large.values()))} a device) cannot be updated in place "
            f"and is held twice while the step runs: {placing}"
        )
