"""Adapters in the format of PEFT compute here what they compute there, or are refused in words."""

import functools
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import hf_reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jdp
from jdp.base import notices
from jdp.checkpoint import CheckpointError
from jdp.cli.main import main
from jdp.experiment.file import ExperimentError, from_table, to_toml
from jdp.export import (
    export_hf,
    export_peft,
    gpt_config_from_hf,
    hf_names,
    import_peft,
    import_safetensors,
    lora_from_peft,
    merge_lora,
)
from jdp.models import GPT, GPTConfig

STORED = json.loads(hf_reference.FILE.read_text(encoding="utf-8"))
ADAPTER, BASE = STORED["peft"], STORED["llama"]
ATOL = 2e-5
"""float32 on both sides, as in test_hugging_face.py; here the update is added to the output, there to the kernel."""


def written(folder, stored, kind, **changes):
    """A folder as PEFT or transformers writes it, with keys of its configuration changed."""
    folder.mkdir(exist_ok=True)
    (folder / f"{'adapter_config' if kind == 'adapter_model' else 'config'}.json").write_text(
        json.dumps(stored["config"] | changes)
    )
    save_file(hf_reference.weights(stored["shapes"]), folder / f"{kind}.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    return written(folder / "base", BASE, "model"), written(folder / "adapter", ADAPTER, "adapter_model")


PLAN = jdp.Plan(jdp.make_mesh(data=8), "zero3", min_shard_size=16)


@functools.cache
def state_of(folders, scan):
    """A sharded state of base and adapter, and its configuration."""
    base, adapter = folders
    config = replace(gpt_config_from_hf(base), **lora_from_peft(adapter), scan=scan)
    state = jdp.init_state(
        lambda rng: GPT(config, rngs=nnx.Rngs(rng)), optax.sgd(0.1), PLAN, rng=jax.random.key(0), wrt="*/lora_*"
    )
    state = import_safetensors(base, state, names=hf_names(config), missing="*/lora_*")
    return import_peft(adapter, state, config), config


@pytest.fixture(scope="module", params=[True, False], ids=["scanned", "unrolled"])
def tuned(request, folders):
    return state_of(folders, request.param)


def test_an_adapter_of_peft_gives_its_merged_logits(tuned):
    logits = jax.jit(lambda model: model(jnp.asarray(hf_reference.TOKENS)))(tuned[0].model)
    logits = logits[0, jnp.array(hf_reference.POSITIONS)]
    np.testing.assert_allclose(logits, ADAPTER["logits"], rtol=0, atol=ATOL)
    assert np.abs(np.subtract(ADAPTER["logits"], BASE["logits"])).max() > 1


def test_it_leaves_again_bit_for_bit_with_its_configuration(tuned, tmp_path):
    """Of arrays of NumPy, as `jax.device_get` returns them, as of arrays on devices."""
    state, config = tuned
    export_peft(tmp_path / "host", jax.device_get(state.unpadded().params), config, base="llama")
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (4, 6.0, ("query", "value", "down"))
    export_peft(tmp_path, state, config, base="llama")
    out = load_file(tmp_path / "adapter_model.safetensors")
    drawn = hf_reference.weights(ADAPTER["shapes"])
    assert out.keys() == drawn.keys()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "host" / name).read_bytes() == (tmp_path / name).read_bytes()
    for name, values in drawn.items():
        assert values.tobytes() == out[name].tobytes(), name
    keys = json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(keys.pop("target_modules")) == sorted(ADAPTER["config"]["target_modules"])
    assert keys.pop("base_model_name_or_path") == "llama"
    assert keys == {key: ADAPTER["config"][key] for key in keys}
    assert lora_from_peft(tmp_path) == {
        key: getattr(config, key) for key in ("lora_rank", "lora_alpha", "lora_targets")
    }


