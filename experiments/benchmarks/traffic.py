"""Compare the bytes that a training step sends with the contract, for all strategies, on programs for real GPUs.

    python experiments/benchmarks/traffic.py [--targets h100:1x8,h100:64x8] [--models gpt,unrolled,mlp] [--layers 2] …

The steps are compiled, not run: this needs no GPU, but `pip install 'jdp[aot]'` and JAX_PLATFORMS=cpu. The model gpt is
gpt2-124m with fewer layers, and two rows of 1024 tokens per device and microbatch; in unrolled the layers are compiled
one by one; untied has a separate matrix for the logits; mlp is 784-2048-2048-2048-16. Bytes are counted in the compiled
program, loop trip counts included. "wire" is the number of bytes that a device sends per step, by ring algorithms;
"contract" is that number for the row below, with psi parameters, c and r bytes per element of the working copy and of
the reduced gradient (r = 4), and K microbatches. A step keeps the contract if it sends at most 1.02 times that, and at
most 1% by other kinds of collective (`jdp.foresight.traffic.contract`). "*" marks the choice of `partitioning=None`.

    ddp    all-reduce r psi
    zero1  reduce-scatter r psi      all-gather c psi
    zero2  reduce-scatter K r psi    all-gather c psi
    zero3  reduce-scatter K r psi    all-gather at most 2 K c psi: as much as the step's trace gathers

Promised: every chosen partitioning keeps the contract.

Measured 2026-11-28 for 8, 64 and 512 H100 (jax 0.10.2, Python 3.11.7), bf16, the chosen partitioning (always manual):
    --targets h100:1x8,h100:8x8,h100:64x8 --models gpt,unrolled,mlp --width 1024 --precisions bf16
    --partitionings chosen
0 of 72 break the contract; each sends 1.000 of its row. MiB per device:

                  gpt                  unrolled             mlp
                  1x8   8x8   64x8     1x8   8x8   64x8     1x8   8x8   64x8
    ddp    K=1, 4 519   584   592      519   584   592      67    75    76
    zero1  K=1, 4 389   438   444      389   438   444      50    57    57
    zero2  K=1    389   438   444      389   438   444      50    57    57
           K=4    1168  1314  1332     1168  1314  1332     151   170   172
    zero3  K=1    410   462   468      431   485   492      64    72    73
           K=4    1641  1846  1872     1725  1941  1968     257   289   293

The width is 1024 because gpt2-124m's 768 does not divide by 512: with it zero1 K=1 sends 1.270 of the contract, and
zero3 reduces embedding and attention unsharded, so both break it. With --replicas 64 (replica=64 x data=8) width 768
keeps it on 512 too: 1.000 in all, zero3 0.839 and 0.822 of 2 K c psi.

Measured 2026-11 for 8 H100, both partitionings, width 768: all 32 choices keep it. Wire bytes / contract:

    gpt, scanned        fp32 K=1         fp32 K=4         bf16 K=1         bf16 K=4
    auto / manual
    ddp                 1.721 / 1.000*   6.839 / 1.000*   1.589 / 1.000*   6.311 / 1.000*
    zero1               1.118 / 1.000*   2.970 / 1.000*   0.990 / 1.000*   2.962 / 1.000*
    zero2               1.118 / 1.000*   1.188 / 1.000*   0.990 / 1.000*   0.987 / 1.000*
    zero3               0.833 / 0.755*   0.833 / 0.755*   0.809 / 0.816*   0.809 / 0.816*

unrolled: the same to 0.01, except ddp in auto with K=4: 6.05 and 5.91. untied, fp32: auto is chosen except for ddp and
zero1 with K=4, and keeps it (1.000, 0.859, 0.859, 0.624; with K=4 zero2 0.774, zero3 0.624). mlp, fp32: both are 1.000
(zero3 0.667), except zero1 in auto with K=4: 2.500. mlp, bf16: manual 1.000 (zero3 0.750); auto reduces in bf16 and
sends half to two thirds of that, except zero1 with K=4: 1.667.
jax 0.12.0.1, ddp and zero3 with K=4: the same, except gpt fp32 zero3 in auto: 0.649.

Measured 2026-11 for 64 H100 in 8 hosts, with other axes on the mesh (jax 0.10.2), bf16, the chosen partitioning (always
manual): --targets h100:8x8 --models gpt,unrolled --width 1024 --precisions bf16 --partitionings chosen, and
    --replicas 8 | --model-axis 8 | --model-axis 2
0 of 48 break it. Wire bytes / contract, with MiB per device in brackets; "apart": activations that are sent along the
axis `model`, MiB per device (gpt and unrolled send the same):

                  replica=8 data=8   data=8 model=8   apart     data=32 model=2   apart
    ddp    K=1    1.000 (584)        1.000 (71)          84     1.000 (291)          48
           K=4    1.000 (584)        1.000 (71)         336     1.000 (291)         192
    zero1  K=1    1.000 (454)        1.000 (53)          84     1.000 (218)          48
           K=4    1.000 (454)        1.000 (53)         336     1.000 (218)         192
    zero2  K=1    1.000 (454)        1.000 (53)          84     1.000 (218)          48
           K=4    1.000 (1233)       1.000 (160)        336     1.000 (656)         192
    zero3  K=1    0.850 (496)        0.824 (59)          84     0.830 (242)          48
           K=4    0.836 (1790)       0.824 (235)        336     0.830 (967)         192

Collectives along `data` are issued on the parts of an array; before that, manual sent 8 times as much with model=8,
because XLA gathered along `model` first. auto, fp32, untied, width 512, data=8 model=8: 1.000 (zero3 0.975; zero1 with
K=4 2.5), but the embedding's gradient makes an all-to-all of activations along data, 1.3 to 3% of the row, so zero1-3
break it, and manual is chosen.

Measured 2026-11 for 64 H100 (jax 0.10.2), images of 224 x 224, 32 per device and microbatch, bf16, the chosen
partitioning (always manual): --targets h100:8x8 --models resnet-50,vit-s16 --precisions bf16 --partitionings chosen.
0 of 16 break it. "apart": the statistics of ResNet's batch norms, 0.8 MiB per device for each microbatch:

                  resnet-50       apart   vit-s16
    ddp   K=1     1.002 (192)       0.8   1.000 (166)
          K=4     1.002 (192)       3.2   1.000 (166)
    zero1 K=1     1.003 (144)       0.8   1.000 (124)
          K=4     1.003 (144)       3.2   1.000 (124)
    zero2 K=1     1.003 (144)       0.8   1.000 (124)
          K=4     1.000 (432)       3.2   1.000 (373)
    zero3 K=1     0.752 (144)       0.8   0.991 (164)
          K=4     0.750 (576)       3.2   0.991 (656)

ResNet's blocks are not a layer loop, so zero3 gathers each kernel once per microbatch and keeps it for the backward
pass. With the statistics counted, zero1 has 1.009 with K=1, and 1.025 with K=4, which would break the contract.

Measured 2026-11-27 with Muon (jax 0.10.2), bf16: --optimizer muon --models gpt --layers 4 --width 256 for 8, 64 and 512
H100s: 1.000 of its row in 12 of 12 programs.

Cost: about 5 s of processor time per program; the 72 took 26 minutes on two cores under a load of 8.
"""

