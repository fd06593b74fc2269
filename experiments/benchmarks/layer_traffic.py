"""Bytes that a layer's kernels read and write, beside the least possible; and zero3's temporaries beside a closed form.

    python experiments/benchmarks/layer_traffic.py [--cases gpt_1b@h100:1x8:zero2,zero3 …] [--set optimizer.lr=1e-4 …]

Steps are compiled, not run: no GPU is needed, but `pip install 'jdp[aot]'` and JAX_PLATFORMS=cpu. Each device gets 8192
tokens in one microbatch, bf16, remat "dots", cuDNN's attention. Counted are the kernels in the bodies of the loops over
the layers (`jdp.foresight.timing.kernels`: what a kernel reads, once, and what it writes; collectives are none), over
the layers in a round. "products" are kernels with a matrix product, "attention" cuDNN's, "other" all that is left:
norms, activations, residuals, copies into and out of the stacks that the loops carry. Layers that are compiled one by
one are counted from the first call of attention to the last.

The least possible, with T tokens, width d, keys and values of k, a feed-forward of h (u = 2 up-projections with a gate,
else 1), H heads, P parameters a layer, c = 2 bytes of activations and working copies, r = 4 of gradients:

    kept      T c (d + 2k + d + d + u h) + 4 T H    queries, keys, values; what attention returns and its softmax's
                                                    statistics; the sum that it enters; the feed-forward's up (and gate)
    forward   c P + T c d + kept + T c d            weights, the layer's input, what is kept, its output
    backward  c P + T c d + kept + 2 T c d + r P    weights, the input, what was kept, the output's gradient and the
                                                    input's, the weights' gradient

No program reaches it: each product would have to hand its result to what comes next without writing it.

zero3's temporaries are to be at most activations + two working copies + a chunk of logits:

    layers (T c d + kept) + 2 c P + c O + (4 + c) t V   O parameters outside the layers, gathered once a microbatch; t
                                                        tokens a chunk (`jdp.models.losses`), V the vocabulary: logits
                                                        in float32, and their gradient for the two products with it

"beside gradients" leaves out of the temporaries what `jdp.foresight.memory` finds of gradients at the peak, which the
closed form does not have: the sharded sum (r / N a parameter), and whole ones on their way to it.

Measured 2026-11-24 for 8 H100 (jax 0.10.2), MiB a layer, least possible in brackets, and kernels; MiB of temporaries:

                      forward     products, attention, other       backward    products, attention, other       of least
    gpt2_124m zero2    597 (146)       206,  48,  343   26 kernels  1137 (185)       462, 180,  495   37 kernels  5.2
    gpt2_124m zero3    597 (146)       206,  48,  343   26          1156 (185)       468, 180,  508   43          5.3
    gpt_1b zero2      1694 (549)       740,  81,  873   21          3553 (813)      1660, 385, 1508   29          3.9
    gpt_1b zero3      1694 (549)       740,  81,  873   21          3596 (813)      1660, 385, 1551   36          3.9

    zero3             temporaries, closed form   over it   gradients among them   over it beside them
    gpt2_124m         2311         2136          1.08       147                   1.01
    gpt_1b            7816         7434          1.05       393                   1.00

In a loop over the layers it was 7.4, 7.2, 5.3 and 5.0 (810 and 1628 MiB a layer of gpt2_124m zero2, 2494 and 4371 of
gpt_1b zero3; 61 and 69 kernels): what a layer keeps was copied into stacks, 802 MiB of gpt_1b's, and zero2's gathered
weights were. Of gpt_1b's "other" under zero3 now, forward: 384 are SwiGLU, 160 norms, 192 residuals, 97 rotary and the
copy of the values; backward: 768 SwiGLU, some 580 norms, 162 rotary.
"""

import math
from collections import Counter
from typing import Any

import jax
from jax.tree_util import keystr
from measure import Row, finish, parser
from overlap import EXPERIMENTS, TOKENS

from jdp.base.disk_cache import Cache
from jdp.experiment.file import load
from jdp.experiment.plan import candidates_of
from jdp.foresight.memory.peak import memory
from jdp.foresight.program.module import Program
from jdp.foresight.targets.relocate import Candidate
from jdp.foresight.targets.resolve import Target, target
from jdp.foresight.timing.operations import Schedule, TimedOp
from jdp.foresight.timing.timeline import timeline
from jdp.models import GPTConfig
from jdp.models.losses import CHUNK_BYTES

