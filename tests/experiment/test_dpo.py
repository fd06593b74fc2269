"""Direct preference optimization: the published formula on any mesh, from one reference that no resume replaces."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from guide_folders import write_chat_llama
from own_process import python
from tiny_experiment import train_here
from tiny_runs import rows, stopped_at

from jdp.base.bucket import Remote
from jdp.checkpoint.safetensors import files
from jdp.data import sample_at
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import ExperimentError, load
from jdp.run.folder import REFERENCE
from jdp.run.signals import Stopped

RECIPE = Path(__file__).parents[2] / "experiments/dpo.toml"
TOY = {"model.context": 48, "data.length": 48, "train.batch_size": 16, "train.steps": 4, "optimizer.warmup_steps": 0}
TOY |= {"train.eval_every": 4, "train.checkpoint_every": 2, "train.log_every": 1, "train.eval_batches": "all"}
TOY |= {"data.heldout_fraction": 0.4, "optimizer.lr": 1e-3, "optimizer.clip_norm": "none", "precision": "fp32"}
TOY |= {"optimizer.schedule": "constant", "optimizer.b2": 0.9, "model.layers": 1, "model.remat": "none"}
TOY |= {"train.keep_best": "false", "train.export": "none", "sample": "none", "loss.label_smoothing": 0.1}
TOY |= {"train.init_from": "none", "train.init_names": "jdp", "strategy": "ddp", "train.accumulate": 1}
NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with `llama/`, which has a chat template, and 60 pairs of answers in `pairs.jsonl`."""
    folder = tmp_path_factory.mktemp("pairs")
    write_chat_llama(folder / "llama")
    found = [{"prompt": f"One more than {n}?", "chosen": f"It is {n + 1}.", "rejected": f"So: {n}"} for n in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def given(folder, **more):
    table = {**TOY, "model.name": f"hf:{folder}/llama", "data.source": f"{folder}/pairs.jsonl", **more}
    return {key: str(value) for key, value in table.items()}


def train(folder, root, devices=2, **more):
    train_here(RECIPE, root, given(folder, **more), devices=devices)
    return SimpleNamespace(rows=rows(root / "dpo", *NAMES), file=root / "dpo" / REFERENCE)


@pytest.fixture(scope="module")
def by_hand(llama):
    """Rafailov et al. 2023, equation 7, and Adam, on one device, a pair at a time: metrics by step, and held-out."""
    assembly = Assembly.on_devices(load(RECIPE, given(llama)), jax.devices()[:1])
    data, (graph, first) = assembly.data, nnx.split(assembly.state().model)

    def logp(params, tokens, targets, weights):
        logits = nnx.merge(graph, params)(tokens[None])[0]
        return jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets] * weights)

    def of_pair(params, sample):
        rows = [[sample[name][k] for name in ("tokens", "targets", "weights")] for k in (0, 1)]
        both = [logp(params, *row) for row in rows]
        rewards = [0.1 * (policy - logp(first, *row)) for policy, row in zip(both, rows, strict=True)]
        margin = rewards[0] - rewards[1]
        loss = -0.9 * jnp.log(1 / (1 + jnp.exp(-margin))) - 0.1 * jnp.log(1 / (1 + jnp.exp(margin)))
        return loss, jnp.stack([loss, *rewards, margin > 0, margin, both[0]])

    measure, slope = jax.jit(of_pair), jax.jit(jax.grad(of_pair, has_aux=True))
    params, tx, found = first, optax.adamw(1e-3, b2=0.9, weight_decay=0.0), {}
    state = tx.init(params)
    for step in range(4):
        batch = [sample_at(data.train, 16 * step + row, assembly.experiment.seed) for row in range(16)]
        slopes, values = zip(*(slope(params, sample) for sample in batch), strict=True)
        found[step + 1] = np.mean(values, axis=0)
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *slopes)
        updates, state = tx.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    heldout = [data.heldout[index] for index in range(len(data.heldout))]
    assert len(heldout) % 16 and len(heldout) > 16  # a last batch that is filled up
    return found, np.mean([measure(params, sample)[1] for sample in heldout], axis=0)


