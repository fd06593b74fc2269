"""Imports go down only. Every module stands on a floor, and what it imports at run time is on the same one or below."""

import ast
import dataclasses
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jdp"

FLOORS = {
    0: ("amounts", "distributed", "machine", "mesh", "notices", "schedules", "toml", "types", "user_path", "wording"),
    1: ("agreement", "batch", "opt_placement", "placement", "plan", "state", "strategy"),
    2: ("averages", "flax_nnx", "gradients", "init", "keys", "layers", "optimizer_fit", "precision", "step", "wrt"),
    3: ("checkpoint", "data", "export", "foresight", "health", "metrics", "prove", "trackers"),
    4: (
        "assemble",
        "evaluation",
        "experiment",
        "init_from",
        "launch",
        "losses",
        "memory_fit",
        "mfu",
        "open_data",
        "optimizers",
        "plan_experiment",
        "profiling",
        "progress",
        "prove_experiment",
        "report",
        "resume",
        "run_folder",
        "run_lock",
        "schema",
        "signals",
        "summary",
        "sweep",
        "train",
    ),
    5: ("__main__", "cli", "commands"),
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names}
MODELS, LAYERS = "models", "layers"


@dataclasses.dataclass(frozen=True)
class Module:
    name: str  # "jdp.gradients.auto"; a package has the name of its folder
    tree: ast.Module

    @property
    def part(self) -> str:
        """What the table of floors lists: the first name below `jdp`."""
        return self.name.removeprefix("jdp").lstrip(".").partition(".")[0]


def read(path):
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    name = ".".join(names[:-1] if names[-1] == "__init__" else names)
    return Module(name, ast.parse(path.read_text(encoding="utf-8"), str(path)))


MODULES = {module.name: module for module in map(read, sorted(PACKAGE.rglob("*.py")))}
EVERY = pytest.mark.parametrize("module", MODULES.values(), ids=lambda module: module.name)


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def at_run_time(tree):
    """Every node that can run: all but the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if is_for_types(child):
            for other in child.orelse:
                yield other
                yield from at_run_time(other)
        else:
            yield child
            yield from at_run_time(child)


def imports_of(tree):
    """Absolute names of the modules that are imported, at the top or inside a function."""
    for node in at_run_time(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in submodules if name in MODULES]
            yield from found
            if len(found) < len(submodules):
                yield node.module


def own_parts(module):
    """The parts of jdp that a module imports, its own left out."""
    names = [name for name in imports_of(module.tree) if name.partition(".")[0] == "jdp"]
    assert all(name in MODULES for name in names), names
    return {MODULES[name].part for name in names} - {module.part}


def rule_breaks(module):
    """What a module imports and may not."""
    used = own_parts(module)
    if module.part == "":  # jdp itself only passes names on
        return used - FLOOR.keys()
    if module.part == MODELS:
        return used - {LAYERS}
    allowed = {part for part, floor in FLOOR.items() if floor <= FLOOR[module.part]}
    return used - allowed - ({MODELS} if FLOOR[module.part] >= 3 else set())


@EVERY
def test_every_module_stands_on_a_floor(module):
    assert module.part in FLOOR or module.part in ("", MODELS)


@EVERY
def test_imports_go_down_only(module):
    assert rule_breaks(module) == set()


def test_a_floor_may_be_as_high_as_five():
    assert {FLOOR[module.part] for module in MODULES.values() if module.part in FLOOR} == set(range(6))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("jdp.plan", "import jdp.step", {"step"}),
        ("jdp.plan", "from jdp import step, mesh", {"step"}),
        ("jdp.gradients.auto", "from jdp.data.feed import shard_batches", {"data"}),
        ("jdp.step", "def f():\n    from jdp.foresight.hlo import collectives", {"foresight"}),
        ("jdp.step", "from jdp.models import GPT", {"models"}),
        ("jdp.models.gpt", "from jdp.types import Loss\nfrom jdp.layers import scan_layers", {"types"}),
        ("jdp.checkpoint", "from jdp.train import run", {"train"}),
        ("jdp.plan", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jdp.step import Step", set()),
        ("jdp.plan", "if not TYPE_CHECKING:\n    from jdp.step import Step", {"step"}),
        ("jdp.train", "from jdp.models import GPT\nfrom jdp.step import Step\nimport jax", set()),
    ],
)
def test_this_file_sees_what_breaks_a_rule(name, text, expected):
    assert rule_breaks(Module(name, ast.parse(text))) == expected


@EVERY
def test_what_trains_knows_nothing_of_foresight_data_or_experiments(module):
    if module.part and FLOOR.get(module.part, 0) <= 2:
        assert not own_parts(module) & {"foresight", "data", "experiment", "schema", "train", "cli"}


@EVERY
def test_below_floor_three_only_one_file_knows_flax(module):
    if module.part and FLOOR.get(module.part, 0) <= 2 and module.part not in ("flax_nnx", MODELS):
        assert not [name for name in imports_of(module.tree) if name.partition(".")[0] == "flax"]


EXECUTES = {"eval", "exec", "compile", "__import__"}
READS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}


def executed(tree):
    """Names of builtins that run text as code, and of modules that unpickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in EXECUTES:
                yield node.func.id
            if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                yield "allow_pickle"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] in READS_CODE)


@EVERY
def test_no_text_or_file_is_executed(module):
    assert list(executed(module.tree)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eval(x)", ["eval"]),
        ("def f():\n    exec(open(p).read())", ["exec"]),
        ("import pickle as p", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("np.load(p, allow_pickle=True)", ["allow_pickle"]),
        ("module.eval()\nre.compile(x)\nlowered.compile()", []),
    ],
)
def test_this_file_sees_what_executes(text, expected):
    assert list(executed(ast.parse(text))) == expected
