"""States that cannot be written, and files that hold more than the model."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import jdp
from jdp.export import export_safetensors, import_safetensors

TX, KEY = optax.sgd(0.1), jax.random.key(0)


def plan():
    return jdp.Plan(jdp.make_mesh(data=4, model=2), "zero3")


def params(rng):
    return {"w": jnp.ones((8, 4)), "lora_a": jnp.ones(2)}


def state(init=params):
    return jdp.abstract_state(init, TX, plan(), rng=KEY)


def saved_among_many(path, state):
    with jdp.Checkpoints(path) as checkpoints:
        checkpoints.save(state)


@pytest.mark.parametrize(
    ("write", "leaf"),
    [(jdp.save, "params/lora_a"), (saved_among_many, "params/lora_a"), (export_safetensors, "lora_a")],
)
def test_an_abstract_state_cannot_be_written(tmp_path, write, leaf):
    with pytest.raises(jdp.CheckpointError, match=rf"{leaf} is abstract, float32\[2\] .*jdp\.init_state, a train step"):
        write(tmp_path / "m.safetensors", state())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What reads a state with LoRA from a checkpoint and from a safetensors file."""
    folder = tmp_path_factory.mktemp("written")
    made = jdp.init_state(lambda rng: {"a": params(rng)}, TX, plan(), rng=KEY)
    jdp.save(folder / "one", made)
    export_safetensors(folder / "m.safetensors", made)
    return {
        "checkpoint": functools.partial(jdp.restore_params, folder / "one"),
        "safetensors": functools.partial(import_safetensors, folder / "m.safetensors"),
    }


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_arrays_beyond_the_model_can_stay_unread(written, kind, caplog):
    """Also a head of another size, if `ignore` and `missing` both name it."""
    read, plain = written[kind], state(lambda rng: {"a": {"w": jnp.zeros((8, 4))}}).params
    with caplog.at_level("INFO", "jdp"):
        got = read(plain, ignore=("*/lora_*",))
    assert jax.tree.map(jnp.shape, got) == {"a": {"w": (8, 4)}} and float(got["a"]["w"].min()) == 1
    assert "`ignore` skips 1 of 2 arrays; the first is" in caplog.text
    with pytest.raises(jdp.CheckpointError, match=r"skip the .*ignore=\('a[./]lora_a',\)"):
        read(plain)
    with pytest.raises(jdp.CheckpointError, match=r"'\*/lora' matches none in .*, which has .*a/w"):
        read(plain, ignore=("*/lora_*", "*/lora"))
    other = jdp.init_state(lambda rng: {"a": {**params(rng), "lora_a": jnp.full(3, 5.0)}}, TX, plan(), rng=KEY).params
    with pytest.raises(jdp.CheckpointError, match=r"the model has a/lora_a.*to `missing`"):
        read(other, ignore=("a/lora_*",))
    got = read(other, ignore=("a/lora_*",), missing=("a/lora_*",))
    assert got["a"]["lora_a"].tolist() == [5, 5, 5] and float(got["a"]["w"].min()) == 1
