"""The model of `zero_muon.py`: square layers, trained by jdp's step, with bytes and FLOPs counted."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from toy import make_batch

import jdp
from jdp.foresight.program.collectives import KINDS, collectives, total_wire_bytes

SIDE, RATE, DECAY = 64, 0.02, 0.95
SETTINGS: dict[str, Any] = {
    "beta": DECAY,
    "nesterov": False,
    "muon_weight_dimension_numbers": {"layers": optax.contrib.MuonDimensionNumbers(1, 2)},  # [matrices, in, out]
}
NAIVE, OWNED = optax.contrib.muon(RATE, **SETTINGS), jdp.muon(RATE, **SETTINGS)


def init(matrices: int) -> dict[str, jax.Array]:
    return {"layers": jax.random.normal(jax.random.key(0), (matrices, SIDE, SIDE)) / SIDE**0.5}


def total_loss(layers: jax.Array, rows: dict[str, Any]) -> jax.Array:
    """Return the sum over rows. Under zero3 `scan_layers` gathers one layer at a time; else it is a plain loop."""
    logits = jdp.scan_layers(lambda w, x: x + jnp.tanh(x @ w) / 4, layers, rows["x"])[:, :10]
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows["y"]).sum()


@dataclass(frozen=True)
class Result:
    """`sent`: kind of collective -> bytes that a device sends per step; `flops`: a device's; `losses`: of each step."""

    sent: dict[str, float]
    flops: float
    losses: list[float]

    @property
    def total(self) -> float:
        return sum(self.sent.values())


def counted(run: Any, losses: list[float] | None = None) -> Result:
    """Return what a compiled step sends and computes, beside the losses of training with it."""
    found = collectives(run.as_text())
    sent = {kind: total_wire_bytes([each for each in found if each.kind == kind]) for kind in KINDS}
    return Result(sent, run.cost_analysis()["flops"], losses or [])


def by_jdp(plan: jdp.Plan, tx: optax.GradientTransformation, matrices: int, steps: int) -> Result:
    def loss_fn(params: Any, rows: dict[str, Any], rng: jax.Array) -> jdp.Loss:
        return jdp.Loss(total_loss(params["layers"], rows), rows["weight"].sum())

    state = jdp.init_state(lambda rng: init(matrices), tx, plan, rng=jax.random.key(0))
    step = jdp.make_train_step(loss_fn, plan, partitioning="manual", check_loss=False, donate=False)
    run, losses = step.compile(state, jax.device_put(make_batch(0), plan.batch_sharding)), list[float]()
    for i in range(steps):
        state, metrics = run(state, jax.device_put(make_batch(i), plan.batch_sharding))
        losses.append(float(metrics["loss"]))
    return counted(run, losses)


def forms(mesh: jax.sharding.Mesh, strategy: str, steps: int) -> dict[str, Result]:
    """Return AdamW's step (not trained), and Muon's without and with owners, for as many matrices as devices."""
    plan = jdp.Plan(mesh, strategy)
    return {
        "AdamW": by_jdp(plan, optax.adamw(3e-3), mesh.size, 0),
        "naive": by_jdp(plan, NAIVE, mesh.size, steps),
        "owned": by_jdp(plan, OWNED, mesh.size, steps),
    }
