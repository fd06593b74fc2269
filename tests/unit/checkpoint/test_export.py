"""safetensors: what others write is read, and what is written others read; low-rank updates are added to their kernels.
Names: test_hugging_face.py.
"""

import functools
import json
import tracemalloc
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from damage import files_of_at_most
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import numpy, safe_open
from tiny_states import assert_same_bits, plan_of

import jdp
from jdp.checkpoint import CheckpointError
from jdp.checkpoint.safetensors.files import Stored
from jdp.export import (
    Names,
    Part,
    Tensor,
    export_hf,
    export_safetensors,
    gpt2_names,
    gpt_config_from_hf,
    hf_names,
    import_safetensors,
    llama_names,
    merge_lora,
)
from jdp.models import GPT, GPTConfig

TX = optax.sgd(0.1, momentum=0.9)
GPT2 = GPTConfig(
    vocab_size=48, context=8, layers=2, width=16, heads=4, mlp_width=24,
    positions="learned", activation="gelu", norm="layer", bias=True, tied=True,
)  # fmt: skip
LLAMA = GPTConfig(vocab_size=48, context=8, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24)


def target(config, plan):
    return jdp.abstract_state(lambda rng: GPT(config, rngs=nnx.Rngs(rng)), TX, plan, rng=jax.random.key(0))


@functools.cache
def made(config):
    """A state whose norms and biases are random too, so that each is seen in the logits."""
    state = jdp.init_state(lambda rng: GPT(config, rngs=nnx.Rngs(rng)), TX, plan_of(), rng=jax.random.key(1))
    leaves, tree = jax.tree.flatten(state.params)
    noise = [np.random.default_rng(i).normal(0, 0.2, x.shape).astype(x.dtype) for i, x in enumerate(leaves)]
    moved = [jax.device_put(np.asarray(x) + n, x.sharding) for x, n in zip(leaves, noise, strict=True)]
    return replace(state, params=jax.tree.unflatten(tree, moved))


def test_exported_weights_come_back_sharded(tmp_path):
    export_safetensors(tmp_path / "model.safetensors", made(LLAMA), names=llama_names(LLAMA), max_shard_bytes=5000)
    plan = plan_of("zero3", data=2, model=2)
    state = import_safetensors(tmp_path, target(LLAMA, plan), names=llama_names(LLAMA))
    assert_same_bits(state.params, made(LLAMA).params)
    for leaf, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(plan.shardings(state).params), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state.opt_state))


def test_an_unrolled_model_reads_a_scanned_one(tmp_path):
    export_safetensors(tmp_path / "m.safetensors", made(GPT2), names=gpt2_names(GPT2))
    unrolled = replace(GPT2, scan=False)
    plan = plan_of("ddp", data=1)
    state = import_safetensors(tmp_path / "m.safetensors", target(unrolled, plan), names=gpt2_names(unrolled))
    assert_same_bits(state.params["layers"]["1"], jax.tree.map(lambda leaf: leaf[1], made(GPT2).params["layers"]))
    export_safetensors(tmp_path / "again.safetensors", state, names=gpt2_names(unrolled))
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_paths_are_the_default_names(tmp_path):
    def init(rng):
        return nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(rng)), nnx.BatchNorm(16, rngs=nnx.Rngs(rng)))

    state = jdp.init_state(init, TX, plan_of("zero1"), rng=jax.random.key(0))
    state = replace(state, model_state=jax.tree.map(lambda x: x + 3, state.model_state))
    export_safetensors(tmp_path / "m.safetensors", state)
    names = {"layers.0.kernel", "layers.0.bias", "layers.1.scale", "layers.1.bias", "layers.1.mean", "layers.1.var"}
    assert numpy.load_file(tmp_path / "m.safetensors").keys() == names
    fresh = jdp.init_state(init, TX, plan_of("ddp", data=2), rng=jax.random.key(5))
    back = import_safetensors(tmp_path / "m.safetensors", fresh)
    assert_same_bits([back.params, back.model_state], [state.params, state.model_state])
    assert back.opt_state is fresh.opt_state and back.step is fresh.step


