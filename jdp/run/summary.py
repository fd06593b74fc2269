"""What a run leaves behind at its end: text that the model writes, and one summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdp.core.formatting import finite_or_none
from jdp.core.optim.ema import ema_params
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.experiment.optimizer import peak_rate
from jdp.models import generate, parameter_count
from jdp.run.resume import Progress


def sample(assembly: Assembly, state: TrainState) -> str | None:
    """Text that the model writes, prompt included; None if the experiment asks for none.

    With `optimizer.ema_decay` the averaged parameters write it. Tokens that the tokenizer does not have, which a model
    of a larger vocabulary may draw, are left out.
    """
    wanted = assembly.experiment.sample
    if wanted is None:
        return None
    if assembly.experiment.optimizer.ema_decay is not None:
        state = ema_params(state)

    def write(state: TrainState, prompt: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(assembly.rng, 2)  # 0 and 1 are the weights' and the steps'
        return generate(
            state.model, prompt, length=wanted.length, temperature=wanted.temperature, top_k=wanted.top_k, rng=rng
        )

    prompt = assembly.data.encode(wanted.prompt)[None]
    tokens = np.asarray(jax.device_get(jax.jit(write, out_shardings=assembly.plan.replicated)(state, prompt)))[0]
    return assembly.data.decode(tokens[tokens < assembly.data.vocab_size])


def summary(assembly: Assembly, progress: Progress, folder: Path) -> dict[str, Any]:
    """The run in one JSON object; `final_…` are of the last row of metrics and of the last evaluation."""
    chosen, evals = assembly.experiment, progress.evals
    speed = progress.steady_units / progress.steady_seconds if progress.steady_seconds else None
    waited = progress.waited / progress.steady_seconds if progress.steady_seconds else None
    own = {
        name: value for name, value in evals.items() if name in ("eval_loss", "eval_bits_per_token", "eval_accuracy")
    }
    best = progress.watched
    return {
        "name": chosen.name,
        "steps": progress.done,
        "of_steps": chosen.train.steps,
        "stopped_early": progress.stops_early(chosen),
        "final_loss": progress.loss,
        **{f"final_{name}": finite_or_none(value) for name, value in own.items()},
        "eval_sets": {name: finite_or_none(value) for name, value in evals.items() if name not in own},
        "best": {"metric": best.metric, "value": best.value, "step": best.step} if best.step else None,
        "best_checkpoint": progress.kept.step if progress.kept and progress.kept.step else None,
        "lr": peak_rate(chosen),
        "seconds": progress.seconds,
        f"{unit(assembly)}_per_second": speed,
        **_utilisation(assembly, speed),
        "data_wait_fraction": waited,
        "devices": assembly.mesh.devices.size,
        "processes": jax.process_count(),
        "strategy": chosen.strategy,
        "partitioning": assembly.train_step.partitioning,
        "parameters": parameter_count(assembly.config),
        "trained_parameters": assembly.trained_count,
        "skipped": progress.skipped,
        "resumed_from": progress.resumed_from,
        "folder": str(folder),
    }


def _utilisation(assembly: Assembly, speed: float | None) -> dict[str, float]:
    """MFU over this visit's steps; nothing where the devices' peak is not known."""
    at_peak = assembly.seconds_at_peak
    return {} if at_peak is None or speed is None else {"mfu": at_peak * speed / units_per_step(assembly)}


def unit(assembly: Assembly) -> str:
    """What speed counts: "tokens" or "examples"."""
    return "tokens" if assembly.experiment.kind == "text" else "examples"


def units_per_step(assembly: Assembly) -> int:
    chosen = assembly.experiment
    return chosen.train.batch_size * (chosen.data.length if chosen.kind == "text" else 1)
