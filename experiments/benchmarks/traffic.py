"""What a training step sends, against the design's contract: all strategies and partitionings, compiled for real GPUs.

    python experiments/benchmarks/traffic.py [--target h100:1x8] [--models gpt,mlp] [--layers 2] [--unrolled] …

The steps are compiled, not run: no GPU is needed, but `pip install 'jdp[aot]'` and JAX_PLATFORMS=cpu. Models: gpt is
gpt2-124m with fewer layers, two rows of 1024 tokens a device and microbatch; untied is the same with a matrix of its
own for the logits; mlp is 784-2048-2048-2048-16. Bytes are counted in the compiled program, loop trip counts included.
"wire" is what a device sends a step, by ring algorithms; "contract" the same for the row below, with psi parameters, c
and r bytes an element of the working copy and of the reduced gradient (r = 4), and K microbatches. A step keeps it when
it sends at most 1.02 times that, and by other kinds of collective at most 1%. "*": what `partitioning=None` chooses.

    ddp    all-reduce r psi
    zero1  reduce-scatter r psi      all-gather c psi
    zero2  reduce-scatter K r psi    all-gather c psi
    zero3  reduce-scatter K r psi    all-gather at most 2 K c psi

Promised: every chosen partitioning keeps the contract.

Measured 2026-11 for 8 H100 (jax 0.10.2, Python 3.11.7): all 32 choices keep it. Wire bytes over the contract's:

    gpt, scanned        fp32 K=1         fp32 K=4         bf16 K=1         bf16 K=4
    auto / manual
    ddp                 1.721 / 1.000*   6.839 / 1.000*   1.589 / 1.000*   6.311 / 1.000*
    zero1               1.118 / 1.000*   2.970 / 1.000*   0.990 / 1.000*   2.962 / 1.000*
    zero2               1.118 / 1.000*   1.188 / 1.000*   0.990 / 1.000*   0.987 / 1.000*
    zero3               0.833 / 0.755*   0.833 / 0.755*   0.809 / 0.816*   0.809 / 0.816*

Unrolled: the same to 0.01, but ddp in auto with K=4: 6.05 and 5.91. untied, fp32: auto is chosen except for ddp and
zero1 with K=4, and keeps it (1.000, 0.859, 0.859, 0.624; with K=4 zero2 0.774, zero3 0.624). mlp, fp32: both are 1.000
(zero3 0.667), but zero1 in auto with K=4: 2.500. mlp, bf16: manual 1.000 (zero3 0.750); auto reduces in bf16 and sends
half to two thirds of that, but zero1 with K=4: 1.667. zero3 is below 1 because what lies outside the layer loop is
gathered once a microbatch and kept for the backward pass.
jax 0.12.0.1, ddp and zero3 with K=4: the same, but gpt fp32 zero3 in auto 0.649.
Cost: 390 s of processor time: 3 to 4 minutes on two cores of one's own, 6.6 minutes under a load of 6.
"""

import dataclasses
import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from measure import finish, parser

import jdp
from jdp.foresight.hlo import collectives, total_wire_bytes, traffic
from jdp.foresight.targets import Target, target
from jdp.models import SIZES, GPTConfig, MLPConfig, build, next_token_loss

