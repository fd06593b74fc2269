"""The order of packages, as in .github/CONTRIBUTING.md: a package imports only those before it. Every import counts.

Those for types only count too, and those inside functions; no two files import each other, by whatever detour.
"""

import ast
from graphlib import TopologicalSorter

import pytest
from parsed_modules import MODULES, ORDER, PACKAGE, Module
from paths import TESTS

FACES = {"jdp", "jdp.__main__", "jdp.export"}
"""Modules beside the packages: they only pass names on, and nothing below `cli` reads names there."""
ALLOWED_FACES = {"jdp.cli.main": {"jdp"}}  # for its version and its folder


def broken(package, rule):
    """What breaks the rule, a function of a module, in each module of the package that breaks it."""
    found = {module.name: rule(module) for module in MODULES.values() if module.package == package}
    assert found
    return {name: wrong for name, wrong in found.items() if wrong}


def imports_of(tree):
    """Absolute names of the modules that are imported: at the top, inside a function, or for types only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in submodules if name in MODULES]
            yield from found
            if len(found) < len(submodules):
                yield node.module


def own_imports(module):
    names = {name for name in imports_of(module.tree) if name.partition(".")[0] == "jdp"}
    assert names <= MODULES.keys(), names - MODULES.keys()
    return names


def breaks_order(module):
    """The packages, and the modules beside them, that a module imports and that do not come before its own."""
    imported = own_imports(module) - ALLOWED_FACES.get(module.name, set())
    used = {name if name in FACES else MODULES[name].package for name in imported} - {module.package}
    return used - {*ORDER[: ORDER.index(module.package)]}


def test_packages_and_files_are_in_order():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(folders) == sorted(ORDER)
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert files == {name.rpartition(".")[2] for name in FACES} - {"jdp"} | {"__init__"}


@pytest.mark.parametrize("package", ORDER)
def test_the_tests_mirror_the_packages(package):
    assert list((TESTS / "unit" / package).glob("test_*.py"))


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_those_before_it(package):
    assert broken(package, breaks_order) == {}


def test_no_circle_among_files():
    """`__init__` files count only as importers: what one passes on is imported from its own file."""
    graph = {name: own_imports(module) - {name, "jdp"} for name, module in MODULES.items()}
    list(TopologicalSorter(graph).static_order())  # else a CycleError that names the files


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("jdp.core.plan", "import jdp.data.feed", {"data"}),
        ("jdp.core.step", "def f():\n    from jdp.foresight.verify import verify", {"foresight"}),
        ("jdp.core.step", "import jdp", {"jdp"}),
        ("jdp.cli.main", "import jdp", set()),
        ("jdp.run.loop", "from jdp.models import GPT\nfrom jdp.core.step import Step\nimport jax", set()),
    ],
)
def test_this_file_sees_what_breaks_the_order(name, text, expected):
    assert breaks_order(Module(name, ast.parse(text))) == expected


def test_models_know_little_of_jdp():
    core = ("layers", "lookup", "rematerialisation", "sharding.mesh")
    known = {"jdp.base.errors", *(f"jdp.core.{name}" for name in core)}
    others = lambda module: {name for name in own_imports(module) if MODULES[name].package != "models"} - known  # noqa: E731
    assert broken("models", others) == {}


def test_training_enters_no_foresight_prove_or_report():
    """`jdp train FILE` reads through nine packages; `launch` has the log of events, which its supervisors write too."""
    road = ("jdp.cli.main", "jdp.cli.train", "jdp.cli.options", "jdp.run.")
    files = [module for module in MODULES.values() if module.name.startswith(road)]
    read = [module for module in files if module.name != "jdp.run.read_folder"]  # reads what a run left
    packages = {MODULES[name].package for module in read for name in own_imports(module)}
    assert packages - {""} == {*ORDER} - {"foresight", "prove", "report"}


def test_in_core_only_one_package_knows_flax():
    flax = broken("core", lambda module: [n for n in imports_of(module.tree) if n.partition(".")[0] == "flax"])
    assert flax and all(name.startswith("jdp.core.flax_nnx") for name in flax)


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


def test_no_text_or_file_is_executed():
    text = "def f():\n    eval(x)\nimport pickle as p\nnp.load(p, allow_pickle=True)\nmodule.eval()\nre.compile(x)"
    assert {*executed(ast.parse(text))} == {"eval", "pickle", "allow_pickle"}  # and no methods of these names
    assert {name: found for name, module in MODULES.items() if (found := list(executed(module.tree)))} == {}


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by these names: of two that are equal, one is not run when both are asked for."""
    names = [path.name for path in TESTS.rglob("*.py")]
    assert sorted(names) == sorted(set(names))