import argparse
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
from jax.sharding import PartitionSpec
from measure import Row, finish, parser

import jdp
from jdp.experiment.optimizer import muon
from jdp.foresight.program.compiled import compile_step
from jdp.foresight.targets.resolve import Target, target
from jdp.foresight.verify import Report, report
from jdp.models import (
    SIZES,
    GPTConfig,
    MLPConfig,
    ModelConfig,
    ResNetConfig,
    ViTConfig,
    build,
    classification_loss,
    next_token_loss,
)

PARTITIONINGS = ("auto", "manual")
COLUMNS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "muon": muon(optax.adamw(1e-3), [optax.scale_by_learning_rate(1e-3)], {}),
}
LENGTH = 1024
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One step to compile."""

    model: str
    target: str
    precision: str
    strategy: str
    accumulate: int

    def __str__(self) -> str:
        return f"{self.model:8} {self.target:9} {self.precision} {self.strategy:5} K={self.accumulate}"


@dataclass(frozen=True)
class Shape:
    """The settings that all cases share."""

    layers: int  # of the gpts
    width: int  # of the gpts
    replicas: int  # of the mesh
    model: int  # devices along the mesh's axis `model`
    optimizer: str

    def axes(self) -> dict[str, int]:
        """Return the mesh's axes, without axes of one device."""
        sizes = {"replica": self.replicas, "data": -1, "model": self.model}
        return {axis: size for axis, size in sizes.items() if size != 1}

    def rules(self, case: Case) -> list[tuple[str, PartitionSpec]]:
        """Return Megatron-LM's rules: the first product of a pair by columns, the second by rows; the table by rows."""
        if self.model == 1 or case.model not in ("gpt", "unrolled"):
            return []
        stacked = (None,) if case.model == "gpt" else ()
        into, out = PartitionSpec(*stacked, None, "model"), PartitionSpec(*stacked, "model", None)
        columns = [f"*/attention/{name}/kernel" for name in ("query", "key", "value")]
        rows = ["*/attention/output/kernel", "*/mlp/down/kernel"]
        ruled = [(path, into) for path in (*columns, "*/mlp/up/kernel")] + [(path, out) for path in rows]
        return [*ruled, ("embed/tokens", PartitionSpec("model", None))]


