"""Files that are damaged, or not ours: one clear error each, and nothing of anybody else's is replaced or removed."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_states import names

import jdp
from jdp.export import export_safetensors, import_safetensors

TREE = {"a": jnp.arange(100.0), "b": jnp.ones(100), "c": jnp.zeros(100)}
AIM = {"w": jnp.zeros(4)}


def file_of(dtype, size):
    text = json.dumps({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


DAMAGED = {
    "cut": (
        file_of("F32", 16)[:-1],
        r"m\.safetensors is damaged or not a safetensors file: .*Copy or download it again",
    ),
    "quantised": (file_of("F8_E4M3", 4), r"F64, .* can be read; .* has w as F8_E4M3"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_one_clear_error(tmp_path, kind):
    content, message = DAMAGED[kind]
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(jdp.CheckpointError, match=message) as error:
        import_safetensors(tmp_path / "m.safetensors", AIM)
    assert len(str(error.value)) < 600


UNWRITABLE = {
    "eight bits": (AIM, jnp.float8_e4m3fn, r"w is float8_e4m3fn\. Pass dtype=jnp\.float32"),
    "a key": ({"w": jax.random.key(0)}, None, r"w is key<fry>\. Cast it, or leave it out"),
    "a number": ({"w": 3}, None, r"Weights are arrays; w is 3\. Remove it, or make it an array"),
    "weights as integers": (AIM, int, "cast to a floating-point dtype; given dtype=<class 'int'>"),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_unwritable_tensors_are_refused(tmp_path, kind):
    tree, dtype, message = UNWRITABLE[kind]
    with pytest.raises(jdp.CheckpointError, match=message):
        export_safetensors(tmp_path / "m.safetensors", tree, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_every_dtype_and_shape_comes_back(tmp_path):
    kinds = ["float32", "float16", "bfloat16", "int32", "int16", "int8", "uint32", "uint16", "uint8", "bool"]
    tree = {kind: jnp.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    tree |= {"scalar": jnp.bfloat16(3), "none": jnp.zeros((0, 3)), "flat": jnp.zeros(0, jnp.int32)}
    export_safetensors(tmp_path / "m.safetensors", tree)
    host = {**jax.device_get(tree), "wide": np.arange(2.0), "long": np.arange(2)}
    export_safetensors(tmp_path / "host.safetensors", host)
    held = load_file(tmp_path / "host.safetensors")
    assert {name: leaf.tobytes() for name, leaf in held.items()} == {name: x.tobytes() for name, x in host.items()}
    assert held["wide"].dtype == np.float64 and held["long"].dtype == np.int64
    back = import_safetensors(tmp_path / "m.safetensors", tree)
    theirs = load_file(tmp_path / "m.safetensors")
    for name, leaf in tree.items():
        assert back[name].dtype == leaf.dtype == theirs[name].dtype and back[name].shape == leaf.shape
        assert np.asarray(back[name]).tobytes() == np.asarray(leaf).tobytes() == theirs[name].tobytes(), name


WHOLE = {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}
INDEXES = {
    "not JSON": (b"xxx", "is not JSON"),
    "no map": ({"metadata": {}}, 'no table "weight_map"'),
    "up": ({"weight_map": {"a": "../away.safetensors"}}, "must list files"),
    "missing files": ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors is listed in m.safetensors.index.j"),
    "another tensor": ({"weight_map": {**WHOLE, "z": WHOLE["a"]}}, "lists z in m-00001-.*, which does not hold it"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_damaged_index_is_one_clear_error(tmp_path, kind):
    text, message = INDEXES[kind]
    folder = tmp_path / "inner"
    (folder / "folder.safetensors").mkdir(parents=True)
    for name, file in WHOLE.items():
        save_file({name: np.ones(3, np.float32)}, folder / file)
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "away.safetensors")
    (folder / "m.safetensors.index.json").write_bytes(text if isinstance(text, bytes) else json.dumps(text).encode())
    with pytest.raises(jdp.CheckpointError, match=message) as error:
        import_safetensors(folder / "m.safetensors", {"a": jnp.zeros(3), "b": jnp.zeros(3)})
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("limit", [10**9, 800], ids=["one file", "shards"])
def test_anothers_shards_are_not_replaced(tmp_path, limit):
    for name, file in WHOLE.items():
        save_file({name: np.ones(3, np.float32)}, tmp_path / file)
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": WHOLE}))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(jdp.CheckpointError, match=r"replaces only files that it wrote; it did not write .*\. Export"):
        export_safetensors(tmp_path / "m.safetensors", TREE, max_shard_bytes=limit)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "m.safetensors.index.json").unlink()
    if limit == 800:
        with pytest.raises(jdp.CheckpointError, match=r"it did not write .*m-00001-of-00002\.safetensors"):
            export_safetensors(tmp_path / "m.safetensors", TREE, max_shard_bytes=limit)


def test_only_own_shards_give_way(tmp_path):
    path = tmp_path / "m.safetensors"
    export_safetensors(tmp_path / "m-lora.safetensors", TREE, max_shard_bytes=400)
    another = names(tmp_path)
    export_safetensors(path, TREE, max_shard_bytes=400)
    third = tmp_path / "m-00003-of-00003.safetensors"
    save_file({"other": np.ones(3, np.float32)}, third)  # somebody else's by now
    export_safetensors(path, TREE, max_shard_bytes=800)
    ours = [*(f"m-0000{n}-of-00002.safetensors" for n in (1, 2)), "m.safetensors.index.json"]
    assert names(tmp_path) == sorted([*ours, third.name, *another])
    assert load_file(third).keys() == {"other"}


def test_a_killed_export_leaves_no_mixture(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    export_safetensors(path, TREE, max_shard_bytes=400)
    twice = {name: 2 * leaf for name, leaf in TREE.items()}
    replace = type(path).replace

    def killed(self, target):
        if target.name == "m-00002-of-00003.safetensors":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(type(path), "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            export_safetensors(path, twice, max_shard_bytes=400)
    with pytest.raises(jdp.CheckpointError, match=r"m\.safetensors does not exist, .*Export or download it again\.$"):
        import_safetensors(path, TREE)
    export_safetensors(path, twice, max_shard_bytes=400)  # the shards are still known as ours
    assert float(import_safetensors(path, TREE)["a"][99]) == 198