def test_lossy_casts_on_import_are_reported(tmp_path, fresh_notices, capsys):
    tree = {"w": jnp.float32([1 + 2**-7, 1 + 2**-9]), "count": jnp.int32(3)}
    export_safetensors(tmp_path / "half.safetensors", tree, dtype=jnp.bfloat16)
    wide = import_safetensors(tmp_path / "half.safetensors", tree)
    np.testing.assert_array_equal(wide["w"], np.float32([1 + 2**-7, 1.0]))
    assert wide["count"] == 3
    export_safetensors(tmp_path / "full.safetensors", tree)
    narrow = import_safetensors(tmp_path / "full.safetensors", {**tree, "w": tree["w"].astype(jnp.bfloat16)})
    assert narrow["w"].dtype == jnp.bfloat16
    assert "float32 are rounded to bfloat16 on import, first w" in capsys.readouterr().err
    words = "weights are cast; count is int32 in the file, float32 in the target"
    with pytest.raises(jdp.CheckpointError, match=words):
        import_safetensors(tmp_path / "full.safetensors", {**tree, "count": jnp.float32(0)})


def test_shards_follow_the_convention(tmp_path):
    tree = {name: jnp.full(100, float(i)) for i, name in enumerate("abc")}
    path = tmp_path / "model.safetensors"
    export_safetensors(path, tree, max_shard_bytes=800)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 1200, "jdp": jdp.__version__}
    assert index["weight_map"] == {"a": first, "b": first, "c": second}
    for file in (first, second):  # Hugging Face's loaders refuse a file without a format
        assert safe_open(tmp_path / file, framework="numpy").metadata()["format"] == "pt"
    for given in (path, tmp_path, tmp_path / "model.safetensors.index.json"):
        assert_same_bits(import_safetensors(given, tree), tree)
    export_safetensors(path, tree)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_host_holds_one_tensor_at_a_time(tmp_path):
    sharding = NamedSharding(jdp.make_mesh(data=8), PartitionSpec("data"))
    tree = {name: jax.device_put(jnp.ones((512, 512)), sharding) for name in "abcdef"}  # 1 MiB each
    export_safetensors(tmp_path / "warm.safetensors", {"w": jax.device_put(jnp.ones((512, 512)), sharding)})
    tracemalloc.start()
    try:
        export_safetensors(tmp_path / "m.safetensors", tree)
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * 2**20 and left < 2**18


def test_only_a_devices_own_shard_is_read(tmp_path, monkeypatch):
    """Of a stack of layers, each device takes from the file the elements that it keeps."""
    tree = {"w": jnp.arange(4 * 8 * 6, dtype=jnp.float32).reshape(4, 8, 6)}
    names = {f"layer.{n}": Tensor((Part("w", n),), transposed=True) for n in range(4)}
    export_safetensors(tmp_path / "m.safetensors", tree, names=names)
    sizes, read = [], Stored.read
    noted = lambda stored, cut: (sizes.append(read(stored, cut).size), read(stored, cut))[1]  # noqa: E731
    monkeypatch.setattr(Stored, "read", noted)
    sharding = NamedSharding(jdp.make_mesh(data=4, model=2), PartitionSpec("data", None, "model"))
    aim = {"w": jax.ShapeDtypeStruct((4, 8, 6), jnp.float32, sharding=sharding)}
    assert_same_bits(import_safetensors(tmp_path / "m.safetensors", aim, names=names), tree)
    assert sizes == [4 * 8 * 6 // 8] * 8  # a device holds one layer's half


@pytest.mark.parametrize(
    ("aim", "message"),
    [
        ({"w": (5,), "b": (2,)}, r"has w as \[4\], but the model's w needs \[5\]"),
        ({"w": (4,), "bias": (2,)}, r"has no bias, which holds bias; its closest name is b\."),
        ({"w": (4,)}, r"has b float32\[2\], which the model does not use"),
    ],
    ids=["shape", "missing", "unexpected"],
)
def test_a_file_of_another_model_is_refused(tmp_path, aim, message):
    export_safetensors(tmp_path / "m.safetensors", {"w": jnp.ones(4), "b": jnp.ones(2)})
    with pytest.raises(jdp.CheckpointError, match=message):
        import_safetensors(tmp_path / "m.safetensors", {name: jnp.zeros(shape) for name, shape in aim.items()})


def test_the_hubs_own_gpt2_file_is_read(tmp_path):
    """Its names have no prefix, and it holds the causal mask."""
    export_safetensors(tmp_path / "m.safetensors", made(GPT2), names=gpt2_names(GPT2, prefix=""))
    held = numpy.load_file(tmp_path / "m.safetensors")
    assert "h.0.attn.c_attn.weight" in held
    mask = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)}
    numpy.save_file(held | mask, tmp_path / "hub.safetensors")
    aim = target(GPT2, plan_of("zero2", data=4))
    read = import_safetensors(tmp_path / "hub.safetensors", aim, names=gpt2_names(GPT2, prefix=""))
    assert_same_bits(read.params, made(GPT2).params)
    with pytest.raises(jdp.CheckpointError, match=r"has no transformer.wte.weight.*closest name is wte.weight"):
        import_safetensors(tmp_path / "hub.safetensors", aim, names=gpt2_names(GPT2))