def configuration(name: str, shape: Shape) -> ModelConfig:
    if name == "mlp":
        return MLPConfig(features_in=784, hidden=(2048, 2048, 2048), features_out=16)
    if name in SIZES:
        return SIZES[name]
    sizes = {"layers": shape.layers, "width": shape.width, "heads": shape.width // 64}
    gpt2 = SIZES["gpt2-124m"]
    assert isinstance(gpt2, GPTConfig)
    return dataclasses.replace(gpt2, scan=name != "unrolled", tied=name != "untied", **sizes)


def gpt_loss(model: Any, batch: Any, rng: Any) -> jdp.Loss:
    logits = model(batch["tokens"], rng=rng)
    return jdp.Loss(*next_token_loss(logits, batch["targets"], batch["weights"]))


def mlp_loss(model: Any, batch: Any, rng: Any) -> jdp.Loss:
    nats = optax.softmax_cross_entropy_with_integer_labels(model(batch["features"]), batch["labels"])
    return jdp.Loss(nats.sum(), jnp.float32(nats.size))


def image_loss(model: Any, batch: Any, rng: Any) -> jdp.Loss:
    logits = model(batch["images"], rng=rng, weights=batch["weights"])
    return jdp.Loss(*classification_loss(logits, batch["labels"], batch["weights"])[:2])


LOSSES = {GPTConfig: gpt_loss, MLPConfig: mlp_loss, ResNetConfig: image_loss, ViTConfig: image_loss}


def abstract_batch(case: Case, config: ModelConfig, devices: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a global batch, which is divided among `devices` devices."""
    if isinstance(config, ResNetConfig | ViTConfig):
        rows = 32 * devices * case.accumulate
        images = (rows, config.image_size, config.image_size, 3)
        shapes = {"images": (images, "float32"), "labels": ((rows,), "int32"), "weights": ((rows,), "float32")}
    elif case.model == "mlp":
        rows = 512 * devices * case.accumulate
        shapes = {"features": ((rows, 784), "float32"), "labels": ((rows,), "int32")}
    else:
        shape = (2 * devices * case.accumulate, LENGTH)
        shapes = {"tokens": (shape, "int32"), "targets": (shape, "int32"), "weights": (shape, "float32")}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}


def compile_case(case: Case, *, shape: Shape, on: dict[str, Target], partitionings: list[str]) -> list[dict[str, Any]]:
    """Return a row for each partitioning; "chosen" is the choice of `partitioning=None`."""
    config, devices = configuration(case.model, shape), on[case.target].devices
    plan = jdp.Plan(jdp.make_mesh(devices=devices, **shape.axes()), case.strategy, rules=shape.rules(case))
    state = jdp.abstract_state(
        lambda rng: build(config, rngs=nnx.Rngs(rng)), OPTIMIZERS[shape.optimizer], plan, rng=jax.random.key(0)
    )
    batch, loss_fn = abstract_batch(case, config, plan.batch_shards), LOSSES[type(config)]
    settings = {"accumulate": case.accumulate, "precision": case.precision, "clip_norm": 1.0}
    undecided = jdp.make_train_step(loss_fn, plan, **settings)
    jax.eval_shape(undecided, state, batch)  # the choice is made during tracing
    rows = []
    for partitioning in [undecided.partitioning if name == "chosen" else name for name in partitionings]:
        step = jdp.make_train_step(loss_fn, plan, partitioning=partitioning, **settings)
        compiled = compile_step(step.lower(state, batch))
        found = report(step, state, compiled, case.target)
        row = {"partitioning": partitioning, "chosen": partitioning == undecided.partitioning, "why": undecided.why}
        rows.append(dataclasses.asdict(case) | row | sent(found) | {"temp_bytes": compiled.temp_bytes})
    return rows


def sent(found: Report) -> dict[str, Any]:
    """Return the numbers of a report about traffic."""
    return {
        "wire_bytes": found.wire_bytes_per_device,
        "contract_bytes": found.theory_wire_bytes_per_device,
        "ratio": found.ratio,
        "keeps_contract": found.kept,
        "payload_bytes": {row.kind: row.found_bytes for row in found.rows},
        "model_axes_wire_bytes": sum(row.wire_bytes for row in found.model_axes),
        "statistics_wire_bytes": found.statistics.wire_bytes if found.statistics else 0.0,
        "breaches": list(found.breaches),
        "caveats": sorted({caveat for s in found.collectives for caveat in s.collective.caveats}),
    }


def show(case: Case, rows: list[dict[str, Any]], *, with_header: bool) -> None:
    """Print sizes in MiB: payload by kind of collective; "apart" is sent, but not compared with the contract."""
    if with_header:
        kinds = " ".join(f"{kind:>14}" for kind in COLUMNS)
        print(f"MiB{'':40}    wire contract  ratio        {kinds}  other  temp    apart")
    for row in rows:
        payload = {kind: size / MIB for kind, size in row["payload_bytes"].items()}
        kinds = " ".join(f"{payload.pop(kind, 0):14.1f}" for kind in COLUMNS)
        mark, verdict = "*" if row["chosen"] else " ", "keeps" if row["keeps_contract"] else "BREAKS"
        sizes = f"{row['wire_bytes'] / MIB:8.1f} {row['contract_bytes'] / MIB:8.1f} {row['ratio']:6.3f} {verdict:6}"
        apart = row["model_axes_wire_bytes"] + row["statistics_wire_bytes"]
        rest = f"{sum(payload.values()):6.1f} {row['temp_bytes'] / MIB:5.0f} {apart / MIB:8.1f}"
        print(f"{case} {row['partitioning']:6}{mark} {sizes} {kinds} {rest}", *row["caveats"])
        if row["chosen"]:
            print(*(f"    {breach}\n" for breach in row["breaches"]), sep="", end="")
    sys.stdout.flush()


def reasons(rows: list[dict[str, Any]]) -> None:
    """Print the choices with their reasons, and how many break the contract."""
    chosen = [row for row in rows if row["chosen"]]
    for why, same in itertools.groupby(sorted(chosen, key=lambda row: row["why"]), key=lambda row: row["why"]):
        group = list(same)
        names = dict.fromkeys(f"{r['model']} {r['precision']} {r['strategy']} K={r['accumulate']}" for r in group)
        print(f"chose {group[0]['partitioning']}, since {why}: {', '.join(names)}")
    print(f"{sum(not row['keeps_contract'] for row in chosen)} of {len(chosen)} chosen steps break the contract")


def headline(rows: list[dict[str, Any]], given: argparse.Namespace) -> Row:
    """Return the row of the README's table: for each strategy the largest ratio of the chosen partitioning."""
    chosen = [row for row in rows if row["chosen"]]
    most = {name: max(r["ratio"] for r in chosen if r["strategy"] == name) for name in given.strategies.split(",")}
    axes = {"replica": given.replicas, "model": given.model_axis}
    mesh = "".join(f", {axis}={size}" for axis, size in axes.items() if size != 1)
    mesh += f", {given.optimizer}" if given.optimizer != "adamw" else ""
    measures = (
        f"wire bytes against the table of strategies: {given.models}; {given.targets}{mesh}; K = {given.accumulate}"
    )
    result = ", ".join(f"{ratio:.3f} `{name}`" for name, ratio in most.items())
    return Row(f"{measures}; {len(chosen)} programs", result, "≤ 1.02")


def main() -> None:
    options = parser(__file__, __doc__)
    options.add_argument("--targets", default="h100:1x8", help="see jdp.foresight.targets")
    options.add_argument("--models", default="gpt,mlp", help="of gpt, unrolled, untied, mlp and the names in SIZES")
    options.add_argument("--layers", type=int, default=2, help="layers of the gpt")
    options.add_argument("--width", type=int, default=768, help="width of the gpt; a head has 64")
    options.add_argument("--replicas", type=int, default=1, help="size of the mesh's axis `replica`")
    options.add_argument("--model-axis", type=int, default=1, help="devices that share each layer of the gpts")
    options.add_argument("--optimizer", default="adamw", choices=[*OPTIMIZERS])
    options.add_argument("--precisions", default="fp32,bf16")
    options.add_argument("--strategies", default="ddp,zero1,zero2,zero3")
    options.add_argument("--accumulate", default="1,4")
    options.add_argument("--partitionings", default="auto,manual", help="any of auto, manual, chosen")
    options.add_argument("--workers", type=int, default=os.cpu_count())
    given = options.parse_args()
    fields = (given.models, given.targets, given.precisions, given.strategies, given.accumulate)
    cases = [Case(m, t, p, s, int(k)) for m, t, p, s, k in itertools.product(*(field.split(",") for field in fields))]
    on, shape = (
        {name: target(name) for name in given.targets.split(",")},
        Shape(given.layers, given.width, given.replicas, given.model_axis, given.optimizer),
    )
    compiled = partial(compile_case, shape=shape, on=on, partitionings=given.partitionings.split(","))
    rows = []
    with ThreadPoolExecutor(given.workers) as pool:
        for case, found in zip(cases, pool.map(compiled, cases), strict=True):
            if not given.json:
                show(case, found, with_header=not rows)
            rows += found
    if not given.json:
        reasons(rows)
    finish({"shape": dataclasses.asdict(shape), "rows": rows}, given.json, headline(rows, given))


if __name__ == "__main__":
    main()