@pytest.mark.parametrize(
    ("strategy", "devices", "accumulate"),
    [("zero3", 8, 2), ("ddp", 1, 1), ("ddp", 8, 1), ("zero1", 8, 1), ("zero2", 4, 4), ("zero3", 2, 1)],
)
def test_it_is_the_published_formula(llama, by_hand, tmp_path, strategy, devices, accumulate):
    """fp32: to the rounding of sums in another order, which decides the accuracy of the first step, where rewards are
    zero."""
    (expected, heldout), more = by_hand, {"strategy": strategy, "train.accumulate": accumulate}
    found = train(llama, tmp_path, devices, **more).rows
    assert [*found] == [1, 2, 3, 4] and found[1][0] == pytest.approx(np.log(2), rel=1e-5)
    accuracy = NAMES.index("rewards/accuracies")
    for step, values in found.items():
        kept = [index for index in range(len(NAMES)) if step > 1 or index != accuracy]
        assert [values[index] for index in kept] == pytest.approx(expected[step][kept], rel=1e-5, abs=1e-5), step
    [last] = rows(tmp_path / "dpo", *(f"eval_{name}" for name in NAMES)).values()
    assert last == pytest.approx(heldout.tolist(), rel=1e-5, abs=1e-5)


def test_a_resume_has_the_same_bits_and_keeps_the_reference(llama, tmp_path):
    whole = train(llama, tmp_path / "whole")
    with stopped_at(2), pytest.raises(Stopped):
        train(llama, tmp_path / "stopped")
    kept = (tmp_path / "stopped/dpo" / REFERENCE).stat().st_mtime_ns
    resumed = train(llama, tmp_path / "stopped")
    assert resumed.rows == whole.rows and resumed.file.stat().st_mtime_ns == kept

    with np.load(resumed.file) as arrays:
        changed = {name: array if name == "weights" else array + 1 for name, array in arrays.items()}
    np.savez(resumed.file, **changed)
    with pytest.raises(ExperimentError, match=rf"other data .* restore \S+{REFERENCE}"):
        train(llama, tmp_path / "stopped")


def test_a_reference_of_other_weights_is_not_used(llama, tmp_path):
    """A visit that was killed before its first checkpoint leaves one; the next may begin with other weights."""
    other = train(llama, tmp_path / "other", seed=1)
    whole = train(llama, tmp_path / "whole")
    folder = tmp_path / "left/dpo"
    folder.mkdir(parents=True)
    for name in ("experiment.toml", ".lock"):
        (folder / name).write_bytes((tmp_path / "whole/dpo" / name).read_bytes())
    shutil.copy(other.file, folder)
    left = train(llama, tmp_path / "left")
    assert left.rows == whole.rows and left.file.read_bytes() != other.file.read_bytes()
    with np.load(left.file) as ours, np.load(whole.file) as theirs:
        assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_further_pairs_to_evaluate_get_a_reference_of_the_initial_weights(llama, tmp_path):
    """At the last step they are evaluated as if they had been there from the beginning."""
    plugged = {"eval": "{other = {source = " + json.dumps(f"{llama}/pairs.jsonl") + "}}", "train.steps": 5}
    ended = train(llama, tmp_path)
    train(llama, tmp_path, **plugged)
    with np.load(ended.file) as arrays:
        assert sum(len(array) for name, array in arrays.items() if name != "weights") == 60
    found = rows(tmp_path / "dpo", "eval_loss", "eval_other_loss")
    assert found[5][1] is not None and found[5][0] != found[5][1] < np.log(2)


def test_lora_starts_from_the_model_without_updates(llama, tmp_path):
    more = {"train.init_from": f"{llama}/llama", "train.init_names": "hf", "model.layers": 2}
    full = train(llama, tmp_path / "full", **more)
    more |= {"model.lora_rank": 2, "train.wrt": "*/lora_*", "optimizer.lr": 1e-2, "train.export": "hf"}
    small = train(llama, tmp_path / "small", strategy="zero3", **more)
    with np.load(full.file) as ours, np.load(small.file) as theirs:
        for name in {*ours} - {"weights"}:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    assert small.rows[1][0] == pytest.approx(np.log(2), rel=1e-5) and small.rows[4][0] < small.rows[1][0]
    assert files.read(tmp_path / "small/dpo/export")


def test_two_processes_learn_what_one_learns(llama, tmp_path, bucket):
    """Each computes its share of the reference, and a resume gets it from the first, which alone fetches the folder."""
    alone, file = train(llama, tmp_path / "alone", 4), tmp_path / "dpo.toml"
    file.write_text(RECIPE.read_text())
    launched = ["-m", "jdp", "launch", "-n", "2", "--devices-per-process", "2", "--", file, "--run-dir", bucket]
    for steps in (2, 4):
        words = [word for item in given(llama, **{"train.steps": steps}).items() for word in ("--" + item[0], item[1])]
        done = python(*launched, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("reference: log-probabilities of 60 pairs" in done.stdout) is (steps == 2), done.stdout
    written = map(json.loads, Remote(f"{bucket}/dpo").read("metrics.jsonl").splitlines())
    found = {row["step"]: row["loss"] for row in written if "loss" in row}
    assert found == pytest.approx({step: values[0] for step, values in alone.rows.items()}, rel=1e-5)
