"""The packages of jdp in their order, and the modules, parsed."""

import ast
import dataclasses

from paths import ROOT

PACKAGE = ROOT / "jdp"

ORDER = ["base", "core", "models", "data", "launch", "foresight", "checkpoint", "guard", "report"]
ORDER += ["prove", "experiment", "run", "cli"]


@dataclasses.dataclass(frozen=True)
class Module:
    name: str  # "jdp.core.gradients.auto"; a package has the name of its folder
    tree: ast.Module

    @property
    def package(self) -> str:
        """The first name below `jdp`."""
        return self.name.removeprefix("jdp").lstrip(".").partition(".")[0]


def read(path):
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    name = ".".join(names[:-1] if names[-1] == "__init__" else names)
    return Module(name, ast.parse(path.read_text(encoding="utf-8"), str(path)))


MODULES = {module.name: module for module in map(read, sorted(PACKAGE.rglob("*.py")))}
