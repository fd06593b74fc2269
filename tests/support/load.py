"""Import a lesson: lessons are programs in a folder, not modules of a package."""

import importlib
import sys
from pathlib import Path

from paths import EXPERIMENTS

LESSONS = EXPERIMENTS / "lessons"


def load(name):
    """Return `experiments/lessons/NAME.py` as a module.

    Its folder is on the path, as it is when Python runs the program, so that `from devices import ...` finds its file.
    """
    if str(LESSONS) not in sys.path:
        sys.path.append(str(LESSONS))
    module = importlib.import_module(name)
    assert module.__file__ is not None, name
    assert Path(module.__file__).parent == LESSONS, f"another module is called {name}: {module.__file__}"
    return module