CASES = ("gpt2_124m@h100:1x8:zero2,zero3", "gpt_1b@h100:1x8:zero2,zero3")
MIB = 2**20
COMPUTE_BYTES, GRADIENT_BYTES = 2, 4
WITHIN = 1.10
"""Of the closed form, that zero3's temporaries may be."""


def layer_bytes(program: Program, on: Target) -> dict[str, Counter[str]]:
    """Return {"forward", "backward"} -> {"products", "attention", "other"} -> bytes a layer; "kernels" -> how many.

    A loop over the layers is one whose body calls cuDNN's attention: that of the backward pass, its backward kernel.
    Of layers that are compiled one by one, what stands from the first call to the last belongs to all but one.
    """
    schedule, found = Schedule(program, on), dict[str, Counter[str]]()
    for step in program[program.entry]:
        if step.kind == "while":
            (body,) = step.called["body"]
            kernels = _kernels(schedule, body)
            calls = Counter(op.cost.attention.backward for op, _ in kernels if op.cost.attention is not None)
            if calls:
                found["backward" if calls[True] else "forward"] = _counted(kernels, calls[True] or calls[False])
    if found:
        return found
    kernels = _kernels(schedule, program.entry)
    for name, backward in (("forward", False), ("backward", True)):
        fused = [op.cost.attention for op, _ in kernels]
        calls = [i for i, each in enumerate(fused) if each is not None and each.backward == backward]
        found[name] = _counted(kernels[calls[0] : calls[-1]], len(calls) - 1)
    return found


