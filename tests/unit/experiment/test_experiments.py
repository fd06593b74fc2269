"""The experiment files in the repository: those for GPUs fit the GPUs they name.

`gpt2_124m` and `llama_8b_zero3` are compiled for theirs, with memory and bytes, in `test_readme.py`.
"""

import json
import math
import re

import jax
import pytest
from paths import EXPERIMENTS

from jdp.core.sharding.mesh import make_mesh
from jdp.experiment.assembly import Assembly
from jdp.experiment.file import check_for_devices, load
from jdp.foresight.targets.resolve import target


def assembled(experiment, described):
    """Return the described devices, and the assembly and abstract state of the experiment on them."""
    chip = target(described)
    check_for_devices(experiment, len(chip.devices))
    assembly = Assembly(experiment, make_mesh(devices=chip.devices, **experiment.mesh))
    return chip, assembly, assembly.training.abstract_state


TARGETS = {"gpt_1b": "h100:1x8", "hsdp": "h100:8x8", "tensor_parallel": "h100:8x8", "digits_resnet": "cpu:4"}
TARGETS |= {"finetune_hf_llama": "h100:1x8", "continue_pretraining": "h100:1x8", "quickstart_muon": "cpu:4"}
TARGETS |= {"imagenet_resnet50": "h100:1x8", "imagenet_vit": "h100:1x8"}
LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 8192,
}  # fmt: skip
"""The config.json of Llama 3 8B, without the keys that change nothing."""


def loaded(name, folder):
    """Return an experiment; of a model of Hugging Face the folder is given on the command line."""
    if name not in ("finetune_hf_llama", "continue_pretraining"):
        return load(EXPERIMENTS / f"{name}.toml")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    given = {"model.name": f"hf:{folder}", "train.init_from": str(folder)}
    given |= {"data.source": "texts.txt", "sample": "none"}
    return load(EXPERIMENTS / f"{name}.toml", given)


@pytest.mark.aot
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.default_ids("quickstart_muon")
def test_fits_its_devices(name, tmp_path):
    """The whole step is traced for the devices that the file names, and what rests on one of them is within its share.

    Compiling these takes minutes; `jdp plan` in their lab notes did. ddp holds all of a replica, zero a part.
    """
    _, assembly, state = assembled(loaded(name, tmp_path), TARGETS[name])
    after, metrics = jax.eval_shape(assembly.training.step, state, assembly.inputs.abstract_batch)
    assert {"loss", "grad_norm", "weight"} <= metrics.keys()
    assert jax.tree.structure(after) == jax.tree.structure(state)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    kept = [placement for placement in assembly.training.plan.placements(state) if "opt_state" not in placement.path]
    at_rest = sum(placement.bytes_per_device for placement in kept)
    shards = math.prod(size for axis, size in assembly.mesh.shape.items() if axis != "replica")
    shards = 1 if assembly.experiment.strategy == "ddp" else shards
    assert at_rest < 1.1 * 4 * size / shards + 50_000, "small leaves and norms stay whole"


@pytest.mark.aot
def test_what_is_tensor_parallel_is_split_in_pairs():
    """A matrix that is split by columns is followed by one split by rows: one all-reduce a pair (arXiv:1909.08053)."""
    _, assembly, state = assembled(load(EXPERIMENTS / "tensor_parallel.toml"), "h100:8x8")
    compute_specs = {placement.path: placement.compute for placement in assembly.training.plan.placements(state)}
    for first, second in (("attention/query", "attention/output"), ("mlp/up", "mlp/down")):
        assert compute_specs[f"params/layers/{first}/kernel"][2] == "model"
        assert compute_specs[f"params/layers/{second}/kernel"][1] == "model"


def test_every_experiment_is_in_the_guide():
    guide = (EXPERIMENTS.parent / "jdp/experiment/README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"experiments/(\w+)\.toml\)", guide))
    assert named == {file.stem for file in EXPERIMENTS.glob("*.toml")}


def test_gpt2_has_the_keys_of_nanogpts_published_run():
    experiment = load(EXPERIMENTS / "gpt2_124m.toml")
    model, given, train = experiment.model.config, experiment.optimizer, experiment.train
    assert (model.layers, model.width, model.heads, model.context, model.vocab_size) == (12, 768, 12, 1024, 50304)
    assert (model.tied, model.bias, model.dropout, model.positions, model.norm) == (True, False, 0, "learned", "layer")
    assert (given.b1, given.b2, given.eps, given.weight_decay, given.clip_norm) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert train.batch_size * experiment.data.length == 12 * 1024 * 40 == 491_520
    assert (train.steps, experiment.precision, experiment.data.heldout_fraction) == (600_001, "bf16", 0.0005)
