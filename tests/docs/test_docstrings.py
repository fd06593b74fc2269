"""What a program can hold of the docstrings: arguments and errors are named where they are taken and raised."""

import ast
import importlib
import inspect
import itertools
import re

import pytest
from parsed_modules import MODULES

FACES = ["export", "data", "models", "launch", "checkpoint", "prove", "experiment", "foresight.targets"]
FACES = ("jdp", *(f"jdp.{name}" for name in FACES))
"""Modules that pass public names on."""


def public_values(*faces):
    """The functions and classes of jdp that these modules pass on, each with its name there."""
    for face in faces:
        for name in getattr(face, "__all__", vars(face)):
            value = getattr(face, name)
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("jdp"):
                yield f"{face.__name__}.{name}", value


def with_methods(value):
    """The value, and the public methods of a class."""
    methods = vars(value).items() if inspect.isclass(value) else ()
    return [value, *(method for name, method in methods if inspect.isfunction(method) and name[0] != "_")]


PUBLIC = {
    f"{value.__module__}.{one.__qualname__}": one
    for _, value in public_values(*map(importlib.import_module, FACES))
    for one in with_methods(value)
}
"""Qualified name -> the public function, class or method."""


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def sections(docstring):
    """The headings of a docstring in Google's style."""
    return set(re.findall(r"^\s*(Args|Attributes|Fields|Returns|Yields|Raises):", docstring, flags=re.M))


def entries(docstring):
    """The names that `Args:` has an entry for: `name: …` or `one, two: …`, four spaces in."""
    _, _, after = docstring.partition("Args:\n")
    lines = itertools.takewhile(lambda line: not line or line.startswith("    "), after.splitlines())
    found = [re.match(r"    (\w+(?:, \w+)*): ", line) for line in lines]
    return {name for match in found if match for name in match[1].split(", ")}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_it_takes(name):
    value, text = PUBLIC[name], inspect.getdoc(PUBLIC[name]) or ""
    assert text, "no docstring"
    if inspect.isfunction(value) and parameters(value):
        assert "Args" in sections(text)
        assert [one for one in parameters(value) if one not in entries(text)] == []
    elif inspect.isclass(value) and "__init__" in vars(value) and not getattr(value, "_is_protocol", False):
        init = value.__init__  # of a dataclass too
        assert not parameters(init) or sections(f"{text}\n{inspect.getdoc(init)}") & {"Args", "Attributes", "Fields"}


def functions(tree, prefix=""):
    """Qualified names and nodes of functions and methods, without private ones and those inside another function."""
    for node in tree.body:
        if node.__dict__.get("name", "").startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def raised(function):
    """Names of the exceptions that a function's own body raises: `raise X(...)`, helpers inside it left out."""
    inner = {
        node
        for child in ast.walk(function)
        if isinstance(child, ast.FunctionDef | ast.Lambda) and child is not function
        for node in ast.walk(child)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and node not in inner and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if name[0].isupper():  # else a function that makes the error
                yield "ValueError" if name == "UserError" else name


UNNAMED = {"NotImplementedError", "SystemExit"}
RAISING = [
    (f"{module.name}.{name}", node, sorted(set(raised(node)) - UNNAMED))
    for module in MODULES.values()
    for name, node in functions(module.tree)
    if f"{module.name}.{name}" in PUBLIC and set(raised(node)) - UNNAMED
]


@pytest.mark.parametrize(("node", "errors"), [row[1:] for row in RAISING], ids=[row[0] for row in RAISING])
def test_a_public_function_names_what_it_raises(node, errors):
    text = ast.get_docstring(node) or ""
    assert "Raises" in text, errors
    assert [error for error in errors if error not in text] == []


NO_VERBS = {"A", "An", "The", "What", "Whether", "How", "Those", "One", "Nothing", "Two", "Each", "All"}


def no_verb(tree):
    """Names of the functions, properties left out, whose docstrings do not begin with a verb."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(d) for d in node.decorator_list):
            first, *_ = (ast.get_docstring(node) or "none").split()
            if first.strip(",:") in NO_VERBS:
                yield node.name


def test_a_functions_docstring_begins_with_a_verb():
    assert list(no_verb(ast.parse('def f():\n    """The size."""\n@property\ndef g():\n    """The size."""'))) == ["f"]
    assert {name: found for name, module in MODULES.items() if (found := [*no_verb(module.tree)])} == {}


def test_messages_have_one_form():
    """A message says of the value that it was given: "given X", and never "got X"."""
    for name, module in MODULES.items():
        raising = [node for node in ast.walk(module.tree) if isinstance(node, ast.Raise)]
        assert [text for node in raising for text in strings(node) if re.search(r"\bgot\b", text)] == [], name


LONGEST_SENTENCE = 30
PRIVATE_WORDS = r"behind an address|of one's own|gangs?|guests?|says so|(?:which|this|that) is (?:said|told)"
PRIVATE_WORDS += r"|held against|lies? so|mends?|mended|rests? (?:where|as|flat|whole)|(?:stays?|rests?|stands?) whole"
"""What strangers did not understand, each with a plain word: in a bucket, custom, processes, is reported, fixes."""


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def sentences(docstring):
    """The sentences of a docstring's prose: tables, drawings, code and headings are left out."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[\w, ]+: )|\n(?=\s*\d\. )", docstring):
        if not re.search(r"\S {2,}\S|[│├└]|^\s*>>>", paragraph, flags=re.M):
            prose = re.sub(r"`[^`]*`", "code", paragraph)
            yield from (each for each in re.split(r"(?<=[.!?])\s+", prose) if each.strip())


def too_long(texts):
    found = (each for text in texts for each in sentences(text))
    return [text for text in found if len(re.findall(r"[\w'-]*\w[\w'-]*", text)) > LONGEST_SENTENCE]


def private_words(texts):
    return sorted({match[0] for text in texts for match in re.finditer(rf"\b(?:{PRIVATE_WORDS})\b", text)})


def strings(tree):
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("module", MODULES.values(), ids=lambda module: module.name)
def test_sentences_are_short_and_words_are_plain(module):
    assert too_long(docstrings(module.tree)) == []
    assert private_words([*docstrings(module.tree), *strings(module.tree)]) == []
