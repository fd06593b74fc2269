"""The README tells the truth: its Python runs as it stands, its commands and files exist."""

import ast
import re
import tomllib
from pathlib import Path

from test_packages import MODULES, ORDER

import jdp
from jdp.cli.main import COMMANDS
from jdp.experiment.file import load

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys):
    """As printed, on eight devices; the loss it ends with is that of a model that has learned ten one-hot rows. What is
    said of optimizers, partial training and loops of one's own goes on from there."""
    example, further, own, sending = re.findall(r"```python\n(.*?)```", README, flags=re.S)
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


def test_commands_and_experiments_exist():
    for command in re.findall(r"^jdp (\w+)", README, flags=re.M):
        assert command in COMMANDS
    files = set(re.findall(r"experiments/\w+\.toml", README))
    assert files == {f"experiments/{file.name}" for file in (ROOT / "experiments").glob("*.toml")}
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
