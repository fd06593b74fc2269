"""The README tells the truth: its Python runs as it stands, its commands and files exist."""

import ast
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from test_packages import MODULES, ORDER

import jdp
from jdp.cli.main import COMMANDS
from jdp.experiment.file import load
from jdp.models import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys):
    """As printed, on eight devices; the loss it ends with is that of a model that has learned ten one-hot rows. What is
    said of optimizers, partial training and loops of one's own goes on from there."""
    example, further, _, own, sending, _ = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    plan, loss, *placements = capsys.readouterr().out.splitlines()
    assert plan == "zero3 on data=8 cpu devices: gathered at each use"
    assert float(loss) < 0.1
    assert any("sharded on dimension" in line for line in placements)
    exec(compile(further, "README.md", "exec"), names)
    state, _ = names["train_step"](names["state"], next(names["jdp"].shard_batches(names["loader"](), names["plan"])))
    assert state.static.trained == (True, True, False, False)
    exec(compile(own, "README.md", "exec"), names)
    assert 0 < float(names["metrics"]["loss"]) < 4
    names["plan"] = jdp.Plan(jdp.make_mesh(replica=2, data=4), "zero2")
    exec(compile(sending, "README.md", "exec"), names)


def test_a_model_of_hugging_faces_comes_in_and_goes_out(tmp_path, monkeypatch):
    """As printed; what goes out is what came in."""
    monkeypatch.chdir(tmp_path)
    transfer = re.findall(r"```python\n(.*?)```", README, flags=re.S)[2]
    config = GPTConfig(vocab_size=16, context=8, layers=2, width=16, heads=2, qk_norm=True)
    plan = jdp.Plan(jdp.make_mesh(), "zero3")
    init = lambda rng: GPT(config, rngs=nnx.Rngs(rng))  # noqa: E731
    state = jdp.init_state(init, optax.sgd(0.1), plan, rng=jax.random.key(0))
    jdp.export.export_hf("in", state, config)
    exec(compile(transfer, "README.md", "exec"), {"jdp": jdp, "folder": "in", "state": state})
    for file in ("config.json", "model.safetensors"):
        assert Path("in", file).read_bytes() == Path("out", file).read_bytes()


def test_the_step_of_your_own_is_foreseen(capsys):
    """As printed, for the eight devices at hand."""
    *_, foreseen = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    mesh = jdp.make_mesh()
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for tree in (model, optimizer):
        nnx.update(tree, jax.device_put(nnx.state(tree), NamedSharding(mesh, PartitionSpec())))

    @nnx.jit
    def train_step(model, optimizer, x, y):
        grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, grads)

    x = jax.device_put(np.ones((16, 64), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    names = {"jdp": jdp, "train_step": train_step, "model": model, "optimizer": optimizer, "x": x, "y": x}
    exec(compile(foreseen.replace("h100:8x8", "cpu:8"), "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith("train_step on data=8 for cpu:8\nKept: a device sends ")


def test_commands_and_experiments_exist():
    for command in re.findall(r"^jdp (\w+)", README, flags=re.M):
        assert command in COMMANDS
    files = set(re.findall(r"experiments/\w+\.toml", README))
    assert files <= {f"experiments/{file.name}" for file in (ROOT / "experiments").glob("*.toml")}
    for file in files:
        load(ROOT / file)
    for linked in re.findall(r"\]\((\S+?)\)", README):
        assert linked.startswith("https://") or (ROOT / linked).exists(), linked


def test_the_two_commands_install_what_pyproject_offers():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[(\w+)\]", README)) <= extras.keys()


def test_its_layout_is_the_table_of_packages():
    table = re.findall(r"^\| `(\w+)/` \|", README, flags=re.M)
    assert table == list(ORDER)


def test_every_file_it_names_exists():
    for path in re.findall(r"`((?:tests|experiments|jdp)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
    assert "TABLE" not in README


def test_packages_are_described_as_they_describe_themselves():
    """The README's table and the first line of each package's docstring are the same sentence."""
    table = dict(re.findall(r"^\| `(\w+)/` \| (.+) \|$", README, flags=re.M))
    assert table == {name: ast.get_docstring(MODULES[f"jdp.{name}"].tree).partition("\n")[0] for name in ORDER}