def test_merged_it_is_a_plain_model_of_hugging_face(tuned, tmp_path):
    state, config = tuned
    params, plain = merge_lora(state, config)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    assert plain.lora_rank is None and paths and not any("lora" in path for path in paths)
    shardings = {path: leaf.sharding for path, leaf in jax.tree.leaves_with_path(state.unpadded().params)}
    assert all(leaf.sharding == shardings[path] for path, leaf in jax.tree.leaves_with_path(params))
    export_hf(tmp_path, params, plain)
    fresh = lambda rng: GPT(plain, rngs=nnx.Rngs(rng))  # noqa: E731
    again = jdp.abstract_state(fresh, optax.sgd(0.1), PLAN, rng=jax.random.key(1))
    again = import_safetensors(tmp_path, again, names=hf_names(plain))
    logits = jax.jit(lambda model: model(jnp.asarray(hf_reference.TOKENS)))(again.model)
    np.testing.assert_allclose(logits[0, jnp.array(hf_reference.POSITIONS)], ADAPTER["logits"], rtol=0, atol=ATOL)
    with pytest.raises(ValueError, match=r"given lora_rank=None\. Export it as it is"):
        merge_lora(params, plain)
    with pytest.raises(ValueError, match=r"given parameters without any\. Give those"):
        merge_lora(params, config)
    with pytest.raises(ValueError, match=r"as nested dicts; given a GPT"):
        merge_lora(state.model, config)
    with pytest.raises(CheckpointError, match=r"abstract|no values"):
        merge_lora(jax.eval_shape(lambda: state), config)
    host, _ = merge_lora(jax.device_get(state.unpadded().params), config)
    for one, other in zip(*map(jax.tree.leaves, (host, params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    export_hf(tmp_path / "host", jax.device_get(params), plain)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "host" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_an_update_of_padded_leaves_asks_for_the_state(folders):
    base, adapter = folders
    config = replace(gpt_config_from_hf(base), **lora_from_peft(adapter))
    plan = jdp.Plan(jdp.make_mesh(data=3, devices=jax.devices()[:3]), "zero3", min_shard_size=16)
    state = jdp.init_state(lambda rng: GPT(config, rngs=nnx.Rngs(rng)), optax.sgd(0.1), plan, rng=jax.random.key(0))
    assert state.static.flat and merge_lora(state, config)
    with pytest.raises(CheckpointError, match=r"of padded leaves the state, not its params"):
        merge_lora(state.params, config)
    with pytest.raises(CheckpointError, match=r"An update of rank 5 fits its kernel; given .* with lora_a .* 4\] and"):
        merge_lora(state, replace(config, lora_rank=5))


def test_only_the_targets_have_updates_and_are_trained(folders):
    state, _ = state_of(folders, True)
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(state.model, nnx.LoRAParam))]
    maps = ("attention/query", "attention/value", "mlp/down")
    assert set(paths) == {f"layers/{name}/lora_{part}" for name in maps for part in "ab"}
    assert sum(state.static.trained) == 6

    def loss(model, batch, rng):
        total, weight = model.loss(batch["tokens"][:, :-1], batch["tokens"][:, 1:], jnp.ones((8, 15)))
        return jdp.Loss(total, weight)

    before = jax.device_get(state.params)
    step = jdp.make_train_step(loss, PLAN, donate=False)
    after, _ = step(state, {"tokens": np.random.default_rng(0).integers(0, 40, (8, 16))})
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(jax.device_get(after.params)), strict=True)
    moved = {jax.tree_util.keystr(path, simple=True, separator="/") for (path, old), new in pairs if (old != new).any()}
    assert moved == set(paths)


