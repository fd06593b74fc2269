"""Checkpoints of trees of a user's own loop: modules, optimizers, arrays and numbers, onto any plan."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny_states import assert_same_bits, at

import jdp


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.tied = self.first


def tree_of(plan, seed):
    model = jdp.init(lambda rng: Net(nnx.Rngs(rng)), plan, rng=jax.random.key(seed))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "epoch": seed, "order": np.arange(3), "rng": jax.random.key(seed)}


@nnx.jit
def update(model, optimizer):
    optimizer.update(model, nnx.state(model, nnx.Param))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with one checkpoint of a tree, and the tree, on four devices under zero3."""
    folder = tmp_path_factory.mktemp("trees")
    plan = jdp.Plan(jdp.make_mesh(data=4, devices=jax.devices()[:4]), "zero3", min_shard_size=0)
    tree = tree_of(plan, 3)
    update(tree["model"], tree["optimizer"])
    with jdp.Checkpoints(folder / "steps") as checkpoints:
        checkpoints.save(tree, {"note": "text"}, step=5)
    jdp.save(folder / "one", tree)
    return folder, tree


def test_a_tree_is_restored_onto_another_plan(saved):
    folder, tree = saved
    target = tree_of(jdp.Plan(jdp.make_mesh(data=8), "zero1", min_shard_size=0), 0)
    with jdp.Checkpoints(folder / "steps") as checkpoints:
        read, record = checkpoints.restore(target, 5)
    assert record == {"note": "text"}
    kernel = read["model"].first.kernel.get_value()
    assert kernel.sharding.mesh.shape == {"data": 8} and kernel.sharding.spec == PartitionSpec("data")
    assert read["model"].tied is read["model"].first
    assert (read["epoch"], read["order"].tolist()) == (3, [0, 1, 2]) and isinstance(read["order"], np.ndarray)
    for name in ("model", "optimizer"):
        assert_same_bits(*(nnx.to_pure_dict(nnx.state(one[name])) for one in (read, tree)))
    assert_same_bits(read["rng"], tree["rng"])
    update(read["model"], read["optimizer"])  # what was free to move still is


def test_numbers_keep_all_their_bits(tmp_path):
    """Also counters of tokens and float64 of NumPy and Python, which JAX would narrow to 32 bits."""
    tree = {"tokens": 5_000_000_000, "share": 1 / 3, "on": True}
    arrays = {"many": np.array([2**40, 1]), "wide": np.array([1e300]), "host": np.float64(1 / 3)}
    sharding = NamedSharding(jdp.make_mesh(data=8), PartitionSpec("data"))
    kinds = "bool int4 int8 uint32 int32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64"
    for dtype in kinds.split():
        values = np.random.default_rng(0).integers(-8, 8, (8, 3)).astype(jax.numpy.dtype(dtype))
        arrays |= {dtype: jax.device_put(values, sharding), f"one {dtype}": jax.numpy.asarray(values[0, 0])}
    free = {"full": jax.numpy.ones(3), "empty": jax.numpy.zeros((0, 4))}
    arrays |= free
    jdp.save(tmp_path / "one", tree | arrays)
    read = jdp.restore(tmp_path / "one", {"tokens": 0, "share": 0.0, "on": False, **arrays})
    numbers = {name: read.pop(name) for name in tree}
    assert numbers == tree and isinstance(numbers["tokens"], int) and isinstance(numbers["on"], bool)
    assert_same_bits(read, arrays)
    assert not any(read[name].committed or array.committed for name, array in free.items()), "still free to move"


def test_bad_trees_are_refused(saved, tmp_path):
    folder, tree = saved
    with jdp.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"under a step number.*given step=None.*save\(tree, step=1000\)"):
            checkpoints.save(tree)
        with pytest.raises(jdp.CheckpointError, match=r"arrays and numbers; tree/name is 'x'.*record"):
            checkpoints.save({"name": "x"}, step=1)
        with pytest.raises(ValueError, match="A train state is saved under the number"):
            checkpoints.save(at(1), step=9)
        with pytest.raises(ValueError, match=r"given a tuple \(TrainState, dict\).*`state, metrics = step\("):
            checkpoints.save((at(1), {"loss": 1.0}), step=1)
        assert checkpoints.steps == []
    with pytest.raises(jdp.CheckpointError, match=r"has tree/epoch as .*nothing is wanted"):
        jdp.restore(folder / "one", {"model": tree["model"]})
    for given in ({0: np.ones(3), "0": np.ones(3)}, {"a": [{None: 1.0, "b": 2.0}]}):
        with pytest.raises(ValueError, match=r"keys of a dict in a tree must have an order.*given \[.*as text"):
            jdp.save(tmp_path / "keys", given)


def test_states_and_trees_are_told_apart(saved, tmp_path):
    folder, state = saved[0], at(1)
    jdp.save(tmp_path / "state", state)
    whole = r"holds another tree\. Read it whole: jdp\.restore\(path, target\)"
    for read in (jdp.restore, jdp.restore_params):
        with pytest.raises(jdp.CheckpointError, match=whole):
            read(folder / "one", state)
    with pytest.raises(jdp.CheckpointError, match=whole):
        jdp.restore_params(folder / "one", state.params)
    with pytest.raises(jdp.CheckpointError, match=r"holds a train state, .* another tree.*jdp\.restore_params"):
        jdp.restore(tmp_path / "state", state.params)
