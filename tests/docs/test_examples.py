"""Every public name has an example in its docstring, which runs as it is written and prints what it says.

The examples go on from the lines in the docstring of `jdp` itself, which make a plan, a model, a loss and a batch.
"""

import builtins
import doctest
import inspect
import re

import jax
import pytest
from own_process import python
from test_docstrings import public_values

import jdp

MODULES = ("checkpoint", "data", "export", "guard", "models", "prove")
FOR_A_PROCESS = ("jdp.initialize", "jdp.keep_memory", "jdp.keep_programs")
"""They change the process that they run in, for good: their examples run in one of their own."""
SHOWN_ELSEWHERE = {*(f"jdp.export.{name}" for name in ("Names", "Part", "Tensor")), "jdp.prove.Proof", "jdp.prove.Run"}
"""The types of what jdp.export.hf_names and jdp.prove.prove return: in the examples of these."""


NAMES = {}  # name -> function or class, each once: by the shortest of its names
for _name, _value in public_values(jdp, *(getattr(jdp, module) for module in MODULES)):
    if _value not in NAMES.values():
        NAMES[_name] = _value
IN_THIS_PROCESS = [name for name in NAMES if name not in {*FOR_A_PROCESS, *SHOWN_ELSEWHERE}]


def parsed(value):
    return doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")


def face(name):
    """Return the module that a name is public in: jdp, or one of `MODULES`."""
    module = name.split(".")[-2]
    return getattr(jdp, module) if module in MODULES else jdp


def examples(name):
    """Return the examples of a name's docstring, else those of its module's if they use it."""
    of_module = [] if face(name) is jdp else parsed(face(name))
    used = any(name.rpartition(".")[2] in re.findall(r"\w+", example.source) for example in of_module)
    return parsed(NAMES[name]) or (of_module if used else [])


def run(examples, name, values):
    """Run examples, fail with what they printed if it is not what they say, and return what they define."""
    report = []
    test = doctest.DocTest(examples, values, name, None, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=report.append, clear_globs=False)
    vars(builtins).pop("_", None)  # the last value that was shown; tyro, imported later, would hash it
    assert not report, "".join(report)
    return test.globs


@pytest.fixture(scope="module")
def first_lines():
    """What the lines in the docstring of `jdp` define."""
    return run(parsed(jdp), "jdp", {})


@pytest.mark.parametrize("name", IN_THIS_PROCESS)
def test_the_example_runs(name, first_lines, monkeypatch, tmp_path):
    found = examples(name)
    assert found, "a public name has an example in its docstring: lines with >>>, and what they print"
    monkeypatch.chdir(tmp_path)
    own = jax.tree.map(lambda x: x.copy(), first_lines["state"])  # examples donate it
    modules = vars(inspect.getmodule(NAMES[name])) | vars(face(name))
    run(found, name, modules | first_lines | {"state": own})


def test_the_examples_that_change_a_process_run(tmp_path):
    lines = "\n".join(example.source for name in FOR_A_PROCESS for example in examples(name))
    assert all(map(examples, FOR_A_PROCESS))
    result = python("-W", "error", "-c", f"import jdp\n{lines}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
