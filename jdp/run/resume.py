"""Where a run starts: from fresh weights, from another model's weights, or from its newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jdp.checkpoint import Checkpoints, RemoteCheckpoints
from jdp.core.state import TrainState
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError
from jdp.experiment.schema.experiment import Train
from jdp.guard.bad_steps import RollBack
from jdp.run.evaluation import Best
from jdp.run.folder import CHECKPOINTS
from jdp.run.in_bucket import held_at
from jdp.run.progress import Progress, check_record


def open_checkpoints(train: Train, folder: Path) -> Checkpoints:
    """Open the run's checkpoints; [train] sets which of them are kept."""
    best = train.best_metric
    by: dict[str, Any] = {"best": best, "mode": Best(best).mode} if best else {}
    by |= {"keep": train.keep_checkpoints, "keep_every": train.keep_every}
    if (run := held_at(folder)) is None:
        return Checkpoints(folder / CHECKPOINTS, **by)
    saved = RemoteCheckpoints(f"{run.remote.address}/{CHECKPOINTS}", **by)
    saved.before_commit = run.before_commit
    return saved


def check_init_from(train: Train, config: Any) -> None:
    """Check that `train.init_from` and `train.init_adapter` exist and have the weights of this model."""
    if train.init_from is not None:
        from jdp.run import initial_weights  # late, as all that reads other models' files

        initial_weights.check_init_from(train, config)


def start(
    assembly: Assembly, saved: Checkpoints, back: RollBack | None = None
) -> tuple[TrainState, Progress, str | None]:
    """Restore the newest complete checkpoint onto the run's plan, or make a state from `train.init_from`."""
    experiment, fingerprint = assembly.experiment, assembly.data.fingerprint
    step = saved.latest if back is None else max((one for one in saved.steps if one < back.before), default=None)
    if step is None:
        progress = Progress.of(experiment.train, assembly.toml, {"fingerprint": fingerprint})
        progress.bad.went(back)
        if experiment.train.init_from is None:
            return assembly.state(), progress, None
        from jdp.run.initial_weights import load_parameters

        state, message = load_parameters(assembly.state(), experiment.train, assembly.config, assembly.plan)
        return state, progress, message
    state, record = saved.restore(assembly.abstract_state(), step if back else None)
    check_record(record, saved.directory / str(int(state.consumed)))
    if record["fingerprint"] != fingerprint:
        raise ExperimentError(
            f"{saved.directory.parent} was trained on other data (fingerprint {record['fingerprint']}, now "
            f"{fingerprint}): restore [data] as it was, or choose another `name`. The standard library's text "
            "differs between Python versions."
        )
    progress = Progress.of(experiment.train, assembly.toml, record)
    progress.bad.went(back)
    progress.skipped = progress.skips_seen = int(jax.device_get(state.skipped))
    return state, progress, None
