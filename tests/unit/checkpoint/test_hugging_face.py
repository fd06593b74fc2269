"""Weights of Hugging Face's compute here what they compute there, or are refused with the keys to set."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import hf_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file, save_file

import jdp
from jdp.checkpoint.safetensors.config import compared
from jdp.cli.main import main
from jdp.experiment.file import from_table, load, to_toml
from jdp.export import export_hf, gpt_config_from_hf, hf_names, import_safetensors
from jdp.models import GPT
from jdp.run.weights import check_initial

STORED = json.loads(hf_reference.FILE.read_text(encoding="utf-8"))
LLAMA, LLAMA31, GPT2, QWEN3 = (STORED[case]["config"] for case in ("llama", "llama 3.1", "gpt2", "qwen3"))


ATOL = 5e-5
"""float32 on both sides: sums of tens of terms around 1, through two layers. 3e-6 was measured."""


def config_in(folder, table):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(table if isinstance(table, str) else json.dumps(table))
    return folder


def abstract(config):
    """Parameters without values, on one device."""
    params = nnx.to_pure_dict(nnx.state(jax.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), params)


@jax.jit
def logits_of(model):
    return model(jnp.asarray(hf_reference.TOKENS))[0, jnp.array(hf_reference.POSITIONS)]


def imported(folder, case):
    """A case's weights, written as transformers writes them, and read; the model's configuration and parameters."""
    config_in(folder, STORED[case]["config"])
    save_file(hf_reference.weights(STORED[case]["shapes"]), folder / "model.safetensors")
    config = gpt_config_from_hf(folder)
    return config, import_safetensors(folder, abstract(config), names=hf_names(config))


def model_of(config, params):
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, params)
    return model


@pytest.mark.parametrize("case", STORED)
@pytest.mark.default_ids("llama", "llama 3.1", "gpt2", "mistral", "qwen2", "qwen3")
def test_the_logits_are_those_of_transformers(tmp_path, case):
    config, params = imported(tmp_path, case)
    np.testing.assert_allclose(logits_of(model_of(config, params)), STORED[case]["logits"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("case", STORED)
@pytest.mark.default_ids("llama", "llama 3.1", "gpt2", "mistral", "qwen2", "qwen3")
def test_an_exported_model_is_what_was_imported(tmp_path, case):
    """The same tensors bit for bit; each key of config.json that transformers writes too has its value, and beside the
    original all of its keys have."""
    (tmp_path / "in").mkdir()
    config, params = imported(tmp_path / "in", case)
    export_hf(tmp_path / "out", params, config)
    drawn, out = hf_reference.weights(STORED[case]["shapes"]), load_file(tmp_path / "out" / "model.safetensors")
    assert drawn.keys() == out.keys()
    for name, values in drawn.items():
        assert values.tobytes() == out[name].tobytes(), name
    assert gpt_config_from_hf(tmp_path / "out") == config
    theirs, ours = STORED[case]["config"], json.loads((tmp_path / "out" / "config.json").read_text())
    # said in layer_types; null for what follows from the width; not those that transformers has where none is named
    aside = {"max_window_layers", "n_inner", "bos_token_id", "eos_token_id"}
    differing = {key for key in theirs.keys() & ours.keys() if theirs[key] != ours[key]} - aside
    assert ours["bos_token_id"] is ours["eos_token_id"] is None
    assert differing == ({"model_type"} if case == "mistral plain" else set()), "without a window it is a Llama"
    export_hf(tmp_path / "out", params, config)  # its own config.json stays
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == ours
    export_hf(tmp_path / "kept", params, config, original=tmp_path / "in")
    kept = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert kept == theirs | {"architectures": kept["architectures"], "torch_dtype": "float32"}


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_an_export_keeps_what_jdp_does_not_know(tmp_path, dtype):
    """The ends of a text, the context of rotary positions, the dtype unless one is given, also of a model that grew."""
    known = {"max_position_embeddings": 131_072, "eos_token_id": [2, 9], "dtype": "bfloat16"}
    folder = config_in(tmp_path / "in", STORED["mistral plain"]["config"] | known)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9], "top_p": 0.9}')
    config = replace(gpt_config_from_hf(folder), context=32)
    for tokens in (40, 48):
        grown, out = replace(config, vocab_size=tokens), tmp_path / f"{tokens}"
        params = jax.tree.map(lambda leaf: np.full(leaf.shape, 1 / 3, np.float32), abstract(grown))
        export_hf(out, params, grown, original=folder / "config.json", dtype=dtype)
        keys = json.loads((out / "config.json").read_text())
        name = "bfloat16" if dtype is None else "float32"
        assert keys.items() >= {"model_type": "mistral", "torch_dtype": name, "vocab_size": tokens}.items()
        assert (keys["max_position_embeddings"], keys["eos_token_id"], "dtype" in keys) == (131_072, [2, 9], False)
        assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [2, 9], "top_p": 0.9}
        assert {str(values.dtype) for values in load_file(out / "model.safetensors").values()} == {name}
    with pytest.raises(jdp.CheckpointError, match=r"has no config.json"):
        export_hf(tmp_path / "none", params, grown, original=tmp_path)


def transformers_says(*arguments):
    program = [sys.executable, hf_reference.__file__, *map(str, arguments)]
    result = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
    reason="the numbers that transformers gave are kept, and held against above; these hold them against itself",
)
def test_transformers_has_the_kept_numbers_and_loads_exports(tmp_path):
    transformers_says("--check")
    for case in STORED:
        (tmp_path / case).mkdir()
        config, params = imported(tmp_path / case, case)
        export_hf(tmp_path / case / "out", params, config)
    found = json.loads(transformers_says("--loads", *(tmp_path / case / "out" for case in STORED)))
    for case, stored in STORED.items():
        said = found[str(tmp_path / case / "out")]
        assert not said["missing_keys"] + said["unexpected_keys"] + said["mismatched_keys"], case
        np.testing.assert_allclose(said["logits"], stored["logits"], rtol=0, atol=ATOL, err_msg=case)


def test_what_a_file_leaves_out_has_transformers_defaults(tmp_path):
    gpt2 = gpt_config_from_hf(config_in(tmp_path, {"model_type": "gpt2"}))  # openai-community/gpt2
    assert (gpt2.vocab_size, gpt2.context, gpt2.layers, gpt2.width, gpt2.heads) == (50257, 1024, 12, 768, 12)
    assert (gpt2.activation, gpt2.norm_eps, gpt2.tied, gpt2.hidden_width) == ("gelu", 1e-5, True, 3072)
    llama = gpt_config_from_hf(config_in(tmp_path, {"model_type": "llama"}))
    assert (llama.norm_eps, llama.rope_theta, llama.rope_factor, llama.tied) == (1e-6, 10_000.0, None, False)
    assert (llama.width, llama.key_value_heads, llama.mlp_width, llama.vocab_size) == (4096, 32, 11008, 32000)


UNKNOWN = {
"a model": (LLAMA | {"model_type": "bert"}, 'model_type must be gpt2 or llama or .* for a model .*given "b'),
"windows": (QWEN3 | {"use_sliding_window": True}, "use_sliding_window must be false or null .*given true"),
"an option": (QWEN3 | {"attention_sinks": 4}, "attention_sinks = 4 is not a known option of Qwen3. If the m"),
"yarn": (LLAMA | {"rope_scaling": {"rope_type": "yarn"}}, 'rope_type must be default or llama3 .*given "yarn"'),
"quantised": (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config must be null"),
"text": (LLAMA | {"hidden_size": "32"}, 'hidden_size must be a whole number .*given "32"'),
"heads": (LLAMA | {"num_attention_heads": 5, "head_dim": None}, "heads must divide width"),
"not JSON": ("{", "is damaged: it is not JSON"),
"another's": ({"learning_rate": 1}, "has no config.json of .*, because it has no model_type"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_configuration_is_one_error(tmp_path, kind):
    table, message = UNKNOWN[kind]
    with pytest.raises(jdp.CheckpointError, match=message) as error:
        gpt_config_from_hf(config_in(tmp_path, table))
    assert str(tmp_path) in str(error.value) and len(str(error.value)) < 600


OTHERS = {
"rope": (LLAMA31, {"rope_factor": None}, r"rope_factor = 8.0 \(given none\), rope_original_context = 32 \(g"),
"gelu": (GPT2, {"activation": "gelu_exact"}, r'activation = "gelu" \(given "gelu_exact"\)'),
"heads": (LLAMA, {"heads": 4, "kv_heads": 2}, r"heads = 2 \(given 4\), head_dim = 16 \(given 8\), kv_heads = 1"),
"vocabulary": (GPT2, {"vocab_size": 32}, r"vocab_size = 40 \(given 32\)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_weights_of_another_configuration_are_refused(tmp_path, kind):
    table, changed, message = OTHERS[kind]
    config = replace(gpt_config_from_hf(config_in(tmp_path, table)), **changed)
    state = {"w": jnp.zeros(1)}  # the configuration is looked at before any tensor is
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(jdp.CheckpointError, match=message) as error:
            import_safetensors(path, state, names=hf_names(config))
        assert f"jdp.export.gpt_config_from_hf({str(tmp_path)!r})" in str(error.value)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_tokens_that_a_file_lacks_are_padded(tmp_path, case, capsys, fresh_notices):
    """By the mean of its rows, on any sharding, and reported; the other tokens' logits stay."""
    config, params = imported(tmp_path, case)
    grown = replace(config, vocab_size=48)
    mesh = jax.sharding.Mesh(jax.devices(), "data")

    def sharded(leaf):
        sharding = NamedSharding(mesh, PartitionSpec("data" if leaf.shape[0] == 48 else None))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    target = jax.tree.map(sharded, abstract(grown))
    read = jax.device_get(import_safetensors(tmp_path, target, names=hf_names(grown)))
    table = read["embed"]["tokens"]
    assert_array_equal(table[:40], params["embed"]["tokens"])
    np.testing.assert_allclose(table[40:], np.tile(np.mean(table[:40], 0), (8, 1)), rtol=0, atol=1e-6)  # rounding
    logits = logits_of(model_of(grown, jax.tree.map(jnp.asarray, read)))
    np.testing.assert_allclose(logits[:, :40], STORED[case]["logits"], rtol=0, atol=ATOL)
    said = capsys.readouterr().err
    assert "has 40 tokens in" in said and ", 48 in the model: 8 rows are added" in said
    assert ("lm_head.weight" in said) == (case == "llama")
    experiment = from_table(table_for(tmp_path, vocab_size=48))
    check_initial(experiment.train.init_from, experiment.model.config)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    table = config_in(tmp_path, LLAMA | {"tie_word_embeddings": True})
    drawn = hf_reference.weights(STORED["llama"]["shapes"])
    save_file(drawn, tmp_path / "model.safetensors")
    config = gpt_config_from_hf(table)
    with pytest.raises(jdp.CheckpointError, match=r'lm_head.weight repeats .* Set "tie_word_embeddings" to false'):
        import_safetensors(tmp_path, abstract(config), names=hf_names(config))
    import_safetensors(tmp_path, abstract(config), names=hf_names(config), ignore=("lm_head.weight",))
    save_file(drawn | {"lm_head.weight": drawn["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    import_safetensors(tmp_path, abstract(config), names=hf_names(config))


def table_for(folder, **model):
    return {
        "name": "tuned",
        "model": {"name": f"hf:{folder}", **model},
        "data": {"source": "stdlib"},
        "train": {"steps": 1, "batch_size": 8, "init_from": str(folder)},
    }


def test_a_model_by_its_folder_reads_back(tmp_path):
    folder = config_in(tmp_path / "llama", LLAMA31)
    made = from_table(table_for(folder, lora_rank=2))
    assert made.model.config == replace(gpt_config_from_hf(folder), lora_rank=2) and made.kind == "text"
    (tmp_path / "again.toml").write_text(to_toml(made))
    assert load(tmp_path / "again.toml") == made
    (tmp_path / "relative.toml").write_text(to_toml(made).replace(f"hf:{folder}", "hf:llama"))
    assert load(tmp_path / "relative.toml") == made, "relative to the file"


def test_a_run_says_the_keys_to_set(tmp_path, capsys):
    folder = config_in(tmp_path / "llama", LLAMA31)
    save_file({"model.norm.weight": np.zeros(32, np.float32)}, folder / "model.safetensors")
    np.savez(tmp_path / "tokens.npz", tokens=np.random.default_rng(0).integers(0, 40, 2000).astype(np.int32))
    table = table_for(folder, rope_theta=10_000.0, norm_eps=1e-6)
    table["data"] = {"source": str(tmp_path / "tokens.npz"), "length": 16}
    (tmp_path / "tuned.toml").write_text(to_toml(from_table(table)))
    assert main(["train", str(tmp_path / "tuned.toml"), "--run-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "set model.rope_theta = 500.0 (given 10000.0), model.norm_eps = 1e-05 (given 1e-06)" in error
    assert f'model.name = "hf:{folder}"' in error and not (tmp_path / "runs").exists()
    experiment = from_table(table_for(folder, position_std=0.02))  # only where untrained positions start
    check_initial(experiment.train.init_from, experiment.model.config)
    updated = replace(experiment.model.config, lora_rank=2)
    assert compared(updated, replace(updated, lora_alpha=4.0)) == ["lora_alpha = 16.0 (given 4.0)"]