TOLERANCE, SLACK = 1.02, 0.01
PARTITIONINGS = ("auto", "manual")
COLUMNS = ("all-reduce", "reduce-scatter", "all-gather")
LENGTH = 1024
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One step to compile."""

    model: str
    precision: str
    strategy: str
    accumulate: int


def contract(case: Case, parameters: int) -> dict[str, int]:
    """Payload bytes a step by kind of collective."""
    c, r, k = (2 if case.precision == "bf16" else 4), 4, case.accumulate
    factors = {
        "ddp": {"all-reduce": r},
        "zero1": {"reduce-scatter": r, "all-gather": c},
        "zero2": {"reduce-scatter": k * r, "all-gather": c},
        "zero3": {"reduce-scatter": k * r, "all-gather": 2 * k * c},
    }
    return {kind: factor * parameters for kind, factor in factors[case.strategy].items()}


def wire(payload: dict[str, int], devices: int) -> float:
    """Bytes that each device sends, by ring algorithms."""
    return sum((2 if kind == "all-reduce" else 1) * (devices - 1) / devices * size for kind, size in payload.items())


def configuration(name: str, layers: int, unrolled: bool) -> GPTConfig | MLPConfig:
    if name == "mlp":
        return MLPConfig(features_in=784, hidden=(2048, 2048, 2048), features_out=16)
    return dataclasses.replace(SIZES["gpt2-124m"], layers=layers, scan=not unrolled, tied=name != "untied")


def gpt_loss(model: Any, batch: Any, rng: Any) -> jdp.Loss:
    logits = model(batch["tokens"], rng=rng)
    return jdp.Loss(*next_token_loss(logits, batch["targets"], batch["weights"]))


def mlp_loss(model: Any, batch: Any, rng: Any) -> jdp.Loss:
    nats = optax.softmax_cross_entropy_with_integer_labels(model(batch["features"]), batch["labels"])
    return jdp.Loss(nats.sum(), jnp.float32(nats.size))


def abstract_batch(case: Case, devices: int) -> dict[str, jax.ShapeDtypeStruct]:
    if case.model == "mlp":
        rows = 512 * devices * case.accumulate
        shapes = {"features": ((rows, 784), "float32"), "labels": ((rows,), "int32")}
    else:
        shape = (2 * devices * case.accumulate, LENGTH)
        shapes = {"tokens": (shape, "int32"), "targets": (shape, "int32"), "weights": (shape, "float32")}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}


def compile_case(case: Case, *, layers: int, unrolled: bool, on: Target) -> list[dict[str, Any]]:
    """A row for each partitioning."""
    config = configuration(case.model, layers, unrolled)
    plan = jdp.Plan(jdp.make_mesh(devices=on.devices, data=-1), case.strategy)
    state = jdp.abstract_state(
        lambda rng: build(config, rngs=nnx.Rngs(rng)), optax.adamw(1e-3), plan, rng=jax.random.key(0)
    )
    batch, loss_fn = abstract_batch(case, len(on.devices)), mlp_loss if case.model == "mlp" else gpt_loss
    settings = {"accumulate": case.accumulate, "precision": case.precision, "clip_norm": 1.0}
    undecided = jdp.make_train_step(loss_fn, plan, **settings)
    jax.eval_shape(undecided, state, batch)  # chooses while it is traced
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    rows = []
    for partitioning in PARTITIONINGS:
        compiled = jdp.make_train_step(loss_fn, plan, partitioning=partitioning, **settings).compile(state, batch)
        row = {"partitioning": partitioning, "chosen": partitioning == undecided.partitioning, "why": undecided.why}
        row |= sent(compiled, contract(case, parameters), len(on.devices))
        rows.append(dataclasses.asdict(case) | row)
    return rows


def sent(compiled: jax.stages.Compiled, row: dict[str, int], devices: int) -> dict[str, Any]:
    """What a compiled step sends and keeps in temporary memory, held against its row of the contract."""
    found = collectives(compiled.as_text())
    theory, measured, payload = wire(row, devices), total_wire_bytes(found), traffic(found)
    others = sum(c.wire_bytes for c in found if c.kind not in row)
    return {
        "wire_bytes": measured,
        "contract_bytes": theory,
        "ratio": measured / theory,
        "keeps_contract": measured <= TOLERANCE * theory and others <= SLACK * theory,
        "payload_bytes": payload,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "caveats": sorted({caveat for c in found for caveat in c.caveats}),
    }


def report(rows: list[dict[str, Any]], *, with_header: bool) -> None:
    """Sizes in MiB; the columns by kind are payload."""
    if with_header:
        kinds = " ".join(f"{kind:>14}" for kind in COLUMNS)
        print(f"MiB{'':27}    wire contract  ratio        {kinds}  other  temp")
    for row in rows:
        payload = {kind: size / MIB for kind, size in row["payload_bytes"].items()}
        kinds = " ".join(f"{payload.pop(kind, 0):14.1f}" for kind in COLUMNS)
        name = f"{row['model']:6} {row['precision']} {row['strategy']:5} K={row['accumulate']} {row['partitioning']:6}"
        mark, verdict = "*" if row["chosen"] else " ", "keeps" if row["keeps_contract"] else "BREAKS"
        sizes = f"{row['wire_bytes'] / MIB:8.1f} {row['contract_bytes'] / MIB:8.1f} {row['ratio']:6.3f} {verdict:6}"
        print(
            f"{name}{mark} {sizes} {kinds} {sum(payload.values()):6.1f} {row['temp_bytes'] / MIB:5.0f}", *row["caveats"]
        )
    sys.stdout.flush()


def reasons(rows: list[dict[str, Any]]) -> None:
    """What was chosen, and why, and whether it keeps the contract."""
    chosen = [row for row in rows if row["chosen"]]
    for why, same in itertools.groupby(sorted(chosen, key=lambda row: row["why"]), key=lambda row: row["why"]):
        group = list(same)
        names = ", ".join(f"{r['model']} {r['precision']} {r['strategy']} K={r['accumulate']}" for r in group)
        print(f"chose {group[0]['partitioning']}, since {why}: {names}")
    print(f"{sum(not row['keeps_contract'] for row in chosen)} of {len(chosen)} chosen steps break the contract")


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--target", default="h100:1x8", help="see jdp.foresight.targets")
    options.add_argument("--models", default="gpt,mlp", help="of gpt, untied, mlp")
    options.add_argument("--layers", type=int, default=2, help="of the gpt")
    options.add_argument("--unrolled", action="store_true", help="the gpt's layers one by one instead of scanned")
    options.add_argument("--precisions", default="fp32,bf16")
    options.add_argument("--strategies", default="ddp,zero1,zero2,zero3")
    options.add_argument("--accumulate", default="1,4")
    chosen = options.parse_args()
    fields = (chosen.models, chosen.precisions, chosen.strategies, chosen.accumulate)
    cases = [Case(m, p, s, int(k)) for m, p, s, k in itertools.product(*(field.split(",") for field in fields))]
    on, rows = target(chosen.target), []
    compiled = partial(compile_case, layers=chosen.layers, unrolled=chosen.unrolled, on=on)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, pair in enumerate(pool.map(compiled, cases)):
            rows += pair
            if not chosen.json:
                report(pair, with_header=i == 0)
    if not chosen.json:
        reasons(rows)
    finish({"target": str(on), "layers": chosen.layers, "unrolled": chosen.unrolled, "rows": rows}, chosen.json)


if __name__ == "__main__":
    main()
