"""Python in processes of its own with the jdp of this checkout, and this process' output on other descriptors."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from paths import ROOT, SUPPORT


def environment(**variables):
    return os.environ | {"PYTHONPATH": str(ROOT)} | variables


def python(*words, cwd=None, timeout=300, **variables):
    """Run Python with these words to its end; return the ended process, with its output as text."""
    command, env = [sys.executable, *map(str, words)], environment(**variables)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def run_pytest(folder, *words, **variables):
    """Run pytest in a process that knows nothing of jdp's own tests, and where they run, and finds their plugins."""
    for name in ("CI", "JDP_CI", "PYTEST_ADDOPTS"):
        variables.setdefault(name, "")
    own = {"PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | variables
    return python("-m", "pytest", "-rs", "-p", "no:cacheprovider", *words, cwd=folder, timeout=100, **own)


def start_python(*words, cwd=None, stdin=None, stderr=subprocess.PIPE, **variables):
    """Start Python with these words; return the process, whose output comes as text."""
    command, env = [sys.executable, *map(str, words)], environment(**variables)
    return subprocess.Popen(command, cwd=cwd, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True)


@contextmanager
def streams(stdout, stderr):
    """Write stdout and stderr of this process, of C++ too, to these descriptors while in `with`; close them."""
    before = [os.dup(number) for number in (1, 2)]
    for number, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with pytest.MonkeyPatch.context() as patched:
        for number, name in ((1, "stdout"), (2, "stderr")):
            patched.setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        try:
            yield
        finally:
            sys.stdout.flush()
            for number, descriptor in zip((1, 2), before, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
