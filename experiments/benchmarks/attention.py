"""Attention and its gradients in the form that jdp chooses, beside XLA's with the whole [length, length] weights.

    python experiments/benchmarks/attention.py [--target h100:1x1] [--rounds 8] [--json]

Causal, grouped heads, bf16 for a GPU (described, compiled, not run: bytes of temporaries and of memory traffic, and
simulated time) and fp32 on this CPU (processor time in turns, and temporaries). A row of shapes is
rows × length × heads / kv_heads × width of a head; "packed": its rows hold several documents.

2026-11-22 (jax 0.10.2; 2 cores, load 12; forward and backward pass):

| | as chosen: held, moved, time | whole weights |
|---|---|---|
| gpt2-124m, 8 × 1024 × 12 / 12 × 64, H100 | 24 MiB, 0.17 GiB, 0.21 ms | 972 MiB, 3.9 GiB, 1.5 ms |
| gpt-1b, 4 × 2048 × 32 / 8 × 64, H100 | 65 MiB, 0.30 GiB, 0.80 ms | 5.0 GiB, 24 GiB, 8.9 ms |
| llama-8b, 1 × 8192 × 32 / 8 × 128, H100 | 129 MiB, 0.60 GiB, 4.2 ms | 20 GiB, 93 GiB, 35 ms |
| gpt2-124m, packed, H100 | 391 MiB, 4.3 GiB, 1.8 ms | 972 MiB, 3.9 GiB, 1.5 ms |
| gpt-1b, packed, H100 | 534 MiB, 16 GiB, 6.9 ms | 5.0 GiB, 24 GiB, 8.9 ms |
| llama-8b, packed, H100 | 661 MiB, 59 GiB, 24 ms | 20 GiB, 93 GiB, 35 ms |
| quickstart, 4 × 128 × 4 / 2 × 32, CPU | 2.4 MiB, processor time 0.75 ± 0.10 | 4.1 MiB, 1 |
| one row of gpt2-124m, CPU | 93 MiB, 0.466 ± 0.019 | 195 MiB, 1 |
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from measure import Row, finish, parser, ratio, show, take_turns

import jdp
from jdp.core.sharding.mesh import tracing_on
from jdp.core.types import Device
from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets.cudnn import ASSUMED, answered_for
from jdp.foresight.targets.resolve import Target, target
from jdp.foresight.timing.timeline import timeline
from jdp.models.attention import attend

ON_GPU = {"gpt2-124m": (8, 1024, 12, 12, 64), "gpt-1b": (4, 2048, 32, 8, 64), "llama-8b": (1, 8192, 32, 8, 128)}
ON_CPU = {"quickstart": (4, 128, 4, 2, 32), "gpt2-124m, one row": (1, 1024, 12, 12, 64)}
FORMS = {"auto": "chosen", "xla": "whole weights"}
MIB = 2**20

Shapes = dict[str, tuple[int, ...]]
Operands = Callable[[tuple[int, ...], Any], list[jax.ShapeDtypeStruct]]


def differentiated(by: Any, query: jax.Array, key: jax.Array, value: jax.Array, run: jax.Array | None = None) -> Any:
    """Return the gradients of the summed squares of what attention returns."""

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(attend(*operands, causal=True, run=run, by=by).astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)


def lowered(function: Any, operands: list[jax.ShapeDtypeStruct], device: Device) -> jax.stages.Lowered:
    """Lower a function of arrays for one device, which may be described only."""
    mesh = jdp.make_mesh(devices=[device])
    there = NamedSharding(mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in operands]
    with tracing_on(mesh), answered_for(device, ASSUMED):
        return jax.jit(function).lower(*placed)


def operands(shape: tuple[int, ...], dtype: Any) -> list[jax.ShapeDtypeStruct]:
    rows, length, heads, kv_heads, width = shape
    return [jax.ShapeDtypeStruct((rows, length, n, width), dtype) for n in (heads, kv_heads, kv_heads)]


def packed(shape: tuple[int, ...], dtype: Any) -> list[jax.ShapeDtypeStruct]:
    return [*operands(shape, dtype), jax.ShapeDtypeStruct(shape[:2], jnp.int32)]


def foreseen(
    shapes: Shapes, forms: dict[str, Any], operands: Operands, on: Target, *, quiet: bool
) -> dict[str, dict[str, Any]]:
    """Compile each form for a described GPU in each shape; return, and print, what is read off the programs."""
    found: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    for (name, shape), (words, form) in itertools.product(shapes.items(), forms.items()):
        compiled = compile_step(lowered(form, operands(shape, jnp.bfloat16), on.devices[0]))
        line = timeline(compiled.program, on)
        held, moved, us = compiled.temp_bytes / MIB, line.bytes / MIB, 1e6 * line.compute_seconds
        found[name][words] = {"temp_mib": held, "traffic_mib": moved, "us": us}
        if not quiet:
            print(f"{on} {name:17} {words:14} {held:8.0f} MiB held, {moved:8.0f} MiB moved, {us:7.0f} us", flush=True)
    return found


def measured(
    shapes: Shapes, forms: dict[str, Any], operands: Operands, rounds: int, *, quiet: bool
) -> dict[str, dict[str, Any]]:
    """Run the forms on this CPU in turns, in each shape; return, and print, what they hold and take."""
    found: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        found[name] = in_turns(forms, operands(shape, jnp.float32), rounds)
        if not quiet:
            temp = ", ".join(f"{words} {size:.1f} MiB" for words, size in found[name]["temp_mib"].items())
            print(f"cpu {name}: processor time {show(found[name]['cpu_ratio'])}; {temp}", flush=True)
    return found


def in_turns(forms: dict[str, Any], given: list[jax.ShapeDtypeStruct], rounds: int) -> dict[str, Any]:
    """Run two compiled forms in turns; return temporaries of each, and the ratio of the first's processor time."""
    device = jax.local_devices(backend="cpu")[0]
    made = {name: lowered(form, given, device).compile() for name, form in forms.items()}
    keys = jax.random.split(jax.random.key(0), len(given))
    values = [
        jax.random.normal(key, x.shape, x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.zeros(x.shape, x.dtype)
        for key, x in zip(keys, given, strict=True)
    ]
    times = take_turns({name: functools.partial(one, *values) for name, one in made.items()}, rounds)
    first, second = times.values()
    sizes: dict[str, Any] = {name: one.memory_analysis() for name, one in made.items()}
    temp = {name: size.temp_size_in_bytes / MIB for name, size in sizes.items()}
    return {"temp_mib": temp, "cpu_ratio": ratio(first.cpu, second.cpu)}


def options(program: str, documentation: str | None) -> argparse.ArgumentParser:
    made = parser(program, documentation)
    made.add_argument("--target", default="h100:1x1", help="see jdp.foresight.targets")
    made.add_argument("--rounds", type=int, default=8, metavar="N")
    return made


def main() -> None:
    given = options(__file__, __doc__).parse_args()
    on = target(given.target)
    forms = {words: functools.partial(differentiated, by) for by, words in FORMS.items()}
    gpu = foreseen(ON_GPU, forms, operands, on, quiet=given.json)
    gpu |= foreseen({f"{name}, packed": shape for name, shape in ON_GPU.items()}, forms, packed, on, quiet=given.json)
    cpu = measured(ON_CPU, forms, operands, given.rounds, quiet=given.json)
    times = ", ".join(f"{one['chosen']['us'] / one['whole weights']['us']:.3f}" for one in gpu.values())
    ratios = ", ".join(f"{one['cpu_ratio']['median']:.2f}" for one in cpu.values())
    measures = f"attention as chosen over whole weights: simulated time ({on}: {'; '.join(gpu)}), processor time"
    finish({"target": str(on), "found": gpu | cpu}, given.json, Row(measures, f"{times}; {ratios}"))


if __name__ == "__main__":
    main()