REFUSED = {
    "another kind": ({"peft_type": "IA3"}, 'peft_type must be "LORA" for a model that jdp builds; given "IA3"'),
    "rank-stabilised": ({"use_rslora": True}, "use_rslora = true makes another update than x @ lora_A @ lora_B"),
    "magnitudes": ({"use_dora": True}, "use_dora = true makes another update"),
    "biases": ({"bias": "all"}, 'bias must be "none" for .*given "all"'),
    "biases of updates": ({"lora_bias": True}, "lora_bias = true makes another update"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save = .* makes another update"),
    "ranks": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = .* makes another update"),
    "a changed base": ({"init_lora_weights": "pissa"}, 'init_lora_weights must be true or false or "gau.*"pissa"'),
    "unknown": ({"new_option": 3}, "adapter_config.json: new_option = 3 makes another update"),
    "no rank": ({"r": "4"}, 'r must be a whole number .*given "4"'),
    "another rank": ({"r": 8}, r"another adapter than the model has: lora_rank = 8 \(given 4\)\. Build the model"),
    "another scale": ({"lora_alpha": 8}, r"another adapter than the model has: lora_alpha = 8.0 \(given 6.0\)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_jdp_does_not_compute_is_one_clear_error(tmp_path, tuned, kind):
    changes, message = REFUSED[kind]
    folder = written(tmp_path / "adapter", ADAPTER, "adapter_model", **changes)
    with pytest.raises(jdp.CheckpointError, match=message) as error:
        import_peft(folder, *tuned)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


TENSORS = {
    "other modules": ({"base_model.model.lm_head.lora_A.weight": [4, 32]}, "which is no update of a linear map"),
    "another target": (
        {f"base_model.model.model.layers.{n}.self_attn.k_proj.lora_{part}.weight": shape
         for n in (0, 1) for part, shape in (("A", [4, 32]), ("B", [16, 4]))},
        r'lora_targets = \["query", "key", "value", "down"\] \(given \["query", "value", "down"\]\)',
    ),
    "a layer less": ({"base_model.model.model.layers.1.mlp.down_proj.lora_A.weight": None}, "has no base_model.*s.1"),
    "a shape": (
        {"base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": [4, 40]}, r"as \[4, 40\], and the model's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_do_not_fit_are_named(tmp_path, tuned, kind):
    changes, message = TENSORS[kind]
    shapes = {name: shape for name, shape in (ADAPTER["shapes"] | changes).items() if shape is not None}
    folder = written(tmp_path / "adapter", ADAPTER | {"shapes": shapes}, "adapter_model")
    with pytest.raises(jdp.CheckpointError, match=message):
        import_peft(folder, *tuned)


def test_what_is_no_adapter_or_of_no_such_model_is_said(tmp_path, folders, tuned):
    state, config = tuned
    with pytest.raises(jdp.CheckpointError, match=r"has no adapter_config.json of an adapter of PEFT's. Give the fol"):
        lora_from_peft(folders[0])
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(jdp.CheckpointError, match="is damaged: it is not JSON"):
        lora_from_peft(tmp_path)
    with pytest.raises(ValueError, match="An adapter is of a model with updates; given lora_rank=None"):
        export_peft(tmp_path, state, replace(config, lora_rank=None, lora_targets=None))
    gpt2 = GPTConfig(
        vocab_size=48, context=8, layers=2, width=16, heads=4, positions="learned", activation="gelu", norm="layer",
        bias=True, lora_rank=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="Llama has positions='rotary'; given 'learned'"):
        import_peft(folders[1], state, gpt2)
    with pytest.raises(jdp.CheckpointError, match=r"is its base and an adapter; given lora_rank=4\. Export the "):
        export_hf(tmp_path, state, config)
    for wrong in (("query", "embed"), (), ("gate",)):
        with pytest.raises(ValueError, match="lora_targets are kernels of a layer; given"):
            replace(gpt2, lora_targets=wrong)
    with pytest.raises(ValueError, match="lora_targets is for updates; given no rank"):
        replace(gpt2, lora_rank=None, lora_targets=("query",))


def test_dropout_of_updates_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notices, "_said", set())
    lora_from_peft(written(tmp_path / "adapter", ADAPTER, "adapter_model", lora_dropout=0.1))
    assert "was trained with lora_dropout; jdp has none: the function is the same" in capsys.readouterr().err


def experiment_for(folders, tmp_path, **model):
    np.savez(tmp_path / "tokens.npz", tokens=np.random.default_rng(0).integers(0, 40, 2000).astype(np.int32))
    table = {
        "name": "tuned",
        "devices": 8,
        "model": {"name": f"hf:{folders[0]}", "lora_rank": 4, "lora_alpha": 6.0, **model},
        "data": {"source": str(tmp_path / "tokens.npz"), "length": 16},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "train": {
            "steps": 1, "batch_size": 8, "wrt": "*/lora_*", "init_from": str(folders[0]), "init_names": "hf",
            "init_adapter": str(folders[1]),
        },
    }  # fmt: skip
    (tmp_path / "tuned.toml").write_text(to_toml(from_table(table)))
    return main(["train", str(tmp_path / "tuned.toml"), "--run-dir", str(tmp_path / "runs")])


def test_a_run_goes_on_from_an_adapter(folders, tmp_path, capsys):
    targets = ["query", "value", "down"]
    assert experiment_for(folders, tmp_path, lora_targets=targets) == 0
    assert f"parameters from {folders[0]}, updates from {folders[1]}\n" in capsys.readouterr().out, "and none is fresh"
    with pytest.raises(
        ExperimentError, match=r"train.init_adapter updates the weights of a GPT, train.init_from: give"
    ):
        from_table(
            {
                "name": "tuned", "model": {"name": "gpt-nano"}, "data": {"source": "stdlib"},
                "train": {"steps": 1, "batch_size": 8, "init_adapter": str(folders[1])},
            }
        )  # fmt: skip


def test_a_run_from_an_adapter_of_another_shape_is_refused_before_it_begins(folders, tmp_path, capsys):
    assert experiment_for(folders, tmp_path) == 2
    error = capsys.readouterr().err
    assert (
        "train.init_adapter: " in error and 'lora_targets = ["query", "value", "down"] (given ["query", "key"' in error
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft")),
    reason="the logits that PEFT gave are kept, and held against above",
)
def test_peft_loads_what_is_exported_and_computes_the_same(tmp_path, tuned):
    export_peft(tmp_path / "out", *tuned)
    program = [sys.executable, hf_reference.__file__, "--loads", str(tmp_path / "out")]
    result = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)[str(tmp_path / "out")]
    assert found["shapes"] == ADAPTER["shapes"]
    np.testing.assert_allclose(found["logits"], ADAPTER["logits"], rtol=0, atol=ATOL)