def _counted(kernels: list[tuple[TimedOp, int]], layers: int) -> Counter[str]:
    """The bytes of kernels, a layer, by kind; and how many there are."""
    counted = Counter[str]()
    for op, times in kernels:
        fused = op.cost.attention
        counted["attention" if fused else "products" if op.cost.products else "other"] += round(times * op.bytes)
        counted["attention"] += 0 if fused is None else fused.pass_bytes
        counted["kernels"] += times * op.cost.launches
    return Counter({name: count // layers for name, count in counted.items()})


def _kernels(schedule: Schedule, computation: str, times: int = 1) -> list[tuple[TimedOp, int]]:
    """Every kernel that a computation runs, in order, and how often."""
    kernels = list[tuple[TimedOp, int]]()
    for op in schedule.operations(computation):
        if op.kind == "kernel":
            kernels.append((op, times))
        for inner in op.inner:
            kernels += _kernels(schedule, inner, times * op.trips)
    return kernels


def parameters(candidate: Candidate, layers: int) -> tuple[int, int]:
    """Return how many parameters a layer has, and how many lie outside the layers."""
    leaves = jax.tree_util.tree_leaves_with_path(candidate.state.params)
    inside = sum(math.prod(leaf.shape) for path, leaf in leaves if "layers" in keystr(path))
    return inside // layers, sum(math.prod(leaf.shape) for _, leaf in leaves) - inside


def least(config: GPTConfig, in_layer: int, outside: int, rows: int) -> dict[str, int]:
    """Return the bytes of the closed forms in the module's docstring; `rows` of the batch are on a device."""
    tokens, width, heads = rows * config.context, config.width, config.heads
    shared, ups = config.key_value_heads * config.head_width, 1 + config.gated
    residual = tokens * COMPUTE_BYTES * width
    kept = 3 * residual + tokens * COMPUTE_BYTES * (2 * shared + ups * config.hidden_width) + 4 * tokens * heads
    weights = COMPUTE_BYTES * in_layer
    chunks = max(1, -(-4 * tokens * config.vocab_size // CHUNK_BYTES))
    logits = (4 + COMPUTE_BYTES) * rows * -(-config.context // chunks) * config.vocab_size
    return {
        "forward": weights + 2 * residual + kept,
        "backward": weights + 3 * residual + kept + GRADIENT_BYTES * in_layer,
        "temporaries": config.layers * (residual + kept) + 2 * weights + COMPUTE_BYTES * outside + logits,
    }


def measured(case: str, changes: dict[str, str]) -> list[dict[str, Any]]:
    """Compile the steps of a case; return their numbers."""
    name, _, rest = case.partition("@")
    kind, _, strategies = rest.rpartition(":")
    on, path = target(kind), str(EXPERIMENTS / f"{name}.toml")
    config = load(path, changes).model.config
    assert isinstance(config, GPTConfig) and config.remat == "dots", "the closed forms are those of remat dots"
    rows = max(1, TOKENS // config.context)
    fixed = {"train.batch_size": str(rows * len(on.devices)), "train.accumulate": "1", "compiler": "overlap"}
    experiment = load(path, {**fixed, **changes})
    found = list[dict[str, Any]]()
    for one in candidates_of(experiment, on, strategies=strategies.split(","), accumulate=(1,), hybrid=False):
        made = one.compile(on, Cache.usual(True))
        form = least(config, *parameters(one, config.layers), rows)
        held, line = memory(made, one.step, one.state), timeline(made.program, on)
        found.append(
            {
                "experiment": name,
                "target": kind,
                "strategy": one.step.plan.strategy,
                "layer": {direction: dict(count) for direction, count in layer_bytes(made.program, on).items()},
                "least": form,
                "temporaries": made.temp_bytes,
                "gradients": held.gradients,
                "step_ms": 1e3 * line.step_seconds,
                "compute_ms": 1e3 * line.compute_seconds,
            }
        )
    return found


PARTS = ("products", "attention", "other")


def over_least(one: dict[str, Any]) -> float:
    """A layer's bytes, forward and backward, over the least possible."""
    counted = sum(count[name] for count in one["layer"].values() for name in PARTS)
    return counted / (one["least"]["forward"] + one["least"]["backward"])


def over_form(one: dict[str, Any], gradients: bool) -> float:
    """Temporaries, with or without gradients, over the closed form."""
    return (one["temporaries"] - (0 if gradients else one["gradients"])) / one["least"]["temporaries"]


def row(rows: list[dict[str, Any]]) -> Row:
    """The line of the README's table."""
    layers = ", ".join(f"{over_least(one):.1f} ({one['experiment']} {one['strategy']})" for one in rows)
    held = [
        f"{over_form(one, True):.2f}, beside gradients {over_form(one, False):.2f} ({one['experiment']})"
        for one in rows
        if one["strategy"] == "zero3"
    ]
    return Row(
        "bytes that a layer's kernels read and write, over the least possible; zero3's temporaries over activations +"
        " two layers' weights + the others + a chunk of logits; bf16, 8192 tokens a device, h100:1x8",
        f"{layers}; {', '.join(held) or '–'}",
        f"–; ≤ {WITHIN:.2f}",
    )


def show(one: dict[str, Any]) -> None:
    """Print a step's numbers."""
    print(
        f"{one['experiment']} {one['strategy']}, {one['target']}: step {one['step_ms']:.1f} ms (computing"
        f" {one['compute_ms']:.1f}), a layer {over_least(one):.2f} of the least"
    )
    for direction, count in one["layer"].items():
        parts = ", ".join(f"{name} {count[name] / MIB:.0f}" for name in PARTS)
        total, bound = sum(count[name] for name in PARTS) / MIB, one["least"][direction] / MIB
        number = f"{count['kernels']} kernels"
        print(f"  {direction:9} {total:6.0f} MiB a layer ({parts}), least {bound:.0f}: {total / bound:.2f}; {number}")
    held, form = one["temporaries"] / MIB, one["least"]["temporaries"] / MIB
    print(
        f"  temporaries {held:.0f} MiB, closed form {form:.0f}: {over_form(one, True):.2f}; of gradients"
        f" {one['gradients'] / MIB:.0f}: {over_form(one, False):.2f} beside them",
        flush=True,
    )


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--cases", nargs="*", default=list(CASES), help="EXPERIMENT@TARGET:STRATEGY,STRATEGY")
    options.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the experiment's file")
    given = options.parse_args()
    changes = dict(one.split("=", 1) for one in given.set)
    rows = [one for case in given.cases for one in measured(case, changes)]
    for one in () if given.json else rows:
        show(one)
    finish({"rows": rows}, given.json, row(rows))


if __name__ == "__main__":
    main()
