"""Python in processes of its own, with the jdp of this checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**variables):
    return os.environ | {"PYTHONPATH": str(ROOT)} | variables


def python(*words, cwd=None, timeout=300, **variables):
    """Run Python with these words to its end; return the ended process, with its output as text."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=timeout, check=False
    )


def start_python(*words, cwd=None, stderr=subprocess.PIPE, **variables):
    """Start Python with these words; return the process, whose output comes as text."""
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**variables), stdout=subprocess.PIPE, stderr=stderr, text=True
    )