@pytest.mark.parametrize(
    ("names_of", "config", "message"),
    [
        (gpt2_names, LLAMA, "GPT-2 has positions='learned'; given 'rotary'"),
        (gpt2_names, replace(GPT2, kv_heads=1), "GPT-2 has kv_heads=4; given 1"),
        (llama_names, GPT2, "Llama has positions='rotary'; given 'learned'"),
    ],
)
def test_names_are_of_one_architecture(names_of, config, message):
    with pytest.raises(ValueError, match=message):
        names_of(config)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"a": "w", "b": "v"}, "b to v, but the model has no such parameter; it has w"),
        ({}, r"w \[2, 3\] has none"),
        ({"a": "w", "b": "w"}, r"w \[2, 3\] has 2"),
        (Names({"a": Tensor((Part("w", 1),))}), r"w \[2, 3\] has 1"),
    ],
    ids=["no such parameter", "no name", "two names", "a layer left out"],
)
def test_names_must_cover_the_parameters(tmp_path, names, message):
    with pytest.raises(jdp.CheckpointError, match=message):
        export_safetensors(tmp_path / "m.safetensors", {"w": jnp.ones((2, 3))}, names=names)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "m.safetensors"
    export_safetensors(path, {"w": jnp.ones(4)})
    with files_of_at_most(10_000), pytest.raises(jdp.CheckpointError, match=r"was not written: File too large.*Free"):
        export_safetensors(path, {"w": jnp.ones(10_000)})
    assert_same_bits(import_safetensors(path, {"w": jnp.zeros(4)}), {"w": jnp.ones(4)})
    assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]


CONFIG = GPTConfig(
    vocab_size=40, context=32, layers=2, width=32, heads=2, kv_heads=1, mlp_width=48,
    lora_rank=4, lora_alpha=6.0, lora_targets=("query", "value", "down"),
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 40, (1, 32))


@functools.cache
def tuned(scan):
    """A sharded state whose updates are not zero, and its configuration."""
    config = replace(CONFIG, scan=scan)
    fresh = lambda rng: GPT(config, rngs=nnx.Rngs(rng))  # noqa: E731
    state = jdp.init_state(fresh, TX, plan_of(), rng=jax.random.key(0), wrt="*/lora_*")
    move = lambda path, x: x + 0.1 if "lora_b" in jax.tree_util.keystr(path) else x  # noqa: E731
    return replace(state, params=jax.tree.map_with_path(move, state.params)), config


logits = jax.jit(lambda model: model(jnp.asarray(TOKENS)))


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.default_ids("scanned")
def test_a_merged_model_has_the_same_logits(scan, tmp_path):
    state, config = tuned(scan)
    params, plain = merge_lora(state, config)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    assert plain.lora_rank is None and paths and not any("lora" in path for path in paths)
    shardings = {path: leaf.sharding for path, leaf in jax.tree.leaves_with_path(state.params)}
    assert all(leaf.sharding == shardings[path] for path, leaf in jax.tree.leaves_with_path(params))
    export_hf(tmp_path, params, plain)
    assert gpt_config_from_hf(tmp_path).lora_rank is None
    again = import_safetensors(tmp_path, target(plain, plan_of()), names=hf_names(plain))
    np.testing.assert_allclose(logits(again.model), logits(state.model), rtol=0, atol=2e-5)
    host, _ = merge_lora(jax.device_get(state.params), config)
    for one, other in zip(*map(jax.tree.leaves, (host, params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_cannot_be_merged_is_one_clear_error(tmp_path):
    state, config = tuned(True)
    params, plain = merge_lora(state, config)
    with pytest.raises(ValueError, match=r"given lora_rank=None\. Export the model unmerged"):
        merge_lora(params, plain)
    with pytest.raises(ValueError, match=r"given parameters without updates\. Pass"):
        merge_lora(params, config)
    with pytest.raises(ValueError, match=r"as nested dicts; given a GPT"):
        merge_lora(state.model, config)
    with pytest.raises(CheckpointError, match=r"abstract|no values"):
        merge_lora(jax.eval_shape(lambda: state), config)
    with pytest.raises(CheckpointError, match=r"without LoRA updates; given lora_rank=4\. Add them to"):
        export_hf(tmp_path, state, config)
