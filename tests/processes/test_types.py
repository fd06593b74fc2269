"""What a type checker says of a program that uses jdp, as an editor does while it is written.

One program is checked twice by pyright, as it is by default: right, and with a mistake in each line of `MISTAKES`.
"""

import json
import sys
from pathlib import Path

import pytest
from own_process import python

PROGRAM = """\
from typing import assert_type

import jax
import optax
from flax import nnx

import jdp

jdp.initialize()
mesh = jdp.make_mesh(data=-1)
plan = jdp.Plan(mesh, "zero3")
pinned = jdp.Plan(mesh, "zero1", offload="optimizer")
key = jax.random.key(0)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first, self.layers = nnx.Linear(4, 4, rngs=rngs), nnx.List(nnx.Linear(4, 4, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jdp.scan_layers(lambda layer, x: layer(x), self.layers, self.first(x), remat="full")


def init(rng):
    return Model(nnx.Rngs(rng))


def loss_fn(model, batch, rng):
    total = ((model(batch["x"]) - batch["y"]) ** 2).sum()
    return jdp.Loss(total, weight=batch["x"].shape[0])


def of_arrays(model: Model, batch: dict[str, jax.Array], rng: jax.Array | None) -> jdp.Loss:
    return jdp.Loss(model(batch["x"]).sum(), weight=4)


def distance(student, teacher, batch, rng):
    return jdp.Loss(((student(batch["x"]) - teacher(batch["x"])) ** 2).sum(), weight=0.5)


state = jdp.init_state(init, optax.adamw(1e-3), plan, rng=key)
shapes = jdp.abstract_state(init, optax.sgd(0.1), plan, rng=key)
assert_type(state.model, Model)
train_step = jdp.make_train_step(loss_fn, plan, accumulate=4, precision="bf16", clip_norm=1)
quick_step = jdp.make_train_step(of_arrays, plan, wire="int8", buckets=2**20, compiler="overlap")
exact_step = jdp.make_train_step(of_arrays, plan, precision=jdp.Precision(reduce="bf16"), wire="bf16")
eval_step = jdp.make_eval_step(of_arrays, plan, partitioning="auto")
student = jdp.init(init, plan, rng=key)
teacher = jdp.init(init, plan, rng=key)
assert_type(student, Model)
gradient = jdp.value_and_grad(distance, plan, argnums=(0, 1), partitioning="manual")
resumed = jdp.restore("checkpoint", state)
for batch in jdp.shard_batches([], plan):
    state, metrics = train_step(state, batch)
    assert_type(state.model, Model)
    held = eval_step(state, batch)
    print(held["loss"], metrics["grad_norm"])
    metrics, grads = gradient(student, teacher, batch, key)
    grown: jax.Array = student.first(batch["x"]) * metrics["loss"]
"""

MISTAKES = (
    ('jdp.Plan(mesh, "zero3")', 'jdp.Plan(mesh, "zero4")'),
    ('offload="optimizer"', 'offload="optimiser"'),
    ('remat="full"', 'remat="fully"'),
    ("jdp.Loss(total, weight=batch", "jdp.Loss(total, weights=batch"),
    ('jdp.Loss(model(batch["x"]).sum(), weight=4)', 'jdp.Loss(model(batch["x"]).sum())'),
    ("init, optax.sgd(0.1), plan, rng=key)", "init, optax.sgd(0.1), plan)"),
    ("jdp.make_train_step(loss_fn, plan, accumulate=4", 'jdp.make_train_step(loss_fn, plan, accumulate="4"'),
    ('jdp.make_train_step(of_arrays, plan, wire="int8"', 'jdp.make_train_step(of_arrays, plan, wire="int9"'),
    ("exact_step = jdp.make_train_step", "exact_step = jdp.make_train_stp"),
    ('partitioning="auto"', 'partitioning="automatic"'),
    ("teacher = jdp.init(init, plan, rng=key)", "teacher = jdp.init(init, plan, rgn=key)"),
    ('partitioning="manual"', 'precision="bf17"'),
    ("held = eval_step(state, batch)\n    print(held", "_, held = eval_step(state, batch)\n    print(held"),
    ("gradient(student, teacher, batch, key)", "gradient(student, teacher, batch)"),
)
"""(what is right, what is wrong), found in the line in which it ends."""


def numbered(text: str, part: str) -> int:
    """The number of the line in which this part ends, which is there once."""
    before, _ = text.split(part)
    return (before + part).count("\n") + 1


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """File -> line -> what pyright says there."""
    folder = tmp_path_factory.mktemp("user")
    wrong = PROGRAM
    for right, mistake in MISTAKES:
        wrong = wrong.replace(right, mistake)
    (folder / "right.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "wrong.py").write_text(wrong, encoding="utf-8")
    command = ["-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "right.py", "wrong.py"]
    result = python(*command, cwd=folder)  # jdp is found as an installed package is
    assert result.returncode == 1, result.stdout + result.stderr
    lines: dict[str, dict[int, str]] = {"right.py": {}, "wrong.py": {}}
    for one in json.loads(result.stdout)["generalDiagnostics"]:
        assert one["severity"] == "error", one
        lines[Path(one["file"]).name][one["range"]["start"]["line"] + 1] = one["message"]
    return lines


@pytest.mark.rest
def test_nothing_is_wrong_with_a_right_program(found):
    assert found["right.py"] == {}


def test_each_mistake_is_found_and_nothing_else(found):
    assert sorted(found["wrong.py"]) == sorted(numbered(PROGRAM, right) for right, _ in MISTAKES)
